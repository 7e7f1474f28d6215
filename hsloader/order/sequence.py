"""BatchSequence: the global sequence of an epoch's batches, and what a rank's share of it is.

The sequence does not know ranks.  With ``world`` ranks, step ``s`` after global position ``p`` takes the batches
``p + s * world`` to ``p + (s + 1) * world - 1``, one a rank, in rank order.  So a run may stop at any step and go on
with another number of ranks: the position is a number of batches, not of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsloader.monitor.words import plural

__all__ = ["MOST_EPOCHS", "BatchSequence", "check_share", "share_of", "steps_left"]

MOST_EPOCHS = 1 << 23  # an epoch and the number of a batch in it are one 64-bit name towards the reader


@dataclass(frozen=True, eq=False, slots=True)
class BatchSequence:
    """An epoch's batches: ``samples[offsets[i]:offsets[i + 1]]`` are the dataset indices of global batch ``i``."""

    samples: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Dataset indices of global batch ``index``, in batch order; ``IndexError`` outside the epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of an epoch of {len(self)} batches")
        return self.samples[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self[index] for index in range(len(self)))

    @classmethod
    def of(cls, batches: list[NDArray[np.int64]]) -> BatchSequence:
        """The sequence of these batches."""
        offsets = np.zeros(len(batches) + 1, dtype=np.int64)
        np.cumsum([len(batch) for batch in batches], out=offsets[1:])
        samples = np.concatenate(batches).astype(np.int64, copy=False) if batches else np.zeros(0, dtype=np.int64)
        return cls(samples, offsets)


def steps_left(batches: int, position: int, world: int) -> int:
    """Batches that every rank still gets from an epoch of ``batches`` at global ``position``; the rest is dropped."""
    return max(batches - position, 0) // world


def share_of(batches: int, position: int, rank: int, world: int) -> range:
    """Numbers of the global batches that ``rank`` still gets from an epoch of ``batches`` at global ``position``."""
    first = position + rank
    return range(first, first + steps_left(batches, position, world) * world, world)


def check_share(batches: int, world: int, *, split: str, samples: int) -> None:
    """Refuse an epoch that leaves a rank without a batch: ``ValueError`` with the numbers and the remedy."""
    if batches >= world:
        return
    make = "makes" if samples == 1 else "make"
    if world == 1:
        raise ValueError(
            f"split={split!r}: {plural(samples, 'sample')} {make} no full batch; use smaller batches, or "
            "drop_last=False"
        )
    remedy = "raise val_ratio, or validate on fewer ranks" if split == "val" else "use smaller batches, or fewer ranks"
    raise ValueError(
        f"split={split!r}: {plural(samples, 'sample')} {make} {plural(batches, 'batch', 'batches')}, fewer than the "
        f"{world} ranks that each need at least one an epoch; {remedy}"
    )
