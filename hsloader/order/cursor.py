"""Cursor: which epoch comes next and how much of it is done, through ``iter()``, ``break``, ``set_epoch`` and states.

The rules (tried with the HF Trainer, Lightning and torchdata's StatefulDataLoader, where the obvious ones lose epochs):

* The last batch ends its epoch: from then on the state reads (epoch + 1, 0).
* ``iter()`` starts at a loaded state if one is pending, else at the start of the epoch set since the last ``iter()``,
  else at the start of the next epoch, also after a ``break``.
* An iteration that gave no batch does not count: wrappers make iterators to try whether they can.
* ``set_epoch(e)`` keeps a pending position of epoch ``e`` and drops one of another epoch.
* A state is refused only while an iteration has begun and not ended.
"""

from __future__ import annotations

from operator import index

from hsloader.errors import StateError
from hsloader.order.sequence import MOST_EPOCHS, steps_left

__all__ = ["Cursor"]


class Cursor:
    """Positions are global: numbers of batches of all ranks together.  No threads: the consumer's own bookkeeping."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._done = (0, 0)  # (epoch, position): what was handed out
        self._begun = (0, 0)  # where the running or last iteration began
        self._pending: tuple[int, int] | None = (0, 0)  # where iter() starts; None: at the epoch after _done's
        self._loaded = False  # _pending comes from a state
        self._began_loaded = False  # and so did where the running iteration began
        self._running = False

    @property
    def running(self) -> bool:
        """Whether an iteration has begun and not ended."""
        return self._running

    @property
    def loaded(self) -> bool:
        """Whether the next ``begin`` starts at a loaded position."""
        return self._loaded

    @property
    def state(self) -> tuple[int, int]:
        """(epoch, position) that a state taken now records."""
        return self._done if self._running or self._pending is None else self._pending

    @property
    def upcoming(self) -> tuple[int, int]:
        """(epoch, position) at which the next ``begin`` starts."""
        return self._pending if self._pending is not None else (self._done[0] + 1, 0)

    def set_epoch(self, epoch: int) -> str | None:
        """The next ``iter()`` shall be ``epoch``; returns a sentence for the log if a loaded position is dropped."""
        epoch = int(index(epoch))  # of numpy too; TypeError for what is no whole number
        if not 0 <= epoch < MOST_EPOCHS:
            raise ValueError(f"set_epoch({epoch}): epochs count from 0, to {MOST_EPOCHS - 1:,} at most")
        if not self._loaded or self._pending is None:
            self._pending = (epoch, 0)
            return None
        if self._pending[0] == epoch:
            return None
        dropped = (
            f"set_epoch({epoch}) drops the loaded position {self._pending[1]} of epoch {self._pending[0]}: "
            f"epoch {epoch} starts at its first batch"
        )
        self._pending, self._loaded = (epoch, 0), False
        return dropped

    def load(self, epoch: int, position: int) -> None:
        """Make (epoch, position) pending; ``StateError`` while an iteration runs."""
        if self._running:
            raise StateError(
                "load_state_dict while an iteration runs: its batches are already on their way; load before iter(), "
                "or end the iteration first"
            )
        self._pending, self._loaded = (epoch, position), True

    def skip_to(self, position: int) -> None:
        """Start the upcoming epoch at ``position`` (a trainer's fast skip); ``StateError`` while running."""
        self.load(self.upcoming[0], position)

    def begin(self) -> tuple[int, int]:
        """Start an iteration, ending a running one; returns its (epoch, position)."""
        self.end()
        self._done = self._begun = self.upcoming
        self._began_loaded = self._loaded
        self._pending, self._loaded, self._running = None, False, True
        return self._begun

    def reach(self, batches_done: int, batches: int) -> None:
        """This rank's first ``batches_done`` batches of the running iteration were handed out, of ``batches`` in all.

        The last one ends the epoch.  Saying the same again changes nothing, so an interrupted call can be made again.
        """
        if not self._running:
            return
        self._done = self.state_after(batches_done, batches)
        if batches_done >= steps_left(batches, self._begun[1], self._world):
            self.finish()

    def finish(self) -> None:
        """The epoch is over: nothing is left of it for this number of ranks."""
        self._done = (self._begun[0] + 1, 0)
        if self._pending is None:  # else set_epoch was called meanwhile
            self._pending = self._done
        self._running = False

    def end(self, *, gave: bool = False) -> None:
        """The iteration was left before its epoch was over (``break``, an exception).

        ``gave``: it gave batches, also if ``reach`` was not told of them.
        """
        if self._running and self._pending is None and not gave and self._done == self._begun:
            self._pending, self._loaded = self._begun, self._began_loaded
        self._running = False

    def state_after(self, batches_done: int, batches: int) -> tuple[int, int]:
        """(epoch, position) after the first ``batches_done`` batches of this rank in the running or last iteration.

        For wrappers that fetch ahead of what the training loop has seen.  ``batches`` is the epoch's global number.
        ``ValueError`` for more than the iteration can give.
        """
        batches_done = int(index(batches_done))
        epoch, start = self._begun
        most = steps_left(batches, start, self._world)
        if not 0 <= batches_done <= most:
            raise ValueError(f"batches_done={batches_done}: this iteration of epoch {epoch} has {most} batches a rank")
        return (epoch + 1, 0) if batches_done == most else (epoch, start + batches_done * self._world)
