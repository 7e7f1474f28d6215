"""A batch that the feeder is filling: its place in the ring, what is left to do, what went wrong."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsloader.reader.pieces import WIRE
from hsloader.reader.planning import Cut
from hsloader.reader.ring import Request

__all__ = ["BadSample", "Batch", "decode_bad", "encode_bad", "pack_blob", "unpack_blob"]

Bytes = npt.NDArray[np.uint8]
Pieces = npt.NDArray[np.void]

KINDS = ("damage", "os")
_SPAN = struct.Struct("<QQ")

# What the list of bad samples may need beyond the request's own bytes (whose place it takes): a few full texts.
BAD_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample whose rows could not be had; they are zero in the batch.

    ``kind`` is ``"damage"`` (the bytes are not those that were written) or ``"os"`` (the system refused to give
    them); ``path``, ``chunk`` and ``offset`` say where (-1: the whole shard), ``text`` what is wrong.
    """

    sample: int
    field: str
    kind: str
    path: str
    chunk: int
    offset: int
    text: str


def pack_blob(offsets: Sequence[int], rows: Sequence[int], wire: Pieces) -> bytes:
    """A request's bytes in the ring: (offset, rows) of every span, then the wire pieces."""
    return b"".join([*(_SPAN.pack(*span) for span in zip(offsets, rows, strict=True)), wire.tobytes()])


def unpack_blob(blob: bytes, fields: int) -> tuple[tuple[int, ...], tuple[int, ...], Pieces]:
    """``pack_blob``'s arguments again."""
    spans = [_SPAN.unpack_from(blob, i * _SPAN.size) for i in range(fields)]
    wire = np.frombuffer(blob, WIRE, offset=fields * _SPAN.size)
    return tuple(span[0] for span in spans), tuple(span[1] for span in spans), wire


class Batch:
    """A request on its way. ``left`` counts pieces of work; who finishes the last one reports the batch."""

    __slots__ = ("bad", "cancelled", "decoded_bytes", "failure", "fresh", "left", "lock", "memory", "offsets",
                 "request", "row_bytes", "rows", "skipped", "slot", "started", "wire")  # fmt: skip

    def __init__(self, slot: int, request: Request, memory: Bytes, row_bytes: Sequence[int]) -> None:
        self.slot = slot
        self.request = request
        self.memory = memory
        self.row_bytes = row_bytes
        self.rows: tuple[int, ...] = ()
        self.offsets: tuple[int, ...] = ()
        self.wire: Pieces = np.empty(0, WIRE)
        self.lock = threading.Lock()
        self.left = 1
        self.cancelled = False  # the trainer wants it no more
        self.fresh = False  # its slot has no pages yet
        self.skipped = False  # ... and some of it was not read
        self.failure = ""
        self.bad: dict[tuple[int, int], tuple[str, str, int, int, str]] = {}
        self.decoded_bytes = 0
        self.started = time.monotonic_ns()

    def parse(self, blob: bytes) -> None:
        """Take the spans and pieces from the request's bytes, and see that the spans lie in the slot."""
        self.offsets, self.rows, self.wire = unpack_blob(blob, len(self.row_bytes))
        for offset, rows, width in zip(self.offsets, self.rows, self.row_bytes, strict=True):
            if offset + rows * width > len(self.memory):
                raise ValueError(f"a span of {rows} rows at {offset} leaves the slot of {len(self.memory)} bytes")

    def place(self, field: int, row: int, rows: int) -> Bytes:
        """The bytes of ``rows`` rows of a span."""
        width = self.row_bytes[field]
        start = self.offsets[field] + row * width
        return self.memory[start : start + rows * width]

    def more(self, count: int) -> None:
        """``count`` more pieces of work are to be done."""
        with self.lock:
            self.left += count

    def done(self, decoded_bytes: int = 0) -> bool:
        """A piece of work is done; True if it was the last."""
        with self.lock:
            self.decoded_bytes += decoded_bytes
            self.left -= 1
            return self.left == 0

    def spoil(self, field: int, cuts: Iterable[Cut], error: Exception, where: tuple[str, int, int]) -> None:
        """The rows of ``cuts`` cannot be had: zero them and note their samples. ``where``: path, chunk, offset."""
        kind = KINDS[isinstance(error, OSError)]
        for _, count, dest, sample in cuts:
            self.place(field, dest, count)[:] = 0
            with self.lock:
                self.bad.setdefault((sample, field), (kind, *where, str(error)))

    def fail(self, text: str) -> None:
        """The feeder itself failed: the batch cannot be had."""
        self.failure = self.failure or text


def encode_bad(bad: Mapping[tuple[int, int], tuple[str, str, int, int, str]], room: int) -> bytes:
    """The bad samples as JSON of at most ``room`` bytes; where they are too many, the later ones lose their texts."""
    entries: list[list[Any]] = []
    texts: dict[str, int] = {}
    for (sample, field), (kind, path, chunk, offset, text) in sorted(bad.items()):
        numbers = [texts.setdefault(path, len(texts)), texts.setdefault(text, len(texts))]
        entries.append([sample, field, KINDS.index(kind), chunk, offset, *numbers])
    whole = _json(list(texts), entries)
    if len(whole) <= room:
        return whole
    short = [text[:500] for text in list(texts)[:8]]
    full = [entry if max(entry[5:]) < len(short) else entry[:3] for entry in entries]
    for kept in (full, [entry[:3] for entry in entries]):
        whole = _json(short, kept)
        if len(whole) <= room:
            return whole
    return _json([], [entry[:3] for entry in entries])


def decode_bad(blob: bytes, fields: Sequence[str]) -> tuple[BadSample, ...]:
    """The bad samples that ``encode_bad`` wrote."""
    told = json.loads(blob)
    found = []
    for sample, field, kind, *rest in told["bad"]:
        chunk, offset, path, text = rest or (-1, -1, None, None)
        words = ("", "its rows could not be read") if path is None else (told["texts"][path], told["texts"][text])
        found.append(BadSample(sample, fields[field], KINDS[kind], words[0], chunk, offset, words[1]))
    return tuple(found)


def _json(texts: list[str], entries: list[list[Any]]) -> bytes:
    return json.dumps({"texts": texts, "bad": entries}, separators=(",", ":")).encode()
