"""Has growing files written to the disk while they grow, so that the fsync of a finished shard finds little left.

On a machine with much memory the kernel keeps gigabytes of written pages; without this, every fsync would stop the
conversion for as long as the disk needs for a whole shard.  Where shards are written past the page cache there is
nothing but the disk's own cache left to flush.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from types import TracebackType

__all__ = ["Flusher"]

_EVERY_SECONDS = 0.25
_FROM_BYTES = 32 << 20


class Flusher:
    """Flushes the files one folder below ``directory`` as they grow. A context manager: a thread lives in it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._flushed: dict[Path, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hsloader-flush", daemon=True)

    def __enter__(self) -> Flusher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            # An error here is one that the writer's own fsync reports too.
            with contextlib.suppress(OSError):
                self._flush()

    def _flush(self) -> None:
        for path in self._directory.glob("*/*"):
            size = path.stat().st_size
            if size - self._flushed.get(path, 0) >= _FROM_BYTES and not self._stop.is_set():
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
                self._flushed[path] = size
