"""Writes one segment: samples one by one, their state fields as encoded frames, their token fields as arrays.

A sample is *begun*, its frames are appended, and it is *committed* or *rolled back*. No shard gets its index before its
last sample is settled, so a bad sample leaves no trace. Equal input gives equal bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hsloader.store.codec import Codec
from hsloader.store.fields import Field
from hsloader.store.files import fsync_directory, write_new
from hsloader.store.growing import Shards, StateArray, TokenArray
from hsloader.store.layout import RowLayout
from hsloader.store.manifest import SegmentEntry
from hsloader.store.samples import encode_extras, encode_name, encode_texts, sample_key, table_from
from hsloader.store.segment_meta import ArrayMeta, SegmentMeta, TableMeta
from hsloader.store.zarr_json import BF16_AS, array_document, chunk_name, group_document, json_bytes, plain_document

__all__ = ["SegmentWriter"]

Bits = np.ndarray[Any, np.dtype[Any]]


class SegmentWriter:
    """Writes a segment into ``directory`` (made if it is not there; its files must not exist yet).

    Not safe for threads: frames are encoded anywhere and appended by one thread, in order. Memory: the frames go
    straight to their shards, names and extras are kept until ``seal``. After an error of ``append`` or ``commit`` comes
    ``rollback``; ``begin``, which seals full shards, may be called again; after one of ``seal`` only ``abort`` is left.
    """

    def __init__(
        self, directory: Path, fields: tuple[Field, ...], layout: RowLayout, *, bf16_as: str = "bfloat16"
    ) -> None:
        if bf16_as not in BF16_AS:
            raise ValueError(f"bf16_as is {bf16_as!r}; expected one of {', '.join(BF16_AS)}")
        self.directory = Path(directory)
        self.fields = tuple(fields)
        self.layout = layout
        self._bf16_as = bf16_as
        self.directory.mkdir(exist_ok=True)
        self._states: dict[str, StateArray] = {}
        self._tokens: dict[str, TokenArray] = {}
        for field in self.fields:
            shards = Shards(self.directory / field.name, field, layout.shard_chunks(field))
            codec = Codec(field, layout.chunk_rows[field.name])
            if field.is_token_field:
                self._tokens[field.name] = TokenArray(field, codec, shards)
            else:
                self._states[field.name] = StateArray(field, codec, shards, layout)
        self._rows_of_samples: list[tuple[int, ...]] = []
        self._names: list[bytes] = []
        self._extras: list[bytes] = []
        self._open: tuple[str, int] | None = None
        self.tokens = 0
        self.rows = 0
        self.raw_bytes = 0

    @property
    def samples(self) -> int:
        """Samples committed so far."""
        return len(self._names)

    def codec(self, field_name: str) -> Codec:
        """The codec of a field; share it between threads, take one encoder a thread from it."""
        return (self._states.get(field_name) or self._tokens[field_name]).codec

    def chunks(self, field_name: str, length: int) -> list[tuple[int, int]]:
        """The row ranges (start, stop) within a sample of ``length`` tokens that become one frame each, in order."""
        rows = self.layout.chunk_rows[field_name]
        return [(start, min(start + rows, length)) for start in range(0, length, rows)]

    def begin(self, name: str, length: int) -> None:
        """Open the next sample: ``length`` tokens, named ``name`` (undecodable bytes as surrogate escapes)."""
        self._demand_settled()
        if length < 1:
            raise ValueError(f"sample {name!r} has {length} tokens; expected at least 1")
        encode_name(name)
        self._settle()
        for array in self._states.values():
            array.begin()
        self._open = (name, length)

    def append(self, field_name: str, frame: memoryview) -> None:
        """Append the next frame of the open sample's state field; the frame's memory is free again on return."""
        if self._open is None:
            raise RuntimeError("no sample is open")
        self._states[field_name].append(frame)

    def commit(
        self,
        tokens: Mapping[str, Bits],
        *,
        loss_tokens: int = -1,
        first_supervised: int = -1,
        flags: int = 0,
        extras: dict[str, Any] | None = None,
    ) -> None:
        """Accept the open sample. ``tokens``: bits ``[length, *shape]`` of every token field.

        Raises ``ValueError`` if a field is missing or does not fit, ``OSError`` if the disk is full; the sample is then
        still open, to be rolled back.
        """
        if self._open is None:
            raise RuntimeError("no sample is open")
        name, length = self._open
        taken = self._checked_tokens(name, length, tokens)
        encoded_extras = encode_extras(extras)
        row = (self.rows, length, loss_tokens, first_supervised, _as_int64(sample_key(name)), flags)
        padded = self.layout.padded(length)
        for array in self._states.values():
            array.check(name, length)
        for array in self._states.values():
            array.pad(padded)
        # From here on only memory is touched: the sample is in as a whole.
        for field_name, bits in taken.items():
            self._tokens[field_name].add(bits, padded)
        for array in self._states.values():
            array.accept()
        self._rows_of_samples.append(row)
        self._names.append(encode_name(name))
        self._extras.append(encoded_extras)
        self.tokens += length
        self.rows += padded
        self.raw_bytes += length * sum(field.row_bytes for field in self.fields)
        self._open = None

    def rollback(self) -> None:
        """Forget the open sample: the shards are cut back to its start."""
        if self._open is None:
            return
        for array in self._states.values():
            array.rollback()
        self._open = None

    def seal(self, quarantine: Sequence[dict[str, Any]] = (), source: dict[str, Any] | None = None) -> SegmentEntry:
        """Finish the segment durably: token chunks, indexes, tables, metadata, fsync of all.

        The entry's ``path`` is empty until the segment is placed. ``quarantine`` and ``source`` are kept in the
        segment's metadata.
        """
        self._demand_settled()
        if not self._names:
            raise ValueError(f"{self.directory}: a segment needs at least one sample")
        self._settle()
        arrays = {field.name: self._seal_array(field) for field in self.fields}
        tables = self._write_tables()
        meta = SegmentMeta(
            samples=self.samples,
            tokens=self.tokens,
            rows=self.rows,
            alignment=self.layout.alignment,
            raw_bytes=self.raw_bytes,
            stored_bytes=sum(s.size for a in arrays.values() for s in a.shards) + sum(t.size for t in tables.values()),
            fields=self.fields,
            arrays=arrays,
            tables=tables,
            quarantine=tuple(quarantine),
            source=source,
        )
        document = json_bytes(group_document(meta.to_attributes()))
        write_new(self.directory / "zarr.json", document)
        fsync_directory(self.directory)
        return meta.entry("", document)

    def abort(self) -> None:
        """Close what is open; unsealed shards are deleted. Harmless after ``seal``."""
        arrays: list[StateArray | TokenArray] = [*self._states.values(), *self._tokens.values()]
        for array in arrays:
            array.shards.abort()

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _demand_settled(self) -> None:
        if self._open is not None:
            raise RuntimeError(f"sample {self._open[0]!r} is still open: commit it or roll it back first")

    def _settle(self) -> None:
        for state in self._states.values():
            state.shards.seal_full()
        for token in self._tokens.values():
            token.flush()
            token.shards.seal_full()

    def _checked_tokens(self, name: str, length: int, tokens: Mapping[str, Bits]) -> dict[str, Bits]:
        if tokens.keys() != self._tokens.keys():
            raise ValueError(
                f"sample {name!r}: expected the token fields {sorted(self._tokens)}, found {sorted(tokens)}"
            )
        for field_name, bits in tokens.items():
            field = self._tokens[field_name].field
            if bits.dtype != field.type.bits or bits.shape != (length, *field.shape):
                raise ValueError(
                    f"sample {name!r}, field {field_name}: expected {field.type.bits} {[length, *field.shape]}, "
                    f"found {bits.dtype} {list(bits.shape)}"
                )
        return dict(tokens)

    def _seal_array(self, field: Field) -> ArrayMeta:
        array = self._states.get(field.name) or self._tokens[field.name]
        records = array.seal()
        chunk_rows = array.codec.chunk_rows
        slots = array.shards.slots
        document = json_bytes(array_document(field, self.rows, chunk_rows, slots * chunk_rows, bf16_as=self._bf16_as))
        directory = self.directory / field.name
        write_new(directory / "zarr.json", document)
        fsync_directory(directory)
        return ArrayMeta(
            chunk_rows=chunk_rows,
            shard_chunks=slots,
            zarr_json=hashlib.sha256(document).hexdigest(),
            shards=tuple(records),
        )

    def _write_tables(self) -> dict[str, TableMeta]:
        names, names_end = encode_texts(self._names)
        tables: dict[str, Bits] = {
            "samples": table_from(self._rows_of_samples),
            "names": names,
            "names_end": names_end,
        }
        if any(extras != b"{}" for extras in self._extras):
            tables["extras"], tables["extras_end"] = encode_texts(self._extras)
        return {name: write_table(self.directory / name, table) for name, table in tables.items()}


def write_table(directory: Path, table: Bits) -> TableMeta:
    """Write a plain array of one chunk, and describe its files."""
    directory.mkdir()
    document = json_bytes(plain_document(table.dtype.name, table.shape))
    data = table.tobytes()
    write_new(directory / chunk_name(0, table.ndim), data)
    write_new(directory / "zarr.json", document)
    fsync_directory(directory)
    return TableMeta(
        size=len(data), digest=hashlib.sha256(data).hexdigest(), zarr_json=hashlib.sha256(document).hexdigest()
    )


def _as_int64(key: int) -> int:
    return key - (1 << 64) if key >= 1 << 63 else key
