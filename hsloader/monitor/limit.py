"""What holds a loader up, from two snapshots of its counters: disk, decode, transfer, the ring, or the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hsloader.monitor.counters import FeederCounter, Stage, ThreadCounter, TrainerCounter
from hsloader.monitor.header import Snapshot
from hsloader.monitor.stats import Interval
from hsloader.monitor.words import plural, rate_text, share_text, time_text

__all__ = ["Limit", "LimitVerdict", "limit_of"]


class Limit(StrEnum):
    """Where the limit is; the word that a verdict begins with."""

    STARTING = "starting"
    TRAINER = "trainer-bound"
    RING = "ring-bound"
    TRANSFER = "transfer-bound"
    DECODE = "decode-bound"
    DISK = "disk-bound"
    LATENCY = "latency-bound"
    STALLED = "stalled"
    FEEDER = "feeder-stuck"


@dataclass(frozen=True, slots=True)
class LimitVerdict:
    """The limit, the number that proves it, and the one action that would help most.

    ``wait`` says how much the trainer waited, where that is part of the proof; ``sentence`` is all of it.
    """

    limit: Limit
    proof: str = ""
    advice: str = ""
    wait: str = ""

    @property
    def sentence(self) -> str:
        """``disk-bound: the trainer waited for data 62 % of the time; 4 read threads ...``."""
        parts = [part for part in (self.wait, self.proof) if part]
        return f"{self.limit}: {'; '.join(parts)}"


_NO_WAIT = 0.05  # share of the time inside next() up to which the trainer is the limit
_START = 10.0  # seconds for the first batch; what takes longer has another reason
_BUSY = 0.2  # share of the time from which threads of a kind count as busy
_QUIET = 5.0  # seconds without a call after which the trainer is said not to ask
_STALL = 1.0  # seconds that a single next() must take, where the others took next to nothing, to be called a stall
_SEVERAL = 8  # next() calls from which one is told from the others,
_A_FEW = 3  # or so many while no thread was busy: a slow disk makes more than one wait
_SILENT = 5.0  # seconds in which a feeder with work must have looked at its requests; it looks every second


def limit_of(before: Snapshot, after: Snapshot) -> LimitVerdict:
    """The verdict on what happened between two snapshots of one ring."""
    interval = Interval(before, after)
    for check in (_starting, _stuck, _quiet, _trainer, _begun, _stalled, _transfer, _ring):
        found = check(interval)
        if found is not None:
            return found
    return _reading(interval)


def _starting(i: Interval) -> LimitVerdict | None:
    now = i.after
    if now[TrainerCounter.RECEIVED] or now[FeederCounter.FILLED]:
        return None
    since = (now.at - (now[TrainerCounter.STARTED_AT] or now.at)) / 1e9
    if not now[TrainerCounter.REQUESTED]:  # no feeder is started before: a loader that waits for its first use
        return LimitVerdict(Limit.STARTING, f"no batch was asked for yet, {time_text(since)} after the loader opened")
    if not now[FeederCounter.READY_AT]:
        return LimitVerdict(Limit.STARTING, f"the feeder is not there yet, {time_text(since)} after the loader opened")
    if since > _START:
        return None
    return LimitVerdict(Limit.STARTING, f"the first batch is being read, {time_text(since)} so far")


def _stuck(i: Interval) -> LimitVerdict | None:
    now = i.after
    pid, seen = min(now.last_looks, key=lambda look: look[1])
    silent = (now.at - seen) / 1e9
    if not now.reading or seen == 0 or silent < _SILENT:
        return None
    who = "the feeder" if pid == now[FeederCounter.PID] else "the feeder's helper"
    return LimitVerdict(
        Limit.FEEDER,
        f"{who} (pid {pid}) has not looked at its requests for {time_text(silent)}: it is stopped, starved of CPU, or "
        "hangs",
        f"look at it: hsloader doctor {pid}",
    )


def _quiet(i: Interval) -> LimitVerdict | None:
    now = i.after
    called = now[TrainerCounter.LAST_CALL]
    quiet = (now.at - called) / 1e9
    if not called or _waiting(now) or quiet < _QUIET or not now.ready:
        return None
    return LimitVerdict(
        Limit.TRAINER,
        f"the trainer has not asked for a batch for {time_text(quiet)}; "
        f"{now.ready} {'is' if now.ready == 1 else 'are'} ready",
    )


def _waiting(now: Snapshot) -> bool:
    return bool(now[TrainerCounter.WAITING_SINCE] or now[TrainerCounter.NEXT_SINCE])


def _trainer(i: Interval) -> LimitVerdict | None:
    if i.data_wait > _NO_WAIT:
        return None
    ready = i.after.ready
    return LimitVerdict(
        Limit.TRAINER,
        f"{ready} of {plural(i.after.slots, 'batch', 'batches')} in the ring {'is' if ready == 1 else 'are'} ready",
        wait=_wait(i),
    )


def _wait(i: Interval) -> str:
    return f"the trainer waited for data {share_text(i.data_wait)} of the time"


def _begun(i: Interval) -> LimitVerdict | None:
    """Nearly all that was waited for is an iteration's first batch: a start, which says nothing of the rest."""
    first = i.first_wait
    rest = i.data_wait * i.seconds - first
    if not first or rest > _NO_WAIT * i.seconds:
        return None
    most = first > i.seconds / 2
    proof = f"the first batch was waited for {time_text(first)}"
    if not most:
        proof += f", and then the trainer waited for data {_share_of(rest, i.seconds - first)} of the time"
    return LimitVerdict(Limit.STARTING if most else Limit.TRAINER, proof)


def _share_of(seconds: float, span: float) -> str:
    return share_text(max(0.0, seconds) / max(span, 1e-9))


def _stalled(i: Interval) -> LimitVerdict | None:
    found = _single(i, _SEVERAL)
    return found if found is not None and found.limit is Limit.STALLED else None


def _single(i: Interval, least: int) -> LimitVerdict | None:
    """Of ``least`` or more ``next()`` a long one, without which the trainer waited for next to nothing."""
    calls, longest, first = sum(i.waits), i.longest_wait, i.first_wait
    rest = i.data_wait * i.seconds - first - longest
    if calls < least or not longest or rest > _NO_WAIT * i.seconds:
        return None
    apart = _share_of(rest, i.seconds - first - longest)
    proof = (
        f"one batch of {calls:,} was waited for {time_text(longest)}, and else the trainer waited for data {apart} of "
        "the time"
    )
    if longest < _STALL:
        return LimitVerdict(Limit.TRAINER, proof)
    advice = f"DataLoader(stall_after={_STALL:.0f}), whose report says what the next one waits for"
    return LimitVerdict(Limit.STALLED, proof, advice)


def _transfer(i: Interval) -> LimitVerdict | None:
    share = i.gained(TrainerCounter.TRANSFER_NS) / 1e9 / i.seconds
    if share < 0.7 or not i.after.ready:
        return None
    rate = i.gained(TrainerCounter.TRANSFER_BYTES) / max(i.gained(TrainerCounter.TRANSFER_NS) / 1e9, 1e-9)
    return LimitVerdict(
        Limit.TRANSFER,
        f"copies to the GPU took {share_text(share)} of the time, at {rate_text(rate)} while they ran; "
        f"{i.after.ready} of {i.after.slots} batches are ready",
        "look at the PCIe link (nvidia-smi -q -d PCIE) and at the NUMA node of the process; hidden_states_dtype and "
        "max_length decide how much is copied",
    )


def _ring(i: Interval) -> LimitVerdict | None:
    now = i.after
    working = any(row[ThreadCounter.TID] and row.stage is not Stage.IDLE for row in now.threads)
    if now.reading or now.ready or working or not _waiting(now):
        return None
    if now[TrainerCounter.SLOTS_BUSY] < now.slots:
        return None
    return LimitVerdict(
        Limit.RING,
        f"the feeder has nothing to do, as all {now.slots} slots hold batches that the script keeps",
        "drop references to old batches, or raise ReadOptions(prefetch=...) above "
        f"{now.slots * now.slot_bytes:,} bytes",
        wait=_wait(i),
    )


def _reading(i: Interval) -> LimitVerdict:
    """The trainer waits: the reads or the decoders are what it waits for."""
    now = i.after
    readers, decoders = now[FeederCounter.READERS], now[FeederCounter.DECODERS]
    read = i.busy(ThreadCounter.READ_NS, ThreadCounter.INDEX_NS, threads=FeederCounter.READERS)
    blocked = i.busy(ThreadCounter.BUFFER_NS, threads=FeederCounter.READERS)
    decode = i.busy(ThreadCounter.DECODE_NS, threads=FeederCounter.DECODERS)
    # A stage that is still running has not been counted: what a thread has been in for the whole interval.
    read = max(read, _running(i, (Stage.READ, Stage.INDEX), readers))
    decode = max(decode, _running(i, (Stage.DECODE,), decoders))
    rate = rate_text(i.worked(ThreadCounter.READ_BYTES) / i.seconds)
    decoded = rate_text(i.worked(ThreadCounter.DECODED_BYTES) / i.seconds)
    proof = (
        f"{plural(readers, 'read thread')} "
        f"spent {share_text(read)} of it in reads ({rate}), {plural(decoders, 'decode thread')} "
        f"{share_text(decode)} in decoding ({decoded})"
    )
    if blocked > 0.1:
        proof += f", and reads waited {share_text(blocked)} of it for the decoders"
    if read < _BUSY and decode < _BUSY and blocked < _BUSY:
        return _latency(i, proof)
    if decode >= read or blocked > 0.3:
        return LimitVerdict(
            Limit.DECODE,
            proof,
            f"ReadOptions(threads={2 * max(1, decoders)}) if cores are free, else give the process more cores",
            wait=_wait(i),
        )
    return LimitVerdict(
        Limit.DISK,
        proof,
        f"hsloader bench tells whether the disk gives more; try ReadOptions(io_threads={2 * max(1, readers)}), or move "
        "the dataset to a faster disk",
        wait=_wait(i),
    )


def _latency(i: Interval, proof: str) -> LimitVerdict:
    """Nobody is busy and yet the trainer waits: for the feeder's start, or for one request at a time."""
    now = i.after
    if now[FeederCounter.READY_AT] > (i.before.at + now.at) // 2:
        opened = (now[FeederCounter.READY_AT] - now[TrainerCounter.STARTED_AT]) / 1e9
        return LimitVerdict(
            Limit.STARTING, f"the feeder came up in this time, {time_text(opened)} after the loader opened"
        )
    single = _single(i, _A_FEW)
    if single is not None:
        return single
    return LimitVerdict(
        Limit.LATENCY,
        proof,
        f"raise ReadOptions(prefetch=...) above {now.slots * now.slot_bytes:,} bytes, so that more is read at once",
        wait=_wait(i),
    )


def _running(i: Interval, stages: tuple[Stage, ...], threads: int) -> float:
    if not threads:
        return 0.0
    spent = sum(
        min(i.seconds, max(0.0, (i.after.at - row[ThreadCounter.SINCE]) / 1e9))
        for row in i.after.threads
        if row[ThreadCounter.TID] and row.stage in stages
    )
    return min(1.0, spent / i.seconds / threads)
