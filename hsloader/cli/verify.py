"""hsloader verify DST: every byte of a dataset against its own digests."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hsloader.cli import output
from hsloader.cli.common import FAILED, Json, Quiet, Traceback, clear_errors
from hsloader.cli.progress import ProgressDisplay

if TYPE_CHECKING:
    from hsloader.store.verification import VerifyReport

__all__ = ["print_verified", "verify", "verify_with_progress"]


@clear_errors
def verify(
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The dataset.")],
    sample: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Read N samples, spread evenly, instead of all. [default: all]"),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    traceback: Traceback = False,
) -> int:
    """Compare every byte with its checksum.

    Exit status 0: sound; 1: damaged, and the damage is listed with the samples that it hits.
    """
    report, seconds = verify_with_progress(dst, sample, quiet=quiet)
    if as_json:
        output.print_json(asdict(report) | {"ok": report.ok, "seconds": seconds})
    else:
        print_verified(report, seconds)
    return 0 if report.ok else FAILED


def verify_with_progress(dst: Path, sample: int | None = None, *, quiet: bool) -> tuple[VerifyReport, float]:
    """The report of ``hsloader.verify`` and the seconds it took, with progress on stderr."""
    import hsloader

    began = time.monotonic()
    with ProgressDisplay(quiet=quiet) as display:
        report = hsloader.verify(dst, sample, progress=lambda done, total: display.show("verify", done, total))
    return report, time.monotonic() - began


def print_verified(report: VerifyReport, seconds: float, *, next_step: bool = True) -> None:
    """The report in words, and (unless ``next_step`` is false) how to train on a sound dataset."""
    checked = output.count(report.checked_samples, "sample")
    if report.checked_samples < report.samples:
        checked += f" of {output.count(report.samples)}"
    rate = output.rate_text(report.bytes_read / seconds) if seconds else ""
    read = f"{checked}, {output.count(report.chunks, 'chunk')}, {output.bytes_text(report.bytes_read)}"
    took = f"{output.duration_text(seconds)} ({rate})"
    if report.ok:
        output.line(f"sound: {read} in {took}", style="good")
        if next_step:
            output.training_line(report.path)
        return
    output.line(f"damaged: {output.count(len(report.problems), 'problem')} in {read}, {took}", style="bad")
    for problem in report.problems:
        output.line(f"  {output.printable(problem)}")
    # The samples of a segment that cannot be opened were not read, and are in no count.
    hit = {name for problem in report.problems if problem.kind != "segment" for name in problem.samples}
    sound = max(0, report.checked_samples - len(hit))
    output.line()
    output.line(
        f"{sound:,} of {output.count(report.samples, 'sample')} {'was' if sound == 1 else 'were'} found sound. "
        "Restore the files named above from a copy, or convert the samples that are hit again into another dataset."
    )
