"""The arrays of a segment while it grows: state fields with a way back, token fields that gather rows."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

import numpy as np

from hsloader.store.codec import Codec, Encoder
from hsloader.store.fields import Field
from hsloader.store.layout import RowLayout, first_chunk_alignment
from hsloader.store.shard import Mark, ShardRecord, ShardWriter
from hsloader.store.zarr_json import chunk_name

__all__ = ["Shards", "StateArray", "TokenArray"]

Bits = np.ndarray[Any, np.dtype[Any]]

# What an encoded sample is taken to measure against its raw bytes before any was seen.
_USUAL_RATIO = 1.45


class Shards:
    """The shard files of one array, in order: sealed ones, then open ones. Chunks fill one after another."""

    def __init__(self, directory: Path, field: Field, slots: int) -> None:
        directory.mkdir()
        self._directory = directory
        self._ndim = 1 + len(field.shape)
        self.slots = slots
        self._records: list[ShardRecord] = []
        self._open: list[ShardWriter] = []

    def append(self, frame: memoryview, align: int) -> None:
        if not self._open or self._open[-1].count == self.slots:
            number = len(self._records) + len(self._open)
            self._open.append(ShardWriter(self._directory / chunk_name(number, self._ndim), self.slots))
        self._open[-1].append(frame, align)

    def mark(self) -> tuple[int, Mark | None]:
        """How many shards are open, and the place in the last of them."""
        return len(self._open), self._open[-1].mark() if self._open else None

    def rollback(self, mark: tuple[int, Mark | None]) -> None:
        count, place = mark
        while len(self._open) > count:
            self._open.pop().abort()
        if place is not None:
            self._open[-1].rollback(place)

    def seal_full(self) -> None:
        while self._open and self._open[0].count == self.slots:
            self._seal_first()

    def seal(self) -> list[ShardRecord]:
        if not self._records and len(self._open) == 1:
            self.slots = self._open[0].trim()  # the only shard: a small dataset is not mostly empty index
        while self._open:
            self._seal_first()
        return self._records

    def abort(self) -> None:
        while self._open:
            self._open.pop().abort()

    def _seal_first(self) -> None:
        record = self._open[0].seal(fsync=True)
        del self._open[0]
        self._records.append(record)


class StateArray:
    """A state field: frames of whole samples, the first of each aligned, with a way back to the sample's start."""

    def __init__(self, field: Field, codec: Codec, shards: Shards, layout: RowLayout) -> None:
        self.field = field
        self.codec = codec
        self.shards = shards
        self._guess = layout.typical_length * field.row_bytes / _USUAL_RATIO
        self._zero_frame: bytes | None = None
        self._samples = 0
        self._bytes = 0
        self.begin()

    def begin(self) -> None:
        self._mark = self.shards.mark()
        self._chunks = 0
        self._sample_bytes = 0

    def append(self, frame: memoryview) -> None:
        mean = self._bytes / self._samples if self._samples else self._guess
        self.shards.append(frame, 8 if self._chunks else first_chunk_alignment(mean))
        self._chunks += 1
        self._sample_bytes += len(frame)

    def check(self, name: str, length: int) -> None:
        """Demand that all chunks of the open sample are there."""
        expected = -(-length // self.codec.chunk_rows)
        if self._chunks != expected:
            raise ValueError(
                f"sample {name!r}, field {self.field.name}: expected {expected} frames for {length} tokens "
                f"({self.codec.chunk_rows} rows a chunk), found {self._chunks}"
            )

    def pad(self, padded: int) -> None:
        """Write the chunks behind the sample that hold nothing but zero rows."""
        while self._chunks < padded // self.codec.chunk_rows:
            self.append(memoryview(self._padding()))

    def accept(self) -> None:
        self._samples += 1
        self._bytes += self._sample_bytes

    def rollback(self) -> None:
        self.shards.rollback(self._mark)
        self.begin()

    def seal(self) -> list[ShardRecord]:
        return self.shards.seal()

    def _padding(self) -> bytes:
        if self._zero_frame is None:
            zeros = np.zeros((self.codec.chunk_rows, self.field.width), self.field.type.bits)
            self._zero_frame = bytes(self.codec.encoder().encode([zeros]))
        return self._zero_frame


@dataclass
class TokenArray:
    """A token field: rows are gathered until they fill a chunk, which may hold many samples."""

    field: Field
    codec: Codec
    shards: Shards
    _pending: list[Bits] = dataclass_field(default_factory=list)
    _rows: int = 0
    _encoder: Encoder | None = None

    def add(self, bits: Bits, padded: int) -> None:
        """Take a sample's rows (copied) and the zero rows behind them."""
        rows = np.zeros((padded, self.field.width), self.field.type.bits)
        rows[: len(bits)] = bits.reshape(len(bits), self.field.width)
        self._pending.append(rows)
        self._rows += padded

    def flush(self) -> None:
        """Write the chunks that are full."""
        rows = self.codec.chunk_rows
        if self._rows < rows:
            return
        pending = np.concatenate(self._pending)
        while len(pending) >= rows:
            self._write(pending[:rows])
            # After each chunk: should the next one fail, a second try begins with that one.
            pending = pending[rows:]
            self._pending, self._rows = [pending], len(pending)
        self._pending = [pending.copy()]

    def seal(self) -> list[ShardRecord]:
        self.flush()
        if self._rows:
            self._write(np.concatenate(self._pending))
            self._pending, self._rows = [], 0
        return self.shards.seal()

    def _write(self, rows: Bits) -> None:
        if self._encoder is None:
            self._encoder = self.codec.encoder()
        self.shards.append(self._encoder.encode([rows]), 8)
