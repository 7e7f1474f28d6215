"""Works out what bounds a run and which ReadOptions suit it, from the measurements and this machine's cores alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hsloader.benchmark.results import Measurement, Need, Verdict
from hsloader.reader.choices import usual_slots
from hsloader.reader.options import Mode, ReadOptions
from hsloader.reader.ring import RingShape

__all__ = ["Rates", "judge", "rates_of", "recommend", "with_limits"]

_MARGIN = 1.25  # decoding this much faster than training needs leaves room for hiccups
_ALIKE = 0.95  # rates this close are the same
_SHORTFALL = 0.8  # a pipeline below this share of its limit is worth a word
_HICCUP_SECONDS = 0.5  # of data that the ring should hold, for a disk that pauses
_DEFAULT_READERS = 8
_BETWEEN_SPANS = 64 << 10  # bytes of a slot beyond its batch's values: each field begins at a multiple of 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What the verdict needs to know, bytes a second; 0 where it was not measured.

    ``disk``: file bytes from the disk.  ``decode``: decoded bytes by number of threads.  ``transfer``: host to one GPU.
    ``pipeline``: decoded bytes of the best cold run (else the best run).  ``in_memory``: the data fit the memory.
    """

    disk: float = 0.0
    ratio: float = 1.0
    decode: Mapping[int, float] = dataclasses.field(default_factory=dict)
    transfer: float = 0.0
    pipeline: float = 0.0
    pipeline_cold: bool = False
    in_memory: bool = False

    @property
    def limits(self) -> dict[str, float]:
        """Decoded bytes a second that each part allows, of those that were measured."""
        found = {"disk": self.disk * self.ratio, "decode": max(self.decode.values(), default=0.0)}
        found["transfer"] = self.transfer
        return {name: rate for name, rate in found.items() if rate > 0}


def rates_of(measurements: Sequence[Measurement], ratio: float, *, in_memory: bool) -> Rates:
    """The rates that a run's measurements give."""
    disk = [m.rate for m in measurements if m.part == "disk" and m.state != "warm" and not m.from_memory]
    piped = [m for m in measurements if m.part == "pipeline" and m.settings.get("device") != "cuda"]
    cold = [m.rate for m in piped if m.state == "cold"]
    return Rates(
        disk=max(disk, default=0.0),
        ratio=ratio,
        decode={int(m.settings["threads"]): m.rate for m in measurements if m.part == "decode"},
        transfer=max((m.rate for m in measurements if m.part == "transfer"), default=0.0),
        pipeline=max(cold or [m.rate for m in piped], default=0.0),
        pipeline_cold=bool(cold),
        in_memory=in_memory,
    )


def with_limits(measurements: Sequence[Measurement], rates: Rates) -> list[Measurement]:
    """The measurements, each with the most it could have been by the others of the run."""
    best_copy = max((m.rate for m in measurements if m.part == "transfer"), default=0.0)
    warm_disk = max((m.rate for m in measurements if m.part == "disk" and m.state == "warm"), default=0.0)
    decode = max(rates.decode.values(), default=0.0)
    # The best of any number of threads, a thread: the first measurement may have met a slower clock.
    one_thread = max((rate / count for count, rate in rates.decode.items()), default=0.0)

    def limit(m: Measurement) -> float:
        if m.part == "disk":
            return max(warm_disk if m.state == "warm" or m.from_memory else rates.disk, m.rate)
        if m.part == "transfer":
            return best_copy
        if m.part == "decode":
            return one_thread * int(m.settings["threads"])
        sources = [decode] if m.state == "warm" else [decode, rates.disk * rates.ratio]
        if m.settings.get("device") == "cuda":
            sources.append(best_copy)
        if m.part == "pipeline" and m.settings.get("threads") in rates.decode:
            sources.append(rates.decode[m.settings["threads"]])
        return min((rate for rate in sources if rate > 0), default=0.0)

    return [dataclasses.replace(m, limit=limit(m)) for m in measurements]


def judge(rates: Rates, need: Need | None, options: ReadOptions) -> Verdict:
    """One sentence with the numbers, what bounds, and how much more there is than is needed."""
    limits, gpus = rates.limits, need.gpus if need is not None else 1
    if "transfer" in limits:
        limits["transfer"] *= gpus  # each has a link of its own; disk and cores they share
    bound = min(limits, key=lambda name: limits[name], default="disk")
    deliverable = limits.get(bound, 0.0)
    if rates.pipeline and (not limits or (not rates.disk and rates.pipeline < _SHORTFALL * deliverable)):
        bound, deliverable = "pipeline", rates.pipeline
    headspace = deliverable / need.total if need is not None and need.total > 0 else None
    words = [*_need_words(need), *_limit_words(rates, gpus)]
    if rates.pipeline and rates.pipeline < _SHORTFALL * deliverable:
        warm = "" if rates.pipeline_cold else ", from memory,"
        share = f"{100 * rates.pipeline / deliverable:.0f} %"
        words.append(f"the pipeline{warm} reached {_gb(rates.pipeline)}, {share} of what {bound} allows")
    if headspace is not None:
        words.append(f"headspace {headspace:.2f}x")
        if headspace < 1:
            words.append(f"the GPU would wait {100 * (1 - headspace):.0f} % of the time")
    words.append(f"bound by {bound}" if deliverable else "nothing could be measured")
    if rates.in_memory and bound == "disk" and rates.disk:
        words.append("after the first epoch the data come from memory")
    return Verdict(
        sentence="; ".join(words), bound=bound, deliverable=deliverable, headspace=headspace, options=options
    )


def _need_words(need: Need | None) -> list[str]:
    if need is None:
        return []
    total = f", {_gb(need.total)} for {need.gpus}" if need.gpus > 1 else ""
    return [f"you need {_gb(need.a_gpu)} GB/s a GPU{total}"]


def _limit_words(rates: Rates, gpus: int) -> list[str]:
    words = []
    if rates.disk:
        words.append(f"disk gives {_gb(rates.disk)} x {rates.ratio:.2f} = {_gb(rates.disk * rates.ratio)} GB/s")
    else:
        words.append("the disk could not be measured")
    if rates.decode:
        threads = max(rates.decode, key=lambda count: rates.decode[count])
        words.append(f"decode {_gb(rates.decode[threads])} with {threads} thread{'s' if threads > 1 else ''}")
    if rates.transfer:
        words.append(f"transfer {_gb(rates.transfer)}{' a GPU' if gpus > 1 else ''}")
    return words


def recommend(
    measurements: Sequence[Measurement],
    rates: Rates,
    need: Need | None,
    *,
    batch_bytes: int = 0,
    memory: int = 0,
    fallback: Mode = "auto",
) -> ReadOptions:
    """The options that the measurements speak for.

    Mode: the fastest, the plainer one where they are alike.  Threads: the fewest that decode what disk and training
    want (idle cores serve the thread that launches kernels).  Prefetch: half a second of data, at most a quarter of
    ``memory``, where that is more than a loader takes by itself.
    """
    gpus = need.gpus if need is not None else 1
    mode = _best_mode(measurements) or fallback
    threads = _threads(rates, need, gpus)
    return ReadOptions(
        mode=mode,
        threads=threads,
        io_threads=_readers(measurements, mode),
        prefetch=_prefetch(need, batch_bytes, memory, gpus, threads),
    )


def _best_mode(measurements: Sequence[Measurement]) -> Mode | None:
    piped = [m for m in measurements if m.part == "pipeline" and m.settings.get("device") != "cuda"]
    piped = [m for m in piped if m.state == "cold"] or piped
    rates: dict[str, float] = {}
    for m in piped:
        rates[m.settings["mode"]] = max(rates.get(m.settings["mode"], 0.0), m.rate)
    if len(rates) < 2:
        return None
    top = max(rates.values())
    order: tuple[Mode, ...] = ("mmap", "pread", "direct")
    return next(mode for mode in order if rates.get(mode, 0.0) >= _ALIKE * top)


def _threads(rates: Rates, need: Need | None, gpus: int) -> int | None:
    if not rates.decode:
        return None
    most = max(rates.decode.values())
    wanted = [most]
    if rates.disk and not rates.in_memory:
        wanted.append(rates.disk * rates.ratio / _ALIKE)
    if need is not None and need.total > 0:
        wanted.append(_MARGIN * need.total)
    enough = [count for count in sorted(rates.decode) if rates.decode[count] >= _ALIKE * min(wanted)]
    return max(1, math.ceil(enough[0] / gpus))


def _readers(measurements: Sequence[Measurement], mode: str) -> int | None:
    """Reads at once, where the disk gives clearly more for another number than the default."""
    way = "O_DIRECT" if mode == "direct" else "buffered"
    depths: dict[int, float] = {}
    for m in measurements:
        if m.part == "disk" and m.settings.get("way") == way and m.state == "cold" and not m.from_memory:
            depth = int(m.settings["depth"])
            depths[depth] = max(depths.get(depth, 0.0), m.rate)
    if not depths:
        return None
    best = min(depth for depth, rate in depths.items() if rate >= _ALIKE * max(depths.values()))
    near = [rate for depth, rate in depths.items() if depth <= _DEFAULT_READERS]
    return best if best > _DEFAULT_READERS and max(near, default=0.0) < 0.9 * depths[best] else None


def _prefetch(need: Need | None, batch_bytes: int, memory: int, gpus: int, threads: int | None) -> int | None:
    """Bytes for half a second of data, where a loader would by itself take less."""
    if not batch_bytes or need is None:
        return None
    slot = RingShape.round_slot(batch_bytes + _BETWEEN_SPANS)
    usual = usual_slots(ReadOptions(threads=threads), slot) * slot
    wanted = -(-int(_HICCUP_SECONDS * need.a_gpu) // slot) * slot
    if memory:
        wanted = min(wanted, memory // 4 // gpus)
    return wanted if wanted > usual else None


def _gb(rate: float) -> str:
    value = rate / 1e9
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"
