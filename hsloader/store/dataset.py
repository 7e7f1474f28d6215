"""Opens a dataset for reading: its samples, and their rows as numpy bits or torch tensors.

Importing this module imports neither torch nor zarr; torch is imported by the first ``dataset[i]``.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hsloader.errors import DamageError, IncompatibleError
from hsloader.store.arrays import as_tensor
from hsloader.store.codec import FrameError
from hsloader.store.fields import Field
from hsloader.store.files import OUT_OF_RESOURCES
from hsloader.store.lending import LentMemory
from hsloader.store.manifest import Manifest, Provenance, read_manifest
from hsloader.store.packed import read_tables
from hsloader.store.samples import COLUMNS
from hsloader.store.stored_segment import ArrayInfo, Segment, ShardCache

if TYPE_CHECKING:
    import torch

__all__ = ["Dataset", "open_dataset"]

Bits = npt.NDArray[Any]

# Decoded chunks of token fields that are kept: one holds the rows of many samples.
_TOKEN_CHUNKS = 32

# Before more memory than this is taken for a sample, its shards are opened: a manifest can claim anything.
_TRUSTED_BYTES = 256 << 20


def open_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Open the dataset at ``path``.

    Reads the manifest and the samples table; everything else is read, and checked, when it is touched. Raises
    ``FileNotFoundError`` if nothing is there, ``DatasetError`` if it is no dataset, ``IncompatibleError`` if this
    version cannot read it, ``DamageError`` if it is damaged.
    """
    return _open(Path(path))


def _open(path: Path, segments: int | None = None, fingerprint: str | None = None) -> Dataset:
    """Open the first ``segments`` segments, which must have ``fingerprint``."""
    for attempt in range(3):
        manifest = read_manifest(path)
        if segments is not None:
            manifest = manifest.first(segments)
        if fingerprint is not None and manifest.fingerprint != fingerprint:
            raise IncompatibleError(
                f"{path}: expected {segments} segments with fingerprint {fingerprint}, found "
                f"{len(manifest.segments)} with {manifest.fingerprint}: the dataset was replaced by another"
            )
        try:
            return Dataset(path, manifest, read_tables(path, manifest))
        except DamageError:
            # A writer may have renewed the packed table between our two reads: then there is another manifest.
            if attempt == 2 or read_manifest(path).packed == manifest.packed:
                raise
    raise AssertionError("not reached")


class Dataset:
    """A dataset open for reading; see ``open_dataset``. Safe for threads and forks; pickles as "open it again".

    Arrays, one value a sample: ``lengths`` (tokens), ``loss_tokens`` (-1 without a mask), ``first_supervised`` (-1),
    ``keys`` (uint64, of the names), ``flags``, ``segment_of`` (int32), ``first_rows`` (within the segment).
    """

    def __init__(self, path: Path, manifest: Manifest, table: npt.NDArray[np.int64]) -> None:
        self.path = path.absolute()  # the working directory may change
        self.manifest = manifest
        self.segments = tuple(Segment(self.path, entry, manifest.fields) for entry in manifest.segments)
        self.fields: dict[str, Field] = {field.name: field for field in manifest.fields}
        table.flags.writeable = False
        column = {name: table[i] for i, name in enumerate(COLUMNS)}
        self.lengths = column["length"]
        self.loss_tokens = column["loss_tokens"]
        self.first_supervised = column["first_supervised"]
        self.first_rows = column["first_row"]
        self.flags = column["flags"]
        self.keys: npt.NDArray[np.uint64] = column["key"].view(np.uint64)
        counts = [entry.samples for entry in manifest.segments]
        self.segment_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        self._shards = ShardCache()
        self._token_chunks = _ChunkCache(_TOKEN_CHUNKS)
        self._memory = LentMemory()

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        fields = ", ".join(f"{f.name} {f.dtype}{list(f.shape)}" for f in self.fields.values())
        return f"<hsloader dataset {self.path}: {len(self):,} samples, {self.manifest.tokens:,} tokens; {fields}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.path, len(self.segments), self.fingerprint)

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open shards; they are opened again if something is read after it."""
        self._shards.clear()
        self._token_chunks.clear()
        self._memory.clear()

    @property
    def provenance(self) -> Provenance:
        """Where the states come from."""
        return self.manifest.provenance

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all segments; ``manifest.fingerprints(n)`` has those of the first n."""
        return self.manifest.fingerprint

    @property
    def metadata(self) -> dict[str, Any]:
        """What people ask of a dataset, as plain values."""
        manifest = self.manifest
        return {
            "path": str(self.path),
            "samples": len(self),
            "tokens": manifest.tokens,
            "segments": len(self.segments),
            "raw_bytes": manifest.raw_bytes,
            "stored_bytes": manifest.stored_bytes,
            "fields": {f.name: {"dtype": f.dtype, "shape": list(f.shape), "codec": f.codec} for f in manifest.fields},
            "provenance": {key: getattr(manifest.provenance, key) for key in Provenance.__slots__},
            "fingerprint": self.fingerprint,
        }

    def name(self, i: int) -> str:
        """The name of sample ``i``."""
        segment, position = self._place(i)
        return segment.name(position)

    def extras(self, i: int) -> dict[str, Any]:
        """The small values of sample ``i`` (conversation id and the like); empty if it has none."""
        segment, position = self._place(i)
        return segment.extras(position)

    def read(
        self, i: int, field: str, start: int = 0, stop: int | None = None, out: Bits | None = None
    ) -> npt.NDArray[Any]:
        """Rows ``start:stop`` of a field of sample ``i`` as bits ``[stop - start, *shape]`` (see ``DType.bits``).

        Only the chunks that hold these rows are read, checked and decoded. ``out``: where to put them (C-contiguous,
        of that dtype and shape). Raises ``DamageError`` naming shard, chunk and sample.
        """
        i = self._index(i)
        length = int(self.lengths[i])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"sample {i} has {length} tokens; rows {start}:{stop} are not within")
        return self._read(i, self._field(field), start, stop, out)

    def __getitem__(self, key: int | tuple[int, slice]) -> dict[str, torch.Tensor]:
        """``dataset[i]`` or ``dataset[i, a:b]``: every field of sample ``i`` (rows a to b) as a CPU tensor."""
        i, rows = key if isinstance(key, tuple) and len(key) == 2 else (key, slice(None))
        if not hasattr(i, "__index__") or not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError(f"expected dataset[i] or dataset[i, start:stop], found dataset[{key!r}]")
        i = self._index(i)
        start, stop, _ = rows.indices(int(self.lengths[i]))
        stop = max(start, stop)
        return {name: as_tensor(self._read(i, f, start, stop, None), f.dtype) for name, f in self.fields.items()}

    def _read(self, i: int, field: Field, start: int, stop: int, out: Bits | None) -> Bits:
        """Rows ``start:stop``, which are within sample ``i``, in ``out`` or in memory of ours."""
        shape, bits = (stop - start, *field.shape), field.type.bits
        if out is not None and (
            out.dtype != bits or out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable
        ):
            raise ValueError(
                f"out: expected writable, C-contiguous {bits} {list(shape)}, found {out.dtype} {list(out.shape)}"
            )
        if start == stop:
            return np.empty(shape, bits) if out is None else out
        array = self.segments[self.segment_of[i]].array(field.name)
        first = int(self.first_rows[i])
        if out is None:
            if (stop - start) * array.row_bytes > _TRUSTED_BYTES:
                self._open_shards(i, array, first + start, first + stop)
            out = self._memory.empty(shape, bits)
        self._read_rows(i, array, first + start, first + stop, out.reshape(-1).view(np.uint8))
        return out

    def _open_shards(self, i: int, array: ArrayInfo, first: int, last: int) -> None:
        """See that the shards of the segment's rows ``first:last`` are there, one after another."""
        rows = array.chunk_rows * array.shard_chunks
        for shard in range(first // rows, -(-last // rows)):
            try:
                self._shards.get(array, shard)
            except DamageError as error:
                raise self._damage(error, f"shard {shard}", i) from error

    def _read_rows(self, i: int, array: ArrayInfo, first: int, last: int, out: npt.NDArray[np.uint8]) -> None:
        """Fill ``out`` with the segment's rows ``first:last``: whole chunks in place, cut ones through a scratch."""
        rows, row_bytes = array.chunk_rows, array.row_bytes
        for chunk in range(first // rows, -(-last // rows)):
            start, stop = max(first, chunk * rows), min(last, (chunk + 1) * rows)
            place = out[(start - first) * row_bytes : (stop - first) * row_bytes]
            if stop - start == rows:
                self._decode(i, array, chunk, place)
                continue
            decoded = self._token_chunks.get(array, chunk) if array.is_token_field else None
            if decoded is None:
                decoded = np.empty(rows * row_bytes, np.uint8)
                self._decode(i, array, chunk, decoded)
                if array.is_token_field:
                    self._token_chunks.put(array, chunk, decoded)
            offset = (start - chunk * rows) * row_bytes
            place[:] = decoded[offset : offset + len(place)]

    def _decode(self, i: int, array: ArrayInfo, chunk: int, out: npt.NDArray[np.uint8]) -> None:
        shard, slot = divmod(chunk, array.shard_chunks)
        handle = None
        try:
            handle = self._shards.get(array, shard)
            array.codec.decode(memoryview(handle.frame(slot, array.codec.max_frame_bytes)), out)
        except (FrameError, DamageError, OSError) as error:
            if isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES:
                raise
            text = str(error) if handle is None else f"{handle.path}: {error}"
            raise self._damage(text, f"shard {shard}, chunk {chunk}", i) from error

    def _damage(self, text: object, place: str, i: int) -> DamageError:
        """The error of a sample that cannot be read."""
        called = str(i)
        with contextlib.suppress(DamageError, OSError):
            called = f"{i} {self.name(i)!r}"
        return DamageError(f"{text} (dataset {self.path}, {place}, sample {called}); run: hsloader verify {self.path}")

    def _place(self, i: int) -> tuple[Segment, int]:
        i = self._index(i)
        number = int(self.segment_of[i])
        return self.segments[number], i - int(self._starts[number])

    def _index(self, i: int) -> int:
        i = operator.index(i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self):,}")
        return i + len(self) if i < 0 else i

    def _field(self, name: str) -> Field:
        try:
            return self.fields[name]
        except KeyError:
            raise KeyError(f"{self.path} has no field {name!r}; it has {', '.join(self.fields)}") from None


class _ChunkCache:
    """Decoded chunks; the oldest goes first. Safe for threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._chunks: OrderedDict[tuple[ArrayInfo, int], npt.NDArray[np.uint8]] = OrderedDict()

    def get(self, array: ArrayInfo, chunk: int) -> npt.NDArray[np.uint8] | None:
        return self._chunks.get((array, chunk))

    def put(self, array: ArrayInfo, chunk: int, decoded: npt.NDArray[np.uint8]) -> None:
        decoded.flags.writeable = False
        self._chunks[array, chunk] = decoded
        while len(self._chunks) > self._capacity:
            self._chunks.popitem(last=False)

    def clear(self) -> None:
        self._chunks.clear()
