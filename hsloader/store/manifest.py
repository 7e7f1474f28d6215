"""The manifest: what a dataset consists of, in one JSON file that is swapped atomically.

``fp_0`` is the sha256 of the format and the fields, ``fp_i = sha256(fp_{i-1} || entry_i)``: a dataset that has grown
still proves its first n segments. There are no times and no host names in it: the same input gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import field as dataclass_field
from itertools import accumulate
from pathlib import Path
from typing import Any

from hsloader.errors import DamageError, DatasetError, IncompatibleError
from hsloader.store.checks import Node, parse_json
from hsloader.store.fields import Field, check_field_set
from hsloader.store.files import read_limited
from hsloader.store.provenance import Provenance
from hsloader.store.samples import COLUMNS, FLAGS, ROWS_LIMIT, SAMPLES_LIMIT

__all__ = [
    "FORMAT",
    "MANIFEST_NAME",
    "Manifest",
    "PackedTable",
    "Provenance",
    "SegmentEntry",
    "canonical",
    "field_from",
    "field_to",
    "read_manifest",
    "segment_path",
]

FORMAT = 1
MANIFEST_NAME = "manifest.json"
BYTES_LIMIT = 1 << 60

# Features that a reader must know to read the data right. Format 1 has none yet.
KNOWN_FEATURES: frozenset[str] = frozenset()

_SIZE_LIMIT = 256 << 20
_SEGMENTS_LIMIT = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentEntry:
    """What the manifest says of one segment. ``raw_bytes``: the samples' values; ``stored_bytes``: all its files."""

    path: str
    samples: int
    tokens: int
    rows: int
    raw_bytes: int
    stored_bytes: int
    digest: str

    @property
    def number(self) -> int:
        """The segment's number, from its path."""
        return int(self.path.rpartition("/")[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTable:
    """The samples tables of the first ``segments`` segments as one array of ``samples`` columns at ``path``."""

    path: str
    segments: int
    samples: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A dataset's manifest; immutable, ``grown`` makes the next one."""

    fields: tuple[Field, ...]
    provenance: Provenance = dataclass_field(default_factory=Provenance)
    segments: tuple[SegmentEntry, ...] = ()
    packed: PackedTable | None = None

    @property
    def samples(self) -> int:
        """Samples of all segments."""
        return sum(entry.samples for entry in self.segments)

    @property
    def tokens(self) -> int:
        """Tokens of all segments."""
        return sum(entry.tokens for entry in self.segments)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the samples' values, uncompressed and without padding."""
        return sum(entry.raw_bytes for entry in self.segments)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all segments' files."""
        return sum(entry.stored_bytes for entry in self.segments)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all segments in order."""
        return self.fingerprints()[-1]

    def fingerprints(self, count: int | None = None) -> list[str]:
        """``fp_0 .. fp_count`` (hexadecimal); of all segments if ``count`` is None."""
        base = canonical({"format": FORMAT, "fields": [field_to(field) for field in self.fields]})
        first = hashlib.sha256(base).hexdigest()
        return list(
            accumulate(
                self.segments[:count],
                lambda former, entry: hashlib.sha256(bytes.fromhex(former) + canonical(asdict(entry))).hexdigest(),
                initial=first,
            )
        )

    def grown(self, entries: Sequence[SegmentEntry]) -> Manifest:
        """This manifest with more segments behind those it has."""
        return replace(self, segments=(*self.segments, *entries))

    def first(self, count: int) -> Manifest:
        """This manifest with its first ``count`` segments only."""
        packed = self.packed if self.packed is not None and self.packed.segments <= count else None
        return replace(self, segments=self.segments[:count], packed=packed)

    def to_bytes(self) -> bytes:
        """The file: JSON with sorted keys; equal manifests give equal bytes."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "features": [],
            "fields": [field_to(field) for field in self.fields],
            "sample_columns": list(COLUMNS),
            "sample_flags": FLAGS,
            "provenance": asdict(self.provenance),
            "segments": [asdict(entry) for entry in self.segments],
            "packed_samples": None if self.packed is None else asdict(self.packed),
            "fingerprint": self.fingerprint,
        }
        document["digest"] = _document_digest(document)
        return json.dumps(document, sort_keys=True, indent=1).encode("ascii") + b"\n"

    @classmethod
    def parse(cls, data: bytes, path: object) -> Manifest:
        """The manifest in ``data``; ``path`` is named in errors.

        Raises ``IncompatibleError`` for another format version or an unknown feature, ``DamageError`` for anything
        that no hsloader wrote. Unknown keys are ignored.
        """
        node = parse_json(data, path)
        _check_version(node)
        found = node.hex_digest("digest")
        expected = _document_digest(node.value)
        if found != expected:
            raise DamageError(
                f"{path}: the manifest was changed: its digest says {found}, its content has {expected}; "
                "restore the file (a manifest is never edited by hand)"
            )
        entries = node.nodes("segments")
        if len(entries) > _SEGMENTS_LIMIT:
            raise node.fail("segments", f"at most {_SEGMENTS_LIMIT:,} segments", len(entries))
        segments = tuple(_entry_from(entry) for entry in entries)
        paths = {entry.path for entry in segments}
        if len(paths) != len(segments):
            raise DamageError(f"{path}: segments: a segment is listed twice")
        manifest = cls(
            fields=_fields_from(node),
            provenance=_provenance_from(node.node("provenance")),
            segments=segments,
            packed=_packed_from(node, segments),
        )
        if manifest.fingerprint != node.hex_digest("fingerprint"):
            raise DamageError(f"{path}: the fingerprint does not belong to the segments listed; restore the file")
        return manifest


def read_manifest(root: Path) -> Manifest:
    """The manifest of the dataset at ``root``; ``FileNotFoundError`` or ``DatasetError`` where there is none."""
    path = root / MANIFEST_NAME
    if not path.exists() and not path.is_symlink():
        if not root.exists():
            raise FileNotFoundError(f"{root}: there is no such dataset")
        raise DatasetError(
            f"{root}: not an hsloader dataset: expected {MANIFEST_NAME} in it, found none; "
            "convert the data first (hsloader convert SRC DST), or give the folder that convert wrote"
        )
    return Manifest.parse(read_limited(path, _SIZE_LIMIT, "the manifest"), path)


def segment_path(number: int) -> str:
    """Where segment ``number`` lies, below the dataset."""
    return f"segments/{number:06d}"


def canonical(value: object) -> bytes:
    """The JSON bytes that digests are taken of: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def field_to(field: Field) -> dict[str, Any]:
    """A field as JSON."""
    return {
        "name": field.name,
        "dtype": field.dtype,
        "shape": list(field.shape),
        "codec": field.codec,
        "source_dtype": field.source_dtype,
        "scale": field.scale,
    }


def field_from(node: Node) -> Field:
    """The field that ``field_to`` wrote; ``DamageError`` for anything else."""
    try:
        return Field(
            name=node.text("name"),
            dtype=node.text("dtype"),
            shape=node.integers("shape", 1, BYTES_LIMIT),
            codec=node.text("codec"),
            source_dtype=node.optional_text("source_dtype"),
            scale=node.optional_text("scale"),
        )
    except ValueError as error:
        raise DamageError(f"{node.path}: {node.where[:-1]}: {error}") from error


def _document_digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical({key: document[key] for key in document if key != "digest"})).hexdigest()


def _check_version(node: Node) -> None:
    version = node.integer("format", 0, 1 << 31)
    if version != FORMAT:
        raise IncompatibleError(
            f"{node.path}: the dataset has format {version}, this hsloader reads format {FORMAT}; "
            f"install an hsloader that reads format {version}, or convert the data again"
        )
    unknown = sorted(set(node.texts("features")) - KNOWN_FEATURES)
    if unknown:
        raise IncompatibleError(
            f"{node.path}: the dataset uses {', '.join(unknown)}, unknown to this hsloader; install a newer one"
        )


def _fields_from(node: Node) -> tuple[Field, ...]:
    fields = tuple(field_from(each) for each in node.nodes("fields"))
    try:
        check_field_set(fields)
    except ValueError as error:
        raise DamageError(f"{node.path}: {error}") from error
    return fields


def _entry_from(node: Node) -> SegmentEntry:
    path = node.text("path")
    number = path.removeprefix("segments/")
    if len(number) > 12 or not (number.isascii() and number.isdigit()) or segment_path(int(number)) != path:
        raise node.fail("path", "segments/NNNNNN", path)
    samples = node.integer("samples", 1, SAMPLES_LIMIT)
    tokens = node.integer("tokens", samples, ROWS_LIMIT)
    return SegmentEntry(
        path=path,
        samples=samples,
        tokens=tokens,
        rows=node.integer("rows", tokens, ROWS_LIMIT),
        raw_bytes=node.integer("raw_bytes", 0, BYTES_LIMIT),
        stored_bytes=node.integer("stored_bytes", 0, BYTES_LIMIT),
        digest=node.hex_digest("digest"),
    )


def _packed_from(node: Node, segments: Sequence[SegmentEntry]) -> PackedTable | None:
    if node.value.get("packed_samples") is None:
        return None
    packed = node.node("packed_samples")
    count = packed.integer("segments", 1, len(segments))
    samples = sum(entry.samples for entry in segments[:count])
    path = packed.text("path")
    prefix, _, name = path.partition("/")
    if prefix != "packed" or not name or not set(name) <= set("0123456789abcdef-"):
        raise packed.fail("path", "packed/NAME", path)
    return PackedTable(
        path=path,
        segments=count,
        samples=packed.integer("samples", samples, samples),
        digest=packed.hex_digest("digest"),
    )


def _provenance_from(node: Node) -> Provenance:
    try:
        return Provenance(**{key: node.value[key] for key in Provenance.__slots__ if key in node.value})
    except ValueError as error:
        raise DamageError(f"{node.path}: {node.where}{error}") from error
