"""Rows of an arrow dataset as Hugging Face's ``datasets`` saves it, through pyarrow (an optional dependency).

The files are arrow streams.  They are read batch by batch, never mapped; a row is found again by its file, the
offset of its batch and its place in the batch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsloader.errors import SourceError
from hsloader.formats.blocks import Block, Tensor
from hsloader.formats.reading import read_small
from hsloader.formats.source import ArrowFile, Identity

__all__ = ["ArrowRow", "load_pyarrow", "read_row", "rows_of"]

_MAX_METADATA = 16 << 20
_KNOWN = frozenset({"input_ids", "loss_mask", "seq_len"})
_DTYPES = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"})

Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ArrowRow:
    """One row: its number, where it lies, its ids, its mask as a tensor (``None`` without one).

    ``file`` is the arrow file that ``place`` is in, as it was when the row was read.  ``notes`` name the columns that
    are not read; they stay where they are, whatever becomes of the states' file.
    """

    number: int
    file: ArrowFile
    place: Place
    ids: npt.NDArray[Any]
    mask: Tensor | None
    notes: tuple[str, ...]

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return len(self.ids)


def rows_of(folder: str, prefix: str = "") -> Iterator[ArrowRow]:
    """All rows of the dataset in ``folder``, in order; ``prefix`` is what its files' names below SRC begin with.

    ``SourceError`` if its files cannot be read, or change meanwhile.
    """
    number = 0
    for i, path in enumerate(_data_files(folder)):
        with _damage(path):
            file = ArrowFile(prefix + os.path.split(path)[1], path, Identity.of(Path(path).stat()))
            for offset, batch in _batches(path):
                for row in range(batch.num_rows):
                    yield _row(batch, number, file, (i, offset, row))
                    number += 1
            if Identity.of(Path(path).stat()) != file.identity:
                raise SourceError(path, "the file changed while it was looked at: it is still being written")


def read_row(file: ArrowFile, number: int, place: Place) -> ArrowRow:
    """The row at ``place`` of a planned file, of which the plan says that it is row ``number``.

    ``SourceError`` if the file is not the one that was planned, before the row was read or after.
    """
    _, offset, row = place
    with _damage(file.path):
        _demand_same(file)
        batch = _batch_at(file, offset)
        if not 0 <= row < batch.num_rows:
            raise SourceError(
                file.path, f"the batch at {offset} has {batch.num_rows} rows, the plan speaks of row {row}"
            )
        return _row(batch, number, file, place)


def _demand_same(file: ArrowFile) -> None:
    try:
        found, planned = Identity.of(Path(file.path).stat()), file.identity
    except OSError as error:
        raise SourceError(file.path, f"the arrow file {file.name} cannot be looked at: {error.strerror}") from error
    if found != planned:
        raise SourceError(
            file.path,
            f"the arrow file {file.name} changed since it was planned: {planned.size} bytes, mtime {planned.mtime_ns}, "
            f"inode {planned.inode} then; {found.size}, {found.mtime_ns}, {found.inode} now",
        )


@contextlib.contextmanager
def _damage(path: str) -> Iterator[None]:
    """Whatever pyarrow makes of a damaged file is a ``SourceError``: it raises errors of many kinds."""
    try:
        yield
    except (SourceError, GeneratorExit):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise SourceError(path, f"the arrow file is damaged, or pyarrow cannot read it ({what})") from error


def _data_files(folder: str) -> list[str]:
    """The arrow files that ``state.json`` lists, in order."""
    state = Path(folder, "state.json")
    try:
        names = [entry["filename"] for entry in json.loads(read_small(str(state), 1 << 20))["_data_files"]]
        if not all(isinstance(n, str) and "/" not in n and n != ".." and n for n in names):
            raise ValueError("it names files outside the folder")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(str(state), f"does not list the files of an arrow dataset: {error}") from None
    paths = [os.path.join(folder, n) for n in names]
    for path in paths:
        if not Path(path).is_file():
            raise SourceError(path, f"not a regular file, though {state.name} lists it as part of the arrow dataset")
    return paths


def load_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise SourceError(
            "arrow dataset", "reading the masks of speculators 0.5 to 0.9 needs pyarrow: pip install pyarrow"
        ) from None
    return pyarrow, pyarrow.ipc


def _batches(path: str) -> Iterator[tuple[int, Any]]:
    """The record batches of one file and their offsets."""
    pyarrow, ipc = load_pyarrow()
    with pyarrow.OSFile(path) as source:
        size = source.size()
        schema = ipc.read_schema(_message(ipc, source, path, size))
        while True:
            offset = source.tell()
            message = _message(ipc, source, path, size)
            if message is None:
                return
            yield offset, _checked(ipc, message, schema, path)


@functools.lru_cache(maxsize=2)
def _batch_at(file: ArrowFile, offset: int) -> Any:
    """The batch at ``offset``; samples are read in order, so the last batch is asked for again and again."""
    pyarrow, ipc = load_pyarrow()
    path = file.path
    with pyarrow.OSFile(path) as source:
        size = source.size()
        schema = ipc.read_schema(_message(ipc, source, path, size))
        source.seek(offset)
        message = _message(ipc, source, path, size)
        if message is None:
            raise SourceError(path, f"there is no batch at {offset}: the file changed since it was planned")
        batch = _checked(ipc, message, schema, path)
    _demand_same(file)
    return batch


def _message(ipc: Any, source: Any, path: str, size: int) -> Any:
    """The next message, or ``None`` at the end of the stream; its length is checked before it is read."""
    at = source.tell()
    head = source.read(8)
    if len(head) < 8:
        raise SourceError(path, f"truncated: the arrow stream has no end ({size} bytes)")
    marker, length = struct.unpack("<Ii", head)
    if marker != 0xFFFFFFFF or not 0 <= length <= min(_MAX_METADATA, size - at):
        raise SourceError(path, f"the arrow file has no message at {at}: it is damaged, or of an old version")
    if length == 0:
        return None
    source.seek(at)
    return ipc.read_message(source)


def _checked(ipc: Any, message: Any, schema: Any, path: str) -> Any:
    if message.type != "record batch":
        raise SourceError(path, f"the arrow file has a message of type {message.type}, expected record batches")
    batch = ipc.read_record_batch(message, schema)
    batch.validate(full=True)  # offsets of a damaged file must not lead outside its buffers
    return batch


def _row(batch: Any, number: int, file: ArrowFile, place: Place) -> ArrowRow:
    names, path = batch.schema.names, file.path
    if "input_ids" not in names:
        raise SourceError(path, f"the arrow dataset has no column input_ids; it has {', '.join(names)[:200]}")
    ids = _values(batch, "input_ids", place[2], path)
    mask = None
    if "loss_mask" in names:
        values = _values(batch, "loss_mask", place[2], path)
        block = Block("arrow column loss_mask", values.nbytes, offset=0, data=values.tobytes())
        mask = Tensor(values.dtype.name, (len(values),), (1,), 0, block)
    notes = tuple(f"column {n[:60]} of the arrow dataset is not converted" for n in names if n not in _KNOWN)
    return ArrowRow(number, file, place, ids, mask, notes)


def _values(batch: Any, column: str, row: int, path: str) -> npt.NDArray[Any]:
    """One row of a list column as numbers."""
    values = getattr(batch.column(column)[row], "values", None)
    if values is None or values.null_count:
        raise SourceError(path, f"column {column} of the arrow dataset holds no list of numbers in row {row}")
    numbers: npt.NDArray[Any] = np.ascontiguousarray(values.to_numpy(zero_copy_only=False))
    if numbers.dtype.name not in _DTYPES:
        raise SourceError(path, f"column {column} of the arrow dataset holds {values.type}, expected integers or bool")
    return numbers
