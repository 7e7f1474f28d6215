"""From the selected samples to an epoch's global sequence of batches.

A planner is a function of the epoch that gives its ``BatchSequence``.  hsloader's own planners know no ranks, so a
run can go on with another number of them; a trainer's own order is made for one number of ranks and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hsloader.order.batching import counted_batches, packed_batches
from hsloader.order.mixing import epoch_permutation
from hsloader.order.multipack import MULTIPACK_VERSIONS, multipack_batches
from hsloader.order.sequence import BatchSequence

__all__ = ["EpochPlans", "Planner", "counted_planner", "multipack_planner", "packed_planner"]

Planner = Callable[[int], BatchSequence]


def counted_planner(
    samples: NDArray[np.int64], batch_size: int, *, seed: int, shuffle: bool = True, drop_last: bool = False
) -> Planner:
    """Batches of ``batch_size`` samples; a shorter last one is kept unless ``drop_last``."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected at least 1")

    def plan(epoch: int) -> BatchSequence:
        order = epoch_permutation(samples, seed, epoch) if shuffle else samples
        return counted_batches(order, batch_size, drop_last=drop_last)

    return plan


def packed_planner(
    samples: NDArray[np.int64], costs: NDArray[np.int64], max_tokens: int, *, seed: int, shuffle: bool = True
) -> Planner:
    """Batches of at most ``max_tokens`` rows; ``costs[i]`` (int64) is what ``samples[i]`` takes of them."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: expected at least 1")
    if len(costs) != len(samples):
        raise ValueError(f"{len(costs)} costs for {len(samples)} samples")
    by_sample = np.zeros(int(samples.max(initial=-1)) + 1, dtype=np.int64)
    by_sample[samples] = costs

    def plan(epoch: int) -> BatchSequence:
        order = epoch_permutation(samples, seed, epoch) if shuffle else samples
        return packed_batches(order, by_sample[order], max_tokens)

    return plan


def multipack_planner(
    samples: NDArray[np.int64],
    lengths: NDArray[np.int64],
    max_tokens: int,
    *,
    version: str,
    seed: int,
    world: int,
) -> Planner:
    """speculators' own order (see ``multipack_batches``); made for ``world`` ranks, not elastic."""
    if version not in MULTIPACK_VERSIONS:
        raise ValueError(f"order {version!r}: expected one of {', '.join(MULTIPACK_VERSIONS)}")

    def plan(epoch: int) -> BatchSequence:
        return multipack_batches(samples, lengths, max_tokens, version=version, seed=seed, epoch=epoch, world=world)

    return plan


@dataclass(slots=True)
class EpochPlans:
    """A planner with its last few epochs remembered: ``len()`` of an epoch and its batches share one plan."""

    planner: Planner
    keep: int = 2
    _plans: dict[int, BatchSequence] = field(default_factory=dict, init=False)

    def __call__(self, epoch: int) -> BatchSequence:
        """The plan of ``epoch``; ``ValueError`` for a negative one."""
        if epoch < 0:
            raise ValueError(f"epoch {epoch}: epochs count from 0")
        if epoch not in self._plans:
            while len(self._plans) >= self.keep:
                del self._plans[next(iter(self._plans))]
            self._plans[epoch] = self.planner(epoch)
        return self._plans[epoch]
