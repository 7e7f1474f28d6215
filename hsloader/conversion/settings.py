"""What a conversion is asked to do: one frozen, keyword-only record, and the part of it that decides the bytes."""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

__all__ = ["ConvertSettings", "cores"]

_SEGMENT_BYTES = 8 << 30
_SEGMENTS_AT_MOST = 4096  # a segment is at least total / 4096, so that opening a dataset stays quick
# A worker converts a segment at a time, so a smaller source is cut for the cores to share, and whatever the machine, so
# that the same source gives the same bytes.
_SEGMENTS_OF_SMALL = 16
_SMALL_SEGMENT = 256 << 20
_SMALLEST_SEGMENT = 1 << 20

_CODECS = ("lossless", "none", "fp8")
_BF16 = ("bfloat16", "uint16")
_NORM_STATES = ("pre", "post", "unknown")

# These change how fast a run is, what it proves or what it leaves behind, but not one byte of the segments.
_NOT_IN_THE_BYTES = frozenset({"workers", "threads", "delete_source", "read_back", "append", "allow_unknown", "replan"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertSettings:
    """Settings of one conversion; ``hsloader.convert`` documents each."""

    codec: str = "lossless"
    bf16_as: str = "bfloat16"
    segment_size: int | None = None
    typical_length: int | None = None
    trim_padding: bool = False
    producer: str | None = None
    model: str | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    layer_ids: tuple[int, ...] | None = None
    layer_convention: str | None = None
    norm_state: str | None = None
    vocab_size: int | None = None
    tokenizer: str | None = None
    notes: tuple[str, ...] = ()
    workers: int | None = None
    threads: int | None = None
    read_back: bool = True
    delete_source: bool | Literal["lossy"] = False
    append: bool = False
    allow_unknown: bool = False
    replan: bool = False

    def __post_init__(self) -> None:
        _one_of("codec", self.codec, _CODECS)
        _one_of("bf16_as", self.bf16_as, _BF16)
        if self.norm_state is not None:
            _one_of("norm_state", self.norm_state, _NORM_STATES)
        for name in ("typical_length", "hidden_size", "num_layers", "vocab_size", "workers", "threads"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}; expected a number of at least 1")
        if self.segment_size is not None and self.segment_size < _SMALLEST_SEGMENT:
            raise ValueError(
                f"segment_size is {self.segment_size:,} bytes; expected at least {_SMALLEST_SEGMENT:,} (raw bytes)"
            )
        if self.delete_source not in (False, True, "lossy"):
            raise ValueError(f"delete_source is {self.delete_source!r}; expected False, True or 'lossy'")
        if self.delete_source and not self.read_back:
            raise ValueError("delete_source cannot go with read_back=False: only what was read back equal is removed")
        if self.lossy and self.delete_source and self.delete_source != "lossy":  # 1 is True, too
            what = (
                "codec fp8 rounds the states" if self.codec == "fp8" else "trim_padding leaves rows of the source out"
            )
            raise ValueError(
                f"{what}, so deleting the source cannot be undone; ask for it as delete_source='lossy', or leave "
                "delete_source out"
            )

    @classmethod
    def of(cls, *, layer_ids: Sequence[int] | None = None, notes: Sequence[str] = (), **rest: Any) -> ConvertSettings:
        """The settings with sequences as tuples; ``TypeError`` for an unknown setting, layers that are no integers."""
        known = sorted(field.name for field in fields(cls))
        for name in rest:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}=?" if near else f"there are {', '.join(known)}"
                raise TypeError(f"there is no keyword {name}=: {hint}")
        if isinstance(notes, str):
            raise TypeError(f"notes is {notes!r}; expected a list of texts")
        try:
            ids = None if layer_ids is None else tuple(operator.index(i) for i in layer_ids)
        except TypeError:
            raise TypeError(f"layer_ids is {layer_ids!r}; expected whole numbers, for example [2, 18, 33]") from None
        return cls(layer_ids=ids, notes=tuple(notes), **rest)

    @property
    def lossy(self) -> bool:
        """Whether something of the source is left out on purpose."""
        return self.trim_padding or self.codec == "fp8"

    def identity(self) -> dict[str, Any]:
        """What decides the bytes of the segments, as JSON values: a rerun must agree in all of it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in sorted(values.items())
            if name not in _NOT_IN_THE_BYTES
        }

    def segment_bytes(self, total: int) -> int:
        """Raw bytes at which a segment closes, for ``total`` raw bytes."""
        if self.segment_size is not None:
            return self.segment_size
        usual = min(_SEGMENT_BYTES, max(_SMALL_SEGMENT, -(-total // _SEGMENTS_OF_SMALL)))
        return max(usual, -(-total // _SEGMENTS_AT_MOST))

    def parallelism(self, segments: int) -> tuple[int, int]:
        """Worker processes and encoder threads in each, for this many segments on the cores that this process has."""
        available = cores()
        workers = min(self.workers or available, max(1, segments))
        threads = self.threads or max(1, available // workers)
        return workers, threads


def cores() -> int:
    """Cores that this process may use: the affinity mask, and the cgroup's quota where there is one."""
    return max(1, min(len(os.sched_getaffinity(0)), _quota()))


def _quota() -> int:
    """Whole cores of the cgroup's CPU quota (version 2, then 1); a large number where there is none."""
    unlimited = 1 << 16
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return unlimited if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):
        pass
    try:
        with open("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") as file:
            quota_us = int(file.read())
        with open("/sys/fs/cgroup/cpu/cpu.cfs_period_us") as file:
            period_us = int(file.read())
        return unlimited if quota_us <= 0 else -(-quota_us // period_us)
    except (OSError, ValueError, ZeroDivisionError):
        return unlimited


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(allowed)}")
