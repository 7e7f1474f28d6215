"""Orders of batches that need torch's own random numbers: ``DistributedSampler``, as SpecForge trains with."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.order.planning import Planner
from hsloader.order.sequence import BatchSequence

__all__ = ["distributed_sampler_planner"]


def distributed_sampler_planner(
    samples: NDArray[np.int64], batch_size: int, *, seed: int, world: int, shuffle: bool = True, drop_last: bool = False
) -> Planner:
    """Batches as a DataLoader over torch's ``DistributedSampler(seed=seed, drop_last=False)`` makes them.

    ``randperm`` of ``seed + epoch``, repeated from its beginning to a multiple of ``world``; rank r takes every
    ``world``-th and cuts its share into batches of ``batch_size``, the last of them shorter unless ``drop_last``.
    The sequence is interleaved (global batch ``n * world + r`` is rank r's n-th) and made for ``world`` ranks: not
    elastic, and up to ``world - 1`` samples come twice, as there.
    """

    def plan(epoch: int) -> BatchSequence:
        if shuffle:
            generator = torch.Generator()
            generator.manual_seed(seed + epoch)
            order = samples[torch.randperm(len(samples), generator=generator).numpy()]
        else:
            order = samples
        share = -(-len(order) // world)
        shares = np.resize(order, share * world).reshape(share, world)
        stops = list(range(batch_size, share + 1, batch_size))
        if share % batch_size and not drop_last:
            stops.append(share)
        starts = [0, *stops]
        return BatchSequence.of(
            [shares[starts[n] : stop, rank] for n, stop in enumerate(stops) for rank in range(world)]
        )

    return plan
