"""``loader.stats()``: a ring's counters as one flat dict of floats, with rates over a window and since the start.

Names end in their unit: ``_bytes``, ``_seconds``, ``_share`` (of one), ``_per_second``; else they are counts.

=============================== ====================================================================================
``uptime_seconds``              since the loader opened
``epoch``, ``position``         the epoch and how many of its ``epoch_batches`` (of this rank) were handed out
``batches``, ``samples``        handed out since the loader opened
``tokens``, ``rows``            handed out, without and with padding; ``padding_share`` is what was padding
``data_wait_seconds``           inside ``next()``, in all; ``data_wait_last_seconds`` the last one
``data_wait_p50_seconds``       half of the ``next()`` took no longer; ``data_wait_p99_seconds``: 99 of 100
``data_wait_share``             share of the window spent inside ``next()``; ``mean_data_wait_share`` of all the time
``tokens_per_second``           over the window; so are ``batches_``, ``samples_``, ``read_bytes_`` and
                                ``decoded_bytes_per_second``
``mean_tokens_per_second``      since the loader opened; so are the other ``mean_`` rates
``window_seconds``              how long the window is
``eta_seconds``                 until the epoch ends, at the window's rate; -1 where nothing can be said
``ring_slots``, ``ring_bytes``  size of the ring; ``ring_ready`` batches are read and not taken, ``ring_reading`` asked
``read_bytes``, ``reads``       asked of the file system (it may come from the page cache)
``decoded_bytes``, ``frames``   decoded into batches from ``frame_bytes``; ``bad_frames`` failed their check,
                                ``cut_frames`` were only partly wanted, ``token_chunk_hits`` were found decoded
``zeroed_bytes``                rows of batches that no sample fills; ``dropped_bytes``: page cache given back
``read_seconds``                thread-seconds in reads; so are ``index_``, ``buffer_`` (waiting for the decoders),
                                ``decode_seconds``
``transfer_seconds``            host-to-device copies, from the events of one in eight; ``transfer_bytes``
``bad_samples``                 reported bad; ``skipped_samples`` of them were left out
``restarts``                    feeders that died and were started again
``batches_requested``           asked of the feeder; ``batches_filled``, ``batches_received``, ``batches_cancelled``;
                                ``fill_seconds`` from taken by the feeder to filled, summed over them
``read_threads``                of the feeder; ``decode_threads``; ``open_shards`` files are open
``queued_reads``                reads that wait for a thread; ``queued_decodes``
=============================== ====================================================================================

A loader whose ``batch_sampler`` gives a batch that is larger than any before gets a larger ring and a new reader with
it.  Then it opens anew: all of this, ``uptime_seconds`` too, counts from there.
"""

from __future__ import annotations

from hsloader.monitor.counters import FeederCounter, ThreadCounter, TrainerCounter, wait_class, wait_quantile
from hsloader.monitor.header import Snapshot

__all__ = ["Interval", "data_wait_ns", "flat_stats"]


def data_wait_ns(snapshot: Snapshot, like: Snapshot | None = None) -> int:
    """Nanoseconds spent inside ``next()``, the running one included.

    A user of the reader without a loader counts no ``next()``; then it is the time inside the client's ``wait()``.
    ``like`` is the snapshot that decides which of the two is counted, so that a difference is one of like times.
    """
    deciding = like or snapshot
    total, since = TrainerCounter.NEXT_NS, TrainerCounter.NEXT_SINCE
    if not deciding[total] and not deciding[since]:
        total, since = TrainerCounter.WAIT_NS, TrainerCounter.WAITING_SINCE
    return snapshot[total] + (max(0, snapshot.at - snapshot[since]) if snapshot[since] else 0)


class Interval:
    """What happened between two snapshots of one ring."""

    def __init__(self, before: Snapshot, after: Snapshot) -> None:
        self.before = before
        self.after = after
        self.seconds = max((after.at - before.at) / 1e9, 1e-9)

    def gained(self, counter: TrainerCounter | FeederCounter) -> int:
        """How much a counter grew (a ring that was replaced begins anew: then what it has now)."""
        before, after = self.before[counter], self.after[counter]
        return after - before if after >= before else after

    def worked(self, counter: ThreadCounter) -> int:
        """How much a thread counter grew, summed over the threads."""
        before, after = self.before.total(counter), self.after.total(counter)
        return after - before if after >= before else after

    def rate(self, counter: TrainerCounter | FeederCounter) -> float:
        """A counter's growth a second."""
        return self.gained(counter) / self.seconds

    @property
    def data_wait(self) -> float:
        """Share of the time that the training loop spent inside ``next()``."""
        spent = data_wait_ns(self.after) - data_wait_ns(self.before, like=self.after)
        return min(1.0, max(0.0, spent / 1e9 / self.seconds))

    @property
    def waits(self) -> list[int]:
        """How many ``next()`` there were in each class of duration."""
        return [max(0, a - b) for a, b in zip(self.after.waits, self.before.waits, strict=True)]

    @property
    def first_wait(self) -> float:
        """Seconds inside the ``next()`` that gave an iteration's first batch; 0 if none lies in this interval."""
        position = self.after[TrainerCounter.POSITION]
        begun = self.after[TrainerCounter.BATCHES] - position  # batches when the last iteration began
        if not position or begun < self.before[TrainerCounter.BATCHES]:
            return 0.0
        return self.after[TrainerCounter.FIRST_NEXT_NS] / 1e9

    @property
    def longest_wait(self) -> float:
        """Seconds inside the longest ``next()`` beside an iteration's first, as well as the classes tell."""
        waits, spent = self.waits, self.gained(TrainerCounter.NEXT_NS) / 1e9
        if first := self.first_wait:
            waits[wait_class(round(first * 1e9))] -= 1
            spent -= first
        top = max((number for number, count in enumerate(waits) if count > 0), default=0)
        if not top:
            return 0.0
        waits[top] -= 1
        others = sum(count * 0.75 * 2.0**number / 1e6 for number, count in enumerate(waits))
        return min(2.0**top / 1e6, max(2.0 ** (top - 1) / 1e6, spent - others))

    def busy(self, *counters: ThreadCounter, threads: FeederCounter) -> float:
        """Share of the time that the threads of a kind spent in what the counters count."""
        number = self.after[threads]
        if not number:
            return 0.0
        return min(1.0, sum(self.worked(c) for c in counters) / 1e9 / self.seconds / number)

    @property
    def eta(self) -> float | None:
        """Seconds until the epoch ends at this interval's rate; None where nothing can be said."""
        left = self.after[TrainerCounter.EPOCH_BATCHES] - self.after[TrainerCounter.POSITION]
        rate = self.rate(TrainerCounter.BATCHES)
        return left / rate if rate > 0 and left >= 0 and self.after[TrainerCounter.EPOCH_BATCHES] else None


def flat_stats(now: Snapshot, before: Snapshot | None = None) -> dict[str, float]:
    """The flat dict that the module's text documents; ``before`` begins the window (None: the loader's start)."""
    started = now[TrainerCounter.STARTED_AT] or now.at
    start = Snapshot(
        at=started, slots=now.slots, slot_bytes=now.slot_bytes, trainer=(0,) * 64, feeder=(0,) * 64, threads=()
    )
    whole = Interval(start, now)
    window = Interval(before, now) if before is not None else whole
    found = _totals(now)
    found |= {f"mean_{name}": value for name, value in _rates(whole).items()} | _rates(window)
    eta = window.eta
    found |= {
        "uptime_seconds": whole.seconds,
        "window_seconds": window.seconds,
        "eta_seconds": -1.0 if eta is None else eta,
    }
    return {name: float(value) for name, value in found.items()}


def _rates(interval: Interval) -> dict[str, float]:
    return {
        "batches_per_second": interval.rate(TrainerCounter.BATCHES),
        "samples_per_second": interval.rate(TrainerCounter.SAMPLES),
        "tokens_per_second": interval.rate(TrainerCounter.TOKENS),
        "read_bytes_per_second": interval.worked(ThreadCounter.READ_BYTES) / interval.seconds,
        "decoded_bytes_per_second": interval.worked(ThreadCounter.DECODED_BYTES) / interval.seconds,
        "data_wait_share": interval.data_wait,
    }


def _totals(now: Snapshot) -> dict[str, float]:
    rows, tokens = now[TrainerCounter.ROWS], now[TrainerCounter.TOKENS]
    last = TrainerCounter.LAST_NEXT_NS if now[TrainerCounter.NEXT_NS] else TrainerCounter.LAST_WAIT_NS
    return {
        "epoch": now[TrainerCounter.EPOCH],
        "position": now[TrainerCounter.POSITION],
        "epoch_batches": now[TrainerCounter.EPOCH_BATCHES],
        "batches": now[TrainerCounter.BATCHES],
        "samples": now[TrainerCounter.SAMPLES],
        "tokens": tokens,
        "rows": rows,
        "padding_share": 1 - tokens / rows if rows else 0.0,
        "data_wait_seconds": data_wait_ns(now) / 1e9,
        "data_wait_last_seconds": now[last] / 1e9,
        "data_wait_p50_seconds": wait_quantile(now.waits, 0.5),
        "data_wait_p99_seconds": wait_quantile(now.waits, 0.99),
        "ring_slots": now.slots,
        "ring_bytes": now.slots * now.slot_bytes,
        "ring_ready": now.ready,
        "ring_reading": now.reading,
        "read_bytes": now.total(ThreadCounter.READ_BYTES),
        "reads": now.total(ThreadCounter.READS),
        "decoded_bytes": now.total(ThreadCounter.DECODED_BYTES),
        "frames": now.total(ThreadCounter.FRAMES),
        "frame_bytes": now.total(ThreadCounter.FRAME_BYTES),
        "bad_frames": now.total(ThreadCounter.BAD_FRAMES),
        "cut_frames": now.total(ThreadCounter.CUT_FRAMES),
        "zeroed_bytes": now.total(ThreadCounter.ZEROED_BYTES),
        "dropped_bytes": now.total(ThreadCounter.DROPPED_BYTES),
        "token_chunk_hits": now.total(ThreadCounter.TOKEN_HITS),
        "read_seconds": now.total(ThreadCounter.READ_NS) / 1e9,
        "index_seconds": now.total(ThreadCounter.INDEX_NS) / 1e9,
        "buffer_seconds": now.total(ThreadCounter.BUFFER_NS) / 1e9,
        "decode_seconds": now.total(ThreadCounter.DECODE_NS) / 1e9,
        "transfer_seconds": now[TrainerCounter.TRANSFER_NS] / 1e9,
        "transfer_bytes": now[TrainerCounter.TRANSFER_BYTES],
        "bad_samples": now[TrainerCounter.BAD_SAMPLES],
        "skipped_samples": now[TrainerCounter.SKIPPED],
        "restarts": now[TrainerCounter.RESTARTS],
        "batches_requested": now[TrainerCounter.REQUESTED],
        "batches_received": now[TrainerCounter.RECEIVED],
        "batches_cancelled": now[TrainerCounter.CANCELLED],
        "batches_filled": now[FeederCounter.FILLED],
        "fill_seconds": now[FeederCounter.FILL_NS] / 1e9,
        "open_shards": now[FeederCounter.OPEN_SHARDS],
        "read_threads": now[FeederCounter.READERS],
        "decode_threads": now[FeederCounter.DECODERS],
        "queued_reads": now[FeederCounter.QUEUED_READS],
        "queued_decodes": now[FeederCounter.QUEUED_DECODES],
    }
