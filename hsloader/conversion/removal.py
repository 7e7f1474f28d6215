"""``delete_source``: removes a source file when, and only when, the dataset holds everything that was in it.

A file goes if every sample in it is in a listed segment that was read back equal, no field of it was left out, it is
reached without a link, and it is still the file that was read.  All others stay, and the report says why.

While a file is removed it is called ``.hsloader-delete-{16 hex digits}-{its name}`` (without the name where that would
be too long).  What a kill leaves under such a name, ``finish_interrupted`` of a later run looks at.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hsloader.conversion.plan import Plan, PlannedSegment, file_of
from hsloader.conversion.report import Deleted
from hsloader.formats.discover import REMOVING, Skipped
from hsloader.formats.source import Identity

__all__ = ["SourceRemover", "finish_interrupted"]

_CHANGED = "it changed since it was read"
_HIDDEN = re.compile(re.escape(REMOVING) + r"[0-9a-f]{16}(?:-(.+))?\Z", re.DOTALL)
_NAME_BYTES = 255  # of a file's name on Linux


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

    def hidden_file(self, hidden: str) -> str | None:
        """The file of this plan that was called ``hidden`` for its removal; ``None`` if it is none of them."""
        folder, base = os.path.split(hidden)
        match = _HIDDEN.match(base)
        path = os.path.join(self._root, hidden)
        if match is None or os.path.realpath(path) != os.path.join(os.path.realpath(self._root), hidden):
            return None
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            return None
        if match[1] is not None:
            name = os.path.join(folder, match[1])
            return name if name in self._files else None
        same = (n for n, planned in self._files.items() if planned == Identity.of(found))
        return next((n for n in same if os.path.split(n)[0] == folder), None)

    def remove_hidden(self, hidden: str, name: str) -> bool:
        """Remove what is left of the file ``name`` as ``hidden``, if all of it is proved to be in the dataset."""
        path = os.path.join(self._root, hidden)
        found = Identity.of(os.lstat(path))
        if found != self._files[name] or name in self._kept or self._waiting.get(name) != 0:
            return False
        os.unlink(path)  # noqa: PTH108 - names may hold what Path would normalise
        self._removed += 1
        self._bytes += found.size
        return True

    def restore_hidden(self, hidden: str, name: str) -> None:
        """Give ``hidden`` its name again; where that is taken, say so."""
        if _put_back(os.path.join(self._root, hidden), os.path.join(self._root, name)):
            self._kept.setdefault(name, "an interrupted run had hidden it to remove it; it has its name again")
        else:
            self.keep_hidden(hidden, f"an interrupted run hid it to remove it, and another file is called {name} now")

    def keep_hidden(self, hidden: str, why: str) -> None:
        """Report a hidden file that stays."""
        self._kept[hidden] = why

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


def finish_interrupted(removers: Sequence[SourceRemover], found: Iterable[str]) -> None:
    """Finish what a kill left in the middle of a removal; ``found``: names below SRC, of which others are ignored.

    To be called when the removers were told of all segments that are done.  What a plan proves to be in the dataset is
    removed; any other file of a plan gets its name again.  What no plan here knows is another conversion's, and stays.
    """
    for hidden in found:
        if not os.path.split(hidden)[1].startswith(REMOVING):
            continue
        ours: list[tuple[SourceRemover, str]] = []
        try:
            ours = [(r, name) for r in removers if (name := r.hidden_file(hidden)) is not None]
            if ours and not any(remover.remove_hidden(hidden, name) for remover, name in ours):
                remover, name = ours[-1]
                remover.restore_hidden(hidden, name)
        except FileNotFoundError:
            continue  # whoever hid it goes on
        except OSError as error:
            if ours:
                ours[-1][0].keep_hidden(hidden, f"it cannot be removed or renamed: {error.strerror}")


def _unlink_if(path: str, expected: Identity) -> str | None:
    """Remove the file unless another one is there by now; then that one stays, and the reason is returned.

    A producer may put another file of this name there between a look and an unlink.  So the file first gets a name that
    nobody else knows, and is looked at under that.
    """
    folder, base = os.path.split(path)
    made = f"{REMOVING}{os.urandom(8).hex()}"
    hidden = os.path.join(folder, f"{made}-{base}" if len(os.fsencode(f"{made}-{base}")) <= _NAME_BYTES else made)
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
            if not os.path.samestat(os.lstat(hidden), os.lstat(path)):
                return False
            os.unlink(hidden)  # noqa: PTH108 - killed once between these two names
            return True
        os.rename(hidden, path)  # noqa: PTH104 - a file system without hard links
        return True
    os.unlink(hidden)  # noqa: PTH108
    return True
