"""hsloader bench PATH: what disk, processor and bus give here, what bounds a training run, which options suit it."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from hsloader.cli import output
from hsloader.cli.common import Json, Quiet, Traceback, clear_errors, parse_size
from hsloader.cli.progress import ProgressDisplay
from hsloader.errors import HsloaderError

if TYPE_CHECKING:
    from hsloader.benchmark.api import BenchProgress
    from hsloader.benchmark.results import BenchReport

__all__ = ["bench"]

_SCRATCH = 1 << 30


@clear_errors
def bench(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A dataset, a folder of .pt files, or a folder on the disk in question."),
    ],
    *,
    tokens_per_second: Annotated[
        float | None, typer.Option(metavar="X", help="What training takes in on one GPU.")
    ] = None,
    step_ms: Annotated[
        float | None, typer.Option(metavar="MS", help="Or: the milliseconds of a step, with --tokens-per-step.")
    ] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of one step on one GPU: the batch.")
    ] = None,
    gpus: Annotated[int, typer.Option(metavar="N", min=1, help="GPUs that share this machine.")] = 1,
    seconds: Annotated[float, typer.Option(metavar="S", min=0.5, help="About how long to measure.")] = 30.0,
    scratch: Annotated[
        int | None,  # no default here: typer would hand it to the parser, as a number
        typer.Option(
            parser=parse_size, metavar="SIZE", help="Scratch on that disk, and each disk measurement. [default: 1GiB]"
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most decode threads. [default: the cores]")
    ] = None,
    hidden_size: Annotated[
        int, typer.Option(metavar="H", min=1, help="Of synthetic samples, where PATH has none.")
    ] = 7168,
    drop_cache: Annotated[
        bool, typer.Option("--drop-cache", help="Drop the dataset's own files from the page cache, to read them cold.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Also write a page with plots (pip install 'hsloader[report]')."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    traceback: Traceback = False,
) -> int:
    """Measure this machine.

    What disk, decoding, the whole pipeline and GPU copies give, what bounds training, and which ReadOptions suit.

    Leaves nothing behind, needs no privileges, and drops no page of anybody's files but its own scratch.
    """
    if report is not None:
        _check_page(report)
    import hsloader

    measuring = False
    with _signals_that_clean_up() as leave_if_told, ProgressDisplay(quiet=quiet or as_json) as display:

        def show(state: BenchProgress) -> None:
            nonlocal measuring
            measuring = True
            leave_if_told()
            done = min(state.elapsed, state.seconds)
            display.show("bench", int(done), int(state.seconds), unit="s", rate=0.0, note=f"{state.part}: {state.name}")

        try:
            found = hsloader.bench(
                path,
                tokens_per_second=tokens_per_second,
                step_ms=step_ms,
                tokens_per_step=tokens_per_step,
                gpus=gpus,
                seconds=seconds,
                scratch_bytes=_SCRATCH if scratch is None else scratch,
                threads=threads,
                hidden_size=hidden_size,
                drop_cache=drop_cache,
                progress=show,
            )
        except ValueError as problem:
            if traceback or measuring:
                raise
            raise typer.BadParameter(output.in_options(str(problem))) from None
    if as_json:
        output.print_json(found.to_dict())
    else:
        _print(found)
    if report is not None:
        found.save(report)
        if not as_json:
            output.line()
            output.line(f"the page with plots: {output.printable(report)}")
    return 0


def _check_page(page: Path) -> None:
    """What would keep the page from being written is said before half a minute of measuring, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise HsloaderError("--report needs matplotlib: pip install 'hsloader[report]'")
    if not page.absolute().parent.is_dir() or page.is_dir():
        raise HsloaderError(f"--report {page}: expected the name of a file in a folder that is there")


@contextlib.contextmanager
def _signals_that_clean_up() -> Iterator[Callable[[], None]]:
    """A signal that ends the command runs its clean-up first; one that is ignored, as by nohup, stays so.

    What a handler raises while a finalizer runs, Python drops.  So it is raised again by what this gives, and at the
    end at the latest.
    """
    told: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        told.append(number)
        leave_if_told()

    def leave_if_told() -> None:
        if told:
            raise KeyboardInterrupt if told[0] == signal.SIGINT else SystemExit(128 + told[0])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    ours = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in ours:
        signal.signal(number, leave)
    try:
        yield leave_if_told
        leave_if_told()
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _print(found: BenchReport) -> None:
    from hsloader.benchmark.words import HEADINGS, PART_TITLES, cells, machine_text

    output.line(f"{output.printable(found.path)}: {found.subject}", style="bold")
    output.line(f"  {output.printable(machine_text(found))}")
    for part, title in PART_TITLES.items():
        rows = [cells(item) for item in found.of(part)]
        if rows:
            output.heading(title)
            used = [i for i in range(len(HEADINGS)) if any(row[i] for row in rows)]
            table = [[row[i] for i in used] for row in (list(HEADINGS), *rows)]
            output.columns(table, right=[used.index(i) for i in (2, 3, 4, 5) if i in used])
    output.listing("notes", [(output.in_options(note), "") for note in found.notes], style="dim")
    output.heading("verdict")
    headspace = found.verdict.headspace
    output.line(
        f"  {found.verdict.sentence}", style=None if headspace is None else "good" if headspace >= 1 else "warn"
    )
    output.heading("recommended")
    output.line(f"  hsloader.DataLoader(..., read={found.options_python()})")
    output.line(f"  {found.options_json()}")
