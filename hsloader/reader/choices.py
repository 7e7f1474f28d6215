"""What a client decides before it starts: process or threads, the read mode, how many threads, if the ring fits."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING

from hsloader._launch import launch_problem
from hsloader.monitor.voice import say
from hsloader.reader.engine import MOST_ENGINES, EngineSettings
from hsloader.reader.limits import cpu_share, default_budget, memory_available
from hsloader.reader.modes import choose_mode
from hsloader.reader.options import ReadOptions
from hsloader.reader.ring import RingShape

if TYPE_CHECKING:
    from hsloader.store.dataset import Dataset

__all__ = [
    "MANY_SLOTS",
    "check_budget",
    "choose_settings",
    "possible_options",
    "processes_for",
    "usual_budget",
    "usual_slots",
]

_LEAST_SLOTS = 3
MANY_SLOTS = 1 << 10  # so many that they bound nothing
_USUAL_SLOTS = 4
_SLOTS_EACH = 2  # of a process: one to fill, one that is read ahead or was handed out
_SMALL_RING = 1 << 30  # bytes up to which more slots than four are taken unasked
_READERS = {"mmap": 8, "direct": 8, "pread": 8}
_REMOTE_READERS = 16  # a server answers many requests at a time, each of them late
_DECODERS_EACH = 2  # threads of one process wait for one another (see ``helpers``)


def possible_options(options: ReadOptions) -> ReadOptions:
    """The options, with threads of this process where no feeder process can be had; that is said."""
    problem = launch_problem() if hasattr(os, "memfd_create") else "this system has no memfd"
    if not problem or options.in_process:
        return options
    say(f"reading with threads of this process, which slows the trainer: {problem}", logging.WARNING)
    return dataclasses.replace(options, in_process=True)


def choose_settings(
    dataset: Dataset, fields: tuple[str, ...], options: ReadOptions, *, slots: int, metrics_port: int
) -> tuple[EngineSettings, str]:
    """How the engine is to read batches into so many slots, and why in this mode."""
    path = dataset.path.absolute()
    widest = max(fields, key=lambda name: dataset.fields[name].row_bytes)
    mode = choose_mode(
        options,
        path,
        dataset.manifest.stored_bytes,
        lambda: next((segment.array(widest).shard_path(0) for segment in dataset.segments), None),
    )
    decoders = _decoders(options)
    engines = 1 if options.in_process else processes_for(decoders, slots)
    readers = max(_READERS[mode.mode], 2 * engines) if mode.local else _REMOTE_READERS
    settings = EngineSettings(
        path=str(path),
        segments=len(dataset.segments),
        fingerprint=dataset.fingerprint,
        fields=fields,
        row_bytes=tuple(dataset.fields[name].row_bytes for name in fields),
        mode=mode.mode,
        drop_pages=mode.drop_pages,
        bypass=mode.bypass,
        readers=max(options.io_threads or readers, engines),
        decoders=decoders,
        engines=engines,
        metrics_port=metrics_port,
    )
    return settings, mode.reason


def processes_for(decoders: int, slots: int = MANY_SLOTS) -> int:
    """Processes that share so many decode threads: even two threads gain from two, as long as each has a batch to fill.

    A batch is filled by one process, and of few ``slots`` some are with the trainer.
    """
    wanted = max(min(decoders, 2), decoders // _DECODERS_EACH)
    return max(1, min(MOST_ENGINES, wanted, slots // _SLOTS_EACH))


def usual_slots(options: ReadOptions, slot_bytes: int) -> int:
    """Batches in a ring that nobody chose a size for: four, or while they are small two for each process."""
    wanted = _SLOTS_EACH * (1 if options.in_process else processes_for(_decoders(options)))
    return max(_USUAL_SLOTS, min(wanted, _SMALL_RING // max(1, slot_bytes)))


def usual_budget(options: ReadOptions, batch_bytes: int, loaders: int) -> int:
    """Bytes of that ring for batches of ``batch_bytes``, where so many loaders share the memory."""
    slot = RingShape.round_slot(batch_bytes)
    return default_budget(slot, loaders, usual_slots(options, slot))


def _decoders(options: ReadOptions) -> int:
    cores = cpu_share()
    return options.threads or max(1, cores - 1 if cores > 2 else cores)


def check_budget(slot_bytes: int, budget: int) -> None:
    """``ValueError``, with the number that would do, for a ring of less than three slots or more than the memory."""
    least = _LEAST_SLOTS * slot_bytes
    if budget < least:
        raise ValueError(
            f"prefetch of {budget:,} bytes: the largest batch takes {slot_bytes:,} bytes and the loader needs room for "
            f"three; give ReadOptions(prefetch={least}) or more, or make the batches smaller"
        )
    available = memory_available()
    if budget > available:
        raise ValueError(
            f"prefetch of {budget:,} bytes: only {available:,} bytes of memory are available; give "
            f"ReadOptions(prefetch=...) of {least:,} bytes or more that fits, or make the batches smaller"
        )
