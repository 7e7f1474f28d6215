"""Reading rows of tensors with pread into reused memory, each record's CRC-32 running along.

Nothing is mapped: a mapped file that shrinks kills the process, a short ``pread`` is an error message.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from hsloader.errors import SourceError
from hsloader.formats.blocks import Block, Tensor
from hsloader.store.dtypes import dtype_of

__all__ = ["BlockReader", "RowBuffer", "crc32", "pread_exactly", "pread_into", "read_rows", "read_small"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

crc32: Callable[..., int]
try:
    from isal import isal_zlib

    crc32 = isal_zlib.crc32
except ImportError:  # isal has no wheel on some platforms; zlib's is exact too, and three times slower
    crc32 = zlib.crc32

_STEP = 1 << 20  # bytes of a block read at once only for its checksum
_SPAN = 4 << 20  # a span of this many bytes is read whole, however little of it is wanted ...
_WASTE = 16  # ... and a longer one if at least 1/16 of it is
_RUN = 4096  # rows of this many bytes are worth a read of their own where the rest is not wanted
_HELD = 256 << 20  # blocks whose values lie scattered (transposed tensors) are held in memory up to this size
_ALIGN = 64


class RowBuffer:
    """Memory that rows are read into. The caller owns it, and so decides how many blocks of rows are alive at once."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._bytes.nbytes

    def reserve(self, nbytes: int) -> Bytes:
        """``nbytes`` of memory; what was returned before is overwritten (or let go, if it was too small)."""
        if nbytes > self._bytes.nbytes:
            self._bytes = np.empty(0, np.uint8)  # freed before the larger one is taken
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes[:nbytes]


def pread_into(fd: int, out: Bytes, offset: int) -> int:
    """Fill ``out`` from ``offset``; returns the bytes read, fewer only at the end of the file."""
    view = memoryview(out)  # type: ignore[arg-type]
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def read_small(path: str, limit: int) -> bytes:
    """A small regular file whole; ``ValueError`` if it is none or larger than ``limit``, ``OSError`` as it comes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            raise ValueError(f"not a regular file of at most {limit} bytes")
        return os.read(fd, limit)
    finally:
        os.close(fd)


def pread_exactly(fd: int, size: int, offset: int, path: str, what: str) -> bytes:
    """``size`` bytes at ``offset``, or ``SourceError``: the file is truncated. The caller has bounded ``size``."""
    data = os.pread(fd, size, offset)
    while len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            raise SourceError(path, f"truncated: {what} needs {size} bytes at {offset}, the file has {len(data)} there")
        data += more
    return data


class BlockReader:
    """Reads spans of a file's blocks and keeps a CRC-32 of each block that has one recorded.

    A span that continues where the checksum stands is summed as it is read, with what lies between; a span behind
    it was summed before.  ``finish`` sums the rest of every block that was ``expect``-ed, and compares.
    ``locate`` gives a block's offset in the file (it reads a zip record's local header).
    """

    def __init__(self, fd: int, path: str, locate: Callable[[Block], int] | None = None) -> None:
        self._fd = fd
        self._path = path
        self._locate = locate
        self._offsets: dict[str, int] = {}
        self._sums: dict[str, tuple[Block, int, int]] = {}  # block, bytes summed, CRC-32 of them
        self._scratch: Bytes | None = None
        self._held: dict[str, Bytes] = {}

    def expect(self, block: Block) -> None:
        """Have the block checked by ``finish``."""
        if block.crc and block.data is None:
            self._sums.setdefault(block.name, (block, 0, 0))

    def read(self, block: Block, start: int, out: Bytes) -> None:
        """Fill ``out`` with the block's bytes from ``start``."""
        stop = start + len(out)
        if block.data is not None:
            out[:] = np.frombuffer(block.data, np.uint8, len(out), start)
            return
        if block.name in self._sums:
            self._sum_to(block.name, start)
        self._pread(block, start, out)
        entry = self._sums.get(block.name)
        if entry is not None and start <= entry[1] < stop:
            self._sums[block.name] = (block, stop, crc32(out[entry[1] - start :], entry[2]))

    def whole(self, block: Block) -> Bytes:
        """All bytes of a block, held for the next rows: for values that lie scattered in it."""
        held = self._held.get(block.name)
        if held is None:
            if block.size > _HELD:
                raise SourceError(
                    self._path,
                    f"the values of {block.name} ({block.size} bytes) lie too far apart to be read in order, and a "
                    f"storage of more than {_HELD} bytes is not held in memory: save the tensor with .contiguous()",
                )
            while self._held and sum(map(len, self._held.values())) + block.size > _HELD:
                self._held.pop(next(iter(self._held)))
            held = np.empty(block.size, np.uint8)
            for at in range(0, block.size, _STEP):
                self.read(block, at, held[at : at + _STEP])
            self._held[block.name] = held
        return held

    def scalar(self, tensor: Tensor) -> object:
        """The values of a tensor of at most a few elements, as a python number or nested list."""
        item = dtype_of(tensor.dtype)
        if not tensor.nbytes:
            return []
        flat = Tensor(tensor.dtype, (1, *tensor.shape), (0, *tensor.stride), tensor.offset, tensor.block)
        values = read_rows(self, (flat,), 0, 1, RowBuffer())
        from hsloader.formats.casting import as_numbers

        joined = np.concatenate([v.reshape(-1) for v in values]).reshape(tensor.shape)
        numbers = as_numbers(joined, tensor.dtype)
        return numbers.astype(bool).tolist() if item.name == "bool" else numbers.tolist()

    def finish(self) -> None:
        """Sum what is left of each expected block and compare; ``SourceError`` names the block that differs."""
        for name, (block, _, _) in list(self._sums.items()):
            self._sum_to(name, block.size)
            found = self._sums[name][2]
            if found != block.crc:
                raise SourceError(
                    self._path,
                    f"the CRC-32 of record {name} ({block.size} bytes) is {found:08x}, recorded is {block.crc:08x}: "
                    "the file is damaged (checksum)",
                )

    def close(self) -> None:
        """Close the file."""
        self._held.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _offset(self, block: Block) -> int:
        offset = self._offsets.get(block.name)
        if offset is None:
            offset = self._locate(block) if self._locate is not None and block.offset < 0 else block.offset
            self._offsets[block.name] = offset
        return offset

    def _pread(self, block: Block, start: int, out: Bytes) -> None:
        try:
            offset = self._offset(block)
            done = pread_into(self._fd, out, offset + start)
        except OSError as error:
            raise SourceError(
                self._path, f"reading {len(out)} bytes from byte {start} of {block.name}: {error.strerror}"
            ) from error
        if done < len(out):
            raise SourceError(
                self._path,
                f"truncated while it was read: {block.name} needs {len(out)} bytes at {offset + start}, got {done}",
            )

    def _sum_to(self, name: str, position: int) -> None:
        block, at, crc = self._sums[name]
        if at >= position:
            return
        if self._scratch is None:
            self._scratch = np.empty(_STEP, np.uint8)
        while at < position:
            part = self._scratch[: min(_STEP, position - at)]
            self._pread(block, at, part)
            crc = crc32(part, crc)
            at += len(part)
        self._sums[name] = (block, at, crc)


def read_rows(reader: BlockReader, parts: Sequence[Tensor], start: int, stop: int, buffer: RowBuffer) -> list[Array]:
    """Rows ``start:stop`` of tensors ``[S, ...]`` as 2-D bits arrays that stand side by side along axis 1.

    Tensors whose rows interleave in one block (layers of a ``[S, L, H]`` storage) are read in one go.
    """
    spans = [part.span(start, stop) if part.nbytes else (0, 0) for part in parts]
    found: dict[int, Array] = {}  # rows of each part
    places: dict[int, tuple[int, int]] = {}  # of a part that is read with its span: its buffer offset, its first byte
    jobs: list[tuple[Block, int, int, int]] = []
    dense: list[tuple[int, int]] = []
    total = 0
    for group in _shared(parts, spans):
        block = parts[group[0]].block
        low, high = min(spans[i][0] for i in group), max(spans[i][1] for i in group)
        wanted = sum(_row_bytes(parts[i]) for i in group) * (stop - start)
        if _in_runs(block, [parts[i] for i in group], high - low, wanted):
            for i in group:
                dense.append((i, total))
                total += _round_up(_row_bytes(parts[i]) * (stop - start))
        elif high - low > max(_SPAN, _WASTE * wanted) and block.data is None:
            whole = reader.whole(block)
            for i in group:
                found[i] = _view(parts[i], start, stop, whole[spans[i][0] : spans[i][1]])
        else:
            jobs.append((block, low, high, total))
            places.update(dict.fromkeys(group, (total, low)))
            total += _round_up(high - low)
    memory = buffer.reserve(total)
    for block, low, high, at in jobs:
        reader.read(block, low, memory[at : at + high - low])
    for i, at in dense:
        found[i] = _runs(reader, parts[i], start, stop, memory[at : at + _row_bytes(parts[i]) * (stop - start)])
    for i, (at, low) in places.items():
        found[i] = _view(parts[i], start, stop, memory[at + spans[i][0] - low : at + spans[i][1] - low])
    return [flat for i in range(len(parts)) for flat in _flat(found[i])]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _in_runs(block: Block, parts: Sequence[Tensor], span: int, wanted: int) -> bool:
    """Whether to read only the rows themselves: they are long runs, and what lies between needs no checksum."""
    return (
        block.crc == 0
        and block.data is None
        and span >= 2 * wanted
        and all(
            _row_bytes(p) >= _RUN and _dense(p.shape[1:], p.stride[1:]) and p.stride[0] * p.item_size >= _row_bytes(p)
            for p in parts
        )
    )


def _dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether axes of these element strides are one run of elements."""
    step = 1
    for size, gap in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and gap != step:
            return False
        step *= size
    return True


def _runs(reader: BlockReader, part: Tensor, start: int, stop: int, out: Bytes) -> Array:
    """Dense rows that lie apart, each read into its place in ``out``."""
    width = _row_bytes(part)
    for row in range(start, stop):
        at = (part.offset + row * part.stride[0]) * part.item_size
        reader.read(part.block, at, out[(row - start) * width : (row - start + 1) * width])
    return out.view(dtype_of(part.dtype).bits).reshape(stop - start, *part.shape[1:])


def _row_bytes(part: Tensor) -> int:
    return part.nbytes // part.shape[0] if part.shape[0] else 0


def _shared(parts: Sequence[Tensor], spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The parts in groups whose spans overlap in one block, in the order of their spans."""
    groups: list[list[int]] = []
    ends: dict[str, tuple[list[int], int]] = {}
    for i in sorted(range(len(parts)), key=lambda i: spans[i]):
        name, (low, high) = parts[i].block.name, spans[i]
        open_group = ends.get(name)
        if open_group is not None and low < open_group[1]:
            open_group[0].append(i)
            ends[name] = (open_group[0], max(open_group[1], high))
        else:
            groups.append([i])
            ends[name] = (groups[-1], high)
    return groups


def _view(part: Tensor, start: int, stop: int, span: Bytes) -> Array:
    """Rows of a part as a strided view of the bytes of their span."""
    bits = dtype_of(part.dtype).bits
    shape = (stop - start, *part.shape[1:])
    if not span.size:
        return np.empty(shape, bits)
    base = span[: span.size // bits.itemsize * bits.itemsize].view(bits)
    return as_strided(base, shape, tuple(s * bits.itemsize for s in part.stride), writeable=False)


def _flat(rows: Array) -> list[Array]:
    """Rows ``[n, ...]`` as 2-D arrays side by side with contiguous last axis; copies only what cannot be a view."""
    if _dense(rows.shape[1:], [s // rows.itemsize for s in rows.strides[1:]]):
        shape = (len(rows), int(np.prod(rows.shape[1:], dtype=np.int64)))
        return [as_strided(rows, shape, (rows.strides[0], rows.itemsize), writeable=False)]
    if rows.ndim == 2 or (rows.shape[-1] > 1 and rows.strides[-1] != rows.itemsize):
        return [np.ascontiguousarray(rows).reshape(len(rows), -1)]
    return [flat for i in range(rows.shape[1]) for flat in _flat(rows[:, i])]
