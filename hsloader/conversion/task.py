"""One segment's work: what a worker is told, what it does, what it answers.

Runs in a worker process or, for a small data set, in the process of the caller.  A sample that cannot be taken is
rolled back and quarantined with its reason; whatever else goes wrong (a full disk, a segment that reads back
differently) ends the task with an error and leaves its directory to be thrown away.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hsloader.conversion.checks import StateCheck, check_ids
from hsloader.conversion.digests import rows_digest
from hsloader.conversion.flusher import Flusher
from hsloader.conversion.fp8 import LossSum, is_encoded
from hsloader.conversion.pipeline import EncodedSample, Pipeline
from hsloader.conversion.readback import Expected, read_back
from hsloader.conversion.report import Quarantined
from hsloader.conversion.slots import Slots
from hsloader.errors import SourceError
from hsloader.formats.source import Hints, OpenSample, SampleSource, open_sample
from hsloader.store.fields import Field
from hsloader.store.layout import RowLayout
from hsloader.store.manifest import SegmentEntry
from hsloader.store.samples import FLAGS, mask_counts
from hsloader.store.segment import SegmentWriter

__all__ = ["SegmentResult", "SegmentTask", "TaskProgress", "convert_segment"]

Bits = np.ndarray[Any, Any]

_REPORT_EVERY = 0.2  # seconds between two words of progress


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentTask:
    """Everything a worker needs to write one segment into ``directory`` (a temporary one, held by the parent).

    ``refused`` are samples that planning found bad, kept in the segment's metadata beside those found now, as is
    ``source``, by which a resumed run recognises its own work.
    """

    number: int
    directory: str
    scratch: str
    fields: tuple[Field, ...]
    layout: RowLayout
    bf16_as: str
    samples: tuple[SampleSource, ...]
    hints: Hints
    refused: tuple[Quarantined, ...] = ()
    source: dict[str, Any] | None = None
    vocab_size: int | None = None
    trim_padding: bool = False
    threads: int = 1
    read_back: bool = True


@dataclass(kw_only=True, slots=True)
class SegmentResult:
    """What became of a segment's samples. ``entry`` is None if none of them came out (nothing is to be listed)."""

    number: int
    entry: SegmentEntry | None = None
    quarantined: list[Quarantined] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """How far a task is: the source's raw bytes converted, raw bytes read back, samples and quarantined ones."""

    converted: int = 0
    read_back: int = 0
    samples: int = 0
    quarantined: int = 0


def convert_segment(
    task: SegmentTask, report: Callable[[TaskProgress], None] | None = None, slots: Slots | None = None
) -> SegmentResult:
    """Convert the samples of ``task`` into its directory, seal the segment, read it back.

    ``slots``: memory that is kept between the segments of a process.
    """
    return _Conversion(task, report or (lambda _: None), slots or Slots()).run()


class _Conversion:
    def __init__(self, task: SegmentTask, report: Callable[[TaskProgress], None], slots: Slots) -> None:
        self._task = task
        self._report = report
        self._slots = slots
        self._result = SegmentResult(number=task.number)
        self._reasons: dict[str, str] = {}
        self._losses = {f.name: LossSum() for f in task.fields if is_encoded(f)}
        self._scales = {f.name: f.scale for f in task.fields if f.scale is not None and is_encoded(f)}
        self._expected: list[Expected] = []
        self._progress = TaskProgress()
        self._told = 0.0
        self._states = [f for f in task.fields if not f.is_token_field]
        self._token_dtypes = {f.name: f.dtype for f in task.fields if f.is_token_field}
        self._token_checks = {
            f.name: StateCheck(f.dtype, f.type.bits) for f in task.fields if f.is_token_field and f.type.is_float
        }

    def run(self) -> SegmentResult:
        task, result = self._task, self._result
        began = time.monotonic()
        directory = Path(task.directory)
        if not directory.is_dir():
            raise FileNotFoundError(f"{directory}: the directory to write to is gone")
        with SegmentWriter(directory, task.fields, task.layout, bf16_as=task.bf16_as) as writer:
            with (
                Flusher(directory),
                Pipeline(writer, self._states, task.threads, digest=task.read_back, slots=self._slots) as pipeline,
            ):
                for sample in task.samples:
                    self._feed(writer, pipeline, sample)
            # In the order of the plan: samples are settled in an order that depends on the number of threads.
            found = (Quarantined(s.name, self._reasons[s.name]) for s in task.samples if s.name in self._reasons)
            result.quarantined = [*task.refused, *found]
            if writer.samples:
                result.entry = writer.seal(
                    [{"name": q.name, "reason": q.reason} for q in result.quarantined], self._source()
                )
        result.seconds["convert"] = time.monotonic() - began
        if result.entry is not None and task.read_back:
            began = time.monotonic()
            read_back(directory, result.entry, self._expected, task.threads, self._count_read_back)
            result.seconds["read_back"] = time.monotonic() - began
        self._report(self._progress)
        return result

    def _source(self) -> dict[str, Any] | None:
        """What the segment's metadata keeps: the task's mark, and the loss of fields made fp8."""
        if not self._losses:
            return self._task.source
        return {**(self._task.source or {}), "loss": {name: asdict(s.loss()) for name, s in self._losses.items()}}

    def _feed(self, writer: SegmentWriter, pipeline: Pipeline, sample: SampleSource) -> None:
        """Read one sample into the pipeline; what is wrong with it is known at its end at the latest."""
        try:
            opened = open_sample(sample, scratch=self._task.scratch, hints=self._task.hints)
        except SourceError as error:
            self._quarantine(sample, error.reason)
            return
        with opened:
            try:
                tokens, length = self._tokens(opened, sample)
            except SourceError as error:
                self._quarantine(sample, error.reason)
                return
            pipeline.begin(sample.name, length)
            reason: str | None = None
            extras: dict[str, object] = {}
            try:
                for state in self._states:
                    for start, stop in writer.chunks(state.name, length):
                        parts = opened.rows(state.name, start, stop, pipeline.buffer())
                        pipeline.put(state.name, start, parts)
                extras = opened.extras()
                opened.finish()
            except SourceError as error:
                reason = error.reason
        taken = _Taken(sample, tokens, extras, trimmed=length < sample.length)
        pipeline.end(lambda encoded: self._settle(writer, taken, encoded, reason))

    def _tokens(self, opened: OpenSample, sample: SampleSource) -> tuple[dict[str, Bits], int]:
        """The token fields, checked, and the tokens to keep; ``SourceError`` says what is wrong with them."""
        if sample.length < 1:
            raise SourceError(sample.name, "the sample is empty: 0 tokens")
        tokens: dict[str, Bits] = dict(opened.tokens(self._token_dtypes))
        length = sample.length
        if self._task.trim_padding:
            length = length_without_padding(tokens, length)
            if not length:
                raise SourceError(sample.name, "empty: every token is padding (id 0, mask 0)")
            tokens = {name: bits[:length] for name, bits in tokens.items()}
        if "input_ids" in tokens and tokens["input_ids"].ndim == 1:
            problem = check_ids(tokens["input_ids"], self._task.vocab_size)
            if problem is not None:
                raise SourceError(sample.name, problem)
        return tokens, length

    def _settle(self, writer: SegmentWriter, taken: _Taken, encoded: EncodedSample, reason: str | None) -> None:
        """All chunks of the sample are written: commit it, or roll it back with the reason."""
        for name, check in self._token_checks.items():
            if name in taken.tokens:
                encoded.count(name, 0, check([taken.tokens[name].reshape(encoded.length, -1)]))
        reason = reason or encoded.problem()
        if reason is not None:
            writer.rollback()
            self._quarantine(taken.source, reason)
            return
        tokens = {**taken.tokens, **{self._scales[name]: scales for name, scales in encoded.scales.items()}}
        mask = tokens.get("loss_mask")
        loss_tokens, first_supervised = (-1, -1) if mask is None else mask_counts(mask, self._token_dtypes["loss_mask"])
        flags = FLAGS["all_zero_states"] * bool(encoded.zero_rows) | FLAGS["trimmed"] * taken.trimmed
        extras: dict[str, Any] = dict(taken.extras)
        try:
            writer.commit(
                tokens,
                loss_tokens=loss_tokens,
                first_supervised=first_supervised,
                flags=flags,
                extras=extras,
            )
        except ValueError as error:
            writer.rollback()
            self._quarantine(taken.source, str(error))
            return
        self._advance(taken.source.payload_bytes, samples=1)
        for name, loss in encoded.losses.items():
            self._losses[name].add(loss)
        if self._task.read_back:
            digests = {name: rows_digest([bits.reshape(len(bits), -1)]) for name, bits in tokens.items()}
            stored = json.loads(json.dumps(extras))
            self._expected.append(
                Expected(encoded.name, encoded.length, encoded.digests, encoded.widths, digests, stored)
            )

    def _quarantine(self, sample: SampleSource, reason: str) -> None:
        self._reasons[sample.name] = reason
        self._advance(sample.payload_bytes, quarantined=1)

    def _advance(self, converted: int, *, samples: int = 0, quarantined: int = 0) -> None:
        now = self._progress
        self._progress = replace(
            now,
            converted=now.converted + converted,
            samples=now.samples + samples,
            quarantined=now.quarantined + quarantined,
        )
        self._tell()

    def _count_read_back(self, size: int) -> None:
        self._progress = replace(self._progress, read_back=self._progress.read_back + size)
        self._tell()

    def _tell(self) -> None:
        if time.monotonic() - self._told >= _REPORT_EVERY:
            self._told = time.monotonic()
            self._report(self._progress)


@dataclass(frozen=True, slots=True)
class _Taken:
    """What was read of a sample besides its states."""

    source: SampleSource
    tokens: Mapping[str, Bits]
    extras: Mapping[str, object]
    trimmed: bool


def length_without_padding(tokens: Mapping[str, Bits], length: int) -> int:
    """The tokens before the padding that a producer's batches leave behind a sample: ids 0 and mask 0.

    One such token alone may be a real one (0 is a token of some vocabularies), so at least two are padding.
    """
    ids, mask = tokens.get("input_ids"), tokens.get("loss_mask")
    if ids is None or mask is None or ids.ndim != 1 or mask.ndim != 1:
        return length
    real = np.flatnonzero((ids != 0) | (mask != 0))
    end = int(real[-1]) + 1 if len(real) else 0
    return end if length - end >= 2 else length
