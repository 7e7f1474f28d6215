"""The plan of a conversion: which samples go into which segment, in order, and the sources as they were. And as JSON.

A plan holds nothing about the destination and no times of its own, so that the same sources planned twice give the
same segments.  Its JSON is what the journal keeps; a rerun follows it instead of planning anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from hsloader.conversion.report import Quarantined
from hsloader.errors import ConversionError
from hsloader.formats.discover import natural_key
from hsloader.formats.source import ArrowFile, FieldSpec, Identity, SampleSource
from hsloader.store.fields import Field
from hsloader.store.manifest import Provenance, field_to

__all__ = ["Plan", "PlannedSegment", "counts_of", "file_of", "group_samples"]

_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSegment:
    """One segment: its reserved number, its samples in order, and what planning refused between them."""

    number: int
    samples: tuple[SampleSource, ...]
    refused: tuple[Quarantined, ...] = ()

    def digest(self) -> str:
        """Recognises a segment of this plan that an interrupted run left: sha256 of names and lengths."""
        text = json.dumps([[s.name, s.length] for s in self.samples] + [[q.name, q.reason] for q in self.refused])
        return hashlib.sha256(text.encode("ascii")).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One plan of a journal.

    ``source`` is SRC as an absolute path, ``root`` the folder that names are below (SRC, or the folder of a single
    file), ``settings`` what decides the bytes (``ConvertSettings.identity``), ``files`` every source file as it was
    planned, by its name below SRC (arrow files that have masks, too); ``notes`` and ``left_out`` count samples.
    ``refused`` are the bad ones of a plan without any segment to record them; ``accepted`` are converted files that had
    changed when a replan saw them: the dataset keeps what it has of them.
    """

    source: str
    root: str
    settings: Mapping[str, Any]
    fields: tuple[Field, ...]
    provenance: Provenance
    typical_length: int
    segments: tuple[PlannedSegment, ...]
    files: Mapping[str, Identity]
    layouts: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    refused: tuple[Quarantined, ...] = ()
    accepted: Mapping[str, Identity] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """The first of the reserved segment numbers."""
        return self.segments[0].number if self.segments else 0

    @property
    def samples(self) -> int:
        """Samples to convert."""
        return sum(len(segment.samples) for segment in self.segments)

    @property
    def all_refused(self) -> tuple[Quarantined, ...]:
        """Everything that planning refused, in order."""
        return (*(q for segment in self.segments for q in segment.refused), *self.refused)

    def to_json(self) -> bytes:
        """The plan for the journal (``specs`` and layouts are written once and referred to)."""
        tables = _Tables(self.root)
        segments = [
            {
                "number": segment.number,
                "samples": [tables.sample(sample) for sample in segment.samples],
                "refused": [[q.name, q.reason] for q in segment.refused],
            }
            for segment in self.segments
        ]
        document = {
            "format": _FORMAT,
            "source": self.source,
            "root": self.root,
            "settings": dict(self.settings),
            "fields": [field_to(f) for f in self.fields],
            "provenance": asdict(self.provenance),
            "typical_length": self.typical_length,
            "layouts": dict(self.layouts),
            "notes": dict(self.notes),
            "left_out": dict(self.left_out),
            "refused": [[q.name, q.reason] for q in self.refused],
            "files": _identities_to(self.files),
            "accepted": _identities_to(self.accepted),
            "kinds": tables.kinds,
            "segments": segments,
        }
        return json.dumps(document).encode("ascii") + b"\n"

    @classmethod
    def from_json(cls, data: bytes, path: object) -> Plan:
        """The plan that ``to_json`` wrote; ``ConversionError`` naming ``path`` for anything else."""
        try:
            value = json.loads(data)
            if value["format"] != _FORMAT:
                raise ValueError(f"the plan has format {value['format']}, this version writes {_FORMAT}")
            files = _identities_of(value["files"])
            kinds = [_Kind.of(kind) for kind in value["kinds"]]
            segments = tuple(
                PlannedSegment(
                    number=item["number"],
                    samples=tuple(_sample(row, kinds, files, value["root"]) for row in item["samples"]),
                    refused=tuple(Quarantined(*q) for q in item["refused"]),
                )
                for item in value["segments"]
            )
            return cls(
                source=value["source"],
                root=value["root"],
                settings=value["settings"],
                fields=tuple(Field(**{**f, "shape": tuple(f["shape"])}) for f in value["fields"]),
                provenance=Provenance(**_with_tuples(value["provenance"])),
                typical_length=value["typical_length"],
                segments=segments,
                files=files,
                layouts=value["layouts"],
                notes=value["notes"],
                left_out=value["left_out"],
                refused=tuple(Quarantined(*q) for q in value["refused"]),
                accepted=_identities_of(value.get("accepted", ())),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConversionError(
                f"{path}: the journal's plan cannot be read: {error}; put the file back as it was, or convert to "
                "another destination (what is listed here can still be read)"
            ) from error


def file_of(sample: SampleSource) -> str:
    """The name below SRC of the file that a sample lies in."""
    return sample.name if sample.row is None else sample.name.removesuffix(f"#{sample.row}")


class Counts(TypedDict):
    """What a plan counts of its samples."""

    layouts: Mapping[str, int]
    notes: Mapping[str, int]
    left_out: Mapping[str, int]


def counts_of(samples: Iterable[SampleSource]) -> Counts:
    """The counts of a plan for these samples."""
    samples = tuple(samples)
    return {
        "layouts": dict(Counter(s.layout for s in samples)),
        "notes": dict(Counter(note for s in samples for note in s.notes)),
        "left_out": dict(Counter(f"{name}: {why}" for s in samples for name, why in s.left_out)),
    }


def group_samples(
    samples: Sequence[SampleSource], refused: Sequence[Quarantined], fields: Sequence[Field], limit: int, first: int
) -> tuple[PlannedSegment, ...]:
    """Cut samples in natural order into segments of ``limit`` raw bytes, each with the refused ones before its end."""
    row_bytes = sum(f.row_bytes for f in fields)
    groups: list[list[SampleSource]] = []
    size = 0
    for sample in samples:
        raw = sample.length * row_bytes
        if not groups or size + raw > limit:
            groups.append([])
            size = 0
        groups[-1].append(sample)
        size += raw
    left = sorted(refused, key=lambda q: natural_key(q.name))
    segments = []
    for i, group in enumerate(groups):
        end = natural_key(group[-1].name)
        count = len(left) if i == len(groups) - 1 else sum(natural_key(q.name) <= end for q in left)
        segments.append(PlannedSegment(number=first + i, samples=tuple(group), refused=tuple(left[:count])))
        del left[:count]
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What many samples share: layout, fields, what is left out, gzip, and of an arrow dataset its folder and file.

    Both are below the root; a plan of an older version has no ``arrow`` and no ``notes``.
    """

    layout: str
    specs: tuple[FieldSpec, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    gzip: bool
    folder: str | None
    arrow: str | None

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> _Kind:
        specs = tuple(FieldSpec(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in value["specs"])
        left_out = tuple((name, why) for name, why in value["left_out"])
        notes = tuple(value.get("notes", ()))
        return cls(value["layout"], specs, left_out, notes, value["gzip"], value["folder"], value.get("arrow"))


def _identities_to(files: Mapping[str, Identity]) -> list[list[str | int]]:
    return [[name, i.size, i.mtime_ns, i.inode] for name, i in files.items()]


def _identities_of(rows: Sequence[Sequence[Any]]) -> dict[str, Identity]:
    return {name: Identity(size, mtime, inode) for name, size, mtime, inode in rows}


def _with_tuples(value: Mapping[str, Any]) -> Any:
    """JSON lists as the tuples they were."""
    return {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}


class _Tables:
    """Collects the kinds of samples while they are written."""

    def __init__(self, root: str) -> None:
        self.kinds: list[dict[str, Any]] = []
        self._root = root
        self._known: dict[_Kind, int] = {}

    def sample(self, sample: SampleSource) -> list[Any]:
        """One sample as a short list: name, row, length, payload bytes, kind, place."""
        folder = None if sample.folder is None else os.path.relpath(sample.folder, self._root)
        arrow = None if sample.arrow is None else sample.arrow.name
        kind = _Kind(sample.layout, sample.specs, sample.left_out, sample.notes, sample.gzip, folder, arrow)
        number = self._known.get(kind)
        if number is None:
            number = self._known[kind] = len(self.kinds)
            self.kinds.append(
                {
                    "layout": kind.layout,
                    "specs": [[s.name, s.dtype, list(s.shape), s.source_dtype, s.scale] for s in kind.specs],
                    "left_out": [list(item) for item in kind.left_out],
                    "notes": list(kind.notes),
                    "gzip": kind.gzip,
                    "folder": kind.folder,
                    "arrow": kind.arrow,
                }
            )
        row = [sample.name, sample.row, sample.length, sample.payload_bytes, number]
        return row if sample.place is None else [*row, list(sample.place)]


def _sample(row: list[Any], kinds: Sequence[_Kind], files: Mapping[str, Identity], root: str) -> SampleSource:
    name, number, length, payload, kind = row[:5]
    shared = kinds[kind]
    file = name if number is None else name.removesuffix(f"#{number}")
    arrow = shared.arrow
    return SampleSource(
        name=name,
        path=os.path.join(root, file),
        row=number,
        length=length,
        specs=shared.specs,
        layout=shared.layout,
        identity=files[file],
        payload_bytes=payload,
        gzip=shared.gzip,
        notes=shared.notes,
        left_out=shared.left_out,
        folder=None if shared.folder is None else os.path.normpath(os.path.join(root, shared.folder)),
        place=tuple(row[5]) if len(row) > 5 else None,
        arrow=None if arrow is None else ArrowFile(arrow, os.path.join(root, arrow), files[arrow]),
    )
