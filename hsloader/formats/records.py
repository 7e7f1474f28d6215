"""What the layouts share: from the values under a record's keys to fields of one token each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hsloader.formats.blocks import Block, Tensor, checked_tensor
from hsloader.formats.pickle_globals import ArrayStub
from hsloader.formats.source import FieldParts, FieldSpec, Hints

__all__ = ["STATE_DTYPES", "Builder", "LayoutError", "as_tensor", "shape_text"]

_FLOATS = ("float16", "bfloat16", "float32", "float64")
STATE_DTYPES = (*_FLOATS, "float8_e4m3fn", "float8_e5m2")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class LayoutError(ValueError):
    """A record does not have what its layout needs; the message is a sentence without the path."""


def as_tensor(value: object) -> Tensor | None:
    """A tensor, numpy array or list of python ints as a descriptor; ``None`` if it is none of them."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, ArrayStub):
        return value.tensor
    if type(value) is list and value and all(type(v) is int for v in value):
        try:
            data = np.array(value, np.int64).tobytes()
        except OverflowError:
            return None
        return checked_tensor("int64", [len(value)], [1], 0, Block("python list", len(data), offset=0, data=data))
    return None


def shape_text(shape: Sequence[int]) -> str:
    """A shape for a sentence."""
    return "[" + ", ".join(map(str, shape)) + "]"


@dataclass
class Builder:
    """Collects the fields of one sample and checks that all have one row a token."""

    keys: Mapping[object, object]
    hints: Hints
    length: int = 0
    fields: list[FieldParts] = field(default_factory=list)
    extras: dict[str, object] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def ids(self, key: str = "input_ids") -> None:
        """Take the token ids, which set the sample's length."""
        tensor = self._vector(key)
        if tensor is None:
            raise LayoutError(f"the token ids are missing (key {key})")
        if tensor.dtype not in _INTEGERS:
            raise LayoutError(f"{key} holds {tensor.dtype}, expected integers")
        self.length = tensor.shape[0]
        if self.length == 0:
            raise LayoutError("an empty sample: 0 tokens")
        self._add("input_ids", "int32", (tensor,))

    def mask(self, key: str = "loss_mask") -> None:
        """Take the loss mask, if there is one."""
        tensor = self._vector(key)
        if tensor is None:
            self.notes.append("no loss_mask")
            return
        if tensor.dtype not in (*_INTEGERS, "bool", *_FLOATS):
            raise LayoutError(f"{key} holds {tensor.dtype}, expected integers or bool")
        if tensor.shape[0] != self.length:
            raise LayoutError(f"{key} has {tensor.shape[0]} values, the sample has {self.length} tokens")
        self._add("loss_mask", "uint8", (tensor,))

    def states(self, key: str, entry: object = None, label: str | None = None) -> Tensor:
        """The states under ``key``, or one ``entry`` of them, as ``[S, ...]``; a leading axis of 1 is dropped."""
        self.taken.add(key)
        label = label or key
        tensor = as_tensor(self.keys[key] if entry is None else entry)
        if tensor is None:
            raise LayoutError(f"{label} is no tensor of hidden states")
        if tensor.dtype not in STATE_DTYPES:
            raise LayoutError(f"{label} holds {tensor.dtype}, expected floating point states")
        if len(tensor.shape) == 3 and tensor.shape[0] == 1:
            tensor = tensor.select(0, 0)
        if len(tensor.shape) < 2 or tensor.shape[0] != self.length or 0 in tensor.shape:
            raise LayoutError(
                f"{label} has the shape {shape_text(tensor.shape)}: expected {self.length} rows, one a token"
            )
        return tensor

    def last_state(self, key: str) -> Tensor:
        """The last state under ``key``, ``[S, H]``."""
        tensor = self.states(key)
        if len(tensor.shape) != 2:
            raise LayoutError(f"{key} has the shape {shape_text(tensor.shape)}: expected [tokens, hidden size]")
        return tensor

    def scales(self, key: str, name: str) -> str | None:
        """Take the scales of fp8 states, ``[S, 1, 1]`` or ``[S]``, as the field ``name``; ``None`` without them."""
        tensor = as_tensor(self.keys.get(key))
        if tensor is None:
            return None
        self.taken.add(key)
        if tensor.dtype not in _FLOATS:
            raise LayoutError(f"{key} holds {tensor.dtype}, expected floating point scales")
        if not tensor.shape or tensor.shape[0] != self.length or any(n != 1 for n in tensor.shape[1:]):
            raise LayoutError(f"{key} has the shape {shape_text(tensor.shape)}: expected one scale for each token")
        while len(tensor.shape) > 1:
            tensor = tensor.select(1, 0)
        self._add(name, None, (tensor,))
        return name

    def add_layers(self, layers: Sequence[Tensor], scale: str | None = None) -> None:
        """Add the auxiliary layers, tensors ``[S, H]`` or ``[S, k, H]``, as the field ``hidden_states`` ``[k, H]``."""
        count = sum(1 if len(t.shape) == 2 else t.shape[1] for t in layers)
        self._add("hidden_states", None, tuple(layers), (count, layers[0].shape[-1]), scale)

    def add_last(self, last: Tensor, scale: str | None = None) -> None:
        """Add the last state, ``[S, H]``."""
        self._add("last_hidden_state", None, (last,), (last.shape[-1],), scale)

    def split(self, aux: Tensor, hidden: int, key: str) -> Tensor:
        """``[S, k*H]`` as ``[S, k, H]``."""
        if len(aux.shape) != 2 or aux.shape[1] % hidden:
            raise LayoutError(f"{key} has the width {aux.shape[-1]}, not a multiple of the hidden size {hidden}")
        return aux.split_last(aux.shape[1] // hidden)

    def _vector(self, key: str) -> Tensor | None:
        """``[S]`` or ``[1, S]`` under ``key``."""
        value = self.keys.get(key)
        if value is None:
            return None
        self.taken.add(key)
        tensor = as_tensor(value)
        if tensor is None:
            raise LayoutError(f"{key} is neither a tensor nor a list of integers")
        if len(tensor.shape) == 2 and tensor.shape[0] == 1:
            tensor = tensor.select(0, 0)
        if len(tensor.shape) != 1:
            raise LayoutError(f"{key} has the shape {shape_text(tensor.shape)}, expected one value a token")
        return tensor

    def _add(
        self,
        name: str,
        dtype: str | None,
        parts: tuple[Tensor, ...],
        shape: tuple[int, ...] = (),
        scale: str | None = None,
    ) -> None:
        source = parts[0].dtype
        self.fields.append(FieldParts(FieldSpec(name, dtype or source, shape, source, scale), parts))
