"""From a path to its described samples, and from a planned sample to an open one."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from hsloader.errors import SourceError
from hsloader.formats.container import Container, read_container
from hsloader.formats.gz import inflate
from hsloader.formats.layouts import records_of
from hsloader.formats.reading import BlockReader
from hsloader.formats.source import Described, Hints, Identity, OpenSample, Record, SampleSource

__all__ = ["describe_file", "open_container", "open_planned"]


def describe_file(path: str | os.PathLike[str], name: str | None = None, *, hints: Hints | None = None) -> Described:
    """The layout and the samples of one file, from its headers; ``SourceError`` if it cannot be taken.

    ``name`` is what the samples are called (default: the file's name).
    """
    place = os.fspath(path)
    name = name or Path(place).name
    with open_container(place, name) as (container, identity):
        found = records_of(container, name, hints or Hints())
        samples = tuple(_sample(record, name, place, identity, container) for record in found.records)
    return Described(found.layout, samples, found.sidecar)


@contextlib.contextmanager
def open_container(path: str, name: str) -> Iterator[tuple[Container, Identity]]:
    """A file's container and identity; ``SourceError`` if the file changed until the end of the block."""
    fd, identity = _open_regular(path, name)
    try:
        yield _read(fd, name, identity.size), identity
        if Identity.of(os.fstat(fd)) != identity:
            raise SourceError(name, "the file changed while it was looked at: it is still being written")
    finally:
        os.close(fd)


def open_planned(sample: SampleSource, scratch: Path | str | None, hints: Hints) -> OpenSample:
    """Open a planned sample: describe its file afresh, demand that nothing changed, and hand out its rows."""
    fd, identity = _open_regular(sample.path, sample.name)
    inner = -1
    try:
        _demand_same(sample, identity)
        container, size = _read(fd, sample.name, identity.size), identity.size
        if container.inflated_limit is not None:
            inner, size = inflate(fd, sample.name, container.inflated_limit, scratch)
            container = _read(inner, sample.name, size)
            if container.inflated_limit is not None:
                raise SourceError(sample.name, "gzip inside gzip, which is not read")
        reader = BlockReader(fd if inner < 0 else inner, sample.name, container.locate)
        held = [fd] if inner >= 0 else []
        if sample.folder is None:
            record = _planned(sample, records_of(container, sample.name, hints).records)
            return OpenSample(sample, record, reader, _Watch(sample, fd), held)
        from hsloader.formats import speculators_arrow

        record, row = speculators_arrow.planned_record(sample, container)
        opened = OpenSample(sample, record, reader, _Watch(sample, fd), held)
        speculators_arrow.demand_same_ids(opened.whole("input_ids", "int64"), row.ids, sample.name)
        return opened
    except BaseException:
        for descriptor in (fd, inner):
            if descriptor >= 0:
                os.close(descriptor)
        raise


class _Watch:
    """Demands that a file is still what was planned."""

    def __init__(self, sample: SampleSource, fd: int) -> None:
        self._sample = sample
        self._fd = fd

    def __call__(self) -> None:
        _demand_same(self._sample, Identity.of(os.fstat(self._fd)))


def _read(fd: int, name: str, size: int) -> Container:
    try:
        return read_container(fd, name, size)
    except OSError as error:
        raise SourceError(name, f"cannot be read: {error.strerror}") from error


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
        gzip=container.inflated_limit is not None,
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
