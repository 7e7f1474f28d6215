"""How the sources are now compared with how they were planned: what is new, what changed, what is gone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hsloader.conversion.plan import file_of
from hsloader.conversion.state import State
from hsloader.errors import SettingsChangedError
from hsloader.formats.discover import Discovery
from hsloader.formats.source import Identity

__all__ = ["SourceComparison", "source_identity"]

_SHOWN = 8
_MISSING = Identity(0, 0, 0)


def source_identity(path: str | os.PathLike[str]) -> Identity:
    """The file's identity now; all zeros where it cannot be looked at (a dangling link, a file that is not there)."""
    try:
        return Identity.of(Path(path).stat())
    except OSError:
        return _MISSING


class SourceComparison:
    """The files of one source against every plan that a destination has of it.

    A file is *fresh* if no plan knows it, or if it was quarantined and has changed since.  One whose samples are not
    listed yet must be as it was planned, and so must a converted one, unless ``keep_changed``; a converted one may also
    be gone.
    """

    def __init__(self, state: State, source: str, keep_changed: bool) -> None:
        self._keep_changed = keep_changed
        self._known: dict[str, Identity] = {}
        self._pending: set[str] = set()
        self._kept: set[str] = set()
        self._planned: set[str] = set()  # samples and what was refused
        self._seen: set[str] = set()
        self._changed: dict[str, str] = {}
        self.old: set[str] = set()  # converted files that changed since, which the dataset keeps as they were
        for plan in state.plans:
            if plan.source != source:
                continue
            self._known.update(plan.files)
            self._planned.update(item.name for item in plan.all_refused)
            self._planned.update(sample.name for segment in plan.segments for sample in segment.samples)
            for segment in plan.segments:
                done = state.done(segment.number)
                for sample in segment.samples:
                    if not done:
                        self._pending.add(file_of(sample))
                    elif sample.name in state.converted:
                        self._kept.add(file_of(sample))

    def is_fresh(self, name: str, now: Identity) -> bool:
        """Whether the file called ``name`` is to be planned; notes it if it changed and must not have."""
        self._seen.add(name)
        planned = self._known.get(name)
        if planned is None:
            return True
        if now == planned:
            return False
        if now == _MISSING and name in self._kept and name not in self._pending:
            return False  # gone, like a source that was deleted: its samples are listed
        if name in self._pending or (name in self._kept and not self._keep_changed):
            self._changed[name] = f"planned were {_text(planned)}, now it has {_text(now)}"
            return False
        if name in self._kept:
            self.old.add(name)
            return False
        return True

    def fresh_part(self, found: Discovery) -> Discovery:
        """What of ``found`` is to be described: fresh files, and all arrow folders (whose files come to light then)."""
        return Discovery(
            found.src,
            files=[f for f in found.files if self.is_fresh(f.name, source_identity(f.path))],
            folders=found.folders,
            sidecars=found.sidecars,
            bad=[b for b in found.bad if self.is_fresh(b.name, source_identity(os.path.join(found.src, b.name)))],
        )

    def demand_unchanged(self) -> None:
        """``SettingsChangedError`` with both identities and the remedy if a source is not as it must be.

        To be called when every file that there is was asked about: a planned one that was not is gone.
        """
        gone = dict.fromkeys(sorted(self._pending - self._seen), "it is planned, not converted yet, and gone")
        changed = {**self._changed, **gone}
        if not changed:
            return
        lines = [f"  {name}: {what}" for name, what in list(changed.items())[:_SHOWN]]
        if len(changed) > _SHOWN:
            lines.append(f"  and {len(changed) - _SHOWN:,} more")
        raise SettingsChangedError(
            f"{len(changed):,} source files are not as they were when they were planned:\n" + "\n".join(lines) + "\n"
            "Put them back as they were, convert to another destination, or say --replan (in Python replan=True): it "
            "keeps every segment that is listed (whatever happened to its sources since) and plans the rest anew"
        )

    def is_gone(self, name: str) -> bool:
        """Whether a sample of an earlier plan lies in a file that is not there any more, or is no sample's file now.

        To be called when every file that there is was asked about.
        """
        return name in self._planned and self._seen.isdisjoint((name, name.rpartition("#")[0]))

    def note(self) -> Sequence[str]:
        """A line for the report if converted files changed."""
        if not self.old:
            return ()
        return (
            f"{len(self.old):,} source files changed after they were converted (for example {min(self.old)}); the "
            "dataset keeps what it has",
        )


def _text(identity: Identity) -> str:
    return f"{identity.size:,} bytes, mtime {identity.mtime_ns} ns, inode {identity.inode}"
