"""From a path to its described samples, and from a planned sample to an open one."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from hsloader.errors import SourceError
from hsloader.formats.container import Container, read_container
from hsloader.formats.layouts import records_of
from hsloader.formats.reading import BlockReader
from hsloader.formats.source import Described, Hints, Identity, OpenSample, Record, SampleSource

__all__ = ["describe_file", "open_planned"]


def describe_file(path: str | os.PathLike[str], name: str | None = None, *, hints: Hints | None = None) -> Described:
    """The layout and the samples of one file, from its headers; ``SourceError`` if it cannot be taken.

    ``name`` is what the samples are called (default: the file's name).
    """
    place = os.fspath(path)
    name = name or Path(place).name
    with _opened(place, name) as (fd, identity):
        container = read_container(fd, name, identity.size)
        layout, records = records_of(container, name, hints or Hints())
        samples = tuple(_sample(record, name, place, identity, container) for record in records)
        if Identity.of(os.fstat(fd)) != identity:
            raise SourceError(name, "the file changed while it was looked at: it is still being written")
    return Described(layout, samples)


def open_planned(sample: SampleSource, scratch: Path | str | None, hints: Hints) -> OpenSample:
    """Open a planned sample: describe its file afresh, demand that nothing changed, and hand out its rows."""
    fd, identity = _open_regular(sample.path, sample.name)
    try:
        _demand_same(sample, identity)
        container = read_container(fd, sample.name, identity.size)
        _, records = records_of(container, sample.name, hints)
        record = _planned(sample, records)
        reader = BlockReader(fd, sample.name, container.locate)
        return OpenSample(sample, record, reader, lambda: _demand_same(sample, Identity.of(os.fstat(fd))))
    except BaseException:
        os.close(fd)
        raise


def _sample(record: Record, name: str, path: str, identity: Identity, container: Container) -> SampleSource:
    return SampleSource(
        name=name if record.row is None else f"{name}#{record.row}",
        path=path,
        row=record.row,
        length=record.length,
        specs=tuple(f.spec for f in record.fields),
        layout=record.layout,
        identity=identity,
        payload_bytes=sum(t.nbytes for f in record.fields for t in f.parts),
        extras=record.extras,
        notes=(*record.notes, *([container.note] if container.note else [])),
        left_out=record.left_out,
    )


def _planned(sample: SampleSource, records: tuple[Record, ...]) -> Record:
    """The record that the plan speaks of."""
    for record in records:
        if record.row == sample.row:
            if record.length == sample.length and tuple(f.spec for f in record.fields) == sample.specs:
                return record
            break
    raise SourceError(sample.name, "the file no longer holds what was planned: make the plan again")


def _demand_same(sample: SampleSource, found: Identity) -> None:
    if found != sample.identity:
        raise SourceError(
            sample.name,
            f"the file changed since it was planned: {sample.identity.size} bytes, mtime {sample.identity.mtime_ns}, "
            f"inode {sample.identity.inode} then; {found.size}, {found.mtime_ns}, {found.inode} now",
        )


@contextlib.contextmanager
def _opened(path: str, name: str) -> Iterator[tuple[int, Identity]]:
    fd, identity = _open_regular(path, name)
    try:
        yield fd, identity
    finally:
        os.close(fd)


def _open_regular(path: str, name: str) -> tuple[int, Identity]:
    """A descriptor of a regular file and its identity; never blocks on a pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SourceError(name, f"cannot be opened: {error.strerror}") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise SourceError(name, "not a regular file")
    return fd, Identity.of(found)
