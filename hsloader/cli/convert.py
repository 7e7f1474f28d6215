"""hsloader convert SRC DST: producers' files become a checked, compact dataset; the same command again resumes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

import typer

from hsloader.cli import output
from hsloader.cli.common import INTERRUPTED, Command, Json, Quiet, Traceback, clear_errors, parse_size
from hsloader.cli.inspect import others_text
from hsloader.cli.progress import ProgressDisplay, show_progress

if TYPE_CHECKING:
    from hsloader.conversion.api import ConvertOptions
    from hsloader.conversion.report import ConversionReport, PlanSummary

__all__ = ["ConvertCommand", "convert", "convert_with_progress", "print_report"]

_EXACT = "exact"  # what a bare --delete-source means
_DELETE: dict[str | None, Literal["lossy"] | bool] = {None: False, _EXACT: True, "lossy": "lossy"}


class ConvertCommand(Command):
    """Lets ``--delete-source`` stand alone; a value is given after ``=`` (``--delete-source=lossy``)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare ``--delete-source`` its value, then parse as usual."""
        given = [f"{argument}={_EXACT}" if argument == "--delete-source" else argument for argument in args]
        return list(super().parse_args(ctx, given))


def _layer_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of layers; expected for example 2,18,33") from None


def _deletion(value: str | None) -> Literal["lossy"] | bool:
    if value not in _DELETE:
        raise typer.BadParameter(f"--delete-source takes no value but lossy (found {value!r})")
    return _DELETE[value]


@clear_errors
def convert(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of the producer's files, or one file.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="Where the dataset is, or is to be.")],
    norm_state: Annotated[
        str | None,
        typer.Option(metavar="pre|post|unknown", help="Whether the last state is before or after the final norm."),
    ] = None,
    layer_ids: Annotated[str | None, typer.Option(metavar="I,J,K", help="Layers of the auxiliary states.")] = None,
    layer_convention: Annotated[
        str | None,
        typer.Option(metavar="after|before|hf", help="What an id means: after layer i (from 0), vLLM's, or HF's."),
    ] = None,
    producer: Annotated[str | None, typer.Option(metavar="NAME", help="What wrote the files.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model that the states are of.")] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="NAME", help="Its tokenizer.")] = None,
    hidden_size: Annotated[
        int | None, typer.Option(metavar="H", help="Needed where files hold only [tokens, k*H].")
    ] = None,
    num_layers: Annotated[int | None, typer.Option(metavar="N", help="Decoder layers of the model.")] = None,
    vocab_size: Annotated[int | None, typer.Option(metavar="V", help="Refuse ids that are not below it.")] = None,
    note: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Kept in the manifest; repeatable.")] = None,
    codec: Annotated[
        str,
        typer.Option(
            metavar="lossless|none|fp8", help="none: larger, and mappable as it is; fp8: LOSSY, states of 8 bits."
        ),
    ] = "lossless",
    bf16_as: Annotated[
        str, typer.Option(metavar="bfloat16|uint16", help="uint16: for zarr readers without bfloat16.")
    ] = "bfloat16",
    segment_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Raw bytes of a segment. [default: 8GiB or less]"),
    ] = None,
    typical_length: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Chooses the chunk size. [default: the median]")
    ] = None,
    trim_padding: Annotated[
        bool, typer.Option("--trim-padding", help="Cut the tail of id 0 and mask 0 that some producers leave.")
    ] = False,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Processes. [default: the cores]")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Encoder threads of each.")] = None,
    no_read_back: Annotated[
        bool, typer.Option("--no-read-back", help="Do not read back and compare what was written.")
    ] = False,
    delete_source: Annotated[
        str | None,
        typer.Option(
            metavar="[=lossy]",
            help="Remove each source file once its copy is proved; =lossy where something is left out on purpose.",
        ),
    ] = None,
    append: Annotated[bool, typer.Option("--append", help="Add a second source to the dataset.")] = False,
    allow_unknown: Annotated[
        bool, typer.Option("--allow-unknown", help="Append although one side's norm state or layers are unknown.")
    ] = False,
    replan: Annotated[
        bool, typer.Option("--replan", help="Keep what is in the dataset, forget the old plan for the rest.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    traceback: Traceback = False,
) -> int:
    """Convert producers' files into a dataset.

    Interrupted? Type the same command again.

    Exit status 0: everything is in the dataset; 3: everything but what is listed as set aside; 1: failed; 2: the
    command line is wrong. After a failure DST holds what was finished, and the same command goes on from there.
    """
    report = convert_with_progress(
        src,
        dst,
        quiet=quiet,
        show_plan=not as_json,
        dry_run=dry_run,
        norm_state=norm_state,
        layer_ids=None if layer_ids is None else _layer_ids(layer_ids),
        layer_convention=layer_convention,
        producer=producer,
        model=model,
        tokenizer=tokenizer,
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=vocab_size,
        notes=note or (),
        codec=codec,
        bf16_as=bf16_as,
        segment_size=None if segment_size is None else parse_size(segment_size),
        typical_length=typical_length,
        trim_padding=trim_padding,
        workers=workers,
        threads=threads,
        read_back=not no_read_back,
        delete_source=_deletion(delete_source),
        append=append,
        allow_unknown=allow_unknown,
        replan=replan,
    )
    if as_json:
        output.print_json(report.to_dict())
    elif dry_run:
        output.line("a dry run: nothing was written")
    else:
        print_report(report)
    return report.exit_status


def convert_with_progress(
    src: Path, dst: Path, *, quiet: bool, show_plan: bool, dry_run: bool = False, **options: Unpack[ConvertOptions]
) -> ConversionReport:
    """``hsloader.convert`` with its plan on stdout and its progress on stderr.

    An option that the API refuses before it made a plan is a mistake on the command line.
    """
    import hsloader

    planned = False

    def on_plan(plan: PlanSummary) -> None:
        nonlocal planned
        planned = True
        display.clear()
        if show_plan:
            print_plan(plan, list_refused=dry_run)
            output.line()

    with ProgressDisplay(quiet=quiet) as display:
        try:
            return hsloader.convert(
                src,
                dst,
                dry_run=dry_run,
                progress=lambda progress: show_progress(display, progress),
                on_plan=on_plan,
                **options,
            )
        except ValueError as problem:
            if planned:
                raise
            raise typer.BadParameter(output.in_options(str(problem))) from None
        except KeyboardInterrupt:
            display.clear()
            output.line("interrupted; the same command goes on from here", style="bad", err=True)
            raise typer.Exit(INTERRUPTED) from None


def print_plan(plan: PlanSummary, *, list_refused: bool) -> None:
    """What a conversion is going to do; ``list_refused``: name the samples that planning found bad, with reasons."""
    output.line(f"{output.path_text(plan.source)} -> {output.path_text(plan.destination)}", style="bold")
    refused = [(item.name, item.reason) for item in plan.quarantined]
    output.facts(
        [
            *(_sizes(plan) if plan.samples else ()),
            ("so far", f"{output.count(plan.present, 'sample')} from earlier" if plan.present else ""),
            ("new samples", "" if plan.samples else "none"),
            ("other files", others_text(plan.skipped)),
            (
                "set aside",
                "" if list_refused or not refused else f"{output.count(len(refused), 'sample')}, listed below",
            ),
            *(
                ("left out", f"{output.printable(what)} ({output.count(n, 'sample')})")
                for what, n in plan.left_out.items()
            ),
            *(("note", _note_text(note)) for note in plan.notes),
        ]
    )
    if list_refused:
        output.listing(f"cannot be converted: {output.count(len(refused), 'sample')}", refused, style="bad")


def _sizes(plan: PlanSummary) -> list[tuple[str, str]]:
    """What is to be converted, and what it takes."""
    lengths = f"{plan.shortest:,} to {plan.longest:,} tokens each, median {plan.median:,}"
    if plan.shortest == plan.longest:
        lengths = f"{output.count(plan.longest, 'token')}{' each' if plan.samples > 1 else ''}"
    time = "" if plan.seconds is None else "under a second" if plan.seconds < 1 else output.duration_text(plan.seconds)
    resources = f"{output.count(plan.workers, 'process', 'processes')} of {output.count(plan.threads, 'thread')}"
    ratio = output.ratio_text(plan.raw_bytes, plan.predicted_bytes)
    return [
        ("layout", ", ".join(f"{name} ({output.count(n, 'sample')})" for name, n in plan.layouts.items())),
        ("samples", f"{output.count(plan.samples)}, {lengths}"),
        ("tokens", output.count(plan.tokens)),
        *(("" if i else "fields", text) for i, text in enumerate(plan.fields)),
        ("states", _origin(plan)),
        ("size now", f"{output.bytes_text(plan.source_bytes)} in {output.count(plan.files, 'file')}"),
        ("size then", f"about {output.bytes_text(plan.predicted_bytes)} ({ratio})"),
        ("disk space", f"needs {output.bytes_text(plan.space_needed)}, {output.bytes_text(plan.space_free)} free"),
        ("time", time and f"{time}{'' if time.startswith('under') else ' or more'}, with {resources}"),
    ]


def _origin(plan: PlanSummary) -> str:
    """What is known of the states; the plan's notes say what is not."""
    norm = {"pre": "the last before the final norm", "post": "the last after the final norm"}
    layers = f"after layer {', '.join(map(str, plan.layer_ids))}" if plan.layer_ids else ""
    return "; ".join(part for part in (layers, norm.get(plan.norm_state, "")) if part)


def _note_text(note: str) -> str:
    """A note of the API, its keywords as the options they are here."""
    return output.printable(output.in_options(note))


def print_report(report: ConversionReport, *, next_step: bool = True) -> None:
    """What a conversion did, and (unless ``next_step`` is false) what to type next."""
    if report.converted:
        proof = ", read back and compared" if report.read_back else ", not read back"
        output.line(
            f"converted {output.count(report.converted, 'sample')} ({output.count(report.tokens, 'token')}) "
            f"in {output.duration_text(report.seconds)} at {output.rate_text(report.rate)}{proof}",
            style="good",
        )
    elif report.present:
        there = output.count(report.present, "sample") + (" is" if report.present == 1 else " are")
        if report.quarantined:
            output.line(f"nothing new to convert: {there} in the dataset already")
        else:
            output.line(f"nothing to do: all {there} in the dataset", style="good")
    output.facts(
        [
            ("from earlier", output.count(report.present, "sample") if report.present and report.converted else ""),
            ("values", output.bytes_text(report.raw_bytes) if report.raw_bytes else ""),
            (
                "on disk",
                f"{output.bytes_text(report.stored_bytes)} ({output.ratio_text(report.raw_bytes, report.stored_bytes)})"
                if report.stored_bytes
                else "",
            ),
            *_findings(report),
        ]
    )
    output.listing(
        f"set aside: {output.count(len(report.quarantined), 'sample')} of {output.count(report.samples_found)}",
        [(item.name, item.reason) for item in report.quarantined],
        style="bad",
    )
    output.listing(
        f"kept although deletion was asked for: {output.count(len(report.deleted.kept), 'file')}",
        [(item.name, item.reason) for item in report.deleted.kept],
    )
    if next_step:
        output.next_command("hsloader", "info", output.path_text(report.destination))
        output.training_line(report.destination)


def _findings(report: ConversionReport) -> list[tuple[str, str]]:
    return [
        (
            "deleted",
            _some(report.deleted.files, "source file")
            and f"{_some(report.deleted.files, 'source file')}, {output.bytes_text(report.deleted.bytes)}",
        ),
        (
            "zero states",
            _some(report.zero_state_samples, "sample")
            and f"{_some(report.zero_state_samples, 'sample')} have a token whose state is all zero (flagged, kept)",
        ),
        (
            "no target",
            _some(report.unsupervised_samples, "sample")
            and f"{_some(report.unsupervised_samples, 'sample')} have no supervised token (kept)",
        ),
        ("trimmed", _some(report.trimmed_samples, "sample")),
        *(
            ("lossy", f"{name} is fp8: restored it differs by {loss.mean:.2%} on average, {loss.max:.2%} at most")
            for name, loss in report.loss.items()
        ),
        *(
            ("left out", f"{output.printable(what)} ({output.count(n, 'sample')})")
            for what, n in report.left_out.items()
        ),
        *(("note", _note_text(note)) for note in report.notes if report.plan is None or note not in report.plan.notes),
    ]


def _some(number: int, noun: str) -> str:
    return output.count(number, noun) if number else ""
