"""What a conversion says: the plan before, progress during, the report after. Plain records; nothing here prints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hsloader.conversion.fp8 import Loss
from hsloader.formats.discover import Skipped

__all__ = [
    "ConversionReport",
    "Deleted",
    "Loss",
    "PlanSummary",
    "Progress",
    "ProgressCallback",
    "Quarantined",
    "Skipped",
]


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A sample or file that did not come out: its name (path below SRC, ``#row`` in containers) and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """What ``delete_source`` did: files and bytes removed, and the files that stay with the reason for each."""

    files: int = 0
    bytes: int = 0
    kept: tuple[Skipped, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run stands. ``stage``: ``"find"``, ``"describe"``, ``"measure"``, ``"convert"`` or ``"finish"``.

    ``done`` and ``total`` count files while describing and raw bytes while converting (``total`` 0: not known);
    ``rate`` is raw bytes a second of this run, ``seconds_left`` the estimate from it (None: not known yet).
    """

    stage: str
    done: int = 0
    total: int = 0
    samples: int = 0
    quarantined: int = 0
    segments: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    seconds_left: float | None = None
    note: str = ""


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """What a run is going to do; ``dry_run=True`` stops here.

    Bytes: ``source_bytes`` the files, ``raw_bytes`` the values in them, ``predicted_bytes`` what will be stored,
    ``space_needed`` what must be free at ``dst`` (``space_free`` is).  ``seconds`` is the estimate at the rate measured
    on this machine (None: nothing to convert).  ``samples`` are those still to convert, ``present`` those that are
    listed already.
    """

    source: str
    destination: str
    layouts: Mapping[str, int]
    fields: tuple[str, ...]
    samples: int
    present: int
    tokens: int
    shortest: int
    median: int
    longest: int
    files: int
    source_bytes: int
    raw_bytes: int
    predicted_bytes: int
    space_needed: int
    space_free: int
    ratio: float
    seconds: float | None
    segments: int
    workers: int
    threads: int
    norm_state: str
    layer_ids: tuple[int, ...] | None
    quarantined: tuple[Quarantined, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionReport:
    """What became of every sample that was found; ``samples_found == converted + present + len(quarantined)``.

    ``converted`` in this run, ``present`` from earlier ones.  ``raw_bytes`` and ``stored_bytes`` are this run's,
    ``seconds`` its wall time.  ``zero_state_samples`` have a token whose state is all zero, ``unsupervised_samples``
    have a mask without a supervised token; both are in the dataset.  ``left_out`` counts samples by field that stays
    behind ("name: reason"), ``notes`` are anomalies in words.  ``loss``: of each field that the codec fp8
    made, over all samples of the dataset.
    """

    source: str
    destination: str
    samples_found: int
    converted: int
    present: int
    quarantined: tuple[Quarantined, ...]
    skipped: tuple[Skipped, ...]
    tokens: int
    segments: int
    source_bytes: int
    raw_bytes: int
    stored_bytes: int
    seconds: float
    read_back: bool
    zero_state_samples: int = 0
    unsupervised_samples: int = 0
    trimmed_samples: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    loss: Mapping[str, Loss] = field(default_factory=dict)
    deleted: Deleted = Deleted()
    fingerprint: str = ""
    plan: PlanSummary | None = None

    @property
    def exit_status(self) -> int:
        """0: every sample is in the dataset.  3: some were quarantined.  (1 and 2 are errors, which are raised.)"""
        return 3 if self.quarantined else 0

    @property
    def ratio(self) -> float:
        """Raw bytes for each stored byte of this run; 0 if it stored nothing."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 0.0

    @property
    def rate(self) -> float:
        """Raw bytes a second of this run."""
        return self.raw_bytes / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> str:
        """The report as one JSON object (names that are no UTF-8 with their surrogates escaped)."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=True)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        made = asdict(self)
        made.update(exit_status=self.exit_status, ratio=self.ratio, rate=self.rate)
        return made
