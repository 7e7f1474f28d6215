"""All loaders of this user on this machine as rows of a table: what ``hsloader top`` shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hsloader.monitor.counters import ThreadCounter, TrainerCounter
from hsloader.monitor.limit import limit_of
from hsloader.monitor.neighbours import FoundRing
from hsloader.monitor.samples import GpuSample
from hsloader.monitor.stats import Interval

__all__ = ["LoaderRow", "overview"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRow:
    """One loader over an interval.  Rates a second, bytes, shares of one, seconds; ``gpu`` is a share or None.

    ``reason``: why the loader reads in this ``mode``.
    """

    pid: int
    rank: int | None
    world: int | None
    job: str
    split: str
    dataset: str
    mode: str
    reason: str
    epoch: int
    position: int
    epoch_batches: int
    batches_per_second: float
    tokens_per_second: float
    read_bytes_per_second: float
    decoded_bytes_per_second: float
    data_wait_share: float
    ready: int
    reading: int
    slots: int
    eta: float | None
    limit: str
    verdict: str
    advice: str
    bad_samples: int
    restarts: int
    gpu: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The row for ``--json``."""
        return dataclasses.asdict(self)


def overview(
    before: Iterable[FoundRing], after: Iterable[FoundRing], gpus: Sequence[GpuSample] | None = None
) -> list[LoaderRow]:
    """The loaders that were there at both moments, by job and rank."""
    known = {ring.key: ring for ring in before}
    rows = [_row(known[ring.key], ring, gpus or ()) for ring in after if ring.key in known]
    return sorted(rows, key=lambda row: (row.job, row.rank if row.rank is not None else -1, row.pid))


def _row(before: FoundRing, after: FoundRing, gpus: Sequence[GpuSample]) -> LoaderRow:
    interval = Interval(before.snapshot, after.snapshot)
    now, info = after.snapshot, after.snapshot.info
    verdict = limit_of(before.snapshot, now)
    return LoaderRow(
        pid=after.owner,
        rank=_number(info.get("rank")),
        world=_number(info.get("world")),
        job=str(info.get("job", "")),
        split=str(info.get("split", "")),
        dataset=str(info.get("dataset", "")),
        mode=str(info.get("mode", "")),
        reason=str(info.get("reason", "")),
        epoch=now[TrainerCounter.EPOCH],
        position=now[TrainerCounter.POSITION],
        epoch_batches=now[TrainerCounter.EPOCH_BATCHES],
        batches_per_second=interval.rate(TrainerCounter.BATCHES),
        tokens_per_second=interval.rate(TrainerCounter.TOKENS),
        read_bytes_per_second=interval.worked(ThreadCounter.READ_BYTES) / interval.seconds,
        decoded_bytes_per_second=interval.worked(ThreadCounter.DECODED_BYTES) / interval.seconds,
        data_wait_share=interval.data_wait,
        ready=now.ready,
        reading=now.reading,
        slots=now.slots,
        eta=interval.eta,
        limit=str(verdict.limit),
        verdict=verdict.sentence,
        advice=verdict.advice,
        bad_samples=now[TrainerCounter.BAD_SAMPLES],
        restarts=now[TrainerCounter.RESTARTS],
        gpu=_gpu(after.owner, str(info.get("device", "")), str(info.get("gpu", "")), gpus),
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _gpu(pid: int, device: str, uuid: str, gpus: Sequence[GpuSample]) -> float | None:
    """How busy the loader's GPU is: the one of its UUID, known from the first batch on.

    Else the one its process uses, or, as in a container, the one that it names.
    """
    for gpu in gpus:
        if uuid and gpu.uuid == uuid:
            return gpu.busy
    for gpu in gpus:
        if pid in gpu.processes:
            return gpu.busy
    if uuid and any(gpu.uuid for gpu in gpus):  # it is none of these, whatever its number
        return None
    if device == "cuda":  # whichever is the process's current one
        return gpus[0].busy if len(gpus) == 1 else None
    return next((gpu.busy for gpu in gpus if device == f"cuda:{gpu.index}"), None)
