"""Reads one segment: its metadata, tables and shard indexes, each checked against its digest when first touched."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsloader.errors import DamageError
from hsloader.store.checks import parse_json
from hsloader.store.codec import Codec, FrameError
from hsloader.store.fields import Field
from hsloader.store.files import open_regular, read_limited
from hsloader.store.manifest import BYTES_LIMIT, SegmentEntry
from hsloader.store.samples import COLUMNS, Table, check_table, decode_text
from hsloader.store.segment_meta import SegmentMeta, check_entry, check_like
from hsloader.store.shard import ABSENT, ShardError, ShardRecord, read_index
from hsloader.store.zarr_json import chunk_name

__all__ = ["ArrayInfo", "Segment", "ShardCache", "ShardHandle"]

_METADATA_LIMIT = 1 << 30
_ZARR_JSON_LIMIT = 1 << 20

# A process may map 65,530 regions and often open 1,024 files; a reader of many segments stays far below both.
OPEN_SHARDS = 512


class ShardHandle:
    """One open shard: ``fd``, ``size`` in bytes, ``index`` uint64 ``[slots, 2]`` of (offset, bytes with crc32c).

    The descriptor is closed when the last reference to the handle is gone.
    """

    __slots__ = ("__weakref__", "fd", "index", "path", "size")

    def __init__(self, path: Path, fd: int, size: int, index: npt.NDArray[np.uint64]) -> None:
        self.path = path
        self.fd = fd
        self.size = size
        self.index = index
        weakref.finalize(self, os.close, fd)

    def frame(self, slot: int, most: int) -> bytes:
        """A chunk's frame; ``FrameError`` if it would have more than ``most`` bytes or the file ends before it does."""
        offset, size = self.index[slot].tolist()
        if size > most:
            raise FrameError(f"a frame of {size:,} bytes; expected at most {most:,}")
        data = os.pread(self.fd, size, offset)
        if len(data) != size:
            raise FrameError(f"expected {size:,} bytes at {offset:,}, the file ends after {len(data):,}")
        return data


class ArrayInfo:
    """One field's array in a segment: where its chunks are.

    ``records[k]`` describes shard k; chunk c holds the rows ``[c * chunk_rows, (c + 1) * chunk_rows)`` of the segment
    and is slot ``c % shard_chunks`` of shard ``c // shard_chunks``.
    """

    __slots__ = (
        "chunk_rows",
        "codec",
        "directory",
        "field",
        "is_token_field",
        "records",
        "row_bytes",
        "rows",
        "shard_chunks",
    )

    def __init__(self, directory: Path, field: Field, meta: SegmentMeta) -> None:
        array = meta.arrays[field.name]
        self.directory = directory
        self.field = field
        # Copies, since a read of a small sample would spend a tenth of its time on deriving them.
        self.row_bytes = field.row_bytes
        self.is_token_field = field.is_token_field
        self.rows = meta.rows
        self.chunk_rows = array.chunk_rows
        self.shard_chunks = array.shard_chunks
        self.records: tuple[ShardRecord, ...] = array.shards
        self.codec = Codec(field, array.chunk_rows)

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.records)

    def shard_path(self, shard: int) -> Path:
        """The file of a shard."""
        return self.directory / chunk_name(shard, 1 + len(self.field.shape))

    def open_shard(self, shard: int) -> ShardHandle:
        """Open a shard and read its index; ``DamageError`` unless both are what the segment recorded."""
        record = self.records[shard]
        path = self.shard_path(shard)
        fd = open_regular(path, record.size, "the shard")
        try:
            index = read_index(fd, record.size, self.shard_chunks, crc=record.index_crc)
            held = index[: record.chunks]
            if (held == ABSENT).any() or (index[record.chunks :] != ABSENT).any():
                raise ShardError(f"the index does not hold exactly the first {record.chunks} chunks")
        except ShardError as error:
            os.close(fd)
            raise DamageError(f"{path}: the shard's index is damaged: {error}; restore the file") from error
        except BaseException:
            os.close(fd)
            raise
        return ShardHandle(path, fd, record.size, index)

    def index(self, shard: int) -> npt.NDArray[np.uint64]:
        """A shard's index, read afresh: uint64 ``[shard_chunks, 2]`` of (offset, bytes with crc32c)."""
        return self.open_shard(shard).index


class Segment:
    """One listed segment. Nothing is read before it is asked for.

    ``fields``: the manifest's, which the segment's must be like.
    """

    def __init__(self, root: Path, entry: SegmentEntry, fields: Sequence[Field] = ()) -> None:
        self.entry = entry
        self._fields = fields
        self.path = root / entry.path
        self._meta: SegmentMeta | None = None
        self._arrays: dict[str, ArrayInfo] = {}
        self._texts: dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]] = {}

    @property
    def meta(self) -> SegmentMeta:
        """The segment's metadata, checked against the manifest's digest."""
        if self._meta is None:
            path = self.path / "zarr.json"
            data = read_limited(path, _METADATA_LIMIT, "the segment's metadata")
            found = hashlib.sha256(data).hexdigest()
            if found != self.entry.digest:
                raise DamageError(
                    f"{path}: the manifest says sha256 {self.entry.digest}, the file has {found}: "
                    "it was changed or belongs to another segment; restore it"
                )
            meta = SegmentMeta.parse(data, path)
            check_entry(meta, self.entry, path)
            check_like(meta, self._fields, path)
            self._meta = meta
        return self._meta

    def array(self, field_name: str) -> ArrayInfo:
        """Where a field's chunks are; ``DamageError`` if the array's zarr.json is not the one that was sealed."""
        info = self._arrays.get(field_name)
        if info is None:
            meta = self.meta
            field = next((field for field in meta.fields if field.name == field_name), None)
            if field is None:
                raise DamageError(f"{self.path}: the segment has no field {field_name}, the manifest lists it")
            check_zarr_json(self.path / field_name, meta.arrays[field_name].zarr_json)
            info = ArrayInfo(self.path / field_name, field, meta)
            self._arrays[field_name] = info
        return info

    def table(self) -> Table:
        """The samples table: int64 ``[columns, samples]`` in the order of ``COLUMNS``."""
        data = self._table_bytes("samples", len(COLUMNS) * self.entry.samples * 8)
        table = np.frombuffer(data, "<i8").reshape(len(COLUMNS), self.entry.samples)
        check_table(table, self.entry.rows, self.entry.tokens, self.path / "samples")
        return table

    def name(self, position: int) -> str:
        """The name of the segment's sample number ``position``."""
        return decode_text(self._text("names", position))

    def extras(self, position: int) -> dict[str, Any]:
        """The small values of the segment's sample number ``position``; empty if it has none."""
        if "extras" not in self.meta.tables:
            return {}
        return parse_json(self._text("extras", position), f"{self.path / 'extras'}: sample {position}").value

    def _text(self, table: str, position: int) -> bytes:
        if not 0 <= position < self.entry.samples:
            raise IndexError(f"sample {position} of a segment of {self.entry.samples}")
        if table not in self._texts:
            ends = np.frombuffer(self._table_bytes(table + "_end", self.entry.samples * 8), "<i8")
            data = np.frombuffer(self._table_bytes(table, None), np.uint8)
            if (np.diff(ends, prepend=0) < 0).any() or ends[-1] != len(data):
                raise DamageError(f"{self.path / table}: the ends do not fit the {len(data):,} bytes of text")
            self._texts[table] = data, ends
        data, ends = self._texts[table]
        return data[ends[position - 1] if position else 0 : ends[position]].tobytes()

    def _table_bytes(self, name: str, size: int | None) -> bytes:
        directory = self.path / name
        table = self.meta.tables.get(name)
        if table is None or (size is not None and table.size != size):
            found = "none" if table is None else f"{table.size:,} bytes"
            raise DamageError(f"{directory}: expected a table of {size} bytes, the segment's metadata has {found}")
        check_zarr_json(directory, table.zarr_json)
        path = directory / chunk_name(0, 2 if name == "samples" else 1)
        data = read_limited(path, BYTES_LIMIT, "the table", size=table.size)
        found_digest = hashlib.sha256(data).hexdigest()
        if found_digest != table.digest:
            raise DamageError(
                f"{path}: the segment says sha256 {table.digest}, the file has {found_digest}; restore it"
            )
        return data


def check_zarr_json(directory: Path, digest: str) -> None:
    """Demand that an array's zarr.json is the one that was sealed: other zarr readers believe it."""
    path = directory / "zarr.json"
    found = hashlib.sha256(read_limited(path, _ZARR_JSON_LIMIT, "the array's metadata")).hexdigest()
    if found != digest:
        raise DamageError(f"{path}: the segment says sha256 {digest}, the file has {found}; restore it")


class ShardCache:
    """The shards that are open, at most ``capacity``: the least recently used one is let go. Safe for threads.

    By default 512, or a quarter of the descriptors that this process may open.
    """

    def __init__(self, capacity: int | None = None) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._capacity = capacity or max(1, min(OPEN_SHARDS, descriptors // 4))
        self._handles: OrderedDict[tuple[ArrayInfo, int], ShardHandle] = OrderedDict()
        self._lock = threading.Lock()
        _caches.add(self)

    def get(self, array: ArrayInfo, shard: int) -> ShardHandle:
        """The shard, opened if need be. It stays open as long as the caller holds it."""
        key = (array, shard)
        with self._lock:
            handle = self._handles.get(key)
            if handle is not None:
                self._handles.move_to_end(key)
                return handle
        handle = array.open_shard(shard)
        with self._lock:
            handle = self._handles.setdefault(key, handle)
            while len(self._handles) > self._capacity:
                self._handles.popitem(last=False)
        return handle

    def clear(self) -> None:
        """Let all go."""
        with self._lock:
            self._handles.clear()

    def _after_fork(self) -> None:
        # Another thread of the parent may have held the lock; the descriptors are good in the child (pread only).
        self._lock = threading.Lock()


_caches: weakref.WeakSet[ShardCache] = weakref.WeakSet()


def _renew_locks() -> None:
    for cache in list(_caches):
        cache._after_fork()


os.register_at_fork(after_in_child=_renew_locks)
