"""Which samples take part: filters on the columns of the samples table, with their effect in numbers.

``min_loss_tokens`` counts supervised tokens that survive truncation, and some trainers need two neighbouring ones.
The samples table holds counts of whole samples, which decides nearly all of them; only for the rest are masks read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hsloader.errors import IncompatibleError
from hsloader.monitor.words import plural

__all__ = ["Columns", "Filters", "MaskReader", "Selection", "Step", "chosen", "select"]

MaskReader = Callable[[NDArray[np.int64]], Iterable[NDArray[np.generic]]]
"""Gives the loss mask, one 1-D array a sample in the order asked, of at least its first ``max_length`` tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns of the samples table that selection needs; each is int64 of the dataset's number of samples."""

    lengths: NDArray[np.int64]
    loss_tokens: NDArray[np.int64]
    first_supervised: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """What a sample must be like.

    ``max_length`` tokens are used of a sample; a longer one is cut (``long="truncate"``) or left out (``"drop"``).
    ``min_loss_tokens`` supervised tokens must lie within them.  ``neighbours`` demands two supervised tokens in a
    row within them (SpecForge's DFlash family).  ``told``: what of ``max_length`` a batch gets, where a shift takes
    the rest; for the words alone.
    """

    max_length: int | None = None
    long: Literal["truncate", "drop"] = "truncate"
    min_loss_tokens: int = 0
    neighbours: bool = False
    told: int | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length={self.max_length}: expected at least 1 token, or None for no limit")
        if self.long not in ("truncate", "drop"):
            raise ValueError(f"long={self.long!r}: expected 'truncate' or 'drop'")
        if self.min_loss_tokens < 0:
            raise ValueError(f"min_loss_tokens={self.min_loss_tokens}: expected 0 or more")


@dataclass(frozen=True, slots=True)
class Step:
    """One filter's effect: samples before it and after it (equal where it only cuts), and what it did in words."""

    name: str
    before: int
    after: int
    effect: str


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The samples that take part: ``indices`` int64, in the order of the candidates, and what each filter did."""

    indices: NDArray[np.int64]
    steps: tuple[Step, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def describe(self) -> str:
        """One line for the log: ``"10,000 samples -> 9,968: 32 with fewer than 4 supervised tokens left out; ..."``."""
        effects = self.effects()
        if not effects:
            return plural(len(self), "sample")
        return f"{plural(self.steps[0].before, 'sample')} -> {len(self):,}: {effects}"

    def effects(self) -> str:
        """What the filters did to some sample; empty where they did nothing."""
        return "; ".join(step.effect for step in self.steps if not step.effect.startswith("0 "))


def chosen(samples: Sequence[int] | NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Explicit sample indices as int64; ``ValueError`` for none, duplicates or indices outside the dataset."""
    indices = np.asarray(samples)
    if indices.ndim != 1 or not len(indices) or indices.dtype.kind not in "iu":
        raise ValueError("samples: expected a non-empty list of sample indices")
    indices = indices.astype(np.int64)
    outside = indices[(indices < 0) | (indices >= count)]
    if len(outside):
        raise ValueError(f"samples: {outside[0]} is outside the dataset's {count:,} samples (0 to {count - 1:,})")
    values, counts = np.unique(indices, return_counts=True)
    if len(values) != len(indices):
        raise ValueError(f"samples: {values[counts > 1][0]} is listed twice; a sample comes at most once an epoch")
    return indices


def select(
    candidates: NDArray[np.int64], columns: Columns, filters: Filters, masks: MaskReader | None = None
) -> Selection:
    """Apply ``filters`` to ``candidates`` (dataset indices); the columns are those of the whole dataset.

    ``masks`` is called at most once, with the samples whose columns leave the answer open.  ``IncompatibleError`` if
    the dataset has no loss mask, ``ValueError`` if masks have to be read and there is no reader.
    """
    steps: list[Step] = []
    kept = np.asarray(candidates, dtype=np.int64)
    if filters.max_length is not None:
        kept, step = _by_length(kept, columns.lengths, filters)
        steps.append(step)
    if filters.min_loss_tokens > 0 or filters.neighbours:
        facts = _mask_facts(kept, columns, filters, masks)
        if filters.min_loss_tokens > 0:
            good = facts[0]
            effect = f"{_count(~good)} with fewer than {filters.min_loss_tokens:,} supervised tokens left out"
            steps.append(Step("min_loss_tokens", len(kept), int(good.sum()), effect))
            kept, facts = kept[good], (facts[0][good], facts[1][good])
        if filters.neighbours:
            good = facts[1]
            effect = f"{_count(~good)} without two supervised tokens in a row left out"
            steps.append(Step("neighbours", len(kept), int(good.sum()), effect))
            kept = kept[good]
    return Selection(kept, tuple(steps))


def _count(which: NDArray[np.bool_]) -> str:
    return f"{int(which.sum()):,}"


def _by_length(kept: NDArray[np.int64], lengths: NDArray[np.int64], filters: Filters) -> tuple[NDArray[np.int64], Step]:
    limit = filters.max_length
    assert limit is not None
    long = lengths[kept] > limit
    if filters.long == "drop":
        effect = f"{_count(long)} longer than {limit:,} tokens left out"
        return kept[~long], Step("max_length", len(kept), int((~long).sum()), effect)
    told = limit if filters.told is None else filters.told
    lost = int((lengths[kept][long] - told).sum())
    effect = f"{_count(long)} cut to {plural(told, 'token')} ({plural(lost, 'token')} less)"
    return kept, Step("max_length", len(kept), len(kept), effect)


def _mask_facts(
    kept: NDArray[np.int64], columns: Columns, filters: Filters, masks: MaskReader | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each sample: has it enough supervised tokens, and two of them in a row?"""
    lengths, total = columns.lengths[kept], columns.loss_tokens[kept]
    if (total < 0).any():
        raise IncompatibleError(
            "min_loss_tokens and a trainer that needs supervised tokens count them in loss_mask, which this dataset "
            "does not have; convert the producer's masks with the states, or drop the filter"
        )
    used = lengths if filters.max_length is None else np.minimum(lengths, filters.max_length)
    # Of the supervised tokens, at most as many as are cut off can lie behind the cut.
    least = np.maximum(total - (lengths - used), 0)
    most = np.minimum(total, np.maximum(used - columns.first_supervised[kept], 0))
    most[total == 0] = 0
    enough, open_ = (
        least >= filters.min_loss_tokens,
        (least < filters.min_loss_tokens) & (most >= filters.min_loss_tokens),
    )
    # More than every other token supervised: two of them must be neighbours.
    paired = least * 2 > used + 1
    if filters.neighbours:
        open_ |= ~paired & (most >= 2)
    unknown = np.flatnonzero(open_)
    if len(unknown):
        if masks is None:
            raise ValueError(f"the loss masks of {len(unknown):,} samples must be read, and no reader was given")
        for at, mask in zip(unknown.tolist(), masks(kept[unknown]), strict=True):
            supervised = np.asarray(mask)[: used[at]] != 0
            enough[at] = int(supervised.sum()) >= filters.min_loss_tokens
            paired[at] = bool((supervised[:-1] & supervised[1:]).any())
    return enough, paired
