"""hsloader export DST OUT: a dataset's samples as producers' files again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hsloader.cli import output
from hsloader.cli.common import Json, Quiet, Traceback, clear_errors
from hsloader.cli.progress import ProgressDisplay, show_progress

__all__ = ["export"]


@clear_errors
def export(
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The dataset.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder for the files.")],
    layout: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="As inspect names it, for example speculators-list. [default: the sources']"),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    traceback: Traceback = False,
) -> int:
    """Write the producers' files back.

    The same keys, shapes, data types and values.
    """
    import hsloader

    with ProgressDisplay(quiet=quiet) as display:
        try:
            report = hsloader.export(dst, out, layout, progress=lambda progress: show_progress(display, progress))
        except ValueError as problem:  # a layout that is not known, or cannot hold what the dataset has
            raise typer.BadParameter(output.in_options(str(problem))) from None
    if as_json:
        output.print_json(report.to_dict())
        return 0
    rate = output.rate_text(report.raw_bytes / report.seconds) if report.seconds else ""
    output.line(
        f"wrote {output.count(report.samples, 'sample')} as {report.layout} below "
        f"{output.path_text(report.destination)}: {output.bytes_text(report.raw_bytes)} "
        f"in {output.duration_text(report.seconds)} ({rate})",
        style="good",
    )
    for note in report.notes:
        output.line(output.printable(note))
    if report.renamed:
        name, file = next(iter(report.renamed.items()))
        output.line(
            f"{output.count(len(report.renamed), 'sample')} had to be named otherwise, for example "
            f"{output.printable(name)} as {output.printable(file)} (all of them with --json)"
        )
    return 0
