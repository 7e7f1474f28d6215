"""The feeder's pieces of work: plan a batch, open a shard, read a run of frames, decode it, zero what no piece covers.

Each is a small object with ``run(worker)``. Reading threads take them in the order of the batches; what they have
read goes to the decoding threads. Whole chunks decode straight into the batch, cut ones through one chunk of scratch,
token chunks (which hold many samples) into a cache.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from hsloader.errors import DatasetError
from hsloader.reader.access import Buffer, OpenShard, populate_for_writing
from hsloader.reader.batch import Batch
from hsloader.reader.counters import Stage, ThreadCounter
from hsloader.reader.planning import Cut, Frame, Run, ShardGroup, gaps, runs_of, split_by_array, split_by_shard
from hsloader.reader.workers import Shared, Work, Worker
from hsloader.store.codec import FrameError

__all__ = ["Plan"]

Bytes = npt.NDArray[np.uint8]

_FAULT_BYTES = 2 << 20  # short: opening a shard maps it, and waits for whoever is giving pages


class _Step:
    __slots__ = ("batch",)

    def __init__(self, batch: Batch) -> None:
        self.batch = batch


class Plan(_Step):
    """Work out what a batch needs; the first thing done for it."""

    __slots__ = ()

    def run(self, worker: Worker) -> None:
        """See ``Work``."""
        batch, shared = self.batch, worker.shared
        worker.stage(Stage.PLAN, batch)
        if not batch.cancelled:
            rest: list[Work] = [_Fault(batch, *part) for part in _new_pages(shared, batch)]
            batch.fresh = bool(rest)
            filling: list[Work] = [_Zero(batch, *gap) for gap in gaps(batch.wire, batch.rows)]
            groups: list[Work] = []
            for field, segment, pieces in split_by_array(batch.wire):
                try:
                    array = shared.array(segment, field)
                    groups += [_Shard(batch, group) for group in split_by_shard(array, field, segment, pieces)]
                except (DatasetError, OSError) as error:
                    cuts = [(0, int(p["rows"]), int(p["dest"]), int(p["sample"])) for p in pieces]
                    batch.spoil(field, cuts, error, (str(shared.root), -1, -1))
            batch.more(len(filling) + len(groups))
            shared.decodes.put_last(*rest)
            shared.decodes.put(*filling)
            shared.reads.put(*groups)
        worker.finish(batch)


def _new_pages(shared: Shared, batch: Batch) -> list[tuple[int, int]]:
    """The parts of a slot that is used for the first time, to be given pages before somebody pins them.

    Decoders give the pages that they write to by themselves, so the batch does not wait for the whole slot.
    """
    if batch.slot in shared.faulted:
        return []
    shared.faulted.add(batch.slot)
    size = len(batch.memory)
    return [(start, min(size, start + _FAULT_BYTES)) for start in range(0, size, _FAULT_BYTES)]


class _Fault(_Step):
    """Give a part of a slot its pages, when there is nothing else to do; it is not counted as the batch's work."""

    __slots__ = ("start", "stop")

    def __init__(self, batch: Batch, start: int, stop: int) -> None:
        super().__init__(batch)
        self.start = start
        self.stop = stop

    def run(self, worker: Worker) -> None:
        """See ``Work``."""
        worker.stage(Stage.PLAN, self.batch, self.start, self.stop - self.start)
        populate_for_writing(self.batch.memory[self.start : self.stop])


class _Zero(_Step):
    """Zero rows that no piece covers."""

    __slots__ = ("field", "start", "stop")

    def __init__(self, batch: Batch, field: int, start: int, stop: int) -> None:
        super().__init__(batch)
        self.field = field
        self.start = start
        self.stop = stop

    def run(self, worker: Worker) -> None:
        """See ``Work``."""
        worker.stage(Stage.DECODE, self.batch)
        place = self.batch.place(self.field, self.start, self.stop - self.start)
        place[:] = 0
        worker.row[ThreadCounter.ZEROED_BYTES] += len(place)
        worker.finish(self.batch)


class _Shard(_Step):
    """Open a shard, find the byte ranges of its chunks, ask for their reads."""

    __slots__ = ("group",)

    def __init__(self, batch: Batch, group: ShardGroup) -> None:
        super().__init__(batch)
        self.group = group

    def run(self, worker: Worker) -> None:
        """See ``Work``."""
        batch, group, shared = self.batch, self.group, worker.shared
        if not batch.cancelled:
            if group.array.field.is_token_field:
                group = self._from_cache(worker)
            if len(group.chunk):
                begun = worker.stage(Stage.INDEX, batch)
                worker.working_on(group.array, group.shard)
                try:
                    shard = shared.shards.get(group.array, group.shard, shared.segments[group.segment].entry.samples)
                except (DatasetError, OSError) as error:
                    path = str(group.array.shard_path(group.shard))
                    batch.spoil(group.field, group.cuts(), error, (path, -1, -1))
                else:
                    self._ask(worker, shard, group)
                worker.row[ThreadCounter.INDEX_NS] += time.monotonic_ns() - begun
        worker.finish(batch)

    def _ask(self, worker: Worker, shard: OpenShard, group: ShardGroup) -> None:
        shared = worker.shared
        runs, absurd = runs_of(group, shard.index)
        for frame in absurd:
            limit = group.array.codec.max_frame_bytes
            error = FrameError(f"a frame of {frame.length:,} bytes; expected at most {limit:,}")
            self.batch.spoil(group.field, frame.cuts, error, (str(shard.path), frame.chunk, frame.offset))
        self.batch.more(len(runs))
        for run in runs:
            read = _Read(self.batch, group, shard, run)
            data = shared.access.resident(shard, run.start, run.stop)
            if data is None:
                shared.reads.put(read)
            else:
                _count_read(worker, run)
                shared.decodes.put(_Decode(read, data, None))

    def _from_cache(self, worker: Worker) -> ShardGroup:
        """Copy what decoded token chunks hold; the rest of the group."""
        group = self.group
        missing = np.ones(len(group.chunk), np.bool_)
        for chunk in dict.fromkeys(group.chunk.tolist()):  # numpy.unique would first import numpy.ma, for 10 ms
            decoded = worker.shared.tokens.get((group.segment, group.field, chunk))
            if decoded is not None:
                here = group.chunk == chunk
                missing &= ~here
                _copy(self.batch, group.field, decoded, group.where(here).cuts())
                worker.row[ThreadCounter.TOKEN_HITS] += 1
        return group if missing.all() else group.where(missing)


class _Read(_Step):
    """Read a run of frames."""

    __slots__ = ("group", "run_", "shard")

    def __init__(self, batch: Batch, group: ShardGroup, shard: OpenShard, run: Run) -> None:
        super().__init__(batch)
        self.group = group
        self.shard = shard
        self.run_ = run

    def run(self, worker: Worker) -> None:
        """See ``Work``."""
        batch, run, shared, row = self.batch, self.run_, worker.shared, worker.row
        if batch.cancelled:
            worker.finish(batch)
            return
        waited = worker.stage(Stage.BUFFER, batch)
        buffer = shared.buffers.take()
        worker.working_on(self.group.array, self.group.shard)
        begun = worker.stage(Stage.READ, batch, run.start, run.stop - run.start)
        row[ThreadCounter.BUFFER_NS] += begun - waited
        try:
            data = shared.access.read(self.shard, run.start, run.stop, buffer)
        except (DatasetError, OSError) as error:
            shared.buffers.give(buffer)
            shared.shards.forget(self.group.array, self.group.shard)
            for frame in run.frames:
                batch.spoil(self.group.field, frame.cuts, error, (str(self.shard.path), frame.chunk, frame.offset))
            worker.finish(batch)
            return
        except BaseException:
            shared.buffers.give(buffer)
            raise
        _count_read(worker, run)
        row[ThreadCounter.READ_NS] += time.monotonic_ns() - begun
        shared.access.arrived(not len(shared.decodes))
        shared.decodes.put(_Decode(self, data, buffer))


class _Decode(_Step):
    """Check and decode the frames of a run into their places."""

    __slots__ = ("buffer", "data", "read")

    def __init__(self, read: _Read, data: Bytes, buffer: Buffer | None) -> None:
        super().__init__(read.batch)
        self.read = read
        self.data = data
        self.buffer = buffer

    def run(self, worker: Worker) -> None:
        """See ``Work``."""
        batch, read, shared, row = self.batch, self.read, worker.shared, worker.row
        run, group = read.run_, read.group
        decoded = 0
        try:
            if not batch.cancelled:
                worker.working_on(group.array, group.shard)
                begun = worker.stage(Stage.DECODE, batch, run.start, run.stop - run.start)
                if batch.fresh:
                    self._give_pages()
                for frame in run.frames:
                    decoded += self._frame(worker, frame)
                row[ThreadCounter.FRAMES] += len(run.frames)
                row[ThreadCounter.FRAME_BYTES] += sum(frame.length for frame in run.frames)
                row[ThreadCounter.DECODED_BYTES] += decoded
                row[ThreadCounter.DECODE_NS] += time.monotonic_ns() - begun
            if shared.access.drop_pages:
                worker.stage(Stage.DROP, batch, run.start, run.stop - run.start)
                row[ThreadCounter.DROPPED_BYTES] += shared.access.consumed(read.shard, run.start, run.stop, run.last)
        finally:
            if self.buffer is not None:
                shared.buffers.give(self.buffer)
        worker.finish(batch, decoded)

    def _give_pages(self) -> None:
        """Give the run's place its pages, all at once; where its rows lie far apart the kernel gives each by itself."""
        batch, field = self.batch, self.read.group.field
        cuts = [cut for frame in self.read.run_.frames for cut in frame.cuts]
        first = min(dest for _, _, dest, _ in cuts)
        end = max(dest + count for _, count, dest, _ in cuts)
        if end - first <= 2 * sum(count for _, count, _, _ in cuts):
            populate_for_writing(batch.place(field, first, end - first))

    def _frame(self, worker: Worker, frame: Frame) -> int:
        """Decode one frame; the bytes it gave."""
        batch, group = self.batch, self.read.group
        array = group.array
        start = frame.offset - self.read.run_.start
        body = self.data[start : start + frame.length]
        source, count, dest, _ = frame.cuts[0]
        try:
            if count == array.chunk_rows and source == 0 and len(frame.cuts) == 1:
                array.codec.decode(body, batch.place(group.field, dest, count))
                return array.codec.chunk_bytes
            if array.field.is_token_field:
                decoded = np.empty(array.codec.chunk_bytes, np.uint8)
                array.codec.decode(body, decoded)
                worker.shared.tokens.put((group.segment, group.field, frame.chunk), decoded)
            else:
                decoded = worker.scratch(array.codec.chunk_bytes)
                array.codec.decode(body, decoded)
                worker.row[ThreadCounter.CUT_FRAMES] += 1
        except FrameError as error:
            worker.row[ThreadCounter.BAD_FRAMES] += 1
            batch.spoil(group.field, frame.cuts, error, (str(self.read.shard.path), frame.chunk, frame.offset))
            return 0
        _copy(batch, group.field, decoded, frame.cuts)
        return array.codec.chunk_bytes


def _count_read(worker: Worker, run: Run) -> None:
    worker.row[ThreadCounter.READS] += 1
    worker.row[ThreadCounter.READ_BYTES] += run.stop - run.start


def _copy(batch: Batch, field: int, decoded: Bytes, cuts: list[Cut]) -> None:
    """Copy the cuts of a decoded chunk to their places."""
    width = batch.row_bytes[field]
    for source, count, dest, _ in cuts:
        batch.place(field, dest, count)[:] = decoded[source * width : (source + count) * width]
