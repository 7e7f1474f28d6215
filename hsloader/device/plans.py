"""What becomes of each span of a batch on its way to a device, and which spans travel in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hsloader.batches.states import torch_dtype
from hsloader.device.packing import NOT_IN_NUMPY
from hsloader.store.fields import Field

__all__ = ["Move", "SpanPlan", "moves_of"]


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """What becomes of a span on its way: its dtype in the batch, the span with its fp8 scales, whether it is noised."""

    name: str
    field: Field
    dtype: torch.dtype
    scale: str | None
    noisy: bool

    @property
    def stored(self) -> torch.dtype:
        """Its dtype in the ring."""
        return torch_dtype(self.field.dtype)

    @property
    def changes(self) -> bool:
        """Whether its values are not simply copied."""
        return self.noisy or self.dtype != self.stored

    @property
    def is_small(self) -> bool:
        """Whether the host packs it together with its own arrays, cast if it must be, as ids and masks."""
        castable = self.dtype == self.stored or not {self.dtype, self.stored} & NOT_IN_NUMPY
        return self.field.is_token_field and castable and not self.noisy


@dataclass(frozen=True, slots=True)
class Move:
    """Spans ``first`` to ``last`` (numbers) that travel in one copy, as they lie side by side and stay as they are."""

    first: int
    last: int
    dtype: torch.dtype
    last_row_bytes: int


def moves_of(plans: Sequence[SpanPlan]) -> list[Move]:
    """The copies of a batch's states. Spans that change their dtype are in none, nor are those that are packed.

    Apart from what is small, as a script may collect its masks, and would keep the states with them.
    """
    moves: list[Move] = []
    for number, plan in enumerate(plans):
        if plan.is_small or plan.dtype != plan.stored:
            continue
        first = number
        if moves and moves[-1].last == number - 1 and moves[-1].dtype == plan.dtype:
            first = moves.pop().first
        moves.append(Move(first, number, plan.dtype, plan.field.row_bytes))
    return moves
