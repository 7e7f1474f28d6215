"""What callers hand in and get back: torch tensors and numpy arrays to bits, and bits to torch tensors.

torch is only imported where a tensor is involved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hsloader.store.dtypes import DTYPES, dtype_of
from hsloader.store.fields import Field, check_field_set

if TYPE_CHECKING:
    import torch

__all__ = ["as_array_like", "as_bits", "as_tensor", "declared_fields", "dtype_name", "infer_field"]

Bits = npt.NDArray[Any]

# Types that numpy lacks, and the torch type of the same size that numpy has.
_CARRIERS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def dtype_name(value: Any) -> str:
    """The name of a tensor's or array's data type as in ``DTYPES`` (which need not have it)."""
    name = str(value.dtype)
    return name.removeprefix("torch.") if name.startswith("torch.") else str(value.dtype.name)


def as_bits(value: Any, dtype: str) -> Bits:
    """The bits of a torch tensor or numpy array of ``dtype``, C-contiguous; shares memory where it can.

    A numpy array of the bits themselves (uint16 for bfloat16, uint8 for fp8) is taken too. ``TypeError`` for another
    data type.
    """
    bits = dtype_of(dtype).bits
    found = dtype_name(value)
    if _is_tensor(value):
        if found != dtype:
            raise TypeError(f"expected {dtype}, found {found}")
        tensor = value.detach().cpu().contiguous().resolve_neg()
        if dtype in _CARRIERS:
            import torch

            tensor = tensor.view(getattr(torch, _CARRIERS[dtype]))
        carried: Bits = tensor.numpy().view(bits)
        return carried
    array: Bits = np.ascontiguousarray(value)
    if found == dtype:
        return array.view(bits) if dtype in _CARRIERS else array.astype(bits, copy=False)
    if dtype in _CARRIERS and array.dtype == bits:
        return array
    raise TypeError(f"expected {dtype}, found {found}")


def as_tensor(bits: Bits, dtype: str) -> torch.Tensor:
    """The torch tensor of ``dtype`` that shares the memory of ``bits``."""
    import torch

    if dtype in _CARRIERS:
        view: torch.Tensor = torch.from_numpy(bits.view(_CARRIERS[dtype]))
        return view.view(getattr(torch, dtype))
    return torch.from_numpy(bits)


def infer_field(name: str, value: Any, codec: str) -> Field:
    """The field that ``value`` (``[tokens, *shape]``) would be a sample of."""
    found = dtype_name(value)
    if found not in DTYPES:
        raise TypeError(f"field {name}: data type {found}; a field may be one of {', '.join(DTYPES)}")
    if len(value.shape) < 1:
        raise ValueError(f"field {name}: expected an array with one row a token, found a single number")
    return Field(name=name, dtype=found, shape=tuple(int(n) for n in value.shape[1:]), codec=codec)


def declared_fields(declared: Mapping[str, Any] | Iterable[Field], codec: str) -> tuple[Field, ...]:
    """Fields from ``{name: dtype}``, ``{name: (dtype, shape)}`` or ready-made ``Field`` objects."""
    fields = []
    for each in declared.items() if isinstance(declared, Mapping) else declared:
        if isinstance(each, Field):
            fields.append(each)
            continue
        name, what = each
        if isinstance(what, Field):
            fields.append(replace(what, name=name))
            continue
        dtype, shape = (what, ()) if isinstance(what, str) else what
        fields.append(Field(name=name, dtype=dtype, shape=shape, codec=codec))
    check_field_set(fields)
    return tuple(fields)


def as_array_like(name: str, value: Any) -> Any:
    """``value`` if it is a dense tensor or an array, else the numpy array of it (lists of numbers).

    Refused, naming the field ``name``: what is no array, and arrays whose values are not all there (sparse and meta
    tensors, masked arrays).
    """
    if _is_tensor(value):
        if value.is_meta or str(value.layout) != "torch.strided":
            kind = "meta" if value.is_meta else str(value.layout).removeprefix("torch.")
            raise TypeError(f"field {name}: expected a dense tensor that holds its values, found a {kind} one")
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"field {name}: expected an array whose values are all there, found a masked one")
    if isinstance(value, np.ndarray):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # a ragged list
        array = np.empty(0, object)
    if array.dtype.kind not in "iufb":
        raise TypeError(f"field {name}: expected a torch tensor or numpy array, found {type(value).__name__}")
    return array


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
