"""DataLoader: batches of hidden states for a training loop; what a training script sees."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Unpack

from hsloader.batches.fit import check_fit
from hsloader.batches.registry import trainer_named
from hsloader.errors import LoaderError
from hsloader.loading.connection import Connection, connect, largest_batch
from hsloader.loading.course import WHOLE, Course, Run, Share
from hsloader.loading.delivery import pinned
from hsloader.loading.epochs import Epochs
from hsloader.loading.facade import SamplerFacade
from hsloader.loading.ranks import check_unchanged, find_ranks, local_rank_warning
from hsloader.loading.settings import LoaderOptions, LoaderSettings
from hsloader.loading.stream import Target
from hsloader.monitor.voice import say
from hsloader.order.sequence import MOST_EPOCHS, BatchSequence, share_of
from hsloader.store.dataset import Dataset, open_dataset

__all__ = ["DataLoader"]


class DataLoader:
    """Batches of ``dataset`` (a path, or what ``open_dataset`` gave), as a trainer's own loader makes them::

        loader = hsloader.DataLoader("data.hs", trainer="speculators-0.9", max_tokens=8192, max_length=2048,
                                     split="train", val_ratio=0.1, seed=0, device="cuda")
        for batch in loader:
            ...

    A batch is that trainer's dict (``trainer="raw"``: a list of dicts, one a sample), its tensors on ``device``.  CPU
    batches lie in the loader's ring and are the script's as long as it keeps them.  ``len()`` is the exact number of
    batches of the running epoch, or of the next one.  Each ``iter()`` is one epoch, from its start or from a loaded
    state on; a new one ends the one before.  It is no ``torch.utils.data.DataLoader`` and has no ``dataset`` or
    ``sampler``: wrappers that would split its batches over the ranks once more leave it alone.

    ``LoaderSettings`` explains the keywords.  Raises ``ValueError`` and ``TypeError`` for settings that make no sense,
    ``IncompatibleError`` if the dataset does not fit the trainer, and what ``open_dataset`` raises; iterating raises
    ``DamageError``, ``FeederError`` and ``LoaderError``.
    """

    def __init__(self, dataset: str | os.PathLike[str] | Dataset, **settings: Unpack[LoaderOptions]) -> None:
        self._prepare(dataset, LoaderSettings.of(settings), WHOLE)
        if self._settings.batch_sampler is None:
            self._connect()
            if self._settings.split == "train":  # the minutes that a model takes to compile fill the ring
                self._aim(self._course.target(*self._course.upcoming))

    @classmethod
    def _planned(cls, dataset: str | os.PathLike[str] | Dataset, settings: LoaderSettings, share: Share) -> DataLoader:
        """A loader that reads nothing before its first ``iter()``."""
        loader = cls.__new__(cls)
        loader._prepare(dataset, settings, share)
        return loader

    def _prepare(self, dataset: str | os.PathLike[str] | Dataset, settings: LoaderSettings, share: Share) -> None:
        self._settings = settings
        self._ranks = find_ranks(settings.rank, settings.world_size)
        self._share = share
        self._owned = not isinstance(dataset, Dataset)
        self._dataset = dataset if isinstance(dataset, Dataset) else open_dataset(Path(dataset))
        self._trainer = trainer_named(
            settings.trainer,
            self._dataset.fields,
            variant=settings.variant,
            max_tokens=settings.max_tokens,
            batch_size=settings.batch_size,
            max_length=settings.max_length,
            hidden_states_dtype=settings.hidden_states_dtype,
            drop_last=settings.drop_last,
            sequence_parallel=settings.sequence_parallel,
        )
        self._notes = check_fit(
            self._trainer,
            self._dataset.provenance,
            path=self._dataset.path,
            norm_state=settings.norm_state,
            layer_ids=settings.layer_ids,
        )
        # A script's own batches are those of its own rank.
        ranks = self._ranks if settings.batch_sampler is None else replace(self._ranks, rank=0, world=1)
        self._epochs = Epochs(self._dataset, self._trainer, settings, ranks)
        self._course = Course(self._dataset, self._epochs, settings, ranks, share)
        self._connection: Connection | None = None
        self._run: Run | None = None
        self._handle: weakref.ref[_Iteration] | None = None
        self._closed = False

    # What a training loop calls.

    def __len__(self) -> int:
        self._settle()
        return self._course.steps(self._run)

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "hsloader.DataLoader is iterated, not indexed (for batch in loader), and stands in place of torch's "
            "DataLoader; what goes into torch's is hsloader.HiddenStateDataset(...). One sample: open_dataset(path)[i]"
        )

    def __iter__(self) -> Iterator[Any]:
        self._check_open()
        if self._settings.batch_sampler is None:
            check_unchanged(self._ranks)
        self._settle(abandoned=True)
        sampled = self._settings.batch_sampler is not None
        if self._connection is None or sampled:
            self._connect(self._course.target(*self._course.upcoming).plan if sampled else None)
        run = self._run = self._course.begin()
        self._handle = weakref.ref(iteration := _Iteration(self, run))
        assert self._connection is not None
        self._connection.delivery.drop()
        self._aim(run.target)
        self._connection.epoch_begins(run.target.epoch, len(run.target.numbers))
        return iteration

    @property
    def batch_sampler(self) -> SamplerFacade:
        """What speculators' Trainer asks for: ``set_epoch`` and its skip into the middle of an epoch."""
        return SamplerFacade(self)

    def set_epoch(self, epoch: int) -> None:
        """The next ``iter()`` shall be ``epoch``.  A loaded position of that epoch is kept, of another one dropped."""
        self._settle()
        self._course.set_epoch(epoch)

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """Where the loader stands, as small JSON: after the batch that was handed out last.

        ``batches_done``: after the first so many of the running (or last) iteration, for wrappers that fetch ahead of
        what the training loop has seen.
        """
        self._settle()
        return self._course.state(self._run, batches_done)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next ``iter()`` go on where ``state`` was taken, on any number of ranks.

        ``StateError`` while an iteration runs, and for a state of another dataset, seed or kind of batches.
        """
        self._settle()
        self._course.load(state)
        if self._run is not None:
            self._run.left = True

    def stats(self) -> dict[str, float]:
        """Rates, waits and totals as a flat dict of floats; ``hsloader.monitor.stats`` has the names and units."""
        self._check_open()
        return {} if self._connection is None else self._connection.reporter.stats()

    def close(self) -> None:
        """End the reading process and free the ring.  Batches that the script keeps stay valid."""
        if self._closed:
            return
        self._closed = True
        self._settle(abandoned=True)
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                connection.close()
        finally:
            if self._owned:
                self._dataset.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"rank {self._ranks.rank} of {self._ranks.world}"
        return f"<hsloader.DataLoader {self._dataset.path} for {self._trainer.title}, {self._settings.split}, {state}>"

    # Inside.

    def _check_open(self) -> None:
        if self._closed:
            raise LoaderError("the loader is closed; make a new one")
        if self._connection is not None:
            self._connection.client.check()  # first: a forked child must not write into its parent's counters

    def _settle(self, *, abandoned: bool = False) -> None:
        """Take in what iterations did since: their last store is the number of batches handed out."""
        gone = self._handle is not None and self._handle() is None
        if self._run is not None and (gone or abandoned):
            self._run.left = True
        ran = self._course.running
        self._course.settle(self._run, abandoned=abandoned or gone)
        if ran and not self._course.running and self._connection is not None and not self._closed:
            self._connection.reporter.epoch_ended()

    def _take(self, run: Run) -> Any:
        """The batch after those that ``run`` has handed out; counts nothing that ctrl-C could make wrong."""
        if run.over:  # once over it stays so, whatever became of the loader since
            run.left = True
            self._settle()
            raise StopIteration
        self._check_open()
        if run is not self._run:
            raise LoaderError("a newer iter() of the same loader ended this iteration; use one iterator at a time")
        assert self._connection is not None
        numbers = run.target.numbers
        following = numbers[run.taken + 1] if run.taken + 1 < len(numbers) else None
        with self._connection.timed():
            delivered = self._connection.delivery.take(self._connection.stream, numbers[run.taken], following)
            batch = self._trainer.finish(delivered.layout, delivered.spans, delivered.host)
            if self._settings.pin_memory:
                batch = pinned(batch)
        self._connection.count(delivered.layout, run.taken + 1)
        return batch if self._settings.collate is None else self._settings.collate(batch)

    def _connect(self, plan: BatchSequence | None = None) -> None:
        """Make the ring and its reader, unless there are some for batches as large as those of ``plan``."""
        size = largest_batch(self._dataset, self._trainer, self._epochs.usable, plan)
        old = self._connection
        if old is not None:
            if size <= old.client.slot_bytes:
                return
            self._connection = None  # first: a larger ring may be refused
            old.close()
        self._connection = connect(
            self._dataset, self._trainer, self._settings, self._ranks, slot_bytes=size, share=self._share
        )
        if old is None and self._share.worker == 0:
            self._announce()

    def _aim(self, target: Target) -> None:
        """Begin to read ``target``, and after it the next epoch, while the last batches of this one are trained on."""
        assert self._connection is not None
        course = self._course
        runs_on = self._settings.split == "train" and self._settings.batch_sampler is None
        runs_on = runs_on and target.epoch + 1 < MOST_EPOCHS
        stream = self._connection.stream
        stream.aim(target, lambda: course.target(target.epoch + 1, 0) if runs_on else None)
        stream.ask()

    def _announce(self) -> None:
        """What the loader is about to do, in numbers; rank 0 speaks."""
        assert self._connection is not None
        warning = local_rank_warning(self._ranks)
        if warning is not None:
            say(warning, logging.WARNING)
        target = self._course.target(*self._course.upcoming)
        if self._ranks.rank == 0:
            for note in self._notes:
                say(note, logging.WARNING)
            whole = share_of(len(target.plan), self._course.upcoming[1], 0, self._ranks.world)
            self._connection.announce(
                self._epochs,
                batches=len(target.numbers),
                rank_batches=len(whole) if self._share.workers > 1 else None,
                left_out=self._course.left_out(target),
            )

    def _batches_of(self, epoch: int | None) -> list[list[int]]:
        """This rank's batches of an epoch (None: the next one), for the facade."""
        target = self._course.target(self._course.upcoming[0] if epoch is None else epoch, 0)
        return [target.plan[number].tolist() for number in target.numbers]

    def _skip_to(self, epoch: int, step: int) -> None:
        """Have the next iteration begin in the middle of ``epoch``, for the facade."""
        self.set_epoch(epoch)
        self._course.skip_to(step)


class _Iteration:
    """One epoch's iterator.  Its end, by ``break`` too, is seen from its being gone."""

    def __init__(self, loader: DataLoader, run: Run) -> None:
        self._loader = loader
        self._run = run

    def __iter__(self) -> _Iteration:
        return self

    def __len__(self) -> int:
        return len(self._run.target.numbers)

    def __next__(self) -> Any:
        run = self._run
        batch = self._loader._take(run)
        run.taken += 1  # last: no call lies between this and the return, so ctrl-C before it repeats the batch
        return batch


def _signature() -> Signature:
    """The signature that ``help()`` shows: the settings, spelled out."""
    dataset = Parameter("dataset", Parameter.POSITIONAL_OR_KEYWORD, annotation="str | os.PathLike[str] | Dataset")
    return Signature([dataset, *signature(LoaderSettings).parameters.values()])


DataLoader.__signature__ = _signature()  # type: ignore[attr-defined]
