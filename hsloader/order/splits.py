"""Train and validation: by a hash of each sample's recorded name, or as a trainer's own loader does it."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from hsloader.order.mixing import mixed

__all__ = ["OWN_SPLITS", "own_split", "split_of"]

# Fixed for ever: with another salt every dataset's validation set would move into its training set.
_SALT = np.uint64(0x68736C6F61646572)

OWN_SPLITS = ("contiguous", "shuffled-files")


def split_of(keys: NDArray[np.uint64], val_ratio: float) -> NDArray[np.bool_]:
    """Which samples belong to the validation side, as a bool array; ``keys`` is the dataset's ``key`` column.

    A sample's side depends on its own key and on ``val_ratio`` alone: not on the seed, not on its position, not on
    what was appended later.  A larger ratio only adds samples to the validation side.  ``ValueError`` unless
    ``0 <= val_ratio < 1``.
    """
    if not 0.0 <= val_ratio < 1.0:
        raise ValueError(f"val_ratio={val_ratio!r}: expected a number from 0 up to, not including, 1")
    # Exact in integers: val_ratio * 2**64 has no exact float near 1.
    threshold = int(Fraction(val_ratio) * 2**64)
    return mixed(np.asarray(keys, dtype=np.uint64) ^ _SALT) < np.uint64(threshold)


def own_split(name: str, count: int, train_ratio: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A trainer's own split of ``count`` samples in file order: (train, validation) indices, in that trainer's order.

    ``"contiguous"``: speculators 0.5 to 0.9, the first ``int(count * train_ratio)`` samples train.
    ``"shuffled-files"``: speculators 0.3 and 0.4 (and ``--legacy-data`` later), ``random.seed(0)`` and a shuffle of
    the file list.  Theirs was in the order of ``os.walk``; here it is the dataset's order, so it equals a run of
    theirs only where both listed the files alike.  ``ValueError`` for another name or a ratio outside (0, 1].
    """
    if not 0.0 < train_ratio <= 1.0:
        raise ValueError(f"train_ratio={train_ratio!r}: expected a number above 0, at most 1")
    cut = int(count * train_ratio)
    if name == "contiguous":
        order = np.arange(count, dtype=np.int64)
    elif name == "shuffled-files":
        listing = list(range(count))
        random.Random(0).shuffle(listing)
        order = np.array(listing, dtype=np.int64)
    else:
        raise ValueError(f"split {name!r}: expected one of {', '.join(OWN_SPLITS)}")
    return order[:cut], order[cut:]
