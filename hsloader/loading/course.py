"""Course: where a loader stands in its epochs, and the states that remember it.  Reads nothing, hands out nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hsloader.errors import StateError
from hsloader.loading.epochs import Epochs
from hsloader.loading.ranks import Ranks
from hsloader.loading.settings import LoaderSettings
from hsloader.loading.stream import Target
from hsloader.monitor.voice import say
from hsloader.order.cursor import Cursor
from hsloader.order.sequence import share_of, steps_left
from hsloader.order.state import LoaderState, check_position, check_state
from hsloader.store.dataset import Dataset

__all__ = ["WHOLE", "Course", "Run", "Share"]

_log = logging.getLogger("hsloader")


@dataclass(frozen=True, slots=True)
class Share:
    """What this process takes of its rank's batches: every ``workers``-th from ``worker`` on (DataLoader workers)."""

    worker: int
    workers: int


WHOLE = Share(0, 1)


class Run:
    """One iteration: its target and how many of the target's batches were handed out."""

    __slots__ = ("left", "position", "skipped", "taken", "target")

    def __init__(self, target: Target, position: int, skipped: int) -> None:
        self.target = target
        self.position = position  # where it began in the global sequence
        self.skipped = skipped  # batches of a worker's share that lie before it
        self.taken = 0
        self.left = False  # whoever iterated has seen its end, or is gone

    @property
    def over(self) -> bool:
        """Whether every batch was handed out."""
        return self.taken >= len(self.target.numbers)


class Course:
    """The position of one process; numbers are those of ``Cursor``."""

    def __init__(self, dataset: Dataset, epochs: Epochs, settings: LoaderSettings, ranks: Ranks, share: Share) -> None:
        self._dataset = dataset
        self._epochs = epochs
        self._settings = settings
        self._ranks = ranks
        self._share = share
        self._cursor = Cursor(ranks.world)
        self._cursor.set_epoch(settings.epoch)
        self._fewer: tuple[int, int] | None = None  # (epoch, segments): an epoch begun before the dataset grew
        self._skip = 0  # of a worker's share, at a loaded position
        self._short: tuple[int, int] | None = None  # where skip_to went

    @property
    def running(self) -> bool:
        """Whether an iteration has begun and not ended."""
        return self._cursor.running

    @property
    def loaded(self) -> bool:
        """Whether the next iteration begins at a loaded state."""
        return self._cursor.loaded

    @property
    def upcoming(self) -> tuple[int, int]:
        """(epoch, position) at which the next iteration begins."""
        return self._cursor.upcoming

    def target(self, epoch: int, position: int) -> Target:
        """What this process takes of ``epoch`` from a global position on."""
        plan = self._epochs.plan(epoch, self._segments(epoch))
        ranks, share = self._ranks, self._share
        numbers = share_of(len(plan), position, ranks.rank, ranks.world)
        return Target(epoch, plan, numbers[share.worker :: share.workers])

    def begin(self) -> Run:
        """Start an iteration."""
        epoch, position = self._cursor.upcoming
        target = self.target(epoch, position)
        skip = self._skip
        run = Run(Target(epoch, target.plan, target.numbers[skip:]), position, skip)
        self._cursor.begin()
        self._skip = 0
        if self._fewer is not None and self._fewer[0] != epoch:
            self._fewer = None
        return run

    def settle(self, run: Run | None, *, abandoned: bool = False) -> None:
        """Take in how far ``run`` has come; ``abandoned``: it will not go on."""
        if run is None or not self._cursor.running:
            return
        if self._share == WHOLE:
            self._cursor.reach(run.taken, len(run.target.plan))
        if self._cursor.running and run.over:
            self._cursor.finish()
        if self._cursor.running and abandoned:
            self._cursor.end(gave=run.taken > 0)

    def steps(self, run: Run | None) -> int:
        """Batches of the whole epoch that runs, else of the next one: what wrappers count with, also after a resume.

        After ``skip_to`` only the rest of it, as speculators' Trainer expects.
        """
        # The last batch ends the epoch, but the loop that works on it still asks about that epoch.
        if run is not None and (self._cursor.running or not run.left):
            epoch, plan, position = run.target.epoch, run.target.plan, run.position
        else:
            epoch, position = self._cursor.upcoming
            sampler = self._settings.batch_sampler
            if sampler is not None:
                return len(sampler)  # type: ignore[arg-type] # TypeError if it has none, as torch's loader
            plan = self._epochs.plan(epoch, self._segments(epoch))
        steps = steps_left(len(plan), position if self._short == (epoch, position) else 0, self._ranks.world)
        return len(range(self._share.worker, steps, self._share.workers))

    def left_out(self, target: Target) -> int:
        """Batches at the end of an epoch that do not make a step for every rank."""
        return len(target.plan) % self._ranks.world

    def set_epoch(self, epoch: int) -> None:
        """The next iteration shall be ``epoch``."""
        dropped = self._cursor.set_epoch(epoch)
        if dropped is not None:
            self._skip = 0
            say(dropped, logging.WARNING)

    def skip_to(self, step: int) -> None:
        """The next iteration begins ``step`` batches of each rank into its epoch."""
        self._cursor.skip_to(step * self._ranks.world)
        self._short = self._cursor.upcoming

    def state(self, run: Run | None, batches_done: int | None = None) -> dict[str, Any]:
        """The state now, or after the first ``batches_done`` batches of the running or last iteration."""
        if batches_done is None or run is None:
            if batches_done:
                raise ValueError(f"batches_done={batches_done}: no iteration has begun")
            epoch, position = self._cursor.state
        else:
            epoch, position = self._cursor.state_after(batches_done, len(run.target.plan))
        state = self._state(epoch, position)
        if self._share == WHOLE:
            return state
        # A worker's place lies between positions of the rank: the iteration's start, and how many batches since.
        midway = run is not None and self._cursor.running and not run.over
        if midway and run is not None:
            state = self._state(run.target.epoch, run.position)
        taken = run.skipped + run.taken if midway and run is not None else self._skip
        return state | {"worker": {"number": self._share.worker, "of": self._share.workers, "taken": taken}}

    def _state(self, epoch: int, position: int) -> dict[str, Any]:
        segments = self._segments(epoch)
        return LoaderState(
            segments=segments,
            fingerprint=self._dataset.manifest.fingerprints(segments)[-1],
            seed=self._settings.seed,
            epoch=epoch,
            position=position,
            contract=json.loads(json.dumps(self._epochs.contract)),
        ).to_json()

    def load(self, value: Mapping[str, Any]) -> None:
        """Go on at a state; ``StateError`` for one of another dataset, seed or contract."""
        state = LoaderState.from_json(value)
        manifest = self._dataset.manifest
        check_state(
            state,
            segments=len(manifest.segments),
            fingerprint_of=lambda count: manifest.fingerprints(count)[-1],
            seed=self._settings.seed,
            contract=self._epochs.contract,
            path=self._dataset.path,
        )
        plan = self._epochs.plan(state.epoch, state.segments) if self._settings.batch_sampler is None else None
        if plan is not None:
            check_position(state.epoch, state.position, len(plan))
        skip = self._taken_by_worker(value)
        self._cursor.load(state.epoch, state.position)
        self._skip, self._short, self._fewer = skip, None, None
        if state.segments < len(manifest.segments) and state.position:
            self._fewer = state.epoch, state.segments
            _log.info(
                "%s has grown from %d to %d segments since the state: epoch %d goes on without the new samples",
                self._dataset.path, state.segments, len(manifest.segments), state.epoch,
            )  # fmt: skip

    def _taken_by_worker(self, value: Mapping[str, Any]) -> int:
        """How far beyond the state's position this worker was; ``StateError`` for the state of another one."""
        worker = value.get("worker")
        if worker is None:
            return 0
        here = self._share
        taken = worker.get("taken") if isinstance(worker, Mapping) else None
        if not isinstance(taken, int) or taken < 0:
            raise StateError(f"loader state: worker is {worker!r}, expected its number, of how many, and what it took")
        if (worker.get("number"), worker.get("of")) != (here.worker, here.workers):
            raise StateError(
                f"the state is that of DataLoader worker {worker.get('number')} of {worker.get('of')}, this is worker "
                f"{here.worker} of {here.workers}; resume with the same num_workers"
            )
        return taken

    def _segments(self, epoch: int) -> int:
        if self._fewer is not None and self._fewer[0] == epoch:
            return self._fewer[1]
        return len(self._dataset.manifest.segments)
