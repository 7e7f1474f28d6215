"""The lines that a loader says about itself: opening, first batch, heartbeat, end of an epoch.  Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from hsloader.monitor.counters import ThreadCounter, TrainerCounter, wait_quantile
from hsloader.monitor.header import Snapshot
from hsloader.monitor.limit import Limit, LimitVerdict, limit_of
from hsloader.monitor.stats import Interval
from hsloader.monitor.words import plural, rate_text, share_text, size_text, time_text

__all__ = ["Opening", "epoch_text", "first_batch_text", "heartbeat_text", "opening_text"]

_JUDGED = 1.0  # seconds an epoch must take for a word on its limit: what a shorter one waits is its start


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What a loader knows of itself when it opens.

    ``raw_bytes`` of what it uses, decoded; ``stored_bytes`` of the whole dataset; ``whole``: it uses all of that.
    ``batches`` an epoch of this process; ``rank_batches`` of its rank, where they are those of several workers.
    """

    dataset: str
    samples: int
    tokens: int
    raw_bytes: int
    stored_bytes: int
    whole: bool = True
    batches: int
    rank_batches: int | None = None
    world: int = 1
    mode: str
    reason: str
    slots: int
    slot_bytes: int


def opening_text(o: Opening) -> str:
    """``data.hs: 10,000 samples, 16,200,000 tokens, 924 GB (626 GB on disk); 1,250 batches an epoch ...``.

    Of a part ``(the whole dataset is 626 GB on disk)``.
    """
    stored = f"{'' if o.whole else 'the whole dataset is '}{size_text(o.stored_bytes)} on disk"
    share = f" on each of {o.world} ranks" if o.world > 1 else ""
    split = o.rank_batches is not None and o.rank_batches != o.batches
    batches = f"{o.batches:,} of {plural(o.rank_batches or 0, 'batch', 'batches')}" if split else ""
    return (
        f"{o.dataset}: {plural(o.samples, 'sample')}, {plural(o.tokens, 'token')}, {size_text(o.raw_bytes)} "
        f"({stored}); {batches or plural(o.batches, 'batch', 'batches')} an epoch{share}; reads by "
        f"{o.mode} ({o.reason}), ring of {plural(o.slots, 'batch', 'batches')}, {size_text(o.slots * o.slot_bytes)}"
    )


def first_batch_text(seconds: float, now: Snapshot) -> str:
    """``first batch 0.41 s after the loader opened; 3 of 4 batches are ready``."""
    return (
        f"first batch {time_text(seconds)} after the loader opened; {now.ready} of "
        f"{plural(now.slots, 'batch', 'batches')} in the ring {'is' if now.ready == 1 else 'are'} ready"
    )


def heartbeat_text(
    before: Snapshot,
    now: Snapshot,
    verdict: LimitVerdict,
    *,
    slowest: tuple[int, float, int] | None = None,
    advise: bool = True,
) -> str:
    """The line that comes every so often: where the epoch is, how fast, and what the limit is."""
    interval = Interval(before, now)
    parts = [
        _place(now),
        f"{interval.rate(TrainerCounter.TOKENS):,.0f} tokens/s",
        f"{rate_text(interval.worked(ThreadCounter.DECODED_BYTES) / interval.seconds)} decoded from "
        f"{rate_text(interval.worked(ThreadCounter.READ_BYTES) / interval.seconds)} read",
        f"data wait {share_text(interval.data_wait)}",
        f"{now.ready} of {now.slots} in the ring ready",
    ]
    if interval.eta is not None:
        parts.append(f"{time_text(interval.eta)} left")
    text = f"{', '.join(parts)}; {verdict.limit}"
    if verdict.proof and not (verdict.limit is Limit.TRAINER and verdict.wait):  # the ring is in the line already
        text += f": {verdict.proof}"
    if slowest is not None and slowest[2] > 1:
        text += f"; of {slowest[2]} ranks here rank {slowest[0]} waits most: {share_text(slowest[1])}"
    return f"{text} (try: {verdict.advice})" if verdict.advice and advise else text


def _place(now: Snapshot) -> str:
    batches = now[TrainerCounter.EPOCH_BATCHES]
    of = f" of {batches:,}" if batches else ""
    return f"{_name(now, now[TrainerCounter.EPOCH])}, batch {now[TrainerCounter.POSITION]:,}{of}"


def _name(now: Snapshot, epoch: int) -> str:
    """``epoch 3``; that of a validation loader beside the one that trains is ``epoch 3 of val``."""
    split = now.info.get("split")
    return f"epoch {epoch} of {split}" if split == "val" else f"epoch {epoch}"


def epoch_text(start: Snapshot, now: Snapshot, epoch: int) -> str:
    """The summary at the end of an epoch: a small table, one line a topic."""
    i = Interval(start, now)
    tokens, rows = i.gained(TrainerCounter.TOKENS), i.gained(TrainerCounter.ROWS)
    read, decoded = i.worked(ThreadCounter.READ_BYTES), i.worked(ThreadCounter.DECODED_BYTES)
    padding = f", {share_text(1 - tokens / rows)} padding" if rows > tokens else ""
    waited = i.data_wait * i.seconds
    table = [
        ("batches", f"{i.gained(TrainerCounter.BATCHES):,} in {time_text(i.seconds)}"),
        ("samples", f"{i.gained(TrainerCounter.SAMPLES):,}"),
        ("tokens", f"{tokens:,} ({tokens / i.seconds:,.0f}/s{padding})"),
        ("read", f"{size_text(read)} ({rate_text(read / i.seconds)})"),
        ("decoded", f"{size_text(decoded)} ({rate_text(decoded / i.seconds)})"),
        (
            "data wait",
            f"{time_text(waited)}, {share_text(i.data_wait)} of the time; a batch: half under "
            f"{time_text(wait_quantile(i.waits, 0.5))}, 99 % under {time_text(wait_quantile(i.waits, 0.99))}",
        ),
    ]
    if i.seconds >= _JUDGED:
        table.append(("limit", limit_of(start, now).sentence))
    if copied := i.gained(TrainerCounter.TRANSFER_BYTES):
        spent = i.gained(TrainerCounter.TRANSFER_NS) / 1e9
        table.insert(5, ("to the GPU", f"{size_text(copied)} in {time_text(spent)}"))
    if skipped := i.gained(TrainerCounter.SKIPPED):
        table.append(("left out", f"{plural(skipped, 'bad sample')}"))
    if restarts := i.gained(TrainerCounter.RESTARTS):
        table.append(("restarts", f"the feeder died and was started again {plural(restarts, 'time')}"))
    taken, batches = now[TrainerCounter.POSITION], now[TrainerCounter.EPOCH_BATCHES]
    end = "is over" if taken >= batches else f"was left after {taken:,} of {plural(batches, 'batch', 'batches')}"
    return "\n".join([f"{_name(now, epoch)} {end}", *(f"  {name:<10} {value}" for name, value in table)])
