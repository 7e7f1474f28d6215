"""Samples of producers' files: what they will give, and reading them. The seam between formats and conversion.

Planning yields :class:`SampleSource` objects, small and picklable, made from headers alone.  Execution opens one
with :func:`open_sample` and reads its rows into memory of its own (:class:`RowBuffer`), while the checksums of the
records run along::

    with open_sample(sample, scratch=dst) as opened:
        for start in range(0, sample.length, rows):
            arrays = opened.rows("hidden_states", start, min(start + rows, sample.length), buffers[i])
            ...                                     # [n, w] each; side by side they are [n, layers * hidden]
        tokens = opened.tokens()                    # {"input_ids": int32 [length], "loss_mask": uint8 [length]}
        opened.finish()                             # the rest of the checksums; raises if the file changed meanwhile

Values are bits throughout: bfloat16 is ``<u2``, fp8 is ``u1`` (see ``store/dtypes.py``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hsloader.errors import SourceError
from hsloader.formats.blocks import Tensor
from hsloader.formats.casting import exact_cast
from hsloader.formats.reading import BlockReader, RowBuffer, read_rows
from hsloader.store.dtypes import dtype_of
from hsloader.store.fields import TOKEN_ROW_BYTES

__all__ = [
    "ArrowFile",
    "Described",
    "FieldParts",
    "FieldSpec",
    "Hints",
    "Identity",
    "OpenSample",
    "Record",
    "RowBuffer",
    "SampleSource",
]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One per-token field of a sample.

    ``dtype`` is what reading gives (``input_ids`` as int32, ``loss_mask`` as uint8, else as in the file), ``shape``
    the shape of one token, ``source_dtype`` what the producer's file has (``export`` writes it back).  ``scale`` names
    the field that holds the scales of an fp8 field.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source_dtype: str
    scale: str | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one token, as read."""
        return int(np.prod(self.shape, dtype=np.int64)) * dtype_of(self.dtype).item_size

    @property
    def is_token_field(self) -> bool:
        """Whether the store treats it as a token field (same rule as ``store.fields.Field``)."""
        return self.row_bytes <= TOKEN_ROW_BYTES


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells that a file is still the one that was planned: bytes, mtime in nanoseconds, inode."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Identity:
        """The identity in a stat result."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)


@dataclass(frozen=True, slots=True)
class ArrowFile:
    """The arrow file in which samples have their masks: its name below SRC, its path, and what it was when planned."""

    name: str
    path: str
    identity: Identity


@dataclass(frozen=True, slots=True)
class Hints:
    """What the user knows and the files do not say. ``hidden_size`` splits ``[S, k*H]`` where no last state tells H."""

    hidden_size: int | None = None


@dataclass(frozen=True, slots=True)
class SampleSource:
    """One sample of a producer's file, as planned from headers.

    ``name`` is the path below SRC (``/`` separated, surrogateescape), with ``#row`` inside containers; ``path`` the
    file that holds the states, ``length`` the tokens, ``payload_bytes`` the bytes of its values in the source's own
    dtypes.  ``extras`` are small JSON values of the sample, ``left_out`` names what the file has and the sample does
    not, with the reason; ``notes`` are anomalies for the report ("no checksum: not verified").  ``folder`` is set where
    the sample needs more than its own file: the arrow dataset that has its mask, in the file ``arrow``, whose row
    ``place`` points at (number of the arrow file, offset of the batch, row in the batch).  ``arrow`` is ``None`` with a
    ``folder`` in plans of versions that did not record it; such a sample cannot be opened.
    """

    name: str
    path: str
    row: int | None
    length: int
    specs: tuple[FieldSpec, ...]
    layout: str
    identity: Identity
    payload_bytes: int
    gzip: bool = False
    extras: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    folder: str | None = None
    place: tuple[int, int, int] | None = None
    arrow: ArrowFile | None = None

    def spec(self, name: str) -> FieldSpec:
        """The field called ``name``; ``KeyError`` if the sample has none."""
        for spec in self.specs:
            if spec.name == name:
                return spec
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class FieldParts:
    """A field and where it lies: tensors of shape ``[S, ...]`` whose rows stand side by side."""

    spec: FieldSpec
    parts: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One sample inside a file, with the places of its values: what a layout makes of a file's keys."""

    layout: str
    length: int
    fields: tuple[FieldParts, ...]
    extras: Mapping[str, object] = field(default_factory=dict)
    scalars: Mapping[str, Tensor] = field(default_factory=dict)  # small values that lie in blocks: read on opening
    notes: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Described:
    """What one file holds: its layout's name and its samples; ``sidecar`` says why it is none of the samples' files."""

    layout: str
    samples: tuple[SampleSource, ...]
    sidecar: str | None = None


class OpenSample:
    """An open sample. Not thread-safe: one thread reads, others may use what it returned.

    What ``rows`` returned stays valid until the same :class:`RowBuffer` is given again (without one, until the next
    ``rows`` of that field).  Each field is best read in ascending order: its checksum then costs no second read.
    """

    def __init__(
        self,
        sample: SampleSource,
        record: Record,
        reader: BlockReader,
        check_unchanged: Callable[[], None],
        held: Sequence[int] = (),
    ) -> None:
        self.sample = sample
        self.notes = record.notes
        self._record = record
        self._reader = reader
        self._check_unchanged = check_unchanged
        self._held = list(held)  # descriptors that are closed with the sample
        self._fields = {f.spec.name: f for f in record.fields}
        self._buffers: dict[str, RowBuffer] = {}
        for parts in record.fields:
            for tensor in parts.parts:
                reader.expect(tensor.block)

    def __enter__(self) -> OpenSample:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def rows(self, name: str, start: int, stop: int, buffer: RowBuffer | None = None) -> list[Array]:
        """Rows ``start:stop`` of a field as bits arrays ``[n, w_i]`` that stand side by side along axis 1.

        The rows of an array may be strided, its last axis is contiguous; the widths sum to the width of the field.
        The bytes lie in ``buffer`` (the caller's, reused).  Errors: ``SourceError`` if the bytes are not there, or do
        not fit the dtype that was planned.
        """
        found = self._fields[name]
        if not 0 <= start < stop <= self.sample.length:
            raise ValueError(f"{name}: rows {start}:{stop} of a sample of {self.sample.length} tokens")
        if buffer is None:
            buffer = self._buffers.setdefault(name, RowBuffer())
        arrays = read_rows(self._reader, found.parts, start, stop, buffer)
        if found.spec.dtype == found.spec.source_dtype:
            return arrays
        return [self._cast(found.spec, a, found.spec.dtype) for a in arrays]

    def whole(self, name: str, dtype: str | None = None) -> Array:
        """A field whole, as bits ``[length, *shape]``, cast exactly to ``dtype`` (default: as planned).

        ``SourceError`` names the value that does not fit.  Meant for token fields; the array is the caller's own.
        """
        found = self._fields[name]
        spec, length = found.spec, self.sample.length
        if not length:
            return np.empty((0, *spec.shape), dtype_of(dtype or spec.dtype).bits)
        arrays = read_rows(self._reader, found.parts, 0, length, RowBuffer())
        joined = arrays[0].copy() if len(arrays) == 1 else np.concatenate(arrays, axis=1)
        return self._cast(spec, joined, dtype or spec.dtype).reshape(length, *spec.shape)

    def tokens(self, dtypes: Mapping[str, str] | None = None) -> dict[str, Array]:
        """The token fields (at most 64 bytes a token) whole, by name; ``dtypes`` overrides what was planned."""
        wanted = dtypes or {}
        return {
            spec.name: self.whole(spec.name, wanted.get(spec.name)) for spec in self.sample.specs if spec.is_token_field
        }

    def extras(self) -> dict[str, object]:
        """The sample's small values, those that lie in the file's records included; ``SourceError`` for NaN and Inf."""
        found = dict(self._record.extras)
        for name, tensor in self._record.scalars.items():
            self._reader.expect(tensor.block)
            value = found[name] = self._reader.scalar(tensor)
            if isinstance(value, float) and not math.isfinite(value):
                raise SourceError(self.sample.name, f"{name} is {value}, which JSON has no number for")
        return found

    def finish(self) -> None:
        """Check what is left to check: the checksums to the end of each record, and that the file did not change.

        Raises ``SourceError``.  A sample counts as read only after this.
        """
        self._reader.finish()
        self._check_unchanged()

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._reader.close()
        while self._held:
            os.close(self._held.pop())

    def _cast(self, spec: FieldSpec, bits: Array, dtype: str) -> Array:
        try:
            return exact_cast(bits, spec.source_dtype, dtype, spec.name)
        except ValueError as error:
            raise SourceError(self.sample.name, str(error)) from None


def open_sample(sample: SampleSource, *, scratch: Path | str | None = None, hints: Hints | None = None) -> OpenSample:
    """Open a planned sample for reading; ``SourceError`` if its file is not the one that was planned.

    ``scratch`` is the folder for the unlinked file into which a gzip file is inflated (default: the system's).
    """
    from hsloader.formats.opening import open_planned

    return open_planned(sample, scratch, hints or Hints())
