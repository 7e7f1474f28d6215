"""ReadOptions: how the feeder reads. Everything has a default that suits; all of it is about speed, none about data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Mode", "ReadOptions"]

Mode = Literal["auto", "mmap", "pread", "direct"]

MODES: tuple[str, ...] = get_args(Mode)

_SMALLEST_PREFETCH = 1 << 12
_MOST_THREADS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How a loader reads its dataset.

    threads
        Decode threads of the feeder. None: what the affinity mask, the cgroup quota and the ranks on this node leave.
    io_threads
        Threads that read ahead of the decoders. None: a few for local disks, more for network file systems.
    mode
        ``"mmap"``, ``"pread"``, ``"direct"`` (O_DIRECT), or ``"auto"``, which decides by the file system and logs why.
    prefetch
        Bytes of the ring, the memory that batches are read ahead into. None: four of the largest batches, with many
        cores up to eight while they take less than 1 GiB, at most a quarter of the memory that is available. At least
        three of the largest batches.
    drop_pages
        Whether pages leave the page cache once they are decoded. None: if the dataset does not fit the memory.
    restarts
        How often a feeder that died is started again for the same batch before the loader gives up.
    in_process
        Read with threads of this process instead of a feeder process. The loader does so by itself inside a
        ``torch.utils.data.DataLoader`` worker and where no child can be started; elsewhere it slows the trainer.
    """

    threads: int | None = None
    io_threads: int | None = None
    mode: Mode = "auto"
    prefetch: int | None = None
    drop_pages: bool | None = None
    restarts: int = 3
    in_process: bool = False

    def __post_init__(self) -> None:
        for name in ("threads", "io_threads"):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, 1, _MOST_THREADS)
        _whole("restarts", self.restarts, 0, 1000)
        if self.prefetch is not None:
            _whole("prefetch", self.prefetch, _SMALLEST_PREFETCH, None, " bytes")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r}: expected one of {', '.join(map(repr, MODES))}")
        for name in ("drop_pages", "in_process"):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (value is None and name == "drop_pages")):
                raise TypeError(f"{name}={value!r}: expected True or False")


def _whole(name: str, value: object, least: int, most: int | None, unit: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: expected a whole number{unit and f' of{unit}'}")
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}={value}: expected {bounds}{unit}")
