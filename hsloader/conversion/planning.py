"""Makes a plan: describe what was found, agree on what a sample is, measure a few, cut into segments."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hsloader.conversion.agreement import agree, fields_of
from hsloader.conversion.plan import Plan, counts_of, file_of, group_samples
from hsloader.conversion.probe import Probe, measure, narrowed
from hsloader.conversion.provenance import provenance_of
from hsloader.conversion.report import Quarantined
from hsloader.conversion.settings import ConvertSettings, cores
from hsloader.conversion.sources import UNREAD, SourceComparison, source_identity
from hsloader.errors import ConversionError
from hsloader.formats.discover import Discovery, Skipped
from hsloader.formats.source import Hints, Identity
from hsloader.formats.survey import Survey, survey
from hsloader.monitor.words import plural
from hsloader.store.fields import Field
from hsloader.store.layout import RowLayout, choose_layout
from hsloader.store.manifest import MANIFEST_NAME, Provenance
from hsloader.store.publish import Root

__all__ = ["Made", "hints_of", "layout_of", "make_plan", "nothing_to_convert"]

_SHOWN = 12
_THREADS_AT_MOST = 32


@dataclass(frozen=True, slots=True)
class Made:
    """A plan that was just made (None: nothing is new), with what was measured and what was set aside on the way."""

    plan: Plan | None
    probe: Probe
    sidecars: tuple[Skipped, ...]
    notes: tuple[str, ...] = ()


def hints_of(settings: ConvertSettings) -> Hints:
    """What the formats need to know of the settings."""
    return Hints(hidden_size=settings.hidden_size)


def layout_of(fields: Sequence[Field], typical_length: int) -> RowLayout:
    """The row layout of a plan's segments."""
    return choose_layout(fields, typical_length)


def make_plan(
    found: Discovery,
    settings: ConvertSettings,
    *,
    first: int,
    comparison: SourceComparison,
    provenance: Provenance | None = None,
    present_fields: tuple[Field, ...] | None = None,
    present_names: frozenset[str] = frozenset(),
    scratch: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Made:
    """Plan the samples of ``found`` (all of a source, or what is new in it) into segments from number ``first``.

    Its plan is None if nothing is new after all (``comparison``: the samples of arrow folders come to light here).
    ``present_fields`` and ``present_names``: the fields and sample names of the dataset that they are to join;
    ``provenance``: that of an earlier plan of the same source, which is not told anew.
    ``progress(files described, files)``.  Raises ``ConversionError`` if there is nothing to convert, the samples are
    not of one kind, or names are taken; a plan that joins a dataset may be without samples (all new ones are bad).
    """
    hints = hints_of(settings)
    threads = min(_THREADS_AT_MOST, 4 * cores())
    described = survey(found.src, hints=hints, threads=threads, progress=progress, found=found)
    if found.folders:
        _only_fresh(described, comparison)
    root = str(Path(found.src).parent) if Path(found.src).is_file() else found.src
    bad = [Quarantined(item.name, item.reason) for item in described.bad]
    if not described.samples and present_fields is None:
        raise nothing_to_convert(found.src, bad, described.sidecars)
    if not described.samples and not bad:
        return Made(None, Probe(), tuple(described.sidecars), tuple(described.notes))
    refused: list[Quarantined] = list(bad)
    samples = tuple(described.samples)
    fields = present_fields or ()
    probe = Probe()
    typical = settings.typical_length or 1
    if samples:
        _demand_new_names(described, present_names)
        try:
            agreed = agree(samples, settings.codec, present_fields)
        except ConversionError as error:
            raise ConversionError("\n".join([str(error), *_bad_lines(bad)])) from None
        samples, refused = agreed.samples, [*bad, *agreed.refused]
        fields = _fields(fields_of(samples, settings.codec), present_fields)
        typical = settings.typical_length or max(1, int(statistics.median(s.length for s in samples)))
        probe = measure(samples, fields, layout_of(fields, typical), hints, scratch)
        if present_fields is None:
            fields = narrowed(fields, probe.token_dtypes)
    raw = sum(s.length for s in samples) * sum(f.row_bytes for f in fields)
    layouts = sorted({s.layout for s in samples})
    segments = group_samples(samples, refused, fields, settings.segment_bytes(raw), first)
    plan = Plan(
        source=found.src,
        root=root,
        settings=settings.identity(),
        fields=fields,
        provenance=provenance or provenance_of(settings, fields, layouts, described.settings),
        typical_length=typical,
        segments=segments,
        files=_files(root, described),
        **counts_of(samples),
        refused=() if segments else tuple(refused),
    )
    return Made(plan, probe, tuple(described.sidecars), tuple(described.notes))


def nothing_to_convert(src: str, bad: Sequence[Quarantined], sidecars: Sequence[Skipped]) -> ConversionError:
    """The refusal of a source without a sample, with what was looked at instead."""
    if (Path(src) / MANIFEST_NAME).is_file() and Root(src).private.is_dir():
        return ConversionError(
            f"{src}: expected producers' files, found a dataset that is converted already; `hsloader info` describes "
            "it, `hsloader export` writes producers' files from it"
        )
    what = f"none of the {plural(len(bad), 'sample')} can be taken" if bad else "no samples found"
    lines = [f"{src}: {what}, so nothing was written", *_bad_lines(bad)]
    if sidecars:
        lines.append(f"other files ({len(sidecars):,}):")
        lines += [f"  {item.name}: {item.reason}" for item in sidecars[:_SHOWN]]
        if len(sidecars) > _SHOWN:
            lines.append(f"  and {len(sidecars) - _SHOWN:,} more")
    if not bad and not sidecars:
        lines.append("the folder is empty; give the folder that the producer wrote its samples to")
    return ConversionError("\n".join(lines))


def _bad_lines(bad: Sequence[Quarantined]) -> list[str]:
    if not bad:
        return []
    lines = [f"cannot be converted ({len(bad):,}):"]
    lines += [f"  {item.name}: {item.reason}" for item in bad[:_SHOWN]]
    return [*lines, f"  and {len(bad) - _SHOWN:,} more"] if len(bad) > _SHOWN else lines


def _only_fresh(described: Survey, comparison: SourceComparison) -> None:
    """Leave what is new, and what was refused in an arrow folder with a new or mended arrow file."""
    mended = {_parent(name) for name, now in described.arrows.items() if comparison.is_fresh(name, now)}

    def again(file: str) -> bool:
        return _parent(_parent(file)) in mended and comparison.was_refused(file)  # hidden_states/ lies in between

    described.samples = [s for s in described.samples if comparison.is_fresh_sample(s) or again(file_of(s))]
    described.bad = [
        item
        for item in described.bad
        if (
            comparison.is_fresh_unread(item.name, item.reason)
            if item.name in described.unread
            else comparison.is_fresh(item.name, source_identity(os.path.join(described.src, item.name)))
            or again(item.name)
        )
    ]


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _fields(planned: tuple[Field, ...], present: tuple[Field, ...] | None) -> tuple[Field, ...]:
    """The planned fields, in the order and with the token types of the dataset they join."""
    if present is None:
        return planned
    by_name = {f.name: f for f in planned}
    return tuple(
        Field(
            name=f.name,
            dtype=f.dtype,
            shape=f.shape,
            codec=by_name[f.name].codec,
            source_dtype=by_name[f.name].source_dtype,
            scale=f.scale,
        )
        for f in present
    )


def _files(root: str, described: Survey) -> Mapping[str, Identity]:
    files = {file_of(sample): sample.identity for sample in described.samples}
    for item in described.bad:
        unread = item.name in described.unread
        files.setdefault(item.name, UNREAD if unread else source_identity(os.path.join(root, item.name)))
    return {**files, **described.arrows}


def _demand_new_names(described: Survey, present: frozenset[str]) -> None:
    taken = [s.name for s in described.samples if s.name in present]
    if taken:
        raise ConversionError(
            f"{described.src}: {len(taken):,} of the samples to append have names that the dataset holds already, for "
            f"example {taken[0]}; convert both from a common parent folder, so that their names differ"
        )
