"""Ranks: which share of the batches this process takes, and where that was learned."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hsloader.errors import LoaderError

__all__ = ["Ranks", "check_unchanged", "find_ranks", "local_rank_warning"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The data-parallel ``rank`` of ``world`` and its ``source``: ``"arguments"``, ``"torch.distributed"`` ..."""

    rank: int
    world: int
    source: str


def find_ranks(rank: int | None = None, world_size: int | None = None) -> Ranks:
    """The arguments if given, else torch.distributed if it is set up, else RANK and WORLD_SIZE, else one rank.

    ``ValueError`` for one argument without the other, or a rank outside its world.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank}, world_size={world_size}: give both, or neither")
    if rank is not None and world_size is not None:
        return _checked(Ranks(rank, world_size, "arguments"))
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")
    texts = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if texts[0] and texts[1]:
        if not (texts[0].isdecimal() and texts[1].isdecimal()):
            raise ValueError(f"RANK={texts[0]!r}, WORLD_SIZE={texts[1]!r} in the environment: expected whole numbers")
        return _checked(Ranks(int(texts[0]), int(texts[1]), "the environment"))
    return Ranks(0, 1, "no launcher")


def _checked(ranks: Ranks) -> Ranks:
    for number in (ranks.rank, ranks.world):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"rank={ranks.rank!r}, world_size={ranks.world!r}: expected whole numbers")
    if not 0 <= ranks.rank < ranks.world:
        raise ValueError(f"rank={ranks.rank}, world_size={ranks.world} from {ranks.source}: no such rank")
    return ranks


def check_unchanged(known: Ranks) -> None:
    """Refuse to iterate where the ranks are others by now than when the loader was made (``LoaderError``)."""
    if known.source == "arguments":
        return
    now = find_ranks()
    if (now.rank, now.world) != (known.rank, known.world):
        raise LoaderError(
            f"the loader was made as rank {known.rank} of {known.world} (from {known.source}), now this is rank "
            f"{now.rank} of {now.world} (from {now.source}); make the loader after init_process_group, or give it "
            "rank= and world_size="
        )


def local_rank_warning(ranks: Ranks, environment: Mapping[str, str] | None = None) -> str | None:
    """A sentence if the arguments look like a node's local rank taken for the global one, else None."""
    known = os.environ if environment is None else environment
    numbers = [known.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if ranks.source != "arguments" or not all(number.isdecimal() for number in numbers):
        return None
    rank, world, local_rank, local_world = map(int, numbers)
    local = ranks.rank == local_rank and (local_rank != rank or local_world != world)
    if not local or (ranks.rank, ranks.world) == (rank, world) or ranks.world not in (world, local_world):
        return None
    return (
        f"rank={ranks.rank}, world_size={ranks.world} are this process's local rank; the launcher says rank {rank} of "
        f"{world}. With local ranks several nodes read the same batches"
    )
