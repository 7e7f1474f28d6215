"""``delete_source``: removes a source file when, and only when, the dataset holds everything that was in it.

A file goes if every sample in it is in a listed segment that was read back equal, no field of it was left out, it is
reached without a link, and it is still the file that was read.  All others stay, and the report says why.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping

from hsloader.conversion.plan import Plan, PlannedSegment, file_of
from hsloader.conversion.report import Deleted
from hsloader.formats.discover import Skipped
from hsloader.formats.source import Identity

__all__ = ["SourceRemover"]

_CHANGED = "it changed since it was read"


class SourceRemover:
    """Removes the source files of one plan as its segments become listed."""

    def __init__(self, plan: Plan) -> None:
        self._root = plan.root
        self._files: Mapping[str, Identity] = plan.files
        self._waiting = Counter(file_of(s) for segment in plan.segments for s in segment.samples)
        self._kept: dict[str, str] = {}
        self._removed = 0
        self._bytes = 0
        for item in plan.all_refused:
            name = item.name if item.name in plan.files else item.name.rpartition("#")[0]
            self._keep(name, "a sample in it was quarantined")
        for segment in plan.segments:
            for sample in segment.samples:
                if sample.left_out:
                    self._keep(file_of(sample), f"field {sample.left_out[0][0]} was left out")

    @property
    def deleted(self) -> Deleted:
        """What was removed so far, and what stays."""
        there = (item for item in sorted(self._kept.items()) if os.path.lexists(os.path.join(self._root, item[0])))
        kept = tuple(Skipped(name, why) for name, why in there)
        return Deleted(self._removed, self._bytes, kept)

    def listed(self, segment: PlannedSegment, quarantined: Iterable[str], proved: bool) -> None:
        """A segment is in the durable manifest: remove the files that have nothing left to wait for."""
        bad = set(quarantined)
        done: list[str] = []
        for sample in segment.samples:
            name = file_of(sample)
            self._waiting[name] -= 1
            if sample.name in bad:
                self._keep(name, "a sample in it was quarantined")
            elif not proved:
                self._keep(name, "its segment was listed without a read-back")
            if self._waiting[name] == 0:
                done.append(name)
        for name in done:
            if name not in self._kept:
                self._remove(name)

    def _keep(self, name: str, why: str) -> None:
        if name in self._files:
            self._kept.setdefault(name, why)

    def _remove(self, name: str) -> None:
        path = os.path.join(self._root, name)
        real = os.path.realpath(self._root)
        if os.path.realpath(path) != os.path.join(real, name):
            self._keep(name, "it is reached through a link")
            return
        try:
            found = Identity.of(os.lstat(path))
        except FileNotFoundError:
            return  # removed by an earlier run
        except OSError as error:
            self._keep(name, f"it cannot be looked at: {error.strerror}")
            return
        if found != self._files[name]:
            self._keep(name, _CHANGED)
            return
        try:
            left = _unlink_if(path, found)
        except FileNotFoundError:
            return
        except OSError as error:
            self._keep(name, f"it cannot be removed: {error.strerror}")
            return
        if left is not None:
            self._keep(name, left)
            return
        self._removed += 1
        self._bytes += found.size


def _unlink_if(path: str, expected: Identity) -> str | None:
    """Remove the file unless another one is there by now; then that one stays, and the reason is returned.

    A producer may put another file of this name there between a look and an unlink.  So the file first gets a name that
    nobody else knows, and is looked at under that.
    """
    hidden = os.path.join(os.path.split(path)[0], f".hsloader-delete-{os.urandom(8).hex()}")
    os.rename(path, hidden)  # noqa: PTH104 - names may hold what Path would normalise
    try:
        if Identity.of(os.lstat(hidden)) == expected:
            os.unlink(hidden)  # noqa: PTH108
            return None
    except OSError:
        _put_back(hidden, path)
        raise
    if _put_back(hidden, path):
        return _CHANGED
    return f"{_CHANGED}, twice while it was to be removed; what was there in between is now {hidden}"


def _put_back(hidden: str, path: str) -> bool:
    """Give a file its name again, unless that is taken by now."""
    try:
        os.link(hidden, path, follow_symlinks=False)  # unlike a rename, it replaces nothing
    except OSError:
        if os.path.lexists(path):
            return False
        os.rename(hidden, path)  # noqa: PTH104 - a file system without hard links
        return True
    os.unlink(hidden)  # noqa: PTH108
    return True
