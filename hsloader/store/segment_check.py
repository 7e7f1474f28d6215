"""Checks one segment for ``verify``: metadata, tables, every shard's bytes, and the samples table against the data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsloader.errors import DamageError, IncompatibleError
from hsloader.store.codec import FrameError
from hsloader.store.files import read_limited
from hsloader.store.manifest import FORMAT, MANIFEST_NAME
from hsloader.store.problems import Problem
from hsloader.store.samples import COLUMNS, Table, mask_counts, sample_key
from hsloader.store.shard import frame_crc, index_bytes, shard_digest
from hsloader.store.stored_segment import ArrayInfo, Segment, ShardHandle
from hsloader.store.zarr_json import chunk_name, group_document, json_bytes

__all__ = ["SegmentCheck", "check_groups"]

_MASK = "loss_mask"
_GAP_BYTES = 1 << 20

Count = Callable[[int, int], None]


def check_groups(root: Path) -> list[Problem]:
    """The two group files that hang the dataset together for other zarr readers."""
    problems = []
    attributes = {"hsloader": {"format": FORMAT, "manifest": MANIFEST_NAME}}
    for path, document in (
        (root / "zarr.json", group_document(attributes)),
        (root / "segments" / "zarr.json", group_document()),
    ):
        try:
            if read_limited(path, 1 << 20, "the group's metadata") != json_bytes(document):
                problems.append(Problem("group", str(path), "expected the group's metadata as hsloader writes it"))
        except DamageError as error:
            problems.append(Problem("group", str(path), str(error)))
    return problems


class SegmentCheck:
    """The check of one segment: ``open`` it, run its ``tasks`` in any threads, ``close`` it.

    ``chosen``: numbers of the samples to read (None: all bytes).
    """

    def __init__(self, segment: Segment, chosen: list[int] | None) -> None:
        self.segment = segment
        self.chosen = chosen
        self.table: Table | None = None
        self.checked_samples = 0
        self._problems: list[Problem] = []
        self._arrays: list[ArrayInfo] = []
        self._masks: dict[int, npt.NDArray[Any]] = {}

    def open(self) -> None:
        """Check metadata, tables, names and the presence of every file."""
        segment = self.segment
        try:
            meta = segment.meta
        except (DamageError, IncompatibleError) as error:
            self._add("segment", segment.path / "zarr.json", error, samples=(f"all {segment.entry.samples} samples",))
            return
        try:
            self.table = segment.table()
        except DamageError as error:
            self._add("table", segment.path / "samples", error)
        for field in meta.fields:
            try:
                self._arrays.append(segment.array(field.name))
            except DamageError as error:
                self._add("array", segment.path / field.name / "zarr.json", error)
        self._check_texts()
        self._check_files()

    def tasks(self) -> list[_ShardTask]:
        """One task a shard."""
        made = []
        for array in self._arrays:
            wanted = self._wanted_chunks(array)
            for shard in range(array.shards):
                first = shard * array.shard_chunks
                numbers = range(first, first + array.records[shard].chunks)
                chunks = None if wanted is None else sorted(wanted.intersection(numbers))
                made.append(_ShardTask(self, array, shard, chunks))
        return made

    def close(self) -> list[Problem]:
        """Check the samples table against the data; everything found by ``open`` and here."""
        if self.table is not None:
            self.checked_samples = self.segment.entry.samples if self.chosen is None else len(self.chosen)
            self._check_mask(self.table)
        return self._problems

    def keep_mask(self, shard: int, mask: npt.NDArray[Any]) -> None:
        """Keep the loss mask that a shard holds for ``close``."""
        self._masks[shard] = mask

    def samples_in(self, first: int, last: int) -> tuple[str, ...]:
        """The names of the samples that have rows in ``first:last``."""
        if self.table is None:
            return ()
        starts, ends = self.table[0], self.table[0] + self.table[1]
        return tuple(self._name(int(i)) for i in np.flatnonzero((starts < last) & (ends > first)))

    def padding_in(self, first: int, last: int) -> npt.NDArray[np.bool_] | None:
        """For each row of ``first:last`` whether it belongs to no sample; None where the table is damaged."""
        if self.table is None:
            return None
        padding = np.ones(last - first, np.bool_)
        starts, ends = self.table[0], self.table[0] + self.table[1]
        low = int(np.searchsorted(ends, first, side="right"))
        high = int(np.searchsorted(starts, last, side="left"))
        for i in range(low, high):
            padding[max(int(starts[i]) - first, 0) : int(ends[i]) - first] = False
        return padding

    def names_with(self, keys: set[int]) -> Iterator[str]:
        """The names of the samples whose key (as int64) is one of ``keys``."""
        if self.table is not None:
            for i in np.flatnonzero(np.isin(self.table[COLUMNS.index("key")], list(keys))):
                yield self._name(int(i))

    def _add(self, kind: str, path: Path, error: object, *, samples: tuple[str, ...] = ()) -> None:
        self._problems.append(Problem(kind, str(path), str(error), samples=samples))

    def _name(self, position: int) -> str:
        try:
            return self.segment.name(position)
        except DamageError:
            return f"number {position} of {self.segment.path.name}"

    def _wanted_chunks(self, array: ArrayInfo) -> set[int] | None:
        if self.chosen is None:
            return None
        wanted: set[int] = set()
        for i in self.chosen if self.table is not None else ():
            assert self.table is not None
            first, length = int(self.table[0, i]), int(self.table[1, i])
            wanted.update(range(first // array.chunk_rows, -(-(first + length) // array.chunk_rows)))
        return wanted

    def _check_texts(self) -> None:
        keys = None if self.table is None else self.table[COLUMNS.index("key")].view(np.uint64)
        for position in range(self.segment.entry.samples):
            try:
                name = self.segment.name(position)
                self.segment.extras(position)
            except DamageError as error:
                self._add("table", self.segment.path, error)
                return
            if keys is not None and sample_key(name) != int(keys[position]):
                self._add("sample", self.segment.path / "samples", "the key is not that of the name", samples=(name,))

    def _check_files(self) -> None:
        """Nothing is in the segment but what its metadata describes."""
        expected = {"zarr.json"}
        for array in self._arrays:
            name = array.field.name
            expected |= {f"{name}/{array.shard_path(k).name}" for k in range(array.shards)} | {f"{name}/zarr.json"}
        for name in self.segment.meta.tables:
            chunk = chunk_name(0, 2 if name == "samples" else 1)
            expected |= {f"{name}/zarr.json", f"{name}/{chunk}"}
        known = {field.name for field in self.segment.meta.fields} - {array.field.name for array in self._arrays}
        for folder, _, files in os.walk(self.segment.path):
            below = Path(folder).relative_to(self.segment.path)
            for file in files:
                path = (below / file).as_posix()
                if path not in expected and below.as_posix() not in known:
                    self._add("unexpected", self.segment.path / path, "a file that the segment does not list")

    def _check_mask(self, table: Table) -> None:
        array = next((array for array in self._arrays if array.field.name == _MASK), None)
        if array is None or len(self._masks) < array.shards:
            return
        mask, dtype = np.concatenate([self._masks[shard] for shard in range(array.shards)]), array.field.dtype
        for i, (first, length, loss, supervised) in enumerate(table[:4].T.tolist()):
            found = mask_counts(mask[first : first + length], dtype)
            if found != (loss, supervised):
                text = (
                    f"the samples table says {loss} loss tokens, the first at {supervised}; "
                    f"the mask has {found[0]}, the first at {found[1]}"
                )
                self._add("sample", self.segment.path / "samples", text, samples=(self._name(i),))


@dataclass(frozen=True, slots=True)
class _ShardTask:
    """Reads one shard: all of it (``chunks`` is None), or the chunks listed."""

    check: SegmentCheck
    array: ArrayInfo
    shard: int
    chunks: list[int] | None

    @property
    def size(self) -> int:
        record = self.array.records[self.shard]
        return record.size if self.chunks is None else record.size * len(self.chunks) // max(1, record.chunks)

    def run(self, count: Count) -> list[Problem]:
        path = str(self.array.shard_path(self.shard))
        try:
            handle = self.array.open_shard(self.shard)
        except DamageError as error:
            count(self.size, 0)
            return [Problem("shard", path, str(error), samples=self._samples(None))]
        problems = self._read_all(handle, count) if self.chunks is None else self._read_some(handle, count)
        return problems

    def _read_all(self, handle: ShardHandle, count: Count) -> list[Problem]:
        """Every byte in file order: frames, the gaps between them, and the digest over both."""
        record, array = self.array.records[self.shard], self.array
        problems: list[Problem] = []
        crcs = np.zeros(record.chunks, np.uint32)
        out = np.empty(array.codec.chunk_bytes, np.uint8)
        mask = np.zeros((record.chunks, array.chunk_rows), array.field.type.bits) if self._holds_mask else None
        end = 0
        for slot in np.argsort(handle.index[: record.chunks, 0], kind="stable").tolist():
            offset, size = handle.index[slot].tolist()
            problems += self._check_gap(handle, end, offset, slot)
            found, frame = self._check_frame(handle, slot, out)
            problems += found
            if frame:
                crcs[slot] = frame_crc(memoryview(frame))
            if mask is not None:
                mask[slot] = 0 if found else out.view(mask.dtype)
            count(offset + size - end, 1)
            end = offset + size
        problems += self._check_gap(handle, end, record.size - index_bytes(array.shard_chunks), None)
        count(record.size - end, 0)
        if mask is not None:
            self.check.keep_mask(self.shard, mask.reshape(-1))
        if shard_digest(handle.index, crcs) != record.digest and not problems:
            text = "the digest over index and checksums is not the recorded one: frames were exchanged or rewritten"
            problems.append(self._problem("shard", text, None))
        return problems

    def _read_some(self, handle: ShardHandle, count: Count) -> list[Problem]:
        problems: list[Problem] = []
        out = np.empty(self.array.codec.chunk_bytes, np.uint8)
        for chunk in self.chunks or ():
            slot = chunk - self.shard * self.array.shard_chunks
            problems += self._check_frame(handle, slot, out)[0]
            count(int(handle.index[slot, 1]), 1)
        return problems

    def _check_frame(self, handle: ShardHandle, slot: int, out: npt.NDArray[np.uint8]) -> tuple[list[Problem], bytes]:
        """Decode a chunk into ``out`` and look at its padding; what is wrong, and the frame's bytes (if there)."""
        array = self.array
        frame = b""
        try:
            frame = handle.frame(slot, array.codec.max_frame_bytes)
            array.codec.decode(memoryview(frame), out)
        except FrameError as error:
            return [self._problem("chunk", str(error), slot)], frame
        except OSError as error:  # an unreadable sector
            return [self._problem("chunk", f"the frame cannot be read: {error.strerror}", slot)], frame
        first = (self.shard * array.shard_chunks + slot) * array.chunk_rows
        padding = self.check.padding_in(first, first + array.chunk_rows)
        if padding is not None and out.reshape(array.chunk_rows, -1)[padding].any():
            return [self._problem("padding", "rows that belong to no sample are not zero", slot)], frame
        return [], frame

    def _check_gap(self, handle: ShardHandle, start: int, stop: int, slot: int | None) -> list[Problem]:
        """The bytes ``start:stop``, before a frame or before the index, are zeros; a hostile gap can be terabytes."""
        for at in range(start, stop, _GAP_BYTES):
            size = min(_GAP_BYTES, stop - at)
            try:
                data = os.pread(handle.fd, size, at)
            except OSError as error:
                return [self._problem("shard", f"bytes from {at:,} cannot be read: {error.strerror}", slot)]
            if data != bytes(size):
                return [self._problem("shard", f"bytes {start:,} to {stop:,} between frames are not zero", slot)]
        return []

    @property
    def _holds_mask(self) -> bool:
        return self.array.field.name == _MASK and self.array.field.shape == ()

    def _problem(self, kind: str, text: str, slot: int | None) -> Problem:
        chunk = None if slot is None else self.shard * self.array.shard_chunks + slot
        return Problem(kind, str(self.array.shard_path(self.shard)), text, chunk, self._samples(chunk))

    def _samples(self, chunk: int | None) -> tuple[str, ...]:
        """The samples that one chunk, or the whole shard, holds rows of."""
        rows = self.array.chunk_rows
        if chunk is not None:
            return self.check.samples_in(chunk * rows, (chunk + 1) * rows)
        first = self.shard * self.array.shard_chunks * rows
        return self.check.samples_in(first, first + self.array.records[self.shard].chunks * rows)
