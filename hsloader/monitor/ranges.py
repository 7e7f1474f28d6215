"""Named ranges around the stages of ``next()``, for a profiler such as Nsight Systems, when they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["mark_stages", "stage"]

# A profiler sees a whole process, so this is the process's, not a loader's.
_push: Callable[[str], object] | None = None
_pop: Callable[[], object] | None = None


def mark_stages(push: Callable[[str], object] | None, pop: Callable[[], object] | None) -> None:
    """Have every ``stage`` of this process call ``push(name)`` and ``pop()`` (torch.cuda.nvtx has both); None: stop."""
    global _push, _pop
    _push, _pop = push, pop


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """The range ``hsloader.NAME``; costs well under a microsecond while nobody asked for ranges."""
    push, pop = _push, _pop
    if push is None or pop is None:
        yield
        return
    push(f"hsloader.{name}")
    try:
        yield
    finally:
        pop()
