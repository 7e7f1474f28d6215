"""Stored bits as torch tensors, and stored states in the dtype a trainer wants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.store.fields import Field

__all__ = ["State", "batch_dtype", "restored", "shaped", "tensor_of", "torch_dtype"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class State:
    """One tensor of states in the batch: batch key, the span it comes from, its dtype in the batch (torch's name),
    and the span with the scales of fp8 states."""

    key: str
    span: str
    dtype: str
    scale: str | None = None


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of that name (as in ``Field.dtype``)."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def tensor_of(bits: NDArray[np.generic], field: Field) -> torch.Tensor:
    """Rows of a field as numpy holds them (``DType.bits``) as a tensor of the field's dtype on the same memory."""
    dtype = torch_dtype(field.dtype)
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    whole = torch.from_numpy(bits.view(str(signed).removeprefix("torch.")))
    return whole if signed == dtype else whole.view(dtype)


def batch_dtype(field: Field, *, integers_as_int64: bool) -> str:
    """The dtype of ids and masks in a batch: the producer's own, since stored ones are narrowed.

    Where it was not recorded, integers are int64 as every known producer writes them.  ``integers_as_int64`` widens
    any integer, as ``datasets`` does with arrow columns; bool and floats stay what they were.
    """
    name = field.source_dtype or field.dtype
    whole = torch_dtype(name)
    if whole == torch.bool or whole.is_floating_point:
        return name
    return "int64" if integers_as_int64 or field.source_dtype is None else name


def shaped(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` in that dtype and shape; one that is so already is returned as it is, with no call of torch."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def restored(
    span: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``span`` (``[rows, ...]``) in ``dtype``, in ``out`` if given; a span that is in it already is returned as it is.

    fp8 states with a ``scale`` (fp32, one a row) are restored as hs-connectors 0.9.0 does (``fp8_utils.py``):
    ``fp8.to(bfloat16) * scale.to(bfloat16)``, the scale rounded too, then cast.
    """
    if span.dtype == dtype and out is None:
        return span
    if scale is None or span.dtype not in _FP8:
        return span.to(dtype) if out is None else out.copy_(span)
    whole = out if out is not None and out.dtype == torch.bfloat16 else torch.empty_like(span, dtype=torch.bfloat16)
    whole.copy_(span)
    whole *= scale.to(torch.bfloat16).reshape(-1, *[1] * (span.dim() - 1))
    if whole.dtype == dtype:
        return whole
    return whole.to(dtype) if out is None else out.copy_(whole)
