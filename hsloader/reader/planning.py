"""From the pieces of a batch to the chunks it needs and the byte ranges they lie in. Pure functions of arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsloader.errors import DamageError
from hsloader.store.stored_segment import ArrayInfo

__all__ = ["Cut", "Frame", "Run", "ShardGroup", "gaps", "runs_of", "split_by_array", "split_by_shard"]

# Frames that lie closer than this in a shard are read together: reading the gap costs less than another request ...
_GAP_BYTES = 64 << 10
# ... up to this length: the piece of work of one read and of one decoder.
RUN_BYTES = (4 << 20) - (8 << 10)  # with the ends that O_DIRECT adds, two pages of 2 MiB
# Ranges that lie closer than this may share a page of the page cache.
_NEAR_BYTES = 2 << 20

Ints = npt.NDArray[np.int64]
Pieces = npt.NDArray[np.void]

# A part of a chunk that a batch wants: (first row in the chunk, rows, row of the span, sample).
Cut = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """What a batch wants of one shard of one field: parallel arrays, sorted by chunk.

    Rows ``[source, source + count)`` of chunk ``chunk`` (numbered in the segment) belong at row ``dest`` of the span.
    """

    array: ArrayInfo
    field: int
    segment: int
    shard: int
    chunk: Ints
    source: Ints
    count: Ints
    dest: Ints
    sample: Ints

    def cuts(self) -> list[Cut]:
        """The parallel arrays as a list."""
        columns = (self.source, self.count, self.dest, self.sample)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def where(self, wanted: npt.NDArray[np.bool_]) -> ShardGroup:
        """The part of the group for which ``wanted`` is true."""
        columns = (self.chunk, self.source, self.count, self.dest, self.sample)
        kept = (column[wanted] for column in columns)
        return ShardGroup(self.array, self.field, self.segment, self.shard, *kept)


@dataclass(frozen=True, slots=True)
class Frame:
    """One chunk's frame in a shard, and what is wanted of it."""

    chunk: int
    offset: int
    length: int
    cuts: list[Cut]


@dataclass(frozen=True, slots=True)
class Run:
    """A byte range of a shard with the frames in it, in file order. ``last``: the next one is not near."""

    start: int
    stop: int
    frames: list[Frame]
    last: bool


def split_by_array(wire: Pieces) -> Iterator[tuple[int, int, Pieces]]:
    """The wire pieces by (field, segment)."""
    if not len(wire):
        return
    order = np.lexsort((wire["segment"], wire["field"]))
    wire = wire[order]
    field, segment = wire["field"], wire["segment"]
    edges = np.flatnonzero((field[1:] != field[:-1]) | (segment[1:] != segment[:-1])) + 1
    for part in np.split(wire, edges):
        yield int(part["field"][0]), int(part["segment"][0]), part


def split_by_shard(array: ArrayInfo, field: int, segment: int, pieces: Pieces) -> list[ShardGroup]:
    """The chunks that ``pieces`` (all of one field and segment) need, by shard, in ascending order of chunks."""
    size = array.chunk_rows
    row, rows = pieces["row"], pieces["rows"]
    if int(row.min()) < 0 or int((row + rows).max()) > array.rows:
        raise DamageError(f"{array.directory}: a batch wants rows beyond the segment's {array.rows:,}")
    first = row // size
    spread = (row + rows - 1) // size - first + 1
    piece = np.repeat(np.arange(len(pieces)), spread)
    chunk = first[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(spread) - spread, spread)
    begin = np.maximum(row[piece], chunk * size)
    count = np.minimum((row + rows)[piece], (chunk + 1) * size) - begin
    dest = pieces["dest"][piece] + begin - row[piece]
    order = np.argsort(chunk, kind="stable")
    columns = [column[order] for column in (chunk, begin - chunk * size, count, dest, pieces["sample"][piece])]
    shard = columns[0] // array.shard_chunks
    edges = np.flatnonzero(np.diff(shard)) + 1
    parts = zip(*(np.split(column, edges) for column in columns), strict=True)
    firsts = shard[np.concatenate([[0], edges])]
    return [ShardGroup(array, field, segment, int(number), *part) for number, part in zip(firsts, parts, strict=True)]


def runs_of(group: ShardGroup, index: npt.NDArray[np.uint64]) -> tuple[list[Run], list[Frame]]:
    """The byte ranges to read for ``group``, given its shard's index, in file order; and frames of absurd length."""
    chunks, starts = np.unique(group.chunk, return_index=True)
    places = index[chunks - group.shard * group.array.shard_chunks].astype(np.int64).tolist()
    cuts = group.cuts()
    bounds = [*starts.tolist(), len(cuts)]
    frames = [
        Frame(chunk, offset, length, cuts[bounds[i] : bounds[i + 1]])
        for i, (chunk, (offset, length)) in enumerate(zip(chunks.tolist(), places, strict=True))
    ]
    longest = group.array.codec.max_frame_bytes
    absurd = [frame for frame in frames if frame.length > longest]
    frames = sorted((frame for frame in frames if frame.length <= longest), key=lambda frame: frame.offset)
    groups: list[list[Frame]] = []
    for frame in frames:
        held = groups[-1] if groups else []
        if (
            not held
            or frame.offset - (held[-1].offset + held[-1].length) > _GAP_BYTES
            or frame.offset + frame.length - held[0].offset > RUN_BYTES
        ):
            groups.append([frame])
        else:
            held.append(frame)
    ends = [(held[0].offset, held[-1].offset + held[-1].length) for held in groups]
    following = [start for start, _ in ends[1:]] + [1 << 62]
    runs = [
        Run(start, stop, held, later - stop > _NEAR_BYTES)
        for (start, stop), held, later in zip(ends, groups, following, strict=True)
    ]
    return runs, absurd


def gaps(wire: Pieces, rows: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """The (field, first row, last row + 1) of the spans that no piece covers. ``wire`` is sorted by (field, dest)."""
    found: list[tuple[int, int, int]] = []
    edges = np.searchsorted(wire["field"], np.arange(len(rows) + 1))
    for field, total in enumerate(rows):
        part = wire[edges[field] : edges[field + 1]]
        begin = np.concatenate([[0], part["dest"] + part["rows"]])
        end = np.concatenate([part["dest"], [total]])
        open_ones = np.flatnonzero(end > begin)
        found += [(field, int(begin[i]), int(end[i])) for i in open_ones]
    return found
