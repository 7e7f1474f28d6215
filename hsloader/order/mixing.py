"""Counter-based random numbers: the same on every machine, numpy version and rank, with no generator to carry along.

``numpy.random.Generator`` may change its streams between releases (NEP 19), and a run must be resumable on another
machine.  So everything drawn here is a hash of *(what for, seed, epoch, index)* by the splitmix64 finalizer
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["draws", "epoch_permutation", "mixed", "noise_seed", "stream_key"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB

# Purposes of a stream; the numbers are part of the order's definition and never change.
SHUFFLE = 1
NOISE = 2


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finalizer of each value; a bijection of 64-bit words."""
    words = np.array(values, dtype=np.uint64, ndmin=1)
    words ^= words >> np.uint64(30)
    words *= np.uint64(_M1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_M2)
    words ^= words >> np.uint64(31)
    return words


def stream_key(purpose: int, seed: int, epoch: int) -> int:
    """A 64-bit key for one stream of draws; seeds beyond 64 bits and negative ones are folded, not refused."""
    key = 0
    for word in (purpose, seed, seed >> 64, epoch):
        key = int(mixed(np.array([(key + _GOLDEN + word) & _MASK], dtype=np.uint64))[0])
    return key


def draws(key: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One 64-bit draw for each index, independent of which other indices are asked for."""
    counters = indices.astype(np.uint64)
    counters *= np.uint64(_GOLDEN)
    counters += np.uint64(key)
    return mixed(counters)


def epoch_permutation(samples: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
    """``samples`` in this epoch's random order.

    The order of any two samples depends on their dataset indices, ``seed`` and ``epoch`` alone, so a subset is
    shuffled as the whole set is, with the other samples left out.
    """
    keys = draws(stream_key(SHUFFLE, seed, epoch), samples)
    return samples[np.argsort(keys, kind="stable")]


def noise_seed(seed: int, epoch: int, batch: int) -> int:
    """The seed of the noise on a global batch of an epoch, a 63-bit number."""
    return int(draws(stream_key(NOISE, seed, epoch), np.array([batch], dtype=np.int64))[0] >> np.uint64(1))
