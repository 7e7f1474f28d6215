"""An epoch's samples into batches: a fixed number of samples each, or as many as fit a token budget.

Packing works on a window of the shuffled order at a time: the window's samples, longest first, each into the fullest
open batch that still has room (best fit decreasing).  That fills batches to 99 % and more of the budget where the
lengths allow it, keeps the epoch random (a sample moves within its window only), and takes about a microsecond a
sample.  Nothing depends on ranks.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from hsloader.order.sequence import BatchSequence

__all__ = ["PACKING_WINDOW", "counted_batches", "packed_batches"]

# Samples that are packed together. Part of the order's definition: a change moves samples between batches.
PACKING_WINDOW = 4096


def counted_batches(samples: NDArray[np.int64], batch_size: int, *, drop_last: bool) -> BatchSequence:
    """Consecutive batches of ``batch_size`` samples; a shorter last one is kept unless ``drop_last``."""
    full = len(samples) // batch_size
    offsets = np.arange(full + 1, dtype=np.int64) * batch_size
    if len(samples) % batch_size and not drop_last:
        offsets = np.append(offsets, np.int64(len(samples)))
    return BatchSequence(samples[: offsets[-1]], offsets)


def packed_batches(samples: NDArray[np.int64], costs: NDArray[np.int64], budget: int) -> BatchSequence:
    """Batches whose costs add up to at most ``budget``.

    ``samples`` is the epoch's order, ``costs`` the rows each of them takes of a batch (int64, same length); a cost
    above the budget counts as the budget (the sample is cut), one below 1 as 1.  Every sample is in exactly one batch,
    in which samples keep the epoch's order.
    """
    clipped = np.clip(costs, 1, budget)
    groups: list[NDArray[np.int64]] = []  # positions, batch after batch
    counts: list[NDArray[np.int64]] = []
    carried = np.zeros(0, dtype=np.int64)
    for start in range(0, len(samples), PACKING_WINDOW):
        stop = min(start + PACKING_WINDOW, len(samples))
        window = np.concatenate([carried, np.arange(start, stop, dtype=np.int64)])
        batch_of, first_of, left = _best_fit(clipped[window], budget)
        if stop < len(samples):
            # At most one batch can be half empty or worse; its samples get another chance in the next window.
            poor = left[batch_of] * 2 >= budget
            carried, window, batch_of = window[poor], window[~poor], batch_of[~poor]
        # A batch stands where its longest sample stood: a place that does not depend on how many it holds.
        place = _places(first_of)[batch_of]
        order = np.argsort(place, kind="stable")
        groups.append(window[order])
        counts.append(np.unique(place, return_counts=True)[1].astype(np.int64))
    offsets = np.zeros(sum(len(count) for count in counts) + 1, dtype=np.int64)
    if counts:
        np.cumsum(np.concatenate(counts), out=offsets[1:])
    positions = np.concatenate(groups) if groups else np.zeros(0, dtype=np.int64)
    return BatchSequence(samples[positions], offsets)


def _places(first_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each batch its rank among the window's batches, by the position of its first-placed sample."""
    places = np.empty(len(first_of), dtype=np.int64)
    places[np.argsort(first_of, kind="stable")] = np.arange(len(first_of), dtype=np.int64)
    return places


def _best_fit(costs: NDArray[np.int64], budget: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Best fit decreasing: (batch of each sample, position of each batch's first sample, room left in each batch)."""
    order = np.argsort(-costs, kind="stable")
    smallest = int(costs[order[-1]])
    rooms: list[int] = []  # room left in the open batches, ascending
    names: list[int] = []  # and which batches they are
    first_of: list[int] = []
    left: list[int] = []
    batch_of = [0] * len(costs)
    for position, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        at = bisect_left(rooms, cost)
        if at == len(rooms):
            batch = len(first_of)
            first_of.append(position)
            left.append(budget)
            room = budget - cost
        else:
            batch = names.pop(at)
            room = rooms.pop(at) - cost
        batch_of[position] = batch
        left[batch] = room
        if room >= smallest:
            at = bisect_left(rooms, room)
            rooms.insert(at, room)
            names.insert(at, batch)
    return (
        np.array(batch_of, dtype=np.int64),
        np.array(first_of, dtype=np.int64),
        np.array(left, dtype=np.int64),
    )
