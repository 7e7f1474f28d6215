"""BatchStream: asks the reader for a rank's batches ahead of time, in order, and waits for the one that is due.

A batch is named by its epoch and its number in the epoch's global sequence, never by how often something was called:
whatever ctrl-C interrupts can be called again.  What was asked is a fact of the client.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hsloader.batches.layout import BatchLayout
from hsloader.batches.trainer import Trainer
from hsloader.errors import DamageError, DatasetError
from hsloader.monitor.ranges import stage
from hsloader.monitor.voice import say
from hsloader.monitor.words import plural
from hsloader.order.sequence import BatchSequence
from hsloader.reader.batch import BadSample
from hsloader.reader.client import FeederClient
from hsloader.reader.counters import TrainerCounter
from hsloader.reader.lease import Filled, Prepared
from hsloader.reader.pieces import PIECES, BatchRequest
from hsloader.store.dataset import Dataset

__all__ = ["BatchStream", "Fetched", "Target"]

_PLANNED = 16  # batches that are laid out in one go
_REFILLS = 8  # in which a whole ring is asked for anew
_GLANCE = 0.005  # seconds between looks at what a GPU still reads
_NUMBERS = 1 << 40  # more batches than an epoch has: epoch and number in one key
_MOST_LOSSES = 16  # that an iteration under on_bad="skip" may have, or, if that is more,
_LOSSES_IN = 100  # one in so many of the samples that it has handed out


@dataclass(frozen=True, eq=False, slots=True)
class Target:
    """What a rank takes of an epoch: ``numbers`` of its global batches, in order."""

    epoch: int
    plan: BatchSequence
    numbers: range

    def key(self, number: int) -> int:
        """The batch's name towards the reader."""
        return self.epoch * _NUMBERS + number


@dataclass(frozen=True, eq=False, slots=True)
class Fetched:
    """A batch as it lies in the ring, checked."""

    key: int
    epoch: int
    number: int
    layout: BatchLayout
    filled: Filled


class BatchStream:
    """The batches of one ``Target`` after another.  ``then`` gives the target that probably follows, or None.

    ``stalled`` is called with the seconds waited and the batch's key when a batch takes longer than ``stall_after``,
    and again now and then.
    """

    def __init__(
        self,
        dataset: Dataset,
        trainer: Trainer,
        client: FeederClient,
        *,
        on_bad: Literal["raise", "skip"],
        stall_after: float,
        stalled: Callable[[float, int], None],
    ) -> None:
        self.client = client
        self.relieve: Callable[[], None] = lambda: None
        """Lets go of slots whose batches have left; called while a free one is waited for."""
        self.receive: Callable[[tuple[int, int], NDArray[np.uint8]], None] = lambda place, memory: None
        """Makes a slot ready for the batch that comes into it; called before that is waited for."""
        self._dataset = dataset
        self._trainer = trainer
        self._on_bad = on_bad
        self._stall_after = stall_after
        self._stalled = stalled
        self._mask = next((i for i, span in enumerate(trainer.spans) if span.name == "loss_mask"), None)
        self._layouts: dict[int, tuple[BatchSequence, BatchLayout]] = {}
        self._planned: dict[int, tuple[BatchSequence, BatchLayout, Prepared]] = {}
        self._lost: set[int] = set()
        self._losses: set[tuple[str, int]] = set()  # of this iteration: damaged chunks, and samples of whole shards
        self._handed_before = 0  # samples, when it began
        self._target: Target | None = None
        self._then: Callable[[], Target | None] = lambda: None
        self._ahead: list[tuple[Target, int]] = []  # targets and how many of their batches were asked

    @property
    def lost(self) -> frozenset[int]:
        """Samples that were found damaged and are left out."""
        return frozenset(self._lost)

    def aim(self, target: Target, then: Callable[[], Target | None]) -> None:
        """From now on the batches of ``target`` are due; what was asked for something else is forgotten."""
        due = {target.key(number) for number in target.numbers[: self.client.slots]}
        asked = [(key, plan) for key, (plan, _) in self._layouts.items() if key in self.client]
        if any(key not in due or plan is not target.plan for key, plan in asked):
            self.forget()
        self._target, self._then = target, then
        self._ahead = [(target, 0)]
        self._losses.clear()
        self._handed_before = int(self.client.counters[TrainerCounter.SAMPLES])

    def forget(self) -> None:
        """Nothing that was asked is wanted."""
        self.client.abandon()  # first: what the client has asked always has its layout here
        self._layouts.clear()
        self._planned.clear()
        self._ahead = []

    def ask(self) -> None:
        """Ask for as many batches as the ring has room for."""
        if self._ask_all():
            self.client.wake()

    def _ask_all(self) -> int:
        """``ask``, of which the feeder learns the first batch; how many were asked."""
        count = 0
        for at in range(2):
            if at == len(self._ahead):
                following = self._then()
                if following is None:
                    return count
                self._ahead.append((following, 0))
            target, asked = self._ahead[at]
            while asked < len(target.numbers):
                if not self._submit(target, target.numbers[asked], wake=not count):
                    return count
                asked += 1
                count += 1
                self._ahead[at] = target, asked
        return count

    def refill(self) -> None:
        """``ask``, once an eighth of the slots that nobody holds are free: one bell wakes the feeder for all."""
        client = self.client
        if client.room >= max(1, (client.slots - client.held) // _REFILLS):
            self.ask()

    def fetch(self, number: int) -> Fetched:
        """The batch of that number of the target, waiting for it.

        Raises ``DamageError`` for bytes that are damaged, or, under ``on_bad="skip"``, for a batch that cannot go
        without them and for more damage than single chunks (see ``_bound``); also for bytes that the system refuses.
        What skipping does not cover is asked for again by the next call.  ``FeederError`` if the reader died for good.
        """
        target = self._target
        assert target is not None
        key = target.key(number)
        while True:
            # The due batch first: asking ahead would take the slot that a batch with lost samples has just left.
            if key not in self.client and not self._submit(target, number):
                self._make_room(target, number)
                continue
            filled = self.client.look(key)
            if filled is None:
                self.ask()
                filled = self._wait(key)
            layout = self._layouts[key][1]
            if not filled.bad:
                self._check(layout, filled)
                return Fetched(key, target.epoch, number, layout, filled)
            self._judge(key, filled.bad)
            self.done(key)  # and ask again without the lost samples: the batch stays, its rows change

    def peek(self, number: int) -> Fetched | None:
        """The batch of that number if it is there and flawless; never waits, never raises for its data."""
        target = self._target
        assert target is not None
        key = target.key(number)
        if key not in self.client:
            return None
        filled = self.client.look(key)
        if filled is None or filled.bad:
            return None
        layout = self._layouts[key][1]
        try:
            self._check(layout, filled)
        except DatasetError:
            return None
        return Fetched(key, target.epoch, number, layout, filled)

    def done(self, key: int) -> None:
        """The batch was copied, or is held: the ring needs to keep it no more."""
        self.client.done(key)
        self._layouts.pop(key, None)

    def _submit(self, target: Target, number: int, *, wake: bool = True) -> bool:
        key = target.key(number)
        if key in self.client:
            return True
        if not self.client.room:
            return False
        planned = self._planned.get(key)
        if planned is None or planned[0] is not target.plan:
            self._plan_from(target, number)
            planned = self._planned[key]
        plan, layout, prepared = planned
        self._layouts[key] = plan, layout  # first: what the client has asked always has its layout here
        if not self.client.submit(key, prepared, wake=wake):
            return False
        self._planned.pop(key, None)
        return True

    def _plan_from(self, target: Target, number: int) -> None:
        """Lay out and prepare a number of batches from ``number`` on: in one go, a batch takes a fraction."""
        at = target.numbers.index(number)
        numbers = target.numbers[at : at + _PLANNED]
        batches = [target.plan[number] for number in numbers]
        samples = np.concatenate(batches)
        layouts = self._trainer.lay_out_all(
            samples, self._dataset.lengths[samples], [len(batch) for batch in batches], self._lost
        )
        names = [span.name for span in self._trainer.spans]
        requests = [
            BatchRequest(tuple(layout.rows[name] for name in names), layout.pieces.view(PIECES)) for layout in layouts
        ]
        self._planned = {
            target.key(number): (target.plan, layout, prepared)
            for number, layout, prepared in zip(numbers, layouts, self.client.prepare(requests), strict=True)
        }

    def _check(self, layout: BatchLayout, filled: Filled) -> None:
        if self._mask is not None and self._trainer.wants_mask(layout):
            self._trainer.check(layout, filled.span(self._mask))

    def _wait(self, key: int) -> Filled:
        with stage("wait"):
            self.receive(*self.client.place(key))
            return self._waited(key)

    def _waited(self, key: int) -> Filled:
        begun, pause = time.monotonic(), self._stall_after
        while (filled := self.client.wait(key, pause)) is None:
            self._stalled(time.monotonic() - begun, key)
            pause = max(pause, 60.0)
        return filled

    def _make_room(self, target: Target, number: int) -> None:
        """Get a free slot for a batch that is due and was not asked, as an interrupted call can leave it."""
        begun, pause = time.monotonic(), self._stall_after
        key = target.key(number)
        if any(other in self.client for other in self._layouts if other != key):
            self.forget()
            self._ahead = [(target, target.numbers.index(number))]  # what was handed out is not asked again
        while True:
            self.relieve()
            if self.client.wait_free(_GLANCE):
                return
            if (waited := time.monotonic() - begun) >= pause:
                self._stalled(waited, key)
                pause += 60.0

    def _judge(self, key: int, bad: Sequence[BadSample]) -> None:
        """Raise for the bad samples of a batch, or note that they are left out from now on."""
        refused = [entry for entry in bad if entry.kind == "os"]
        told = refused or [entry for entry in bad if entry.sample not in self._lost]
        if not told:  # the batch had been asked for before they were lost
            return
        found = {entry.sample for entry in told}
        more = f" (and {plural(len(found) - 1, 'more sample')} of this batch)" if len(found) > 1 else ""
        text = f"{self._describe(told[0])}{more}"
        if refused:
            # A lost mount or a lack of descriptors says nothing about a sample, and would empty batch after batch.
            self.done(key)
            raise DamageError(
                f"{text}; the system refuses these bytes, which on_bad='skip' does not cover; the next call asks for "
                "them again; if the disk is at fault, leave such samples out with samples="
            )
        if self._on_bad == "raise":
            raise DamageError(
                f"{text}; run: hsloader verify {self._dataset.path}; on_bad='skip' leaves such samples out"
            )
        self._bound(key, told, text)
        self._lost |= found
        self._planned.clear()
        self.client.counters[TrainerCounter.SKIPPED] += len(found)
        say(f"{text}; left out, as on_bad='skip' says: {len(self._lost):,} so far", logging.WARNING)

    def _bound(self, key: int, told: Sequence[BadSample], text: str) -> None:
        """Raise if the losses of this iteration are more than single damaged chunks would make.

        Else a dataset that is deleted or replaced under a training would empty batch after batch.  Samples that lie
        in one damaged chunk (of a token field) are one loss; of a shard that is gone each sample is one.
        """
        losses, handed = self._losses | _losses_of(told), self._handed
        allowed = max(_MOST_LOSSES, handed // _LOSSES_IN)
        if len(losses) > allowed:
            self.done(key)  # the dataset may be put back
            raise DamageError(
                f"{text}; that makes {len(losses):,} losses in this epoch, beside {plural(handed, 'sample')} handed "
                f"out, and on_bad='skip' covers {allowed:,} ({_MOST_LOSSES}, or 1 % of the samples handed out): single "
                "damaged chunks are fewer, so the dataset was probably moved, deleted or replaced. Put it back, run: "
                f"hsloader verify {self._dataset.path}, and resume from the last state; samples that stay damaged are "
                "left out with samples="
            )
        self._losses = losses

    @property
    def _handed(self) -> int:
        """Samples that this iteration has handed out."""
        return int(self.client.counters[TrainerCounter.SAMPLES]) - self._handed_before

    def _describe(self, entry: BadSample) -> str:
        try:
            name = f" {self._dataset.name(entry.sample)!r}"
        except DamageError:
            name = ""
        place = f"{entry.path}, chunk {entry.chunk}" if entry.chunk >= 0 else entry.path
        return f"sample {entry.sample}{name} of {self._dataset.path}: {entry.field}: {place}: {entry.text}"


def _losses_of(bad: Sequence[BadSample]) -> set[tuple[str, int]]:
    """The damaged chunks behind bad samples as (path, chunk); ("", sample) for one that no single chunk explains."""
    chunks: dict[int, set[tuple[str, int]]] = {}
    for entry in bad:
        chunks.setdefault(entry.sample, set()).add((entry.path, entry.chunk))
    losses = set()
    for sample, places in chunks.items():
        place = places.pop()
        losses.add(place if not places and place[1] >= 0 else ("", sample))
    return losses
