"""The layouts that are known, and which of them a file's keys belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hsloader.errors import SourceError
from hsloader.formats import speculators
from hsloader.formats.container import Container
from hsloader.formats.records import Builder, LayoutError
from hsloader.formats.source import Hints, Record

__all__ = ["LAYOUTS", "Layout", "records_of"]


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which a producer arranges a sample."""

    name: str
    producer: str
    detect: Callable[[Mapping[object, object]], bool]
    build: Callable[[Builder], None]
    usual_norm_state: str  # of the last state, as this producer's code writes it; a file does not say who wrote it


LAYOUTS: tuple[Layout, ...] = (
    Layout("speculators-list", "speculators 0.3/0.4", speculators.is_list, speculators.build_list, "pre"),
    Layout("speculators-pair", "speculators (old)", speculators.is_pair, speculators.build_pair, "unknown"),
)


def records_of(container: Container, path: str, hints: Hints) -> tuple[str, tuple[Record, ...]]:
    """The layout's name and the records of a container; ``SourceError`` if no layout fits."""
    keys = container.value
    if not isinstance(keys, dict):
        raise SourceError(path, f"not a sample: the file holds a {type(keys).__name__}, expected a dict of fields")
    for layout in LAYOUTS:
        if layout.detect(keys):
            builder = Builder(keys)
            try:
                layout.build(builder)
            except LayoutError as error:
                raise SourceError(path, f"{error} ({layout.name})") from None
            record = Record(layout.name, builder.length, tuple(builder.fields), notes=tuple(builder.notes))
            return layout.name, (record,)
    raise SourceError(path, f"no known layout has these keys: {', '.join(str(k)[:30] for k in list(keys)[:8])}")
