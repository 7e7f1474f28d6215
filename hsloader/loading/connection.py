"""Connection: the ring, its reader and all that hangs on them, made together and closed in the right order."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.batches.layout import BatchLayout
from hsloader.batches.trainer import Trainer
from hsloader.loading.course import Share
from hsloader.loading.delivery import Delivery, make_delivery
from hsloader.loading.epochs import Epochs
from hsloader.loading.ranks import Ranks
from hsloader.loading.settings import LoaderSettings
from hsloader.loading.stream import BatchStream
from hsloader.monitor.counters import TrainerCounter, count_wait
from hsloader.monitor.header import take_snapshot
from hsloader.monitor.lines import Opening
from hsloader.monitor.neighbours import job_name
from hsloader.monitor.ranges import mark_stages, stage
from hsloader.monitor.reporter import Reporter
from hsloader.monitor.words import plural
from hsloader.order.sequence import BatchSequence
from hsloader.reader.choices import possible_options, usual_budget
from hsloader.reader.client import FeederClient
from hsloader.reader.limits import cpu_share, ranks_on_node
from hsloader.reader.pieces import span_offsets
from hsloader.reader.ring import RingShape
from hsloader.store.dataset import Dataset

__all__ = ["Connection", "connect", "largest_batch"]


def largest_batch(
    dataset: Dataset, trainer: Trainer, usable: NDArray[np.int64], plan: BatchSequence | None = None
) -> int:
    """Bytes of the largest batch, as it lies in the ring: that these samples can make, or that is in ``plan``."""
    lengths, spans = dataset.lengths, trainer.spans
    if plan is None or trainer.packed:
        rows = [trainer.largest_rows(lengths[usable])]
    else:
        rows = [trainer.lay_out(samples, lengths[samples]).rows for samples in plan]
    widths = [span.field.row_bytes for span in spans]
    sizes = [span_offsets([found[span.name] for span in spans], widths)[1] for found in rows]
    return RingShape.round_slot(max(sizes, default=0))


@dataclass(frozen=True, eq=False, slots=True)
class Connection:
    """What a loader talks to while it runs."""

    dataset: Dataset
    trainer: Trainer
    settings: LoaderSettings
    ranks: Ranks
    client: FeederClient
    stream: BatchStream
    delivery: Delivery
    reporter: Reporter

    def close(self) -> None:
        """End the transfers, then the reader and the ring."""
        try:
            self.delivery.close()
        finally:  # CUDA refuses everything once a kernel of the script has failed
            self.client.close()

    def timed(self) -> _Timed:
        """A context whose time counts as time inside ``next()``."""
        return _Timed(self.client)

    def epoch_begins(self, epoch: int, batches: int) -> None:
        """Note the epoch that is iterated now."""
        counters = self._counters
        counters[TrainerCounter.EPOCH] = epoch
        counters[TrainerCounter.EPOCH_BATCHES] = batches
        counters[TrainerCounter.POSITION] = 0
        self.reporter.epoch_began()

    def count(self, layout: BatchLayout, position: int) -> None:
        """Note a batch that is about to be handed out, the ``position``-th of its iteration."""
        counters = self._counters
        counters[TrainerCounter.SAMPLES] += len(layout.samples) - layout.dropped
        counters[TrainerCounter.TOKENS] += layout.tokens
        counters[TrainerCounter.ROWS] += layout.rows[self.trainer.spans[0].name]
        counters[TrainerCounter.BATCHES] += 1
        counters[TrainerCounter.POSITION] = position
        if position == 1:
            counters[TrainerCounter.FIRST_NEXT_NS] = counters[TrainerCounter.LAST_NEXT_NS]
        self.reporter.batch_done()

    def announce(self, epochs: Epochs, *, batches: int, rank_batches: int | None, left_out: int) -> None:
        """The opening lines: what there is, how it is read, and what split and filters did."""
        client, dataset = self.client, self.dataset
        usable = epochs.usable
        tokens = int(epochs.used(dataset.lengths[usable]).sum())
        needs = self.trainer.needs
        self.reporter.opened(
            Opening(
                dataset=str(dataset.path),
                samples=len(usable),
                tokens=tokens,
                raw_bytes=tokens * sum(dataset.fields[name].row_bytes for name in needs),
                stored_bytes=dataset.manifest.stored_bytes,
                whole=tokens == dataset.manifest.tokens and set(needs) == set(dataset.fields),
                batches=batches,
                rank_batches=rank_batches,
                world=self.ranks.world,
                mode=client.mode,
                reason=client.mode_reason.partition("; ")[0],  # the monitors have all of it
                slots=client.slots,
                slot_bytes=client.slot_bytes,
            )
        )
        described = epochs.describe()
        more = ""
        if left_out:
            more = f"; {plural(left_out, 'batch', 'batches')} left out, too few for a step of {self.ranks.world} ranks"
        if more or described != plural(len(dataset), "sample"):
            self.reporter.say(f"{self.settings.split}: {described}{more}")

    @property
    def _counters(self) -> Any:
        return self.client.counters


class _Timed:
    __slots__ = ("_begun", "_client", "_stage")

    def __init__(self, client: FeederClient) -> None:
        self._client = client
        self._stage = stage("next")
        self._begun = 0

    def __enter__(self) -> None:
        self._begun = time.monotonic_ns()
        self._client.counters[TrainerCounter.NEXT_SINCE] = self._begun
        self._stage.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stage.__exit__(None, None, None)
        spent = time.monotonic_ns() - self._begun
        counters = self._client.counters  # those of another ring, if that was replaced
        counters[TrainerCounter.NEXT_SINCE] = 0
        counters[TrainerCounter.NEXT_NS] += spent
        if kind is None:
            count_wait(counters, spent)


def _own_port(port: int) -> int:
    """The port of this process among the ranks of its machine, which cannot share one."""
    local = os.environ.get("LOCAL_RANK", "")
    own = port + int(local) if port and local.isdecimal() else port
    if own >= 1 << 16:
        raise ValueError(f"metrics_port={port}: with the local rank {local} it is {own:,}, and TCP ports end at 65,535")
    return own


def connect(
    dataset: Dataset, trainer: Trainer, settings: LoaderSettings, ranks: Ranks, *, slot_bytes: int, share: Share
) -> Connection:
    """A ring for batches of up to ``slot_bytes``, and its reader, which is not started yet.

    ``share``: what this process takes of its rank's batches.  ``ValueError`` if the budget is under three batches.
    """
    read, workers = settings.read, share.workers
    if settings.nvtx:
        if not torch.cuda.is_available():
            raise ValueError("nvtx=True: torch sees no CUDA device, and without one it has no NVTX")
        mark_stages(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    if workers > 1 and read.threads is None:
        read = replace(read, threads=max(1, cpu_share() // workers))
    read = possible_options(read)
    budget = read.prefetch
    if budget is None:
        budget = usual_budget(read, slot_bytes, ranks_on_node() * workers)
    client = FeederClient(
        dataset,
        [span.field.name for span in trainer.spans],
        slot_bytes=slot_bytes,
        budget=budget,
        options=read,
        info={
            "rank": ranks.rank,
            "world": ranks.world,
            "job": job_name(),
            "split": settings.split,
            "trainer": trainer.title,
            "device": str(settings.device),
        },
        metrics_port=_own_port(settings.metrics_port) if share.worker == 0 else 0,
    )
    reporter = Reporter(
        lambda: take_snapshot(client.ring.fd),
        rank=ranks.rank,
        world=ranks.world,
        worker=share.worker,
        workers=workers,
        speaks=ranks.rank == 0 and share.worker == 0,  # of several workers only the first
        log_every=settings.log_every,
    )
    stream = BatchStream(
        dataset,
        trainer,
        client,
        on_bad=settings.on_bad,
        stall_after=settings.stall_after,
        stalled=lambda seconds, key: reporter.stalled(seconds),
    )
    return Connection(dataset, trainer, settings, ranks, client, stream, make_delivery(trainer, settings), reporter)
