"""hsloader inspect SRC: what producers' files hold, from their headers and a few samples; nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hsloader.cli import output
from hsloader.cli.common import FAILED, SET_ASIDE, Json, Quiet, Traceback, clear_errors
from hsloader.cli.progress import ProgressDisplay, show_progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hsloader.conversion.inspection import Inspection
    from hsloader.formats.discover import Skipped
    from hsloader.formats.producer_settings import ProducerSettings

__all__ = ["inspect", "inspect_with_progress", "others_text", "print_inspection"]


@clear_errors
def inspect(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of the producer's files, or one file.")],
    hidden_size: Annotated[
        int | None, typer.Option(metavar="H", min=1, help="Needed where files hold only [tokens, k*H].")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    traceback: Traceback = False,
) -> int:
    """Show what producers' files hold.

    Layouts, counts, data types, lengths, anomalies, from headers and a few samples. Writes nothing.

    Exit status as convert's would be: 0: all can be converted; 3: all but what is listed; 1: refused.
    """
    found = inspect_with_progress(src, hidden_size, quiet=quiet)
    if as_json:
        output.print_json(found.to_dict())
    else:
        print_inspection(found)
    if not found.convertible:
        return FAILED
    return SET_ASIDE if found.quarantined or len(found.kinds) > 1 else 0


def inspect_with_progress(src: Path, hidden_size: int | None = None, *, quiet: bool) -> Inspection:
    """``hsloader.inspect`` with its progress on stderr."""
    import hsloader

    with ProgressDisplay(quiet=quiet) as display:
        return hsloader.inspect(
            src, hidden_size=hidden_size, progress=lambda progress: show_progress(display, progress)
        )


def print_inspection(found: Inspection, *, next_step: bool = True) -> None:
    """The findings in words, and (unless ``next_step`` is false) what to type next."""
    source = output.path_text(found.source)
    output.line(source, style="bold")
    if not found.samples:
        output.line("no samples found", style="bad")
    output.facts(
        [
            ("layout", ", ".join(f"{name} ({output.count(n, 'sample')})" for name, n in found.layouts.items())),
            ("samples", f"{output.count(found.samples)} in {output.count(found.files, 'file')}"),
            ("tokens", output.count(found.tokens)),
            ("size", f"{output.bytes_text(found.source_bytes)}, {output.bytes_text(found.payload_bytes)} of it values"),
            *(("told by" if i == 0 else "", _told(settings)) for i, settings in enumerate(found.told)),
            ("last state", _norm(found)),
            ("other files", others_text(found.skipped)),
            *(
                ("left out", f"{output.printable(what)} ({output.count(n, 'sample')})")
                for what, n in found.left_out.items()
            ),
            *(("note", output.printable(output.in_options(note))) for note in found.notes),
        ]
    )
    if found.kinds:
        output.heading("kinds of samples")
        output.columns([(output.count(n), output.printable(kind)) for kind, n in found.kinds], right=(0,))
        output.histogram("tokens a sample", found.histogram, found.shortest, found.longest, found.median)
    output.listing(
        f"cannot be converted: {output.count(len(found.quarantined), 'sample')}",
        [(item.name, item.reason) for item in found.quarantined],
        style="bad",
    )
    if not found.samples:
        output.listing("what is there instead", [(item.name, item.reason) for item in found.skipped])
    elif not found.convertible:
        output.line()
        output.line("No kind has 90 % of the samples: convert each from a folder of its own.", style="bad")
    elif next_step:
        output.next_command("hsloader", "convert", source, "DST")


def others_text(skipped: Sequence[Skipped]) -> str:
    """How many files are no samples, and which if they are few."""
    what = "that is no sample" if len(skipped) == 1 else "that are no samples"
    return output.named(f"{output.count(len(skipped))} {what}", [item.name for item in skipped])


def _told(settings: ProducerSettings) -> str:
    """What a producer's own settings file says."""
    layers = settings.layer_ids
    said = [
        settings.producer and f"producer {settings.producer}",
        settings.model and f"model {settings.model}",
        layers and f"layers {', '.join(map(str, layers))} (convention {settings.layer_convention})",
        settings.norm_state and f"last state {settings.norm_state}-norm",
    ]
    return output.printable(f"{settings.name}: {', '.join(part for part in said if part) or 'nothing of use'}")


def _norm(found: Inspection) -> str:
    """What the last state's values look like: a hint, and said to be one."""
    norm = found.norm
    if not norm.rows:
        return ""
    looks = {
        "pre": "looks as before the final norm",
        "post": "looks as after the final norm",
        "unknown": "may be before or after the final norm",
    }
    return (
        f"{looks[norm.suggestion]} (RMS of {norm.rows} rows: {norm.smallest:.3g} to {norm.largest:.3g}, "
        f"median {norm.median:.3g}); a hint, not taken as the answer"
    )
