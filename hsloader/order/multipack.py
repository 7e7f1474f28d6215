"""The packing order of speculators' ``MultipackDistributedBatchSamplerV2``, reproduced batch for batch.

Source: ``speculators/train/distributed_batch_sampler.py`` of 0.4.0, 0.7.0 and 0.9.0, itself adapted from
github.com/imoneoi/multipack_sampler.  An epoch's samples are permuted by ``default_rng(seed + epoch)``.  Each step
takes the longest run of them for which the LPT rule (longest first, each into the least full slot) fills one slot a
rank with at most ``max_tokens``; the run is found by binary search.  Slot ``j`` of step ``n`` goes to rank ``j`` up
to 0.6 (``"multipack-0.4"``) and to rank ``(j + n) mod world`` from 0.7 on.  A tail of fewer samples than ranks is
dropped.

Samples of equal length are ordered by plain ``np.argsort``, which is not stable: its order of ties differs between
CPUs (AVX2, AVX-512, neither) and numpy versions.  So does the trainer's own, therefore ``np.argsort`` is called here
on the same array as there.
"""

from __future__ import annotations

from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

from hsloader.order.sequence import BatchSequence

__all__ = ["MULTIPACK_VERSIONS", "multipack_batches"]

# Name of the order -> whether slots rotate over the ranks. 0.3 to 0.6 share one file, 0.7 to 0.9 another.
MULTIPACK_VERSIONS = {"multipack-0.4": False, "multipack-0.7": True, "multipack-0.9": True}


def multipack_batches(
    samples: NDArray[np.int64],
    lengths: NDArray[np.int64],
    max_tokens: int,
    *,
    version: str,
    seed: int,
    epoch: int,
    world: int,
    truncate: bool = True,
    max_batches: int | None = None,
) -> BatchSequence:
    """The epoch's batches, interleaved: global batch ``n * world + r`` is what rank ``r`` gets in step ``n``.

    ``samples`` are dataset indices in the trainer's own sample order, ``lengths`` their token counts before any
    shift.  ``truncate=False`` leaves samples longer than ``max_tokens`` out, else they count as ``max_tokens``.
    ``max_batches`` limits the steps (0.9).  ``ValueError`` for an unknown version.
    """
    if version not in MULTIPACK_VERSIONS:
        raise ValueError(f"order {version!r}: expected one of {', '.join(MULTIPACK_VERSIONS)}")
    sizes = np.ascontiguousarray(lengths, dtype=np.int64)
    valid = np.nonzero(sizes <= max_tokens)[0]
    if truncate:
        valid = np.arange(len(sizes))
        sizes = np.clip(sizes, 0, max_tokens)
    shuffled = np.random.default_rng(seed=seed + epoch).permutation(valid)
    batches = _pack(sizes[shuffled], max_tokens, world, rotate=MULTIPACK_VERSIONS[version], max_steps=max_batches)
    sequence = BatchSequence.of(batches)
    return BatchSequence(np.asarray(samples, dtype=np.int64)[shuffled[sequence.samples]], sequence.offsets)


def _pack(
    sizes: NDArray[np.int64], budget: int, world: int, *, rotate: bool, max_steps: int | None
) -> list[NDArray[np.int64]]:
    """Positions in ``sizes`` of each batch, step after step, within a step by rank."""
    ends = np.cumsum(sizes)
    batches: list[NDArray[np.int64]] = []
    start, before, step = 0, 0, 0
    while len(sizes) - start >= world and step != max_steps:
        most = int(np.searchsorted(ends[start:], before + budget * world, "right"))
        count = _longest_run(sizes, ends, start, most=most, budget=budget, world=world)
        slots = _slots(sizes[start : start + count], world)
        shift = step % world if rotate else 0
        batches += [slots[(rank - shift) % world] + start for rank in range(world)]
        start += count
        before = int(ends[start - 1])
        step += 1
    return batches


def _longest_run(
    sizes: NDArray[np.int64], ends: NDArray[np.int64], start: int, *, most: int, budget: int, world: int
) -> int:
    """How many samples from ``start`` on the step takes: the trainer's binary search in [1, most], probe for probe.

    LPT is not monotone (a longer run may fit where a shorter one does not), so the same probes must be made.
    """
    if world == 1:
        return most  # one slot: every run within the budget fits
    before = int(ends[start - 1]) if start else 0
    left, right = 1, most + 1
    while right - left > 1 and right > world:
        middle = (left + right) // 2
        if _fits(sizes[start : start + middle], int(ends[start + middle - 1]) - before, budget, world):
            left = middle
        else:
            right = middle
    return left


def _fits(sizes: NDArray[np.int64], total: int, budget: int, world: int) -> bool:
    """Whether LPT puts these samples into ``world`` slots of ``budget`` tokens."""
    descending = np.sort(sizes)[::-1]
    # Graham's bound: LPT fills no slot beyond total / world + largest * (world - 1) / world.
    if total + int(descending[0]) * (world - 1) <= budget * world:
        return True
    # A slot's fill and number in one integer, so that the heap orders by (fill, slot) as the trainer's tuples do.
    heap = list(range(world))
    limit = (budget + 1) * world
    for size in (descending * world).tolist():
        filled = heap[0] + size
        if filled >= limit:
            return False
        heapreplace(heap, filled)
    return True


def _slots(sizes: NDArray[np.int64], world: int) -> list[NDArray[np.int64]]:
    """Positions that LPT gives to each slot, in the order it gives them."""
    order = np.argsort(sizes)[::-1]  # unstable on purpose, see above
    if world == 1:
        return [order]
    heap = list(range(world))
    slots: list[list[int]] = [[] for _ in range(world)]
    for position, size in zip(order.tolist(), (sizes[order] * world).tolist(), strict=True):
        slots[heap[0] % world].append(position)
        heapreplace(heap, heap[0] + size)
    return [np.array(slot, dtype=np.int64) for slot in slots]
