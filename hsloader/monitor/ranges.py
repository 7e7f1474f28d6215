"""Named ranges around the stages of ``next()``, for a profiler such as Nsight Systems, when they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

__all__ = ["mark_stages", "stage"]

# A profiler sees a whole process, so this is the process's, not a loader's.
_push: Callable[[str], object] | None = None
_pop: Callable[[], object] | None = None


def mark_stages(push: Callable[[str], object] | None, pop: Callable[[], object] | None) -> None:
    """Have every ``stage`` of this process call ``push(name)`` and ``pop()`` (torch.cuda.nvtx has both); None: stop."""
    global _push, _pop
    _push, _pop = push, pop


def stage(name: str) -> contextlib.AbstractContextManager[None]:
    """The range ``hsloader.NAME``; costs well under a microsecond while nobody asked for ranges."""
    push, pop = _push, _pop
    return _NONE if push is None or pop is None else _Range(f"hsloader.{name}", push, pop)


_NONE = contextlib.nullcontext()


class _Range(contextlib.AbstractContextManager[None]):
    def __init__(self, name: str, push: Callable[[str], object], pop: Callable[[], object]) -> None:
        self._name, self._push, self._pop = name, push, pop

    def __enter__(self) -> None:
        self._push(self._name)

    def __exit__(self, *_: object) -> None:
        self._pop()
