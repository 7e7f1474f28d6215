"""gzip files of tensors: the plan looks at the beginning only, execution inflates into an unlinked file."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

from hsloader.errors import SourceError
from hsloader.formats.blocks import Block
from hsloader.formats.pickle_globals import PickleError
from hsloader.formats.pickle_reader import MAX_PICKLE, PickleCutError, read_pickle
from hsloader.formats.torch_zip import storage_finder
from hsloader.formats.windows import GzipStream, Window

__all__ = ["claimed_bytes", "inflate", "read_zip_head"]

_DEFLATE_MOST = 1032  # deflate never expands a byte to more
_OVERHEAD = 1 << 20  # bytes that a container may have beside its pickle and payloads ...
_OVERHEAD_BLOCK = 1024  # ... and for each record
_STEP = 1 << 20


def read_zip_head(window: Window, path: str) -> tuple[object, list[Block], int]:
    """The object, the blocks and the end of ``data.pkl`` of a torch archive of which only the beginning is known.

    Sizes of records are what the pickle claims; they are compared with the archive when the file is inflated.
    """
    head = window.first(30)
    if len(head) < 30:
        raise SourceError(path, "truncated: a zip archive inside gzip is shorter than one header")
    _, _, flags, method, _, _, _, packed, size, name_len, extra_len = struct.unpack("<4sHHHHHIIIHH", head)
    start = 30 + name_len + extra_len
    name = window.first(start)[30 : 30 + name_len]
    if not name.endswith(b"data.pkl"):
        raise SourceError(path, f"the zip archive inside gzip does not begin with data.pkl, but with {name[:60]!r}")
    if method or flags & 1 or packed != size:
        raise SourceError(path, "data.pkl inside gzip is compressed or encrypted: not a torch archive")
    blocks: dict[str, Block] = {}

    def find_block(key: str, nbytes: int) -> Block:
        return blocks.setdefault(key, Block(f"data/{key}", nbytes))

    count = 1 << 13
    while True:
        data = window.first(start + count)
        try:
            value, end = read_pickle(data, storage_finder(find_block, 5), start)
            return value, list(blocks.values()), end
        except PickleCutError as error:
            if len(data) < start + count or count >= MAX_PICKLE:
                raise SourceError(path, f"data.pkl: {error}") from None
            count = min(8 * count, MAX_PICKLE)
            blocks.clear()
        except PickleError as error:
            raise SourceError(path, f"data.pkl: {error}") from None


def claimed_bytes(path: str, blocks: list[Block], head: int, packed: int) -> int:
    """The most bytes that the container may inflate to; ``SourceError`` if gzip cannot hold what it claims."""
    payload = sum(block.size for block in blocks)
    if payload > _DEFLATE_MOST * packed + _OVERHEAD:
        raise SourceError(
            path, f"claims {payload} bytes of tensors, more than {packed} bytes of gzip can hold (size, ratio)"
        )
    return head + payload + _OVERHEAD + _OVERHEAD_BLOCK * len(blocks)


def inflate(fd: int, path: str, limit: int, scratch: Path | str | None) -> tuple[int, int]:
    """Inflate into a new file without a name in ``scratch``; returns its descriptor and size.

    More than ``limit`` bytes are a ``SourceError``; a full disk is the ``OSError`` it is.
    """
    target = _unnamed(Path(scratch) if scratch is not None else Path(tempfile.gettempdir()))
    total = 0
    try:
        for piece in GzipStream(fd, path).pieces(_STEP):
            total += len(piece)
            if total > limit:
                raise SourceError(
                    path, f"the gzip stream is larger than the {limit} bytes that its tensors need (size limit)"
                )
            view = memoryview(piece)
            while view:
                view = view[os.write(target, view) :]
    except BaseException:
        os.close(target)
        raise
    return target, total


def _unnamed(folder: Path) -> int:
    """A new file that has no name (or loses it at once, where the file system has no such thing)."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        fd, name = tempfile.mkstemp(dir=folder, prefix=".hsloader-inflate-")
        Path(name).unlink()
        return fd
