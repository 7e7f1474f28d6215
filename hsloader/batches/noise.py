"""Noise on states while training: what to add and to which batch keys; ``hsloader.device.noising`` adds it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from hsloader.batches.trainer import Trainer

__all__ = ["GaussianNoise", "UniformNoise", "noise_keys"]


@dataclass(frozen=True, slots=True)
class _Noise:
    std: float
    keys: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.std) and self.std > 0):
            raise ValueError(f"{type(self).__name__}({self.std!r}): expected a positive number")
        if self.keys is not None:
            object.__setattr__(self, "keys", tuple(self.keys))


@dataclass(frozen=True, slots=True)
class UniformNoise(_Noise):
    """Adds ``2 * (rand - 0.5) * std``: uniform within ±``std``, as speculators' ``AddUniformNoise`` (default 0.05).

    ``keys`` are the batch's keys that get it; None stands for the draft model's input states, and in speculators 0.3
    and 0.4 the last state too, as their own loaders do.  It is added after the cast to the batch's dtype, to rows
    that hold tokens, never to padding.
    """


@dataclass(frozen=True, slots=True)
class GaussianNoise(_Noise):
    """Adds ``randn * std``, as speculators' ``AddGaussianNoise``; ``keys`` as in ``UniformNoise``."""


def noise_keys(noise: UniformNoise | GaussianNoise, trainer: Trainer) -> tuple[str, ...]:
    """The batch keys that get the noise; ``ValueError`` for unknown keys, or where the trainer names none."""
    known: Collection[str] = [state.key for state in trainer.states]
    keys = trainer.noise_keys if noise.keys is None else noise.keys
    name = type(noise).__name__
    if not keys:
        raise ValueError(
            f"{trainer.title} has no states that are noised by custom; say which of {', '.join(known) or 'none'} "
            f"shall get it: {name}({noise.std}, keys=(...))"
        )
    if unknown := [key for key in keys if key not in known]:
        raise ValueError(f"{name}: {unknown[0]!r} is no tensor of states of {trainer.title}; it has {', '.join(known)}")
    for state in trainer.states:
        if state.key in keys and state.dtype.startswith("float8"):
            raise ValueError(
                f"{name}: {state.key!r} of {trainer.title} is {state.dtype} here, which nothing can be added to; give "
                "hidden_states_dtype='bfloat16', or other keys="
            )
    return keys
