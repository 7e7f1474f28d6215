"""``hsloader.export``: a dataset's samples as producers' files again, so that converting locks nobody in."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hsloader.conversion.fp8 import is_encoded, made_scales, restored_bits, source_row_bytes
from hsloader.conversion.report import Progress, ProgressCallback
from hsloader.conversion.space import demand_space
from hsloader.errors import ConversionError
from hsloader.formats.layouts import Layout, layout_named
from hsloader.formats.writing import NO_PLACE, WRITABLE, safetensors_metadata, sample_writer
from hsloader.monitor.words import plural
from hsloader.store.dataset import Dataset, open_dataset
from hsloader.store.fields import Field

Bits = np.ndarray[Any, Any]

__all__ = ["ExportReport", "export"]

_WITHOUT_EXTRAS = "speculators-arrow"  # the layout that has no place for values of a sample, but a header's texts


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What ``export`` wrote: ``samples`` of ``raw_bytes`` (the values written) in ``layout`` below ``destination``.

    ``renamed``: samples whose file could not have their name, with the file's; ``notes``: what is not as the sources
    had it.
    """

    source: str
    destination: str
    layout: str
    samples: int
    raw_bytes: int
    seconds: float
    renamed: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def export(
    dst: str | os.PathLike[str],
    out: str | os.PathLike[str],
    layout: str | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write every sample of the dataset at ``dst`` as a producer's file below ``out``, a folder of its own.

    Keys, dtypes, shapes and values are those that the layout's files have; ``layout`` defaults to that of the sources.
    States that the codec fp8 rounded are written in the source's dtype, with the values that a loader restores.
    Rows that were trimmed and fields that were left out by the conversion are not in the dataset and do not come back.
    ``progress`` is told the raw bytes.  Raises ``ValueError`` for a layout that cannot be written or cannot hold what
    the dataset has, ``ConversionError`` if ``out`` is not empty, too small or inside the dataset, or cannot hold files
    of the samples' names, ``DamageError`` for damaged samples.
    """
    began = time.monotonic()
    target = Path(os.path.abspath(os.fspath(out)))
    with open_dataset(dst) as dataset:
        chosen = _layout(dataset, layout)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConversionError(
                f"{target}: expected an empty folder or nothing, found files; choose another one for the export, or "
                "delete this one if it is what an export that failed has left"
            )
        if Path(os.path.realpath(dataset.path)) in Path(os.path.realpath(target)).parents:
            raise ConversionError(f"{target}: this lies inside the dataset {dataset.path}; choose a folder beside it")
        left = NO_PLACE.get(chosen, frozenset())
        total = int(dataset.lengths.sum()) * source_row_bytes(
            [f for f in dataset.fields.values() if f.name not in left]
        )
        demand_space(total, target, can_delete=False)
        target.mkdir(parents=True, exist_ok=True)
        done = lost = 0
        renamed: dict[str, str] = {}
        with sample_writer(chosen, target) as writer:
            for i in range(len(dataset)):
                name = dataset.name(i)
                fields = {name: f for name, f in _fields_of(dataset, i).items() if name not in left}
                values, fields = _restored({field: dataset.read(i, field) for field in fields}, fields)
                extras = dataset.extras(i)
                lost += chosen == _WITHOUT_EXTRAS and len(extras) > bool(safetensors_metadata(extras))
                written = writer.write(name, values, fields, extras)
                if written != name:
                    renamed[name] = written
                done += sum(bits.nbytes for bits in values.values())
                if progress is not None:
                    seconds = time.monotonic() - began
                    progress(Progress(stage="export", done=done, total=total, samples=i + 1, seconds=seconds))
        return ExportReport(
            source=str(dataset.path),
            destination=str(target),
            layout=chosen,
            samples=len(dataset),
            raw_bytes=done,
            seconds=time.monotonic() - began,
            renamed=renamed,
            notes=_notes(dataset, layout_named(chosen), lost),
        )


def _layout(dataset: Dataset, layout: str | None) -> str:
    known = dataset.provenance.source_layout
    chosen = layout or known
    if chosen is None or chosen not in WRITABLE:
        what = f"the layout {layout!r}" if layout else f"the sources' layout ({known or 'not recorded'})"
        raise ValueError(f"{what} is not one that can be written; give one of {', '.join(WRITABLE)}")
    return chosen


def _restored(values: Mapping[str, Bits], fields: Mapping[str, Field]) -> tuple[dict[str, Bits], dict[str, Field]]:
    """A sample without what the codec fp8 made of it: states in the source's dtype, no scales."""
    made = made_scales(fields.values())
    kept = {name: field for name, field in fields.items() if name not in made}
    found = {name: values[name] for name in kept}
    for name, field in kept.items():
        if is_encoded(field):
            assert field.scale is not None
            assert field.source_dtype is not None
            found[name] = restored_bits(values[name], values[field.scale], field.source_dtype)
            kept[name] = replace(field, dtype=field.source_dtype, scale=None)
    return found, kept


def _notes(dataset: Dataset, layout: Layout, lost: int) -> tuple[str, ...]:
    """What is not as the sources had it; ``lost`` samples had extras that were not written."""
    notes = [
        f"{name} has no place in this layout: it is not written"
        for name in sorted(NO_PLACE.get(layout.name, frozenset()) & dataset.fields.keys())
    ]
    if lost:
        notes.append(f"the extras of {plural(lost, 'sample')} have no place in this layout: they are not written")
    if layout.name == _WITHOUT_EXTRAS and "loss_mask" not in dataset.fields:
        notes.append("the dataset has no loss_mask, which this layout needs: every token is written as supervised")
    if rounded := [field.name for field in dataset.fields.values() if is_encoded(field)]:
        notes.append(f"{', '.join(rounded)}: rounded to fp8 by the conversion; written are the restored values")
    words = {"pre": "before the final norm", "post": "after the final norm"}
    here, usual = dataset.provenance.norm_state, layout.usual_norm_state
    if here in words and usual in words and here != usual:
        notes.append(
            f"careful: {layout.producer} writes and expects the last state {words[usual]} ({usual}-norm); the dataset "
            f"has it {words[here]} ({here}-norm), and so have these files"
        )
    return tuple(notes)


def _fields_of(dataset: Dataset, i: int) -> dict[str, Field]:
    """A sample's fields as its own segment recorded them (sources of another append may have had other dtypes)."""
    meta = dataset.segments[int(dataset.segment_of[i])].meta
    return {field.name: field for field in meta.fields}
