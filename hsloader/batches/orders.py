"""Orders of batches by name: hsloader's own, which knows no ranks, and those of the trainers.

``DistributedSampler`` (SpecForge trains with it) draws with torch's own random numbers, so it is here and not in
``order/``, which knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.batches.trainer import Trainer
from hsloader.order.multipack import MULTIPACK_VERSIONS
from hsloader.order.planning import Planner, counted_planner, multipack_planner, packed_planner
from hsloader.order.sequence import BatchSequence

__all__ = ["ORDER_NAMES", "Order", "distributed_sampler_planner", "order_named"]

ORDER_NAMES = ("hsloader", "trainer", *MULTIPACK_VERSIONS, "distributed-sampler")


@dataclass(frozen=True, slots=True)
class Order:
    """How epochs are planned; ``contract`` goes into a state, with the ranks where the order is not elastic."""

    name: str
    planner: Planner
    elastic: bool
    contract: dict[str, str | int | float | bool | None]


def order_named(
    name: str,
    trainer: Trainer,
    samples: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    seed: int,
    world: int,
    split: str = "train",
    shuffle: bool = True,
) -> Order:
    """The order called ``name`` over the selected ``samples`` (dataset indices) of these ``lengths``, one for one.

    ``"hsloader"`` is elastic.  ``"trainer"`` is the trainer's own, as is its name; such an order is made for
    ``world`` data-parallel ranks.  ``shuffle=False`` keeps the samples' order (not possible with multipack).
    ``ValueError`` for a name that there is not, or that the trainer's kind of batches does not go with.
    """
    if name not in ORDER_NAMES:
        raise ValueError(f"order {name!r}: expected one of {', '.join(ORDER_NAMES)}")
    if name == "trainer":
        if trainer.own_order is None:
            raise ValueError(f"trainer {trainer.title} has no order of its own; use order='hsloader'")
        name = trainer.own_order
    tokens, count, drop_last = trainer.settings.max_tokens, trainer.batch_size, trainer.drops_last(split)
    contract: dict[str, str | int | float | bool | None] = {"order": name, "shuffle": shuffle}
    if name == "hsloader":
        if tokens is not None:
            planner = packed_planner(samples, trainer.costs(lengths), tokens, seed=seed, shuffle=shuffle)
        else:
            planner = counted_planner(samples, count, seed=seed, shuffle=shuffle, drop_last=drop_last)
        return Order(name, planner, True, contract)
    contract["world_size"] = world
    if name == "distributed-sampler":
        if tokens is not None:
            raise ValueError(f"order {name} counts samples, {trainer.title} packs by tokens; use order='hsloader'")
        planner = distributed_sampler_planner(
            samples, count, seed=seed, world=world, shuffle=shuffle, drop_last=drop_last
        )
    else:
        if tokens is None or not shuffle:
            reason = "packs by tokens" if tokens is None else "always shuffles"
            raise ValueError(f"order {name} {reason}, which is not what was asked of {trainer.title}")
        used = trainer.cut(lengths)
        planner = multipack_planner(samples, used, tokens, version=name, seed=seed, world=world)
    return Order(name, planner, False, contract)


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
