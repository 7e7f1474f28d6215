"""How the sources are now compared with how they were planned: what is new, what changed, what is gone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from hsloader.conversion.plan import file_of
from hsloader.conversion.state import State
from hsloader.errors import SettingsChangedError
from hsloader.formats.discover import Discovery
from hsloader.formats.source import Identity, SampleSource
from hsloader.monitor.words import plural

__all__ = ["UNREAD", "SourceComparison", "source_identity"]

_SHOWN = 8
_MISSING = Identity(0, 0, 0)
UNREAD = _MISSING  # in a plan: nobody looked into this file, so it is another one as soon as somebody can


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
    be gone.  An arrow file is a file of all samples whose masks are in it.
    """

    def __init__(self, state: State, source: str, keep_changed: bool) -> None:
        self._keep_changed = keep_changed
        self._known: dict[str, Identity] = {}
        self._pending: set[str] = set()
        self._kept: set[str] = set()
        self._planned: set[str] = set()  # samples and what was refused
        self._seen: set[str] = set()
        self._changed: dict[str, str] = {}
        self._root = os.path.realpath(source)
        self._rows: dict[str, tuple[str, int, int]] = {}  # arrow file, batch and row of the samples that have one
        self._converted_as: dict[str, set[Identity]] = {}  # arrow files: rows may have been converted of several states
        self._unrecorded = 0  # converted samples whose arrow file no plan has: an older version wrote it
        self._unsure: set[str] = set()  # arrow folders of such samples that are not converted yet
        self._unread: dict[str, list[str]] = {}  # planned samples without a mask that can be read, by the reason
        self._accepted: dict[str, Identity] = {}  # as a replan has seen converted files that had changed
        self.old: dict[str, Identity] = {}  # converted files that changed since, which the dataset keeps as they were
        for plan in state.plans:
            if plan.source != source:
                continue
            self._known.update(plan.files)
            self._accepted.update(plan.accepted)
            self._planned.update(item.name for item in plan.all_refused)
            self._planned.update(sample.name for segment in plan.segments for sample in segment.samples)
            for segment in plan.segments:
                done = state.done(segment.number)
                for sample in segment.samples:
                    if not done:
                        self._count(sample, self._pending)
                    elif sample.name in state.converted:
                        self._count(sample, self._kept)

    def _count(self, sample: SampleSource, where: set[str]) -> None:
        where.add(file_of(sample))
        if sample.arrow is not None:
            where.add(sample.arrow.name)
            self._rows[sample.name] = _row_of(sample)
            if where is self._kept:
                self._converted_as.setdefault(sample.arrow.name, set()).add(sample.arrow.identity)
        elif sample.folder is not None and where is self._kept:
            self._unrecorded += 1
        elif sample.folder is not None:
            self._unsure.add(sample.folder)

    def is_fresh(self, name: str, now: Identity) -> bool:
        """Whether the file called ``name`` is to be planned; notes it if it changed and must not have."""
        self._seen.add(name)
        planned = self._known.get(name)
        if planned is None:
            return True
        if now == planned:
            if self._converted_as.get(name, {now}) != {now}:
                self.old[name] = now  # a replan went on from another state of it
            return False
        if now == _MISSING and name in self._kept and name not in self._pending:
            return False  # gone, like a source that was deleted: its samples are listed
        if name in self._pending or (name in self._kept and not self._may_have_changed(name, now)):
            self._changed[name] = _difference(planned, now)
            return False
        if name in self._kept:
            self.old[name] = now
            return False
        return True

    def _may_have_changed(self, name: str, now: Identity) -> bool:
        """Whether a converted file may be as it is ``now``: this run is a replan, or an earlier one saw it so."""
        return self._keep_changed or self._accepted.get(name) == now

    def is_fresh_unread(self, name: str, reason: str) -> bool:
        """``is_fresh`` of a file of hidden states whose arrow dataset cannot be read: it is told by its name alone."""
        self._seen.add(name)
        if name in self._pending:
            self._unread.setdefault(reason, []).append(name)
        return name not in self._kept and name not in self._pending and self._known.get(name) != UNREAD

    def is_fresh_sample(self, sample: SampleSource) -> bool:
        """``is_fresh`` of a described sample's file; notes it, too, if its mask is in another row than was planned."""
        name = file_of(sample)
        if self.is_fresh(name, sample.identity):
            return True
        planned = self._rows.get(sample.name)
        if planned is not None and sample.arrow is not None and planned != _row_of(sample):
            if name in self._pending or not self._may_have_changed(name, sample.identity):
                what = f"its mask was planned in {_place_text(planned)}, now it is in {_place_text(_row_of(sample))}"
                self._changed.setdefault(name, what)
            else:
                self.old[name] = sample.identity
        return False

    def was_refused(self, name: str) -> bool:
        """Whether a plan knows the file called ``name``, and nothing in it was converted or is going to be."""
        return name in self._known and name not in self._pending and name not in self._kept

    def fresh_part(self, found: Discovery) -> Discovery:
        """What of ``found`` is to be described: fresh files, and all arrow folders (whose files come to light then)."""
        for name in {arrow for arrow, _, _ in self._rows.values()}:
            now = source_identity(os.path.join(found.src, name))
            if now != _MISSING:
                self.is_fresh(name, now)
        return Discovery(
            found.src,
            files=[f for f in found.files if self.is_fresh(f.name, source_identity(f.path))],
            folders=found.folders,
            sidecars=found.sidecars,
            bad=[
                b
                for b in found.bad
                if self.is_fresh(b.name, source_identity(os.path.join(found.src, b.name)))
                and not self._led_to_a_kept_one(os.path.join(found.src, b.name))
            ],
        )

    def _led_to_a_kept_one(self, path: str) -> bool:
        """Whether this is a link to a file of the source that is converted and gone: discovery took them for one."""
        if not Path(path).is_symlink() or os.path.exists(path):
            return False
        return os.path.relpath(os.path.realpath(path), self._root) in self._kept

    def demand_unchanged(self) -> None:
        """``SettingsChangedError`` with both identities and the remedy if a source is not as it must be.

        To be called when every file that there is was asked about: a planned one that was not is gone.
        """
        if self._unsure:
            raise SettingsChangedError(
                f"the journal's plan is of an older version, which did not record the arrow files of "
                f"{', '.join(sorted(self._unsure)[:_SHOWN])}: whether the masks of the samples that are not converted "
                "yet are still the planned ones cannot be told. Convert to another destination, or say --replan (in "
                "Python replan=True): it keeps every segment that is listed and plans the rest anew"
            )
        gone = dict.fromkeys(sorted(self._pending - self._seen), "it is planned, not converted yet, and gone")
        changed = {**self._changed, **gone}
        if not changed and not self._unread:
            return
        lines = [f"  {name}: {what}" for name, what in list(changed.items())[:_SHOWN]]
        if len(changed) > _SHOWN:
            lines.append(f"  and {len(changed) - _SHOWN:,} more")
        for reason, names in self._unread.items():
            more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            lines.append(f"  {names[0]}{more}: {reason}")
        number = len(changed) + sum(map(len, self._unread.values()))
        raise SettingsChangedError(
            f"{plural(number, 'source file')} {'is' if number == 1 else 'are'} not as planned:\n"
            + "\n".join(lines)
            + "\nPut the files back (a copy counts as another file), convert to another destination, or say --replan "
            "(in Python replan=True): it keeps every segment that is listed (whatever happened to its sources since) "
            "and plans the rest anew"
        )

    def is_gone(self, name: str) -> bool:
        """Whether a sample of an earlier plan lies in a file that is not there any more, or is no sample's file now.

        To be called when every file that there is was asked about.
        """
        return name in self._planned and self._seen.isdisjoint((name, name.rpartition("#")[0]))

    def note(self) -> Sequence[str]:
        """Lines for the report if converted files changed, or may have."""
        lines = []
        if self.old:
            lines.append(
                f"{plural(len(self.old), 'source file')} changed after conversion (for example {min(self.old)}); "
                "the dataset keeps what it has"
            )
        if self._unrecorded:
            lines.append(
                f"{plural(self._unrecorded, 'sample')}: converted by an older version, which did not record their "
                "arrow files: whether their masks changed since cannot be told"
            )
        return lines


def _row_of(sample: SampleSource) -> tuple[str, int, int]:
    """Where a sample's mask is: the arrow file's name, the offset of the batch, the row in it."""
    assert sample.arrow is not None
    assert sample.place is not None
    return (sample.arrow.name, *sample.place[1:])


def _place_text(place: tuple[str, int, int]) -> str:
    name, batch, row = place
    return f"{name} (row {row} of the batch at {batch})"


def _difference(planned: Identity, now: Identity) -> str:
    """What of a file is not as it was planned, each with what it was."""
    if now == _MISSING:
        return "it cannot be looked at any more"
    parts = []
    if now.size != planned.size:
        parts.append(f"{now.size:,} bytes (planned: {planned.size:,})")
    if now.mtime_ns != planned.mtime_ns:
        parts.append(f"modified {_date(now)} (planned: {_date(planned)})")
    if now.inode != planned.inode:
        parts.append(f"another file of that name (inode {now.inode}, planned: {planned.inode})")
    return "now " + ", ".join(parts)


def _date(identity: Identity) -> str:
    """When the file was modified, in local time, with all its digits: two times that differ should look so."""
    seconds, rest = divmod(identity.mtime_ns, 10**9)
    try:
        date = datetime.fromtimestamp(seconds).astimezone()
    except (ValueError, OverflowError, OSError):  # no time that a calendar has
        return f"{identity.mtime_ns} ns"
    return f"{date:%Y-%m-%d %H:%M:%S}.{rest:09d} {date:%z}"
