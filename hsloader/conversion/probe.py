"""Measures on a few samples what a plan needs to know: ratio, rate, which token types fit, how the last state looks."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hsloader.conversion.chunks import ChunkEncoder
from hsloader.conversion.fp8 import Loss, LossSum, source_dtype
from hsloader.errors import SourceError
from hsloader.formats.casting import as_numbers
from hsloader.formats.source import Hints, OpenSample, RowBuffer, SampleSource, open_sample
from hsloader.store.codec import Codec
from hsloader.store.dtypes import dtype_of
from hsloader.store.fields import Field
from hsloader.store.layout import RowLayout

__all__ = ["NormProbe", "Probe", "measure", "narrowed", "row_norms"]

Bits = np.ndarray[Any, Any]

_SAMPLES = 5
_CHUNKS = 2  # of each state field and sample
_NORM_ROWS = 64
_USUAL_RATE = 0.4e9  # bytes a second and core, where nothing could be measured
_USUAL_RATIO = 1.4
_TOKEN_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class NormProbe:
    """How the last state looks: RMS of its rows (smallest, median, largest) over a few samples, and what it suggests.

    After a final RMSNorm every row has nearly the RMS of the norm's weights; before it rows differ by orders of
    magnitude.  A hint, never taken as the answer.
    """

    rows: int = 0
    smallest: float = 0.0
    median: float = 0.0
    largest: float = 0.0

    @property
    def suggestion(self) -> str:
        """``"pre"``, ``"post"`` or ``"unknown"``."""
        if self.rows < 16 or self.median <= 0:
            return "unknown"
        spread = self.largest / max(self.smallest, 1e-30)
        if spread < 3:
            return "post"
        return "pre" if spread > 10 else "unknown"


@dataclass(slots=True)
class Probe:
    """``ratios``: raw bytes for each stored byte, by field.  ``losses``: of fields made fp8, by field.
    ``rate``: the source's bytes a second of one core, end to end.

    ``token_dtypes``: token fields whose planned type does not hold most samples' values, and the type that does.
    """

    ratios: dict[str, float] = field(default_factory=dict)
    losses: dict[str, Loss] = field(default_factory=dict)
    rate: float = _USUAL_RATE
    token_dtypes: dict[str, str] = field(default_factory=dict)
    norm: NormProbe = field(default_factory=NormProbe)

    def stored_bytes(self, fields: Sequence[Field], rows: int) -> int:
        """What ``rows`` rows of the fields will take on disk."""
        return int(sum(f.row_bytes * rows / self.ratios.get(f.name, _USUAL_RATIO) for f in fields))


def measure(
    samples: Sequence[SampleSource], fields: Sequence[Field], layout: RowLayout, hints: Hints, scratch: str | None
) -> Probe:
    """Open a few samples: try their tokens in the planned types, and read, check and encode a few chunks of each.

    Ids are planned as int32 and masks as uint8; where most samples have larger ids or fractional masks, the dataset
    keeps the source's type.  One sample that does not fit is left to the conversion, as is one that cannot be read.
    """
    work = _Measuring(fields, layout)
    for sample in _spread(samples, _SAMPLES):
        try:
            with open_sample(sample, scratch=scratch, hints=hints) as opened:
                work.look(opened)
        except SourceError:
            continue
    return work.result()


class _Measuring:
    def __init__(self, fields: Sequence[Field], layout: RowLayout) -> None:
        self._fields = fields
        self._layout = layout
        self._raw: Counter[str] = Counter()
        self._stored: Counter[str] = Counter()
        self._losses: dict[str, LossSum] = {}
        self._read = 0
        self._seconds = 0.0
        self._votes: Counter[tuple[str, str]] = Counter()
        self._opened = 0
        self._norms: list[Bits] = []

    def look(self, opened: OpenSample) -> None:
        """Take in one sample."""
        self._opened += 1
        for spec in opened.sample.specs:
            if spec.is_token_field and spec.dtype != spec.source_dtype and not _fits(opened, spec.name):
                self._votes[spec.name, spec.source_dtype] += 1
        for state in self._fields:
            if state.is_token_field:
                continue
            self._encode_some(opened, state)
            dtype = source_dtype(state)
            if state.name == "last_hidden_state" and not dtype.startswith("float8"):
                self._norms.append(_row_norms(opened, state.name, dtype))

    def result(self) -> Probe:
        """What the samples said together."""
        probe = Probe(token_dtypes={name: t for (name, t), count in self._votes.items() if 2 * count > self._opened})
        for state in self._fields:
            if self._stored[state.name]:
                probe.ratios[state.name] = self._raw[state.name] / self._stored[state.name]
            elif state.is_token_field:
                probe.ratios[state.name] = _TOKEN_RATIO if state.codec == "lossless" else 1.0
        if self._seconds > 0:
            probe.rate = self._read / self._seconds
        probe.losses = {name: loss.loss() for name, loss in self._losses.items()}
        probe.norm = _norm_of(self._norms)
        return probe

    def _encode_some(self, opened: OpenSample, state: Field) -> None:
        rows = self._layout.chunk_rows[state.name]
        codec = Codec(state, rows)
        encoder, buffer, length = ChunkEncoder(codec, digest=True), RowBuffer(), opened.sample.length
        encoder(
            [np.zeros((1, state.width), dtype_of(source_dtype(state)).bits)]
        )  # the first call pays for fresh memory
        began = time.perf_counter()
        for start in range(0, min(length, _CHUNKS * rows), rows):
            stop = min(start + rows, length)
            parts = opened.rows(state.name, start, stop, buffer)
            chunk = encoder(parts)
            self._read += sum(part.nbytes for part in parts)
            if not chunk.frame:  # values that are not finite
                continue
            self._stored[state.name] += len(chunk.frame)
            self._raw[state.name] += (stop - start) * state.row_bytes
            if chunk.fp8 is not None:
                self._losses.setdefault(state.name, LossSum()).add(chunk.fp8.loss)
        self._seconds += time.perf_counter() - began


def row_norms(samples: Sequence[SampleSource], hints: Hints, scratch: str | None = None) -> NormProbe:
    """Look at the last state's first rows in a few samples."""
    found: list[Bits] = []
    for sample in _spread(samples, _SAMPLES):
        spec = next((s for s in sample.specs if s.name == "last_hidden_state"), None)
        if spec is None or spec.dtype.startswith("float8"):
            continue
        try:
            with open_sample(sample, scratch=scratch, hints=hints) as opened:
                found.append(_row_norms(opened, spec.name, spec.dtype))
        except SourceError:
            continue
    return _norm_of(found)


def _norm_of(found: Sequence[Bits]) -> NormProbe:
    norms = np.concatenate(found) if found else np.empty(0)
    norms = norms[np.isfinite(norms)]
    if not len(norms):
        return NormProbe()
    return NormProbe(len(norms), float(norms.min()), statistics.median(norms.tolist()), float(norms.max()))


def _row_norms(opened: OpenSample, name: str, dtype: str) -> Bits:
    """RMS of the sample's first rows, float64 ``[rows]``."""
    parts = opened.rows(name, 0, min(opened.sample.length, _NORM_ROWS))
    values = as_numbers(np.concatenate(parts, axis=1), dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        rms: Bits = np.sqrt(np.einsum("ij,ij->i", values, values, dtype=np.float64) / values.shape[1])
    return rms


def _fits(opened: OpenSample, name: str) -> bool:
    try:
        opened.whole(name)
    except SourceError:
        return False
    return True


def _spread(samples: Sequence[SampleSource], count: int) -> Sequence[SampleSource]:
    """A few samples, evenly spread."""
    step = max(1, len(samples) // count)
    return samples[::step][:count]


def narrowed(fields: Sequence[Field], dtypes: Mapping[str, str]) -> tuple[Field, ...]:
    """The fields with the dtypes that ``Probe.token_dtypes`` asks for."""
    return tuple(replace(f, dtype=dtypes[f.name]) if f.name in dtypes else f for f in fields)
