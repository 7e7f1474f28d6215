"""What a record holds beside the usual fields: per-token arrays become fields, small values become extras."""

from __future__ import annotations

import math
import re

from hsloader.formats.blocks import Tensor
from hsloader.formats.pickle_globals import ArrayStub, Global
from hsloader.formats.records import Builder, shape_text
from hsloader.formats.source import FieldParts, FieldSpec
from hsloader.store.fields import Field

__all__ = ["take_extras"]

_MAX_NODES = 10_000  # of one value; 64 characters of text count as one more
_MAX_VISITS = 100_000  # of all values of a sample, those that are left out included
_MAX_DEPTH = 16
_MAX_TEXT = 1 << 16
_MAX_KEY = 200
_USUAL = frozenset({"input_ids", "loss_mask", "hidden_states", "last_hidden_state", "hidden_states_scale"})


class _NotJsonError(ValueError):
    """A value that does not fit into JSON; the message says why."""


def take_extras(builder: Builder) -> None:
    """Sort every key that the layout did not take into fields, extras, scalars, or ``left_out`` with a reason."""
    visits = _MAX_VISITS
    for key, value in builder.keys.items():
        if key in builder.taken:
            continue
        tensor = value.tensor if isinstance(value, ArrayStub) else value
        if type(key) is not str:
            builder.left_out.append((str(key)[:60], "its name is not text"))
        elif len(key) > _MAX_KEY:
            builder.left_out.append((key[:60], f"its name has {len(key)} characters, at most {_MAX_KEY} are kept"))
        elif isinstance(tensor, Tensor):
            _take_tensor(builder, key, tensor)
        elif visits <= 0:
            builder.left_out.append((key[:60], f"the sample has more than {_MAX_VISITS} values beside its fields"))
        else:
            left = [min(_MAX_NODES, visits)]
            before = left[0]
            try:
                builder.extras[key] = _json(value, _MAX_DEPTH, left)
            except _NotJsonError as error:
                builder.left_out.append((key[:60], str(error)))
            visits -= before - left[0]


def _take_tensor(builder: Builder, key: str, tensor: Tensor) -> None:
    shape, length = tensor.shape, builder.length
    if not shape and not tensor.dtype.startswith("float8"):
        builder.scalars[key] = tensor
        return
    notes = []
    if len(shape) > 1 and shape[0] == 1 and shape[1] == length:
        tensor = tensor.select(0, 0)
        notes.append(f"tensor {key[:60]!r}: its leading axis of 1 is not kept")
    if not tensor.shape or tensor.shape[0] != length or not math.prod(tensor.shape):
        builder.left_out.append(
            (key[:60], f"its shape {shape_text(shape)} does not have one row for each of {length} tokens")
        )
        return
    name = re.sub(r"[^a-z0-9_]", "_", key.lower())[:64]
    taken = {f.spec.name for f in builder.fields}
    try:
        Field(name=name, dtype=tensor.dtype, shape=tensor.shape[1:])
    except ValueError as error:
        builder.left_out.append((key[:60], str(error)))
        return
    if name in taken | _USUAL:
        builder.left_out.append((key[:60], f"the name {name} is taken by another field"))
        return
    if name != key:
        notes.append(f"tensor {key[:60]!r} is kept as the field {name}")
    builder.notes.extend(notes)
    builder.fields.append(FieldParts(FieldSpec(name, tensor.dtype, tensor.shape[1:], tensor.dtype), (tensor,)))


def _json(value: object, depth: int, nodes: list[int]) -> object:
    """The value as JSON has it: sets as lists, dtypes as text; ``nodes[0]`` counts what may still be visited."""
    nodes[0] -= 1
    if nodes[0] < 0 or depth < 0:
        raise _NotJsonError(f"it is larger than {_MAX_NODES} values or nested deeper than {_MAX_DEPTH}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > 64:
            raise _NotJsonError("a number of more than 64 bits")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _NotJsonError(f"JSON has no {value}")
        return value
    if isinstance(value, str):
        _count_text(value, nodes)
        if not value.isprintable() and any("\ud800" <= c <= "\udfff" for c in value):
            raise _NotJsonError("a text with lone surrogates, which is no UTF-8")
        return value
    if isinstance(value, Global):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_json(item, depth - 1, nodes) for item in value]
    if isinstance(value, (set, frozenset)):
        return [_json(item, depth - 1, nodes) for item in sorted(value, key=lambda v: (type(v).__name__, str(v)[:64]))]
    if isinstance(value, dict):
        if not all(type(k) is str for k in value):
            raise _NotJsonError("a dict whose keys are not text")
        for k in value:
            _count_text(k, nodes)
        return {k: _json(v, depth - 1, nodes) for k, v in value.items()}
    raise _NotJsonError(
        f"a value of type {'tensor' if isinstance(value, (Tensor, ArrayStub)) else type(value).__name__}"
    )


def _count_text(text: str, nodes: list[int]) -> None:
    """Count a text's length as values: one text may be referred to from many places, and is written at each."""
    if len(text) > _MAX_TEXT:
        raise _NotJsonError(f"a text of {len(text)} characters, at most {_MAX_TEXT} are kept")
    nodes[0] -= len(text) // 64
