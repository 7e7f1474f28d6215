"""The layouts that are known, and which of them a file's keys belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hsloader.errors import SourceError
from hsloader.formats import specforge, speculators
from hsloader.formats.container import Container
from hsloader.formats.extras import take_extras
from hsloader.formats.foreign import foreign_layout, sidecar_kind
from hsloader.formats.records import Builder, LayoutError
from hsloader.formats.source import Hints, Record

__all__ = ["LAYOUTS", "FoundRecords", "Layout", "layout_named", "record_of", "records_of"]

# Setting such a file aside in silence would be a guess: another producer's samples look like this, too.
_REMEDY = "; if it is no sample, move it out of the source"


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which a producer arranges a sample.

    ``usual_norm_state`` is that of the last state as this producer's own code writes it: a hint for people and for
    the plan, since a file does not say who wrote it.
    """

    name: str
    producer: str
    detect: Callable[[Mapping[object, object]], bool]
    build: Callable[[Builder], None]
    usual_norm_state: str


@dataclass(frozen=True, slots=True)
class FoundRecords:
    """The layout's name and the records of a file, or why it is a sidecar."""

    layout: str
    records: tuple[Record, ...]
    sidecar: str | None = None


LAYOUTS: tuple[Layout, ...] = (
    Layout("speculators-list", "speculators 0.3/0.4", speculators.is_list, speculators.build_list, "pre"),
    Layout("speculators-pair", "speculators, old", speculators.is_pair, speculators.build_pair, "unknown"),
    Layout("speculators-arrow", "speculators 0.5 to 0.9", lambda keys: False, speculators.build_layers, "pre"),
    Layout("specforge-eagle3", "SpecForge", specforge.is_eagle3, specforge.build_eagle3, "post"),
    Layout("specforge-dspark", "SpecForge 0.2", specforge.is_dspark, specforge.build_dspark, "post"),
    Layout("specforge-dflash", "SpecForge 0.2", specforge.is_dflash, specforge.build_dflash, "unknown"),
)


def layout_named(name: str) -> Layout:
    """The layout called ``name``; ``ValueError`` with the names there are."""
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    raise ValueError(f"unknown layout {name!r}; there are {', '.join(layout.name for layout in LAYOUTS)}")


def records_of(container: Container, path: str, hints: Hints) -> FoundRecords:
    """The records of a container; ``SourceError`` if no layout fits, or the one that fits lacks something."""
    value = container.value
    if isinstance(value, dict):
        for layout in LAYOUTS:
            if layout.detect(value):
                return FoundRecords(layout.name, (record_of(layout.name, layout.build, value, path, hints),))
    sidecar = sidecar_kind(value)
    if sidecar is not None:
        return FoundRecords("", (), sidecar)
    reason = foreign_layout(value)
    if reason is None and isinstance(value, dict):
        keys = ", ".join(str(k)[:30] for k in list(value)[:8])
        reason = f"no known layout has these keys ({keys}): there are no hidden states among them{_REMEDY}"
    if reason is None:
        reason = f"not a sample: the file holds a {type(value).__name__}, expected a dict of fields{_REMEDY}"
    raise SourceError(path, reason)


def record_of(
    name: str, build: Callable[[Builder], None], keys: Mapping[object, object], path: str, hints: Hints
) -> Record:
    """The record that a layout makes of a file's keys."""
    builder = Builder(keys, hints)
    try:
        build(builder)
    except LayoutError as error:
        raise SourceError(path, f"{error} ({name})") from None
    take_extras(builder)
    return Record(
        layout=name,
        length=builder.length,
        fields=tuple(builder.fields),
        extras=builder.extras,
        scalars=builder.scalars,
        notes=tuple(builder.notes),
        left_out=tuple(builder.left_out),
    )
