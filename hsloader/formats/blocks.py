"""Blocks and tensors: where a producer's values lie in its file, without reading them.

A *block* is a run of bytes (a record of a torch zip, a storage of a legacy file, a safetensors payload); a *tensor*
is a strided view of one block.  Every tensor is made by :func:`checked_tensor`, so no number of a file is used
before it was compared with the block it speaks of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hsloader.store.dtypes import dtype_of

__all__ = ["MAX_AXES", "Block", "BlockError", "Tensor", "checked_tensor"]

MAX_AXES = 8
_SMALL = 1 << 20  # a view may claim this many bytes whatever its block holds ...
_EXPANSION = 4  # ... or this many times the block


class BlockError(ValueError):
    """A number of a file does not fit the bytes it speaks of; the message is a sentence without the path."""


@dataclass(frozen=True, slots=True)
class Block:
    """A run of ``size`` bytes.

    ``offset`` is its place in the file; a zip record knows only its local ``header`` until that was read (then
    ``offset`` is -1).  ``crc`` is the recorded CRC-32, 0 where none was recorded.  ``data`` holds the bytes of values
    that lay inside the pickle itself (numpy arrays, python lists).
    """

    name: str
    size: int
    offset: int = -1
    header: int = -1
    crc: int = 0
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A strided view of a block: ``stride`` and ``offset`` count elements of ``dtype`` (a torch name)."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    block: Block

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return dtype_of(self.dtype).item_size

    @property
    def nbytes(self) -> int:
        """Bytes of the values, each counted once for every place it appears in."""
        return math.prod(self.shape) * self.item_size

    def select(self, axis: int, index: int) -> Tensor:
        """The tensor without ``axis``, at ``index`` of it."""
        return replace(
            self,
            shape=self.shape[:axis] + self.shape[axis + 1 :],
            stride=self.stride[:axis] + self.stride[axis + 1 :],
            offset=self.offset + index * self.stride[axis],
        )

    def narrow(self, axis: int, start: int, stop: int) -> Tensor:
        """The tensor with only ``start:stop`` of ``axis``."""
        shape = list(self.shape)
        shape[axis] = stop - start
        return replace(self, shape=tuple(shape), offset=self.offset + start * self.stride[axis])

    def split_last(self, parts: int) -> Tensor:
        """The last axis of width ``parts * w`` as two axes ``[parts, w]``."""
        width, step = self.shape[-1] // parts, self.stride[-1]
        return replace(self, shape=(*self.shape[:-1], parts, width), stride=(*self.stride[:-1], width * step, step))

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The bytes ``lo, hi`` of the block in which rows ``start:stop`` of the first axis lie (``stop > start``)."""
        first = self.offset + start * self.stride[0]
        last = first + (stop - 1 - start) * self.stride[0]
        last += sum((n - 1) * s for n, s in zip(self.shape[1:], self.stride[1:], strict=True))
        return first * self.item_size, (last + 1) * self.item_size


def checked_tensor(
    dtype: str, shape: Sequence[object], stride: Sequence[object], offset: object, block: Block
) -> Tensor:
    """The tensor that these numbers of a file describe, or ``BlockError`` if they do not fit the block."""
    if len(shape) != len(stride) or len(shape) > MAX_AXES:
        raise BlockError(f"a tensor has the shape {_short(shape)} and the stride {_short(stride)}: not the same axes")
    sizes, steps = _counts(shape, "shape"), _counts(stride, "stride")
    (start,) = _counts((offset,), "storage offset")
    elements, end = 1, start + 1
    for size, step in zip(sizes, steps, strict=True):
        elements *= size
        end += (size - 1) * step
    if not elements:
        return Tensor(dtype, sizes, steps, 0, block)
    item = dtype_of(dtype).item_size
    allowed = max(_SMALL, _EXPANSION * block.size)
    if elements * item > allowed:
        raise BlockError(
            f"a tensor of shape {_short(shape)} claims {elements * item} bytes, but its storage {block.name} holds "
            f"{block.size}; at most {allowed} are accepted (stride {_short(stride)})"
        )
    held = block.size // item
    if end > held:
        raise BlockError(
            f"a tensor of shape {_short(shape)}, stride {_short(stride)}, offset {start} reaches {end} elements into "
            f"its storage {block.name}, which holds {held} (out of bounds)"
        )
    return Tensor(dtype, sizes, steps, start, block)


def _counts(numbers: Sequence[object], what: str) -> tuple[int, ...]:
    """The numbers as ints from 0 to 2**62, or ``BlockError``."""
    for n in numbers:
        if type(n) is not int or not 0 <= n <= 1 << 62:
            raise BlockError(f"a tensor's {what} {_short(numbers)} is out of range (expected counts, none negative)")
    return tuple(numbers)  # type: ignore[arg-type]


def _short(numbers: Sequence[object]) -> str:
    """The numbers as text of bounded length."""
    return "[" + ", ".join(str(n)[:24] if type(n) is int else type(n).__name__ for n in numbers[:9]) + "]"
