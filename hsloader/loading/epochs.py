"""Epochs: which samples a loader uses, and each epoch's global sequence of batches over them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsloader.batches.orders import Order, order_named
from hsloader.batches.trainer import Trainer
from hsloader.errors import IncompatibleError
from hsloader.loading.ranks import Ranks
from hsloader.loading.settings import LoaderSettings
from hsloader.monitor.words import plural
from hsloader.order.planning import EpochPlans
from hsloader.order.selection import Columns, Filters, Selection, chosen, select
from hsloader.order.sequence import BatchSequence, check_share
from hsloader.order.splits import own_split, split_of
from hsloader.order.state import ContractValue
from hsloader.store.dataset import Dataset

__all__ = ["Epochs"]


class Epochs:
    """The plans of one loader.  A plan depends on the epoch and on how many segments of the dataset take part."""

    def __init__(self, dataset: Dataset, trainer: Trainer, settings: LoaderSettings, ranks: Ranks) -> None:
        self._dataset = dataset
        self._trainer = trainer
        self._settings = settings
        self._ranks = ranks
        self._split_by = self._own_split() if settings.split_by == "trainer" else settings.split_by
        self._plans: dict[int, EpochPlans] = {}  # by the number of samples that take part
        self._selections: dict[int, Selection] = {}
        self.sides = ""
        self._order: Order | None = None
        if settings.batch_sampler is None:
            self._order = self._ordered(len(dataset))
            self.usable = self._selection(len(dataset)).indices
        else:
            self.usable = np.arange(len(dataset), dtype=np.int64)

    @property
    def contract(self) -> dict[str, ContractValue]:
        """The settings that decide which samples make up which batch."""
        settings = self._settings
        contract = self._trainer.contract(settings.split)
        if self._order is None:
            return contract | {"batch_sampler": True}
        contract |= self._order.contract | {
            "split": settings.split,
            "val_ratio": settings.val_ratio,
            "split_by": self._split_by,
            "long": settings.long,
            "min_loss_tokens": settings.min_loss_tokens,
        }
        if settings.samples is not None:
            indices = np.asarray(settings.samples, dtype="<i8")
            contract["samples"] = hashlib.sha256(indices.tobytes()).hexdigest()[:16]
        return contract

    def used(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of samples of these lengths that reach a batch; a token that a shift takes of each counts too."""
        short, limit, budget = self._trainer.cut(lengths), self._limit(), self._trainer.settings.max_tokens
        if limit is None or budget is None:
            return short
        return np.where(lengths > limit, min(limit, budget), short)

    def describe(self) -> str:
        """The split and the filters in numbers, for the log."""
        if self._settings.batch_sampler is not None:
            return f"{plural(len(self.usable), 'sample')}, chosen by the batch_sampler"
        return self.sides + self._selection(len(self._dataset)).describe()

    def plan(self, epoch: int, segments: int) -> BatchSequence:
        """The global batches of ``epoch`` over the first ``segments`` segments.

        ``ValueError`` if they are fewer than the ranks.
        """
        count = self.samples_in(segments)
        if count not in self._plans:
            sampler, known = self._settings.batch_sampler, len(self._dataset)
            self._plans[count] = EpochPlans(
                self._ordered(count).planner if sampler is None else lambda epoch: _drawn(sampler, epoch, known)
            )
        plan = self._plans[count](epoch)
        if self._settings.batch_sampler is None:
            check_share(len(plan), self._ranks.world, split=self._settings.split, samples=len(self._selection(count)))
        return plan

    def samples_in(self, segments: int) -> int:
        """How many samples the first ``segments`` segments hold."""
        return int(np.searchsorted(self._dataset.segment_of, segments))

    def _ordered(self, count: int) -> Order:
        """The order over the dataset's first ``count`` samples."""
        settings = self._settings
        samples = self._selection(count).indices
        own = (self._trainer.own_order or "") if settings.order == "trainer" else settings.order
        fixed = settings.split == "val" and not own.startswith("multipack")  # which always shuffles
        return order_named(
            settings.order,
            self._trainer,
            samples,
            self._dataset.lengths[samples],
            seed=settings.seed,
            world=self._ranks.world,
            split=settings.split,
            shuffle=not fixed if settings.shuffle is None else settings.shuffle,
        )

    def _own_split(self) -> str:
        if self._trainer.own_split is None:
            raise ValueError(f"trainer {self._trainer.title} has no split of its own; use split_by='name'")
        return self._trainer.own_split

    def _selection(self, count: int) -> Selection:
        """What the filters leave of this side of the dataset's first ``count`` samples."""
        if count not in self._selections:
            candidates = self._candidates(count)
            found = select(candidates, self._columns(), self._filters(), self._masks)
            if not len(found):
                why = "; ".join(part for part in (self.sides.removesuffix("; "), found.effects()) if part)
                raise ValueError(
                    f"{self._dataset.path}: no sample is left for split={self._settings.split!r}"
                    f"{why and f': {why}'}; {self._remedy(len(candidates))}"
                )
            if not self._trainer.costs(self._dataset.lengths[found.indices]).any():
                raise ValueError(
                    f"{self._dataset.path}: no token of {plural(len(found), 'sample')} would reach a batch, as "
                    f"{self._trainer.title} takes one off each; raise max_length, or use longer samples"
                )
            self._selections[count] = found
        return self._selections[count]

    def _remedy(self, candidates: int) -> str:
        if candidates:
            return "loosen the filters"
        if not len(self._dataset):
            return "the dataset is empty"
        if self._settings.split == "train":
            return "lower val_ratio"
        return "give val_ratio= above 0" if self._settings.val_ratio == 0 else "raise val_ratio, or use split='all'"

    def _candidates(self, count: int) -> NDArray[np.int64]:
        settings = self._settings
        if settings.samples is not None:
            indices = chosen(settings.samples, len(self._dataset))
            return indices[indices < count]
        everything = np.arange(count, dtype=np.int64)
        if settings.split == "all":
            return everything
        if self._split_by == "name":
            validation = split_of(self._dataset.keys[:count], settings.val_ratio)
            train, val = everything[~validation], everything[validation]
        else:
            # As the trainer's script has it: 1 - 0.42 is not the 0.58 that stands there.
            train, val = own_split(self._split_by, count, round(1.0 - settings.val_ratio, 12))
        if settings.val_ratio:
            self.sides = f"{plural(len(train), 'sample')} to train, {len(val):,} to validate; "
        return val if settings.split == "val" else train

    def _columns(self) -> Columns:
        dataset = self._dataset
        return Columns(
            lengths=dataset.lengths, loss_tokens=dataset.loss_tokens, first_supervised=dataset.first_supervised
        )

    def _filters(self) -> Filters:
        limit, budget = self._limit(), self._trainer.settings.max_tokens
        return Filters(
            max_length=limit,
            long=self._settings.long,
            min_loss_tokens=self._settings.min_loss_tokens,
            neighbours=self._trainer.needs_neighbours,
            told=None if limit is None or budget is None else min(limit, budget),
        )

    def _limit(self) -> int | None:
        """Tokens that can be used of a sample: ``max_length``, or what a pack holds if that is less."""
        limit, budget = self._settings.max_length, self._trainer.settings.max_tokens
        if budget is None:
            return limit
        # A shift takes a token of each sample, so that one more fits.
        spare = budget - int(self._trainer.costs(np.array([budget], dtype=np.int64))[0])
        whole = budget + max(spare, 0)
        return whole if limit is None else min(limit, whole)

    def _masks(self, samples: NDArray[np.int64]) -> Iterator[NDArray[np.generic]]:
        if "loss_mask" not in self._dataset.fields:
            raise IncompatibleError(f"{self._dataset.path} has no loss_mask, by which samples were to be chosen")
        limit = self._limit()
        for sample in samples.tolist():
            length = int(self._dataset.lengths[sample])
            yield self._dataset.read(sample, "loss_mask", 0, length if limit is None else min(length, limit))


def _drawn(sampler: Iterable[Any], epoch: int, count: int) -> BatchSequence:
    """The batches that a script's own sampler gives for an epoch."""
    for part in (sampler, getattr(sampler, "sampler", None)):
        set_epoch = getattr(part, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
    batches = []
    for drawn in sampler:
        batch = np.asarray(drawn)
        if batch.ndim != 1 or batch.dtype.kind not in "iu" or not len(batch):
            raise ValueError(f"batch_sampler gave {drawn!r}: expected a list of sample indices")
        if batch.min() < 0 or batch.max() >= count:
            raise ValueError(f"batch_sampler gave {drawn!r}: the dataset's samples are 0 to {count - 1:,}")
        batches.append(batch.astype(np.int64))
    return BatchSequence.of(batches)
