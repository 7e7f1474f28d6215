"""The plan as a person reads it: counts, sizes, room and time, before anything is written."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hsloader.conversion.agreement import field_text
from hsloader.conversion.fp8 import source_row_bytes
from hsloader.conversion.plan import Plan, PlannedSegment, file_of
from hsloader.conversion.probe import Probe
from hsloader.conversion.provenance import advice
from hsloader.conversion.report import PlanSummary, Quarantined
from hsloader.conversion.settings import ConvertSettings, cores
from hsloader.conversion.space import SegmentSize, free_bytes, most_ahead, peak_bytes, same_file_system
from hsloader.formats.discover import Skipped
from hsloader.monitor.words import plural
from hsloader.store.manifest import Provenance

__all__ = ["counted", "summarize"]

# Time of a run with the read-back, in times of one without: decoding is faster than encoding, reading is not free.
_READ_BACK_COST = 1.45


def summarize(
    pending: Sequence[tuple[Plan, PlannedSegment]],
    settings: ConvertSettings,
    probe: Probe,
    *,
    source: str,
    destination: Path,
    plans: Sequence[Plan],
    present: int,
    recorded: Provenance | None,
    quarantined: Sequence[Quarantined],
    sidecars: Sequence[Skipped],
    notes: Sequence[str] = (),
) -> PlanSummary:
    """What a run over ``pending`` will do; ``plans`` are all plans of the destination, old and new.

    ``recorded``: the provenance of the dataset that they join, which it keeps.
    """
    samples = [sample for _, segment in pending for sample in segment.samples]
    lengths = sorted(sample.length for sample in samples)
    sizes = _sizes(pending, probe)
    deletes = bool(settings.delete_source) and same_file_system(Path(source), destination)
    workers, threads = settings.parallelism(len(pending))
    # A gzip file is inflated beside the destination while it is read.
    inflated = max((s.payload_bytes for s in samples if s.gzip), default=0)
    needed = peak_bytes(sizes if deletes else [SegmentSize(s.stored) for s in sizes], most_ahead(workers))
    raw = sum(s.length * source_row_bytes(plan.fields) for plan, segment in pending for s in segment.samples)
    stored = sum(size.stored for size in sizes)
    plan = (pending[-1][0] if pending else plans[-1]) if plans else None
    told = recorded or (plan.provenance if plan is not None else Provenance())
    seconds = raw / (probe.rate * min(cores(), workers * threads)) * (_READ_BACK_COST if settings.read_back else 1.0)
    layouts: Counter[str] = Counter(sample.layout for sample in samples)
    return PlanSummary(
        source=source,
        destination=str(destination),
        layouts=dict(layouts),
        fields=tuple(f"{f.name}: {field_text((f.dtype, f.shape))}" for f in plan.fields) if plan is not None else (),
        samples=len(samples),
        present=present,
        tokens=sum(lengths),
        shortest=lengths[0] if lengths else 0,
        median=int(statistics.median(lengths)) if lengths else 0,
        longest=lengths[-1] if lengths else 0,
        files=len({(p.root, file_of(s)) for p, segment in pending for s in segment.samples}),
        source_bytes=sum({(p.root, file_of(s)): s.identity.size for p, g in pending for s in g.samples}.values()),
        raw_bytes=raw,
        predicted_bytes=stored,
        space_needed=needed + inflated * workers if samples else 0,
        space_free=free_bytes(destination),
        ratio=raw / stored if stored else 0.0,
        seconds=seconds if samples else None,
        segments=len(pending),
        workers=workers,
        threads=threads,
        norm_state=told.norm_state,
        layer_ids=told.layer_ids,
        quarantined=tuple(quarantined),
        skipped=tuple(sidecars),
        left_out=dict(sum((Counter(p.left_out) for p in plans), Counter())),
        notes=(
            *counted(plans),
            *_losses(probe),
            *advice(told, list(plan.layouts) if plan is not None else (), probe.norm.suggestion, recorded is not None),
            *notes,
        ),
    )


def _losses(probe: Probe) -> list[str]:
    return [
        f"codec fp8 is lossy: {name} restored differs by {loss.mean:.2%} on average, {loss.max:.2%} at most "
        "(of a token's norm, in the samples measured)"
        for name, loss in sorted(probe.losses.items())
    ]


def counted(plans: Sequence[Plan]) -> list[str]:
    """The notes of the samples, each with the number of samples it is about."""
    notes: Counter[str] = sum((Counter(plan.notes) for plan in plans), Counter())
    return [f"{note} ({plural(count, 'sample')})" for note, count in sorted(notes.items())]


def _sizes(pending: Sequence[tuple[Plan, PlannedSegment]], probe: Probe) -> list[SegmentSize]:
    """What each segment will take, and what deleting its sources frees when it is the last to hold a file."""
    last: dict[tuple[str, str], int] = {}
    size_of: dict[tuple[str, str], int] = {}
    for i, (plan, segment) in enumerate(pending):
        for sample in segment.samples:
            key = plan.root, file_of(sample)
            last[key] = i
            if sample.left_out:
                size_of[key] = 0  # such a file stays
            size_of.setdefault(key, sample.identity.size)
    freed: Counter[int] = Counter()
    for key, i in last.items():
        freed[i] += size_of[key]
    return [
        SegmentSize(probe.stored_bytes(plan.fields, sum(s.length for s in segment.samples)), freed[i])
        for i, (plan, segment) in enumerate(pending)
    ]
