"""HiddenStateDataset: the loader's batches for a stock ``torch.utils.data.DataLoader``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Unpack

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from hsloader.loader import DataLoader
from hsloader.loading.course import WHOLE, Share
from hsloader.loading.ranks import Ranks, check_unchanged, find_ranks
from hsloader.loading.settings import LoaderOptions, LoaderSettings
from hsloader.loading.shared_epoch import SharedEpoch
from hsloader.monitor.voice import say
from hsloader.monitor.words import size_text

__all__ = ["HiddenStateDataset"]


class HiddenStateDataset(IterableDataset[Any]):
    """Yields whole batches, for scripts that keep torch's own DataLoader around them::

        dataset = hsloader.HiddenStateDataset("data.hs", trainer="specforge-0.2", batch_size=4, max_length=2048)
        loader = torch.utils.data.DataLoader(dataset, batch_size=None)

    ``batch_size=None`` tells torch that the items are batches already; without it torch would stack them into batches
    of batches, which raises ``ValueError``.  Takes the keywords of ``hsloader.DataLoader`` but ``device``,
    ``pin_memory`` and ``batch_sampler``: items are CPU tensors.  With ``num_workers=0`` a feeder process reads ahead;
    with workers each of them reads its share in threads, and torch sends the batches through /dev/shm, which is slower.
    Call ``set_epoch`` before each epoch: workers cannot know otherwise.

    With several ranks ``rank=`` and ``world_size=`` must be given: see the error's text.
    """

    def __init__(self, dataset: str | os.PathLike[str], **settings: Unpack[LoaderOptions]) -> None:
        if given := sorted({"device", "pin_memory", "batch_sampler"} & settings.keys()):
            raise TypeError(
                f"HiddenStateDataset takes no {given[0]}=: its items are CPU tensors in an order of its own; "
                "hsloader.DataLoader takes it"
            )
        self._settings, self._ranks = _ranked(LoaderSettings.of(settings))
        self._path = Path(dataset).absolute()
        self._epoch = SharedEpoch(self._settings.epoch)
        self._loader = DataLoader._planned(self._path, self._settings, WHOLE)

    def __len__(self) -> int:
        return len(self._loader)

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "HiddenStateDataset is iterated, not indexed: for batch in dataset; one sample is "
            "hsloader.open_dataset(path)[i]"
        )

    def __iter__(self) -> Iterator[Any]:
        _refuse_to_be_stacked(sys._getframe(1))
        return _Items(self)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration shall be ``epoch``, also in workers that live on."""
        self._loader.set_epoch(epoch)
        self._epoch.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Where this process stands, as ``DataLoader.state_dict``; in a worker it is that of its share."""
        return self._mine().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration go on at ``state``; in a worker a state of that worker, of as many workers."""
        loader = self._mine()
        loader.load_state_dict(state)
        epoch = loader._course.upcoming[0]
        if self._epoch.epoch != epoch:
            self._epoch.epoch = epoch

    def stats(self) -> dict[str, float]:
        """``DataLoader.stats`` of this process."""
        return self._mine().stats()

    def close(self) -> None:
        """Free what this process's iterations needed."""
        self._loader.close()
        self._epoch.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self._path, "settings": self._settings, "ranks": self._ranks, "epoch": self._epoch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._path, self._settings = state["path"], state["settings"]
        self._ranks, self._epoch = state["ranks"], state["epoch"]
        self._loader = DataLoader._planned(self._path, self._settings, WHOLE)

    def _mine(self) -> DataLoader:
        """This process's loader: in a worker of torch's DataLoader one for its share, that reads in threads."""
        worker = get_worker_info()
        if worker is None or self._loader._share == (share := Share(worker.id, worker.num_workers)):
            return self._loader
        read = replace(self._settings.read, in_process=True)
        self._loader = DataLoader._planned(self._path, replace(self._settings, read=read), share)
        self._loader.set_epoch(self._epoch.epoch)
        return self._loader

    def _begin(self) -> Iterator[Any]:
        """Begin an iteration in this process."""
        check_unchanged(self._ranks)
        loader, worker = self._mine(), get_worker_info()
        if worker is None:
            return iter(loader)
        repeated = self._epoch.begun(worker.id)
        if not loader._course.loaded:
            loader.set_epoch(self._epoch.epoch)
            if repeated and worker.id == 0:
                say(
                    f"epoch {self._epoch.epoch} is read again, batch for batch: call set_epoch of the "
                    "HiddenStateDataset before each epoch"
                )
        items = iter(loader)
        if worker.id == 0 and not repeated:
            size = loader._connection.client.slot_bytes if loader._connection is not None else 0
            say(
                f"torch sends each batch, up to {size_text(size)}, from {worker.num_workers} workers through /dev/shm; "
                "num_workers=0 is faster: hsloader reads ahead by itself"
            )
        return items


class _Items:
    """One iteration.  It begins with the first batch, since some wrappers make an iterator and throw it away."""

    def __init__(self, dataset: HiddenStateDataset) -> None:
        self._dataset = dataset
        self._items: Iterator[Any] | None = None

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> Any:
        if self._items is None:
            self._items = self._dataset._begin()
        return next(self._items)


def _refuse_to_be_stacked(caller: FrameType) -> None:
    """``ValueError`` if the ``caller`` of ``iter()`` is torch's fetcher, and it would stack whole batches.

    Nothing else tells: torch asks for items and collates them by itself.  A ``collate_fn`` of the script's own knows
    what it is given.
    """
    if "auto_collation" not in caller.f_code.co_varnames:  # f_locals would keep a script's variables alive
        return
    given = caller.f_locals
    if given.get("auto_collation") and given.get("collate_fn") is default_collate:
        raise ValueError(
            "HiddenStateDataset gives whole batches, and torch's DataLoader would stack them into batches of batches: "
            "say torch.utils.data.DataLoader(dataset, batch_size=None); how many samples are in a batch is "
            "HiddenStateDataset's batch_size= or max_tokens="
        )


def _ranked(settings: LoaderSettings) -> tuple[LoaderSettings, Ranks]:
    """The settings with ranks, and where those come from.

    ``ValueError`` where several ranks are at work and none were given.
    """
    ranks = find_ranks(settings.rank, settings.world_size)
    if ranks.source != "arguments":
        if ranks.world > 1:
            raise ValueError(
                f"HiddenStateDataset with {ranks.world} ranks (from {ranks.source}) needs rank= and world_size=. A "
                "stock DataLoader around it must then not go through accelerate's prepare() (HF Trainer calls it "
                "too): that would split the batches over the ranks once more and silently drop the rest. "
                "hsloader.DataLoader finds its ranks itself, and prepare() leaves it alone"
            )
        # Said to the workers, which cannot find them as this process can.
        settings = replace(settings, rank=ranks.rank, world_size=ranks.world)
    return settings, ranks
