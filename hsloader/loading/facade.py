"""What speculators' Trainer reaches for as ``loader.batch_sampler``: epochs, and a skip into the middle of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

__all__ = ["SamplerFacade"]


class _Loader(Protocol):
    def set_epoch(self, epoch: int) -> None: ...

    def _batches_of(self, epoch: int | None) -> list[list[int]]: ...

    def _skip_to(self, epoch: int, step: int) -> None: ...


class SamplerFacade:
    """Stands for speculators' ``MultipackDistributedBatchSamplerV2`` (0.3 to 0.9), as far as its Trainer uses it.

    To resume, the Trainer lists an epoch's batches with ``_generate_batches``, and puts the rest of that list into
    ``_cached_generated_batches``; here that moves the loader's position.  It is no sampler: the loader needs none.
    """

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader
        self._cache: tuple[int, Sequence[Sequence[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """The next iteration shall be ``epoch``."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._loader._batches_of(None))

    def __len__(self) -> int:
        return len(self._loader._batches_of(None))

    def _generate_batches(self, epoch: int) -> list[list[int]]:
        """This rank's batches of an epoch, as lists of dataset indices."""
        return self._loader._batches_of(epoch)

    @property
    def _cached_generated_batches(self) -> tuple[int, Sequence[Sequence[int]]] | None:
        return self._cache

    @_cached_generated_batches.setter
    def _cached_generated_batches(self, value: tuple[int, Sequence[Sequence[int]]] | None) -> None:
        self._cache = value
        if value is not None:
            epoch, rest = value
            self._loader._skip_to(epoch, len(self._generate_batches(epoch)) - len(rest))
