"""``hsloader.inspect``: what a source holds, from headers and a few samples; nothing is written."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hsloader.conversion.agreement import LEAST_SHARE, Kind, kind_text, kinds_of
from hsloader.conversion.probe import NormProbe, row_norms
from hsloader.conversion.report import Progress, ProgressCallback, Quarantined
from hsloader.conversion.settings import cores
from hsloader.formats.discover import Skipped, discover
from hsloader.formats.producer_settings import ProducerSettings
from hsloader.formats.source import Hints, SampleSource
from hsloader.formats.survey import survey
from hsloader.monitor.words import plural

__all__ = ["Inspection", "inspect"]

_THREADS_AT_MOST = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What ``inspect`` found. Bytes: ``source_bytes`` the files, ``payload_bytes`` the values in them.

    ``kinds``: the samples by norm state of their producer, fields, dtypes and shapes, the most frequent first, with
    counts; ``convertible`` if enough of them agree.  ``lengths``: tokens of each sample, in natural order.
    ``norm`` is a hint from a few last states.  ``told``: what producers' own settings files say.
    """

    source: str
    layouts: Mapping[str, int]
    kinds: tuple[tuple[str, int], ...]
    convertible: bool
    samples: int
    tokens: int
    shortest: int
    median: int
    longest: int
    files: int
    source_bytes: int
    payload_bytes: int
    lengths: tuple[int, ...]
    norm: NormProbe
    told: tuple[ProducerSettings, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def histogram(self) -> tuple[tuple[int, int, int], ...]:
        """Lengths by doubling: (fewest tokens, most tokens, samples)."""
        counts = Counter(length.bit_length() for length in self.lengths)
        return tuple((1 << (bits - 1), (1 << bits) - 1, counts[bits]) for bits in sorted(counts) if bits)

    def to_dict(self) -> dict[str, Any]:
        """The inspection as JSON values (the lengths as a histogram)."""
        made = asdict(self)
        del made["lengths"]
        made["norm"]["suggestion"] = self.norm.suggestion
        made["histogram"] = [list(item) for item in self.histogram]
        return made


def inspect(
    src: str | os.PathLike[str],
    *,
    hidden_size: int | None = None,
    progress: ProgressCallback | None = None,
) -> Inspection:
    """Look at the samples below ``src`` (a folder or one file): layout, counts, dtypes, lengths, anomalies.

    Reads headers in threads and the last states of a few samples.  ``hidden_size`` splits ``[S, k*H]`` where no last
    state tells H.  ``progress`` is called now and then.  Raises ``FileNotFoundError``.
    """
    began = time.monotonic()
    tell = progress or (lambda _: None)
    tell(Progress(stage="find"))
    found = discover(src)
    hints = Hints(hidden_size=hidden_size)

    def told(done: int, total: int) -> None:
        tell(Progress(stage="describe", done=done, total=total, seconds=time.monotonic() - began))

    threads = min(_THREADS_AT_MOST, 4 * cores())
    described = survey(src, hints=hints, threads=threads, progress=told, found=found)
    samples = described.samples
    kinds = kinds_of(samples)
    lengths = tuple(sample.length for sample in samples)
    sizes = {sample.path: sample.identity.size for sample in samples}
    tell(Progress(stage="measure"))
    return Inspection(
        source=found.src,
        layouts=dict(Counter(sample.layout for sample in samples)),
        kinds=tuple((kind_text(kind), count) for kind, count in kinds.most_common()),
        convertible=bool(kinds) and max(kinds.values()) >= LEAST_SHARE * len(samples),
        samples=len(samples),
        tokens=sum(lengths),
        shortest=min(lengths, default=0),
        median=int(statistics.median(lengths)) if lengths else 0,
        longest=max(lengths, default=0),
        files=len(sizes),
        source_bytes=sum(sizes.values()),
        payload_bytes=sum(sample.payload_bytes for sample in samples),
        lengths=lengths,
        norm=row_norms(samples, hints),
        told=tuple(described.settings),
        quarantined=tuple(Quarantined(item.name, item.reason) for item in described.bad),
        skipped=tuple(described.sidecars),
        left_out=dict(Counter(f"{name}: {why}" for sample in samples for name, why in sample.left_out)),
        notes=(*_notes(samples, kinds), *described.notes),
    )


def _notes(samples: Sequence[SampleSource], kinds: Mapping[Kind, int]) -> tuple[str, ...]:
    """Anomalies in words: what the files' readers noted, and more than one kind."""
    notes = Counter(note for sample in samples for note in sample.notes)
    lines = [f"{note} ({plural(count, 'sample')})" for note, count in sorted(notes.items())]
    if len(kinds) > 1:
        lines.append(f"samples of {len(kinds)} kinds: those that are not of the most frequent one are left out")
    return tuple(lines)
