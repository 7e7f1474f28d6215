"""hsloader demo: makes samples, converts them, proves the copy, and says what this machine can do."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from hsloader.cli import output
from hsloader.cli.common import Json, Quiet, Traceback, clear_errors
from hsloader.cli.convert import convert_with_progress, print_report
from hsloader.cli.demo_data import DemoShape, write_samples
from hsloader.cli.inspect import inspect_with_progress, print_inspection
from hsloader.cli.progress import ProgressDisplay
from hsloader.cli.verify import print_verified, verify_with_progress
from hsloader.errors import HsloaderError

__all__ = ["demo"]

_ROOM = 600_000_000  # bytes that must be free: the samples, the dataset, and some air


@dataclass
class _Demo:
    """What the steps share: where things are, whether to talk, and what came out so far."""

    folder: Path
    shape: DemoShape
    quiet: bool
    talk: bool
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def dump(self) -> Path:
        return self.folder / "dump"

    @property
    def dataset(self) -> Path:
        return self.folder / "data.hs"


def _make(demo: _Demo) -> None:
    began = time.monotonic()
    demo.dump.mkdir()
    with ProgressDisplay(quiet=demo.quiet) as display:
        size = write_samples(
            demo.dump, demo.shape, progress=lambda done, total: display.show("make", done, total, unit="files")
        )
    seconds = time.monotonic() - began
    demo.results["make"] = {"files": demo.shape.samples, "bytes": size, "seconds": seconds}
    if demo.talk:
        output.line(
            f"{output.count(demo.shape.samples, 'file')}, {output.bytes_text(size)}, "
            f"{len(demo.shape.layer_ids)} layers of hidden size {demo.shape.hidden_size:,} in bfloat16"
        )


def _inspect(demo: _Demo) -> None:
    found = inspect_with_progress(demo.dump, quiet=demo.quiet)
    demo.results["inspect"] = found.to_dict()
    if demo.talk:
        print_inspection(found, next_step=False)


def _convert(demo: _Demo) -> None:
    report = convert_with_progress(
        demo.dump, demo.dataset, quiet=demo.quiet, show_plan=demo.talk, norm_state="pre", producer="hsloader demo"
    )
    demo.results["convert"] = report.to_dict()
    if demo.talk:
        print_report(report, next_step=False)
    if report.exit_status:
        raise HsloaderError(f"{demo.dump}: the demo's own samples were not all converted; please report this")


def _verify(demo: _Demo) -> None:
    report, seconds = verify_with_progress(demo.dataset, quiet=demo.quiet)
    demo.results["verify"] = asdict(report) | {"ok": report.ok, "seconds": seconds}
    if demo.talk:
        print_verified(report, seconds, next_step=False)
    if not report.ok:
        raise HsloaderError(f"{demo.dataset}: the demo's dataset is damaged; check the disk, then please report this")


def _compare(demo: _Demo) -> None:
    """Load each source file with torch and compare every tensor bit for bit with the dataset's."""
    import torch

    import hsloader

    values, reading = 0, 0.0
    with hsloader.open_dataset(demo.dataset) as dataset:
        for i in range(len(dataset)):
            began = time.perf_counter()
            ours = dataset[i]
            reading += time.perf_counter() - began
            values += sum(tensor.nbytes for tensor in ours.values())
            name = dataset.name(i)
            theirs = torch.load(demo.dump / name, weights_only=True)  # written by this command a moment ago
            states = torch.stack(theirs["hidden_states"], dim=1)
            expected = {
                "hidden_states": states[:, :-1],
                "last_hidden_state": states[:, -1],
                "input_ids": theirs["input_ids"].to(ours["input_ids"].dtype),
                "loss_mask": theirs["loss_mask"].to(ours["loss_mask"].dtype),
            }
            different = [key for key, tensor in expected.items() if not _same_bits(ours[key], tensor)]
            if different or ours.keys() != expected.keys():
                raise HsloaderError(f"{demo.dataset}: {name}: {', '.join(different)} differ; please report this")
    rate = values / reading
    demo.results["compare"] = {"samples": demo.shape.samples, "bytes": values, "seconds": reading, "rate": rate}
    if demo.talk:
        output.line(f"every tensor of all {demo.shape.samples} samples is equal, bit for bit", style="good")
        output.facts([("reading", f"{output.rate_text(rate)} decoded, one thread, from the page cache")])


def _train(demo: _Demo) -> None:
    """A toy draft model, one hidden layer, over an epoch of the dataset as speculators 0.9 would batch it."""
    import torch

    import hsloader

    torch.manual_seed(0)
    width = demo.shape.hidden_size
    model = torch.nn.Sequential(
        torch.nn.Linear((len(demo.shape.layer_ids) - 1) * width, 32), torch.nn.SiLU(), torch.nn.Linear(32, width)
    )
    losses = []
    with (
        _quiet_loader(silent=demo.quiet or not demo.talk),
        hsloader.DataLoader(demo.dataset, trainer="speculators-0.9", max_tokens=1024, log_every=0) as loader,
    ):
        for batch in loader:
            target = batch["verifier_last_hidden_states"].float()
            mask = batch["loss_mask"].unsqueeze(-1)
            wrong = (model(batch["hidden_states"].float()) - target).square()
            loss = (wrong * mask).sum() / (target.square() * mask).sum()
            loss.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.grad is not None:
                        weight.sub_(0.3 * weight.grad)
            model.zero_grad()
            losses.append(loss.item())
        stats = loader.stats()
    demo.results["train"] = {"steps": len(losses), "first_loss": losses[0], "last_loss": losses[-1], "stats": stats}
    if demo.talk:
        output.line(f"{output.count(len(losses), 'step')}, loss {losses[0]:.2f} -> {losses[-1]:.2f}", style="good")


@contextlib.contextmanager
def _quiet_loader(*, silent: bool) -> Iterator[None]:
    """What the loader says goes to stderr where nobody listens to its logger; with ``silent`` somebody does."""
    handler = logging.NullHandler()
    logger = logging.getLogger("hsloader")
    if silent:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _same_bits(ours: Any, theirs: Any) -> bool:
    """Equality that tells -0.0 from 0.0 and compares NaNs by their bits."""
    import torch

    same_type = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    as_bits = {torch.bfloat16: torch.int16}.get(ours.dtype, ours.dtype)
    return bool(same_type and torch.equal(ours.view(as_bits), theirs.contiguous().view(as_bits)))


# What the demo does, in order: what the step says, and the step.
_STEPS: list[tuple[str, Callable[[_Demo], None]]] = [
    ("make samples as speculators 0.4 writes them", _make),
    ("inspect them", _inspect),
    ("convert them", _convert),
    ("verify the dataset", _verify),
    ("compare it with the sources", _compare),
    ("train a toy draft model on it", _train),
]


@clear_errors
def demo(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER", help="A folder to make, or an empty one. [default: hsloader-demo in the current folder]"
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    traceback: Traceback = False,
) -> int:
    """Try everything on samples made here.

    A small realistic set (about 190 MB, a few seconds), in a folder of its own: made, inspected, converted, verified,
    compared with the sources bit for bit, and trained on.
    """
    began = time.monotonic()
    state = _Demo(folder=_new_folder(folder), shape=DemoShape(), quiet=quiet, talk=not as_json)
    free = shutil.disk_usage(state.folder).free
    if free < _ROOM:
        raise OSError(
            f"{state.folder}: the demo needs {output.bytes_text(_ROOM)} of disk, {output.bytes_text(free)} are free; "
            "name a folder elsewhere: hsloader demo FOLDER"
        )
    for number, (title, step) in enumerate(_STEPS, 1):
        if state.talk:
            output.heading(f"[{number}/{len(_STEPS)}] {title}")
        step(state)
    state.results |= {"folder": str(state.folder), "seconds": time.monotonic() - began}
    if as_json:
        output.print_json(state.results)
    else:
        _print_summary(state)
    return 0


def _new_folder(wanted: Path | None) -> Path:
    """The folder to work in: empty, and made here unless the user names an empty one."""
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        if any(wanted.iterdir()):
            raise FileExistsError(f"{wanted}: the folder is not empty; the demo wants a new one or an empty one")
        return wanted
    if not os.access(".", os.W_OK | os.X_OK):
        return Path(tempfile.mkdtemp(prefix="hsloader-demo-"))
    number = 1
    while True:
        folder = Path("hsloader-demo" if number == 1 else f"hsloader-demo-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _print_summary(state: _Demo) -> None:
    converted, verified = state.results["convert"], state.results["verify"]
    before, after = state.results["make"]["bytes"], converted["stored_bytes"]
    output.heading("in short")
    output.facts(
        [
            ("size", f"{output.bytes_text(before)} -> {output.bytes_text(after)} ({output.ratio_text(before, after)})"),
            ("converting", f"{output.rate_text(converted['rate'])} with all checks, read back and compared"),
            ("verifying", f"{output.rate_text(verified['bytes_read'] / verified['seconds'])} of the dataset"),
            ("reading", f"{output.rate_text(state.results['compare']['rate'])} decoded, one thread"),
        ]
    )
    output.line()
    output.line("These samples are small and few: a real conversion has less overhead and uses more cores.")
    output.training_line(state.dataset)
    output.next_command("hsloader", "inspect", "YOUR_FOLDER", why="next, with data of yours")
    output.next_command("rm", "-r", str(state.folder), why="to remove what the demo made")
