"""The ring: one memory file that the trainer and its feeder share; ``hsloader.monitor.header`` draws its layout.

Records carry their own crc32c, so that a half-written one is never taken for a record, and are read only after a system
call (poll or recv) or where the processor keeps loads in order; areas are read and written with pread and pwrite, so
the file may grow under a mapping.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from hsloader.monitor.header import (
    CHECK,
    COMPLETION,
    FILLED,
    INFO,
    MAGIC,
    MEMFD_NAME,
    PAGE,
    RECORD,
    REQUEST,
    ROW,
    ROW_COUNTERS,
    SHAPE,
    VERSION,
    RingShape,
    read_shape,
    unpack_info,
    unpack_record,
)

__all__ = ["MEMFD_NAME", "Completion", "Request", "Ring", "RingShape", "Status"]

Bytes = npt.NDArray[np.uint8]
Counters = npt.NDArray[np.int64]


class Status:
    """How a request ended: its slot is filled, or it was cancelled, or the feeder itself failed (a text says how)."""

    FILLED = FILLED
    CANCELLED = 2
    FAILED = 3


class Request(NamedTuple):
    """The trainer's record of a slot. ``serial`` never repeats in a ring; 0 means that nothing was asked yet."""

    serial: int
    key: int
    generation: int
    area_offset: int
    area_bytes: int
    blob_bytes: int
    blob_crc: int


class Completion(NamedTuple):
    """The feeder's record of a slot: what became of request ``serial``. Instants and bytes as in ``counters``."""

    serial: int
    status: int
    bad: int
    blob_bytes: int
    started: int
    finished: int
    decoded_bytes: int
    blob_crc: int


class Ring:
    """A mapped ring. The memory lives until the ring and every view of its slots are gone."""

    def __init__(self, fd: int, shape: RingShape, slots: mmap.mmap | None = None, *, writable: bool = True) -> None:
        self.fd = fd
        self.shape = shape
        self._closer = weakref.finalize(self, os.close, fd)
        access = mmap.ACCESS_DEFAULT if writable else mmap.ACCESS_READ
        self._header = mmap.mmap(fd, shape.areas_at, access=access)
        header = np.frombuffer(self._header, np.uint8)
        self.trainer: Counters = header[PAGE : shape.feeder_at].view(np.int64)
        self.feeder: Counters = header[shape.feeder_at : shape.threads_at].view(np.int64)
        rows = header[shape.threads_at : shape.info_at].reshape(shape.threads, ROW)
        self.threads: Counters = rows[:, : ROW_COUNTERS * 8].view(np.int64)
        self._paths: Bytes = rows[:, ROW_COUNTERS * 8 :]
        self._slots = slots
        self._memory: Bytes | None = None
        self._tail = shape.file_bytes

    @classmethod
    def create(cls, shape: RingShape) -> Ring:
        """A new ring, in a memory file; where there is no such thing, one that only this process can use."""
        slots = None
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC)
        else:
            import tempfile

            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
            slots = mmap.mmap(-1, shape.slots * shape.slot_bytes)
        try:
            os.ftruncate(fd, shape.file_bytes)
            values = (shape.slots, shape.threads, 0, shape.slot_bytes, shape.area_bytes, shape.file_bytes)
            os.pwrite(fd, SHAPE.pack(MAGIC, VERSION, *values), 0)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, shape, slots)

    @classmethod
    def attach(cls, fd: int, *, writable: bool = True) -> Ring:
        """The ring in the file open at ``fd`` (which it then owns). ``ValueError`` if it is none of this version.

        A monitor opens it read-only; the slots of such a ring cannot be mapped.
        """
        shape = read_shape(fd)
        return cls(fd, shape, writable=writable)

    def close(self) -> None:
        """Close the descriptor. The mapping stays for as long as somebody holds a view of it."""
        self._closer()
        self.fd = -1

    def slot(self, number: int) -> Bytes:
        """The memory of a slot: writable uint8 of ``shape.slot_bytes``, mapped on first use."""
        if self._memory is None:
            size = self.shape.slots * self.shape.slot_bytes
            if self._slots is None:
                self._slots = mmap.mmap(self.fd, size, offset=self.shape.slots_at)
                # Only where /sys/kernel/mm/transparent_hugepage/shmem_enabled says so; the usual "never" ignores it.
                with contextlib.suppress(OSError, AttributeError):
                    self._slots.madvise(mmap.MADV_HUGEPAGE)
            self._memory = np.frombuffer(self._slots, np.uint8)
        start = number * self.shape.slot_bytes
        return self._memory[start : start + self.shape.slot_bytes]

    # Requests: written by the trainer.

    def write_request(self, slot: int, serial: int, key: int, generation: int, blob: bytes | memoryview) -> None:
        """Ask for ``blob`` (span table and wire pieces) in ``slot``; the record is the last thing written."""
        old = self.request(slot)
        if old is not None and old.area_bytes >= len(blob):
            offset, size = old.area_offset, old.area_bytes
        elif len(blob) <= self.shape.area_bytes:
            offset, size = self.shape.areas_at + slot * self.shape.area_bytes, self.shape.area_bytes
        else:
            size = -(-len(blob) * 3 // 2 // PAGE) * PAGE
            offset, self._tail = self._tail, self._tail + size
        self._pwrite(blob, offset)
        record = REQUEST.pack(serial, key, generation, offset, size, len(blob), crc32c(blob))
        self._write_record(self.shape.requests_at + slot * RECORD, record)

    def request(self, slot: int) -> Request | None:
        """The slot's request, or None: nothing was asked yet, or the record is being written."""
        values = self._read_record(self.shape.requests_at + slot * RECORD, REQUEST)
        return Request(*values) if values else None

    def request_blob(self, request: Request) -> bytes | None:
        """What the request says, or None if its bytes are not those that the record describes."""
        blob = self._pread(request.blob_bytes, request.area_offset)
        return blob if crc32c(blob) == request.blob_crc else None

    # Completions: written by the feeder.

    def write_completion(
        self, slot: int, request: Request, status: int, *, bad: int, blob: bytes, times: tuple[int, int], decoded: int
    ) -> None:
        """Report ``request`` done; ``blob`` (bad samples, or the failure's text) overwrites its pieces in the area."""
        blob = blob[: request.area_bytes]
        if blob:
            self._pwrite(blob, request.area_offset)
        record = COMPLETION.pack(request.serial, status, bad, len(blob), *times, decoded, crc32c(blob))
        self._write_record(self.shape.completions_at + slot * RECORD, record)

    def completion(self, slot: int) -> Completion | None:
        """The slot's completion, or None: there is none yet, or it is being written."""
        values = self._read_record(self.shape.completions_at + slot * RECORD, COMPLETION)
        return Completion(*values) if values else None

    def completion_blob(self, request: Request, completion: Completion) -> bytes:
        """What the feeder wrote with its completion."""
        return self._pread(completion.blob_bytes, request.area_offset)

    # What is said for people: info texts and the paths that threads work on.

    def write_info(self, info: Mapping[str, Any], *, feeder: bool = False) -> None:
        """Store a JSON object of at most 8 KB about the loader (the trainer's) or the feeder."""
        text = json.dumps(info, default=str).encode()
        if len(text) > INFO - 8:
            text = json.dumps({"error": f"info of {len(text)} bytes left out"}).encode()
        at = self.shape.info_at + feeder * INFO
        self._header[at : at + 8 + len(text)] = struct.pack("<II", len(text), crc32c(text)) + text

    def info(self, *, feeder: bool = False) -> dict[str, Any]:
        """The trainer's or the feeder's info; empty while it is being written."""
        at = self.shape.info_at + feeder * INFO
        return unpack_info(self._header[at : at + INFO])

    def write_path(self, thread: int, path: bytes) -> None:
        """Name the file that a feeder thread works on, relative to the dataset (its last 255 bytes are kept)."""
        room = self._paths[thread]
        path = path[-(len(room) - 1) :] + b"\0"
        room[: len(path)] = np.frombuffer(path, np.uint8)

    def path(self, thread: int) -> str:
        """The file that a feeder thread works on or worked on last."""
        text: bytes = self._paths[thread].tobytes()
        return text.split(b"\0", 1)[0].decode(errors="replace")

    def _write_record(self, at: int, record: bytes) -> None:
        self._header[at : at + len(record) + 4] = record + CHECK.pack(crc32c(record))

    def _read_record(self, at: int, layout: struct.Struct) -> tuple[Any, ...] | None:
        return unpack_record(self._header[at : at + layout.size + 4], layout)

    def _pwrite(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data).cast("B")
        while view:
            done = os.pwrite(self.fd, view, offset)
            view, offset = view[done:], offset + done

    def _pread(self, size: int, offset: int) -> bytes:
        parts = []
        while size > 0:
            part = os.pread(self.fd, size, offset)
            if not part:
                break
            parts.append(part)
            size, offset = size - len(part), offset + len(part)
        return b"".join(parts)
