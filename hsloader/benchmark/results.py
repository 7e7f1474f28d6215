"""What a benchmark gives: one Measurement a line, the Need of a training run, and the report that holds them all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hsloader.reader.options import ReadOptions

__all__ = ["BenchReport", "Measurement", "Need", "Part", "State", "Verdict"]

Part = Literal["disk", "decode", "pipeline", "transfer", "stock"]

# What the page cache held of the bytes before they were read ("mixed" also where the kernel does not tell); "" where no
# file was read.
State = Literal["cold", "warm", "mixed", ""]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One measured rate.

    ``rate``: bytes a second; of the files for ``disk``, of decoded tensors for all other parts.  ``limit``: what the
    same figure could be at most by the other measurements of this run, 0 if nothing says so.  ``settings``: what was
    varied (``block``, ``depth``, ``way``, ``threads``, ``mode``, ``workers`` ...).  ``from_memory``: the bytes were to
    come from the disk and did not.  ``first_seconds``: until the first batch was there.  ``cpu_seconds_a_gb``: of all
    processes that took part, a decoded GB (1e9 bytes).
    """

    part: Part
    name: str
    rate: float
    size: int
    seconds: float
    state: State = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    limit: float = 0.0
    from_memory: bool = False
    first_seconds: float | None = None
    cpu_seconds_a_gb: float | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """The rate as a share of its limit."""
        return self.rate / self.limit if self.limit > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What training needs: decoded bytes a second a GPU, for ``gpus`` GPUs that share this machine's disk and cores."""

    bytes_a_token: int
    tokens_a_second: float
    gpus: int = 1

    @property
    def a_gpu(self) -> float:
        """Decoded bytes a second for one GPU."""
        return self.bytes_a_token * self.tokens_a_second

    @property
    def total(self) -> float:
        """Decoded bytes a second for all of them."""
        return self.a_gpu * self.gpus


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What bounds the run. ``bound``: ``"disk"``, ``"decode"``, ``"transfer"`` or ``"pipeline"``.

    ``deliverable``: decoded bytes a second that this machine can deliver; ``headspace``: over what training needs,
    None if that was not said.
    """

    sentence: str
    bound: str
    deliverable: float
    headspace: float | None
    options: ReadOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """All that one run of ``hsloader.bench`` found.

    ``subject``: what PATH was; ``machine``: what it ran on; ``ratio``: decoded over stored bytes of the dataset
    that was used; ``notes``: what could not be measured, and why.
    """

    path: str
    subject: str
    machine: Mapping[str, Any]
    bytes_a_token: int
    ratio: float
    measurements: Sequence[Measurement]
    need: Need | None
    verdict: Verdict
    notes: Sequence[str]
    seconds: float

    @property
    def options(self) -> ReadOptions:
        """The ``ReadOptions`` that the measurements recommend."""
        return self.verdict.options

    def of(self, part: Part) -> list[Measurement]:
        """The measurements of one part, in the order in which they were made."""
        return [found for found in self.measurements if found.part == part]

    def options_python(self) -> str:
        """The recommended options as a Python expression."""
        chosen = ", ".join(f"{name}={value!r}" for name, value in _set_options(self.options).items())
        return f"hsloader.ReadOptions({chosen})"

    def options_json(self) -> str:
        """The recommended options as a JSON object: the keywords of ``ReadOptions``."""
        return json.dumps(_set_options(self.options))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; rates are bytes a second, sizes bytes."""
        found = {
            "path": self.path,
            "subject": self.subject,
            "machine": dict(self.machine),
            "bytes_a_token": self.bytes_a_token,
            "ratio": self.ratio,
            "measurements": [_measurement(item) for item in self.measurements],
            "need": None,
            "verdict": {
                "sentence": self.verdict.sentence,
                "bound": self.verdict.bound,
                "deliverable": self.verdict.deliverable,
                "headspace": self.verdict.headspace,
            },
            "read_options": _set_options(self.options),
            "read_options_python": self.options_python(),
            "notes": list(self.notes),
            "seconds": self.seconds,
        }
        if self.need is not None:
            found["need"] = {**dataclasses.asdict(self.need), "a_gpu": self.need.a_gpu, "total": self.need.total}
        return found

    def save(self, path: Any) -> None:
        """Write one self-contained HTML page with plots to ``path``; needs ``pip install 'hsloader[report]'``."""
        from hsloader.benchmark.page import write_page

        write_page(self, path)


def _measurement(item: Measurement) -> dict[str, Any]:
    values = {entry.name: getattr(item, entry.name) for entry in dataclasses.fields(item)}
    return {**values, "settings": dict(item.settings), "share": item.share}


def _set_options(options: ReadOptions) -> dict[str, Any]:
    """The options that differ from their default."""
    values = {entry.name: (getattr(options, entry.name), entry.default) for entry in dataclasses.fields(options)}
    return {name: value for name, (value, default) in values.items() if value != default}
