"""``hsloader.bench``: measures what disk, processor and bus give, and says what that means for a training run."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsloader._launch import LaunchUnavailableError
from hsloader.benchmark.decoding import Frames, frames_of, measure_decoding, thread_counts
from hsloader.benchmark.disk import RawData, data_files, measure_disk, plan_disk
from hsloader.benchmark.machine import describe_machine
from hsloader.benchmark.pipeline import Batches, drop_dataset, make_batches, measure_pipeline
from hsloader.benchmark.residency import is_told
from hsloader.benchmark.results import BenchReport, Measurement, Need
from hsloader.benchmark.samples import copy_files, synthetic_dataset
from hsloader.benchmark.scratch import ScratchFile, ScratchFolder, free_bytes, scratch_place, writable
from hsloader.benchmark.stock import measure_stock
from hsloader.benchmark.timing import Deadline
from hsloader.benchmark.transfer import gpu_problem, measure_pipeline_to_gpu, measure_transfer
from hsloader.benchmark.verdict import judge, rates_of, recommend, with_limits
from hsloader.conversion.api import convert
from hsloader.errors import HsloaderError
from hsloader.formats.discover import discover
from hsloader.reader.choices import usual_slots
from hsloader.reader.limits import cpu_share, memory_available, memory_total
from hsloader.reader.modes import file_system, supports_direct
from hsloader.reader.options import Mode, ReadOptions
from hsloader.store.dataset import Dataset, open_dataset
from hsloader.store.manifest import MANIFEST_NAME

__all__ = ["BenchProgress", "bench"]

_MIB = 1 << 20
_BATCH_BYTES = 128 * _MIB  # of a batch whose size nobody said
_BATCHES = 12  # at least, of one measurement of the pipeline, where there are so many samples
_FRAME_BYTES = 48 * _MIB
_LEAST_SCRATCH = 16 * _MIB
_RATIO = 1.45  # of bf16 states, before any was seen
_TOKENS = 1024  # of a synthetic sample
_MOST_THREADS = 256  # that ReadOptions takes
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # the latter while free_bytes says that there is plenty
_TORCH_FILES = (".pt", ".pth", ".ckpt")  # what the stock way can load


@dataclass(frozen=True, slots=True)
class BenchProgress:
    """Where a benchmark stands: ``elapsed`` of ``seconds``, and what it measures now."""

    part: str
    name: str
    elapsed: float
    seconds: float


def bench(
    path: str | os.PathLike[str],
    *,
    tokens_per_second: float | None = None,
    step_ms: float | None = None,
    tokens_per_step: int | None = None,
    gpus: int = 1,
    seconds: float = 30.0,
    scratch_bytes: int = 1 << 30,
    threads: int | None = None,
    hidden_size: int = 7168,
    drop_cache: bool = False,
    progress: Callable[[BenchProgress], None] | None = None,
) -> BenchReport:
    """Measure the disk at ``path``, decoding, the pipeline, copies to the GPU; say what bounds a training run.

    ``path`` is a dataset (its samples are read), a folder of producers' files (some are copied to scratch and loaded
    the stock way, converted and read), or a folder that can be written (synthetic samples of ``hidden_size``).

    What training needs: ``tokens_per_second`` of one GPU, or ``step_ms`` with ``tokens_per_step``; ``gpus`` of them
    share this machine.  ``seconds`` (about) and ``scratch_bytes`` (per kind of scratch, and read from the disk by one
    measurement) bound the run; ``threads`` (1 to 256) bounds the decode threads (default: the cores there are).

    Nothing is left behind: scratch files lie in ``path`` (or beside the producers' files) until the run ends.  Pages
    of the page cache are dropped of scratch files only, and of the dataset's own files if ``drop_cache`` asks for it.
    ``progress`` is called before each measurement.  Raises ``FileNotFoundError``, ``ValueError`` for arguments and for
    a path that is none of the three, ``DatasetError`` for a damaged dataset.
    """
    place = Path(path)
    _above_zero(tokens_per_second=tokens_per_second, step_ms=step_ms, seconds=seconds)
    for name, value, least, most in (
        ("tokens_per_step", tokens_per_step, 1, None),
        ("gpus", gpus, 1, None),
        ("scratch_bytes", scratch_bytes, _LEAST_SCRATCH, None),
        ("threads", threads, 1, _MOST_THREADS),
        ("hidden_size", hidden_size, 1, None),
    ):
        _within(name, value, least, most)
    need_rate = _tokens_a_second(tokens_per_second, step_ms, tokens_per_step)
    if not place.exists():
        raise FileNotFoundError(f"{place}: there is nothing to measure; give a dataset or a folder on the disk")
    with contextlib.ExitStack() as stack:
        run = _Run(
            place,
            seconds,
            scratch_bytes,
            threads=threads or min(cpu_share(1), _MOST_THREADS),
            drop_cache=drop_cache,
            stack=stack,
            progress=progress,
        )
        return run.all(need_rate, tokens_per_step, gpus, hidden_size)


def _above_zero(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: expected a number above 0")


def _within(name: str, value: int | None, least: int, most: int | None) -> None:
    if value is not None and (value < least or (most is not None and value > most)):
        bounds = f"at least {least:,}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}={value}: expected {bounds}")


def _tokens_a_second(rate: float | None, step_ms: float | None, tokens: int | None) -> float | None:
    if rate is not None and step_ms is not None:
        raise ValueError("tokens_per_second and step_ms both say what training needs; give one of them")
    if step_ms is not None:
        if tokens is None:
            raise ValueError("step_ms needs tokens_per_step: the tokens of one step on one GPU")
        rate = tokens / (step_ms / 1e3)
    return rate


class _Run:
    """One benchmark: the steps share the deadline, the notes and what must be cleaned up."""

    def __init__(
        self,
        path: Path,
        seconds: float,
        scratch_bytes: int,
        *,
        threads: int,
        drop_cache: bool,
        stack: contextlib.ExitStack,
        progress: Callable[[BenchProgress], None] | None,
    ) -> None:
        self._path = path
        self._seconds = seconds
        self._most = scratch_bytes
        self._threads = threads
        self._drop_cache = drop_cache
        self._stack = stack
        self._progress = progress
        self._began = time.monotonic()
        self._notes: list[str] = []
        self._found: list[Measurement] = []
        self._ours = False  # whether the dataset is scratch
        self._copies: list[Path] = []

    def all(self, need_rate: float | None, tokens: int | None, gpus: int, hidden_size: int) -> BenchReport:
        """Run every part and judge."""
        files = self._source_files()
        dataset, subject = self._dataset(files, hidden_size)
        bytes_a_token = sum(f.row_bytes for f in dataset.fields.values()) if dataset else 8 * hidden_size
        frames = frames_of(dataset, _FRAME_BYTES) if dataset else None
        ratio = _ratio(dataset, frames)
        self._disk(dataset, files, bytes_a_token, ratio)
        batch = min(_BATCH_BYTES, self._most // 4) if tokens is None else tokens * bytes_a_token
        if frames is not None:
            self._decode(frames, batch)
        if self._copies:
            self._stock()
        if dataset is not None and len(dataset):
            self._pipeline(dataset, batch)
        self._gpu(dataset, batch)
        need = None
        if need_rate is not None:
            need = Need(bytes_a_token=bytes_a_token, tokens_a_second=need_rate, gpus=gpus)
        stored = dataset.manifest.stored_bytes if dataset is not None and not self._ours else None
        rates = rates_of(self._found, ratio, in_memory=stored is not None and stored < 0.8 * memory_total())
        options = recommend(
            self._found,
            rates,
            need,
            batch_bytes=0 if tokens is None else batch,
            memory=memory_available(),
            fallback="auto" if file_system(self._path)[1] else "pread",
        )
        return BenchReport(
            path=str(self._path),
            subject=subject,
            machine=describe_machine(self._path),
            bytes_a_token=bytes_a_token,
            ratio=ratio,
            measurements=with_limits(self._found, rates),
            need=need,
            verdict=judge(rates, need, options),
            notes=self._notes,
            seconds=time.monotonic() - self._began,
        )

    def _tell(self, part: str, name: str) -> None:
        if self._progress is not None:
            self._progress(BenchProgress(part, name, time.monotonic() - self._began, self._seconds))

    def _until(self, share: float) -> Deadline:
        """A deadline at this share of the whole time; a part that comes late still gets a moment."""
        left = share * self._seconds - (time.monotonic() - self._began)
        return Deadline(max(left, 0.05 * self._seconds))

    # What there is to read.

    def _source_files(self) -> list[Path]:
        if (self._path / MANIFEST_NAME).exists():
            return []
        return [Path(file.path) for file in discover(str(self._path)).files if not file.lock]

    def _dataset(self, files: list[Path], hidden_size: int) -> tuple[Dataset | None, str]:
        """The dataset to read, and what PATH is in words."""
        if (self._path / MANIFEST_NAME).exists():
            dataset = self._stack.enter_context(open_dataset(self._path))
            return dataset, f"a dataset of {len(dataset):,} samples, {dataset.manifest.tokens:,} tokens"
        subject = f"a folder of {len(files):,} sample files" if files else "a folder to write to"
        if not files and not writable(self._path):
            raise ValueError(f"{self._path}: no dataset, no sample files, and not a folder that can be written")
        folder = scratch_place(self._path, beside=bool(files))
        if folder is None:
            self._notes.append(
                f"neither {self._path} nor the folder around it can be written, on this disk: no scratch dataset, so "
                "decoding was not measured"
            )
            return None, subject
        if free_bytes(folder) < 4 * self._most:
            self._notes.append(
                f"{folder} has {free_bytes(folder):,} bytes free: under four times the scratch of {self._most:,}; "
                "no scratch dataset was made (give a smaller scratch_bytes)"
            )
            return None, subject
        scratch = self._stack.enter_context(ScratchFolder(folder))
        self._ours = True
        try:
            made = self._scratch_dataset(files, scratch.path, hidden_size)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            scratch.close()
            self._ours, self._copies = False, []
            self._notes.append(
                f"no scratch dataset of {self._most:,} bytes can be written to {folder}: {error.strerror}; decoding "
                "was not measured (give a smaller scratch_bytes)"
            )
            return None, subject
        return self._stack.enter_context(made), subject

    def _scratch_dataset(self, files: list[Path], scratch: Path, hidden_size: int) -> Dataset:
        """A dataset in the folder ``scratch``: some of the files converted, else synthetic samples."""
        made = self._converted(files, scratch) if files else None
        if made is None:
            tokens = max(16, min(_TOKENS, self._most // 16 // (8 * hidden_size)))
            self._tell("scratch", "writing synthetic samples")
            made = synthetic_dataset(
                scratch / "data.hs",
                hidden_size=hidden_size,
                tokens=tokens,
                most=self._most,
                threads=self._threads,
                deadline=self._until(0.15),
            )
            self._notes.append(
                f"decoding and pipeline were measured with synthetic states ({tokens:,} tokens of hidden size "
                f"{hidden_size})"
            )
        return made

    def _converted(self, files: list[Path], scratch: Path) -> Dataset | None:
        """Some files copied to scratch (for the stock way) and converted there; None if they cannot be."""
        self._tell("scratch", "copying sample files")
        (scratch / "files").mkdir()
        self._copies = copy_files(files, scratch / "files", self._most // 2, self._until(0.12))
        if not self._copies:
            self._notes.append(
                f"every sample file is larger than the scratch of {self._most:,} bytes: none was loaded or converted "
                "(give a larger scratch_bytes)"
            )
            return None
        self._tell("scratch", "converting them")
        try:
            convert(scratch / "files", scratch / "data.hs", read_back=False)
            return open_dataset(scratch / "data.hs")
        except HsloaderError as error:
            reason = str(error).splitlines()[0]
            self._notes.append(f"the sample files were not converted: {reason}")
            return None

    # The parts.

    def _disk(self, dataset: Dataset | None, files: list[Path], bytes_a_token: int, ratio: float) -> None:
        length = float(np.median(dataset.lengths)) if dataset is not None and len(dataset) else _TOKENS
        unit = int(length * bytes_a_token / ratio)
        unit = max(4096, min(unit, self._most // 8))
        data = self._raw_data(dataset, files)
        if data is None:
            return
        if data.size < unit:
            unit = max(4096, data.size // 4)
        plans = plan_disk(unit, direct=data.direct)
        tell = lambda name: self._tell("disk", name)  # noqa: E731 - one line beside its only use
        self._found += measure_disk(data, plans, self._until(0.4), most=self._most, progress=tell)
        if any(m.from_memory for m in self._found if m.part == "disk"):
            self._notes.append("some reads that were to come from the disk were served from memory; they are marked")

    def _raw_data(self, dataset: Dataset | None, files: list[Path]) -> RawData | None:
        """The data at PATH where enough of it is on the disk only, else a scratch file."""
        wanted = 8 * self._most
        found: RawData | None = None
        if dataset is not None and not self._ours:
            found = data_files(_shards(dataset), wanted, "the dataset's shards", may_drop=False)
            if found is None and self._drop_cache:
                found = data_files(_shards(dataset), self._most, "the dataset's shards", may_drop=True)
        elif files:
            found = data_files(files, wanted, "the sample files", may_drop=False)
        if found is not None:
            self._stack.callback(found.close)
            return found
        folder = scratch_place(self._path, beside=False)
        if folder is None or free_bytes(folder) < 4 * self._most:
            self._notes.append(
                f"the disk was not measured alone: {self._path} has too few bytes that are not in memory, and a "
                "scratch file cannot be made there"
            )
            return None
        self._tell("disk", "writing a scratch file")
        try:
            with contextlib.ExitStack() as filling:
                scratch = filling.enter_context(ScratchFile(folder))
                scratch.fill(self._most, 0.12 * self._seconds, lambda size: None)
                self._stack.enter_context(filling.pop_all())
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._notes.append(
                f"the disk was not measured alone: a scratch file of {self._most:,} bytes cannot be written to "
                f"{folder}: {error.strerror} (give a smaller scratch_bytes)"
            )
            return None
        return RawData.of(scratch)

    def _decode(self, frames: Frames, batch_bytes: int) -> None:
        tell = lambda name: self._tell("decode", name)  # noqa: E731
        counts = thread_counts(self._threads)
        slots = usual_slots(ReadOptions(), batch_bytes)
        self._found += measure_decoding(frames, counts, self._until(0.48), slots=slots, progress=tell)

    def _stock(self) -> None:
        files = [file for file in self._copies if file.suffix in _TORCH_FILES]
        if not files:
            self._notes.append(f"the stock way was not measured: torch.load reads {', '.join(_TORCH_FILES)}")
            return
        tell = lambda name: self._tell("stock", name)  # noqa: E731
        try:
            self._found += measure_stock(files, self._until(0.72).left, may_drop=True, progress=tell)
        except (OSError, LaunchUnavailableError) as error:
            self._notes.append(f"the stock way was not measured: {str(error).splitlines()[-1]}")

    def _pipeline(self, dataset: Dataset, batch_bytes: int) -> None:
        """Cold in each mode, with samples that no measurement before read; then warm by threads."""
        modes: list[Mode] = ["mmap", "pread"]
        if supports_direct(next(_shards(dataset))):
            modes.append("direct")
        may_drop = self._ours or self._drop_cache
        order = np.random.default_rng(0).permutation(len(dataset)).astype(np.int64)
        groups = [order] * len(modes) if may_drop else _deal(order, len(modes))
        deadline = self._until(0.97)
        counts = thread_counts(self._threads)
        steps = len(modes) + len(counts)
        group = order
        for number, (mode, samples) in enumerate(zip(modes, groups, strict=True)):
            group = self._at_most(dataset, samples)
            if may_drop:
                drop_dataset(dataset)
            seconds = deadline.share(2.5, steps - number)
            self._pipe(dataset, group, batch_bytes, seconds, mode=mode, threads=self._threads)
        first = self._found[-len(modes)]
        if not _cache_is_told(dataset):
            self._notes.append(
                "the dataset belongs to another user, so the kernel does not tell whether its pages are in memory: the "
                "pipeline's lines may be of the disk or of the page cache"
            )
        elif first.state != "cold" and not may_drop:
            self._notes.append(
                "the samples were in the page cache: reading them from the disk was not measured in the pipeline "
                "(drop_cache lets the benchmark drop the dataset's own pages)"
            )
        for number, count in enumerate(counts):
            if deadline.left < 0.1 and number:
                break
            seconds = deadline.share(1.5, len(counts) - number)
            self._pipe(dataset, group, batch_bytes, seconds, mode="mmap", threads=count)

    def _pipe(
        self,
        dataset: Dataset,
        samples: npt.NDArray[np.int64],
        batch_bytes: int,
        seconds: float,
        *,
        mode: Mode,
        threads: int,
    ) -> None:
        name = f"{mode}, {threads} thread{'s' if threads > 1 else ''}"
        self._tell("pipeline", name)
        batches = _batches(dataset, samples, batch_bytes)
        self._found.append(measure_pipeline(dataset, batches, seconds, mode=mode, threads=threads, name=name))

    def _at_most(self, dataset: Dataset, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first samples, as many as decode to twice the scratch bytes (at least one)."""
        width = sum(field.row_bytes for field in dataset.fields.values())
        ends = np.cumsum(dataset.lengths[samples]) * width
        return samples[: max(1, int(np.searchsorted(ends, 2 * self._most)))]

    def _gpu(self, dataset: Dataset | None, batch_bytes: int) -> None:
        problem = gpu_problem()
        if problem:
            self._notes.append(f"transfer was not measured: {problem}")
            return
        tell = lambda name: self._tell("transfer", name)  # noqa: E731
        deadline = self._until(1.0)
        try:
            self._found += measure_transfer(deadline, progress=tell)
            if dataset is not None and len(dataset):
                self._tell("pipeline", "into GPU memory")
                group = self._at_most(dataset, np.arange(len(dataset), dtype=np.int64))
                options = recommend(self._found, rates_of(self._found, 1.0, in_memory=True), None)
                batches = _batches(dataset, group, batch_bytes)
                self._found.append(measure_pipeline_to_gpu(dataset, batches, deadline.share(2.0), options))
        except RuntimeError as error:  # what torch raises where another process has the GPU or its memory
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._notes.append(f"copies to the GPU were not measured to the end: {reason}")


def _shards(dataset: Dataset) -> Iterator[Path]:
    """The shards of the widest field."""
    name = max(dataset.fields.values(), key=lambda field: field.row_bytes).name
    for segment in dataset.segments:
        array = segment.array(name)
        yield from (array.shard_path(shard) for shard in range(array.shards))


def _batches(dataset: Dataset, samples: npt.NDArray[np.int64], batch_bytes: int) -> Batches:
    """Batches of the size that training has, or of less where there would be too few of them."""
    width = sum(field.row_bytes for field in dataset.fields.values())
    size = min(batch_bytes, int(dataset.lengths[samples].sum()) * width // _BATCHES)
    return make_batches(dataset, samples, size)


def _cache_is_told(dataset: Dataset) -> bool:
    with next(_shards(dataset)).open("rb") as shard:
        return is_told(shard.fileno())


def _ratio(dataset: Dataset | None, frames: Frames | None) -> float:
    if dataset is not None and dataset.manifest.stored_bytes:
        return dataset.manifest.raw_bytes / dataset.manifest.stored_bytes
    return frames.ratio if frames is not None else _RATIO


def _deal(order: npt.NDArray[np.int64], groups: int) -> list[npt.NDArray[np.int64]]:
    """The samples in ``groups`` parts without a common one; all get all where there are too few."""
    return np.array_split(order, groups) if len(order) >= groups else [order] * groups
