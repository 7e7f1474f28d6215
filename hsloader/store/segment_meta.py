"""A segment's metadata: the attributes of its ``zarr.json``, whose sha256 is the segment's digest.

It holds a digest of every other file of the segment (a shard's covers its index and the crc32c of every frame), so
the digest in the manifest covers them all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hsloader.errors import DamageError, IncompatibleError
from hsloader.store.checks import Node, parse_json
from hsloader.store.fields import Field, check_field_set
from hsloader.store.frames import MAX_CHUNK_BYTES
from hsloader.store.manifest import BYTES_LIMIT, FORMAT, SegmentEntry, field_from, field_to
from hsloader.store.samples import ROWS_LIMIT, SAMPLES_LIMIT
from hsloader.store.shard import ShardRecord, index_bytes

__all__ = ["ArrayMeta", "SegmentMeta", "TableMeta"]

_SLOTS_LIMIT = 1 << 26

# zstd keeps 128 KiB in four bytes at best. A shard that claims to hold more is a lie about how much memory to take.
_RATIO_LIMIT = 1 << 15


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayMeta:
    """One field's array in a segment. ``zarr_json``: sha256 of that file."""

    chunk_rows: int
    shard_chunks: int
    zarr_json: str
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMeta:
    """One plain array (samples, names, ...): its one chunk file's bytes and sha256, and the sha256 of its zarr.json."""

    size: int
    digest: str
    zarr_json: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentMeta:
    """What a segment says of itself.

    ``quarantine``: what was left out, and why; ``source``: what the converter notes to recognise its own work. Both
    are JSON of theirs that the store only keeps.
    """

    samples: int
    tokens: int
    rows: int
    alignment: int
    raw_bytes: int
    stored_bytes: int
    fields: tuple[Field, ...]
    arrays: Mapping[str, ArrayMeta]
    tables: Mapping[str, TableMeta]
    quarantine: tuple[dict[str, Any], ...] = ()
    source: dict[str, Any] | None = None

    def to_attributes(self) -> dict[str, Any]:
        """The group's ``attributes``."""
        arrays = {
            name: {
                "chunk_rows": array.chunk_rows,
                "shard_chunks": array.shard_chunks,
                "zarr_json": array.zarr_json,
                "shards": [
                    {"chunks": s.chunks, "size": s.size, "index_crc32c": s.index_crc, "digest": s.digest}
                    for s in array.shards
                ],
            }
            for name, array in self.arrays.items()
        }
        return {
            "hsloader": {
                "format": FORMAT,
                "samples": self.samples,
                "tokens": self.tokens,
                "rows": self.rows,
                "alignment": self.alignment,
                "raw_bytes": self.raw_bytes,
                "stored_bytes": self.stored_bytes,
                "fields": [field_to(field) for field in self.fields],
                "arrays": arrays,
                "tables": {name: asdict(table) for name, table in self.tables.items()},
                "quarantine": list(self.quarantine),
                "source": self.source,
            }
        }

    def entry(self, path: str, zarr_json: bytes) -> SegmentEntry:
        """The manifest's entry for the segment at ``path`` whose zarr.json has the bytes given."""
        return SegmentEntry(
            path=path,
            samples=self.samples,
            tokens=self.tokens,
            rows=self.rows,
            raw_bytes=self.raw_bytes,
            stored_bytes=self.stored_bytes,
            digest=hashlib.sha256(zarr_json).hexdigest(),
        )

    @classmethod
    def parse(cls, data: bytes, path: object) -> SegmentMeta:
        """The metadata in the bytes of a segment's zarr.json; ``DamageError`` naming ``path``."""
        node = parse_json(data, path).node("attributes").node("hsloader")
        version = node.integer("format", 0, 1 << 31)
        if version != FORMAT:
            raise IncompatibleError(
                f"{path}: the segment has format {version}, this hsloader reads format {FORMAT}; "
                f"install an hsloader that reads format {version}"
            )
        samples = node.integer("samples", 1, SAMPLES_LIMIT)
        tokens = node.integer("tokens", samples, ROWS_LIMIT)
        rows = node.integer("rows", tokens, ROWS_LIMIT)
        alignment = node.integer("alignment", 1, rows)
        fields = tuple(field_from(field) for field in node.nodes("fields"))
        try:
            check_field_set(fields)
        except ValueError as error:
            raise DamageError(f"{path}: {error}") from error
        arrays = node.node("arrays")
        tables = node.node("tables")
        source = None if node.value.get("source") is None else node.node("source").value
        return cls(
            samples=samples,
            tokens=tokens,
            rows=rows,
            alignment=alignment,
            raw_bytes=node.integer("raw_bytes", 0, BYTES_LIMIT),
            stored_bytes=node.integer("stored_bytes", 0, BYTES_LIMIT),
            fields=fields,
            arrays={field.name: _array_from(arrays.node(field.name), field, rows, alignment) for field in fields},
            tables={name: _table_from(tables.node(name)) for name in tables.value},
            quarantine=tuple(item.value for item in node.nodes("quarantine")),
            source=source,
        )


def _array_from(node: Node, field: Field, rows: int, alignment: int) -> ArrayMeta:
    chunk_rows = node.integer("chunk_rows", 1, max(1, MAX_CHUNK_BYTES // field.row_bytes))
    if not field.is_token_field and alignment % chunk_rows:
        raise node.fail("chunk_rows", f"a divisor of the alignment {alignment}", chunk_rows)
    shard_chunks = node.integer("shard_chunks", 1, _SLOTS_LIMIT)
    chunks = -(-rows // chunk_rows)
    shards = node.nodes("shards")
    expected = -(-chunks // shard_chunks)
    if len(shards) != expected:
        raise node.fail("shards", f"{expected} shards for {rows:,} rows", len(shards))
    records = []
    for k, shard in enumerate(shards):
        held = min(shard_chunks, chunks - k * shard_chunks)
        raw = held * chunk_rows * field.row_bytes
        least = index_bytes(shard_chunks) + (raw if field.codec == "none" else raw // _RATIO_LIMIT)
        records.append(
            ShardRecord(
                chunks=shard.integer("chunks", held, held),
                size=shard.integer("size", least, BYTES_LIMIT),
                index_crc=shard.integer("index_crc32c", 0, (1 << 32) - 1),
                digest=shard.hex_digest("digest"),
            )
        )
    return ArrayMeta(
        chunk_rows=chunk_rows,
        shard_chunks=shard_chunks,
        zarr_json=node.hex_digest("zarr_json"),
        shards=tuple(records),
    )


def _table_from(node: Node) -> TableMeta:
    return TableMeta(
        size=node.integer("size", 0, BYTES_LIMIT),
        digest=node.hex_digest("digest"),
        zarr_json=node.hex_digest("zarr_json"),
    )


def check_entry(meta: SegmentMeta, entry: SegmentEntry, path: object) -> None:
    """Demand that the segment's own numbers are those that the manifest lists."""
    for key in ("samples", "tokens", "rows", "raw_bytes", "stored_bytes"):
        found, expected = getattr(meta, key), getattr(entry, key)
        if found != expected:
            raise DamageError(f"{path}: {key}: the manifest says {expected:,}, the segment says {found:,}")


def check_like(meta: SegmentMeta, fields: Sequence[Field], path: object) -> None:
    """Demand that the segment stores each of the manifest's ``fields`` as a reader will take it."""
    stored = {field.name: (field.dtype, field.shape) for field in meta.fields}
    for field in fields:
        if stored.get(field.name) != (field.dtype, field.shape):
            raise DamageError(
                f"{path}: field {field.name}: the manifest says {field.dtype} {list(field.shape)}, "
                f"the segment has {stored.get(field.name, 'no such field')}"
            )
