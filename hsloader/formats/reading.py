"""Reading rows of tensors with pread into reused memory, each record's CRC-32 running along.

Nothing is mapped: a mapped file that shrinks kills the process, a short ``pread`` is an error message.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from hsloader.errors import SourceError
from hsloader.formats.blocks import Block, Tensor
from hsloader.store.dtypes import dtype_of

__all__ = ["BlockReader", "RowBuffer", "crc32", "pread_exactly", "pread_into", "read_rows"]

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
_WASTE = 8  # ... and a longer one if at least 1/8 of it is
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

    def read_unsummed(self, block: Block, start: int, out: Bytes) -> None:
        """Fill ``out`` from ``start`` and leave the checksum to ``finish``."""
        self._pread(block, start, out)

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
        offset = self._offset(block)
        try:
            done = pread_into(self._fd, out, offset + start)
        except OSError as error:
            raise SourceError(
                self._path, f"reading {len(out)} bytes of {block.name} at {offset + start}: {error.strerror}"
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
    places: list[tuple[int, int]] = [(0, 0)] * len(parts)  # for each part: offset in the buffer, first byte of its span
    jobs: list[tuple[Block, int, int, int]] = []
    gathered: dict[int, Array] = {}
    total = 0
    for group in _shared(parts, spans):
        low, high = min(spans[i][0] for i in group), max(spans[i][1] for i in group)
        wanted = sum(_row_bytes(parts[i]) for i in group) * (stop - start)
        if high - low > max(_SPAN, _WASTE * wanted) and parts[group[0]].block.data is None:
            for i in group:
                gathered[i] = _gather(reader, parts[i], start, stop)
            continue
        jobs.append((parts[group[0]].block, low, high, total))
        for i in group:
            places[i] = (total, low)
        total += -(-(high - low) // _ALIGN) * _ALIGN
    memory = buffer.reserve(total)
    for block, low, high, at in jobs:
        reader.read(block, low, memory[at : at + high - low])
    arrays: list[Array] = []
    for i, part in enumerate(parts):
        rows = gathered.get(i)
        if rows is None:
            at, low = places[i]
            rows = _view(part, start, stop, memory[at + spans[i][0] - low : at + spans[i][1] - low])
        arrays.extend(_flat(rows))
    return arrays


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
    item = rows.itemsize
    if rows.ndim == 1:
        return [rows.reshape(-1, 1)]
    if rows.shape[-1] > 1 and rows.strides[-1] != item:
        return [np.ascontiguousarray(rows).reshape(len(rows), -1)]
    if rows.ndim == 2:
        return [rows if rows.strides[-1] == item else np.ascontiguousarray(rows)]
    if all(rows.strides[i] == rows.strides[i + 1] * rows.shape[i + 1] for i in range(1, rows.ndim - 1)):
        width = int(np.prod(rows.shape[1:]))
        return [as_strided(rows, (len(rows), width), (rows.strides[0], item), writeable=False)]
    return [flat for i in range(rows.shape[1]) for flat in _flat(rows[:, i])]


def _gather(reader: BlockReader, part: Tensor, start: int, stop: int) -> Array:
    """Rows of a part that lie far apart (a transposed tensor, one layer of many), run by run; a copy.

    Only what is wanted is read; the checksum of such a block is taken by ``finish``.
    """
    bits = dtype_of(part.dtype).bits
    wanted = part.narrow(0, start, stop)
    order = sorted(range(len(wanted.shape)), key=lambda i: -wanted.stride[i])
    shape = [wanted.shape[i] for i in order]
    stride = [wanted.stride[i] for i in order]
    inner = len(shape)  # the axes from here on are one run of elements in the block
    run = 1
    while inner and stride[inner - 1] == run:
        run *= shape[inner - 1]
        inner -= 1
    out = np.empty(shape, bits)
    flat = out.reshape(-1, run).view(np.uint8).reshape(-1, run * bits.itemsize)
    for row, index in enumerate(np.ndindex(*shape[:inner])):
        at = wanted.offset + sum(i * s for i, s in zip(index, stride[:inner], strict=True))
        reader.read_unsummed(wanted.block, at * bits.itemsize, flat[row])
    return out.transpose([order.index(i) for i in range(len(order))])
