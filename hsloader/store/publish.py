"""Publishing: temporary directories with an owner, segments put in their place, the manifest swapped under a lock.

::

    root = Root.create(path)
    number = root.reserve(1)
    with root.temporary() as temporary:              # owned: nobody cleans it while this process lives
        with SegmentWriter(temporary.path, fields, layout) as writer:
            ...
            writer.seal()
        entry = root.place(temporary, number)        # renamed to segments/NNNNNN, not listed yet
        root.append_segments([entry], fields, provenance)

A converter reserves the numbers of its whole plan with ``hold=True``, places segments in any order, and lists them in
the plan's order. A segment that an earlier, killed run placed is recognised with ``placed``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hsloader.errors import DamageError, DatasetError, StoreBusyError
from hsloader.store.compatible import check_compatible, check_fields
from hsloader.store.fields import Field
from hsloader.store.files import fsync_directory, read_limited, replace_file
from hsloader.store.locks import exclusive
from hsloader.store.manifest import (
    FORMAT,
    MANIFEST_NAME,
    Manifest,
    Provenance,
    SegmentEntry,
    read_manifest,
    segment_path,
)
from hsloader.store.owners import TemporaryDirectory, clean_owner, remove_tree
from hsloader.store.packed import remove_stale, write_packed
from hsloader.store.reservations import Numbers, Reservations
from hsloader.store.segment_meta import SegmentMeta
from hsloader.store.zarr_json import group_document, json_bytes

__all__ = ["Root", "TemporaryDirectory"]

LOCK_TIMEOUT = 300.0
LOOSE_SEGMENTS = 64

_PRIVATE = ".hsloader"


class Root:
    """A dataset's directory, for those who write to it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # the working directory may change
        self.private = self.path / _PRIVATE
        self.scratch = self.private / "tmp"
        self._lock_file = self.private / "lock"
        self._reservations = Reservations(self.private / "numbers", self.path / "segments", self.scratch)

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Root:
        """The dataset at ``path``, made if it is not there. Nothing a reader would open exists before ``commit``.

        ``DatasetError`` if ``path`` holds other files.
        """
        root = cls(path)
        if root.path.exists() and not root.private.is_dir() and not (root.path / MANIFEST_NAME).exists():
            if not root.path.is_dir():
                raise DatasetError(f"{root.path}: expected a directory or nothing, found a file")
            others = sorted(entry.name for entry in root.path.iterdir())
            if others:
                raise DatasetError(
                    f"{root.path}: expected an empty directory or an hsloader dataset, found {', '.join(others[:5])}; "
                    "choose another destination"
                )
        root.scratch.mkdir(parents=True, exist_ok=True)
        return root

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Root:
        """The dataset at ``path``, which must have a manifest."""
        root = cls(path)
        read_manifest(root.path)
        root.scratch.mkdir(parents=True, exist_ok=True)
        return root

    def manifest(self) -> Manifest | None:
        """The manifest as it is now; None if nothing has been listed yet."""
        return read_manifest(self.path) if (self.path / MANIFEST_NAME).exists() else None

    @contextlib.contextmanager
    def lock(self, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
        """Hold the manifest's lock: one process and thread at a time; a thread may nest it."""
        with exclusive(self._lock_file, timeout):
            yield

    @contextlib.contextmanager
    def temporary(self) -> Iterator[TemporaryDirectory]:
        """A temporary directory that this process owns until the block ends."""
        with self.lock():  # so that nobody cleans between the owner file's making and its lock
            made = TemporaryDirectory(self.scratch)
        try:
            yield made
        finally:
            made.close()

    def reserve(self, count: int = 1, *, hold: bool = False, first: int | None = None) -> int:
        """Take ``count`` segment numbers that nobody else gets; the first of them is returned.

        ``hold``: ``clean`` leaves segments of these numbers alone until ``release_numbers``.  ``first``: take this
        range again, as a journal recorded it (nothing happens if it is taken already).
        """
        with self.lock():
            numbers = self._reservations.read()
            start = numbers.next if first is None else first
            held = {*numbers.held, (start, count)} if hold else set(numbers.held)
            self._reservations.write(Numbers(max(numbers.next, start + count), tuple(sorted(held))))
        return start

    def next_number(self) -> int:
        """The number that ``reserve`` would return now (hold the lock if that matters)."""
        return self._reservations.read().next

    def release_numbers(self, first: int, count: int, *, unused: bool = False) -> None:
        """End the hold on a range; ``unused`` gives its numbers back if no later ones were taken."""
        with self.lock():
            numbers = self._reservations.read()
            held = tuple(item for item in numbers.held if item != (first, count))
            last = numbers.next == first + count
            self._reservations.write(Numbers(first if unused and last else numbers.next, held))

    def segment_path(self, number: int) -> Path:
        """Where segment ``number`` lies."""
        return self.path / segment_path(number)

    def place(self, temporary: TemporaryDirectory, number: int) -> SegmentEntry:
        """Move a sealed segment to its place, durably. It is not listed yet.

        ``FileExistsError`` if the place is taken: see ``placed`` and ``discard``.
        """
        target = self.segment_path(number)
        with self.lock():
            self._make_groups()
            if os.path.lexists(target):  # a rename onto an empty directory would succeed silently
                raise FileExistsError(f"{target}: segment {number} is already there")
            temporary.note_segment(number)
            try:
                temporary.path.rename(target)
            except OSError:
                # NFS may lose the reply of a rename that was done.
                if temporary.path.exists() or not (target / "zarr.json").exists():
                    raise
            fsync_directory(target.parent)
            fsync_directory(self.scratch)
        placed = self.placed(number)
        if placed is None:
            raise DamageError(f"{target}: the segment vanished after it was put there")
        return placed[0]

    def placed(self, number: int) -> tuple[SegmentEntry, SegmentMeta] | None:
        """The sealed segment that lies at ``number``, listed or not, as the manifest would list it; None if none does.

        Its ``source`` (see ``SegmentWriter.seal``) tells a converter whether it is its own.
        """
        path = self.segment_path(number) / "zarr.json"
        if not path.exists():
            return None
        data = read_limited(path, 1 << 30, "the segment's metadata")
        meta = SegmentMeta.parse(data, path)
        return meta.entry(segment_path(number), data), meta

    def discard(self, number: int) -> None:
        """Delete the segment at ``number``; ``ValueError`` if it is listed."""
        with self.lock():
            manifest = self.manifest()
            name = segment_path(number)
            if manifest is not None and any(entry.path == name for entry in manifest.segments):
                raise ValueError(f"{self.path / name}: the segment is listed; listed segments never change")
            if self.segment_path(number).exists():
                remove_tree(self.segment_path(number), self.scratch)

    def commit(self, expected_fingerprint: str | None, manifest: Manifest) -> None:
        """Make ``manifest`` the dataset's, durably: the only way in.

        ``expected_fingerprint`` is that of the manifest it grew from (None: there was none); ``StoreBusyError`` if it
        is another by now. ``ValueError`` unless ``manifest`` keeps every listed segment.
        """
        with self.lock():
            present = self.manifest()
            found = None if present is None else present.fingerprint
            if found != expected_fingerprint:
                raise StoreBusyError(
                    f"{self.path / MANIFEST_NAME}: expected the manifest {expected_fingerprint}, found {found}: "
                    "somebody else published meanwhile; read it again and retry"
                )
            old = () if present is None else present.segments
            if manifest.segments[: len(old)] != old:
                raise ValueError("a new manifest keeps all listed segments in their order")
            for entry in manifest.segments[len(old) :]:
                placed = self.placed(entry.number)
                if placed is None or placed[0] != entry:
                    raise DamageError(f"{self.path / entry.path}: the segment there is not the one to be listed")
                check_fields(self.path / entry.path, manifest.fields, placed[1].fields)
            self._make_groups()
            replace_file(self.path / MANIFEST_NAME, manifest.to_bytes(), scratch=self.scratch)
            remove_stale(self.path, manifest)

    def append_segments(
        self,
        entries: Sequence[SegmentEntry],
        fields: Sequence[Field],
        provenance: Provenance,
        *,
        allow_unknown: bool = False,
    ) -> Manifest:
        """List placed segments behind those there are, and return the new manifest.

        ``IncompatibleError`` where fields, layers or norm state differ (``allow_unknown``: an unknown one may join).
        """
        with self.lock():
            present = self.manifest()
            if present is None:
                present, expected = Manifest(fields=tuple(fields), provenance=provenance), None
            else:
                check_compatible(self.path, present, fields, provenance, allow_unknown=allow_unknown)
                expected = present.fingerprint
            grown = present.grown(entries)
            if len(grown.segments) - (grown.packed.segments if grown.packed else 0) > LOOSE_SEGMENTS:
                grown = replace(grown, packed=write_packed(self.path, grown, self.scratch))
            self.commit(expected, grown)
        return grown

    def pack(self, *, more_than: int = 8) -> Manifest | None:
        """At the end of a run: renew the packed samples table if it lacks more than ``more_than`` segments.

        The result depends on the listed segments alone, not on the moments at which they were listed.
        """
        with self.lock():
            present = self.manifest()
            if present is None or len(present.segments) <= more_than:
                return present
            if present.packed is None or present.packed.segments < len(present.segments):
                fresh = replace(present, packed=write_packed(self.path, present, self.scratch))
                self.commit(present.fingerprint, fresh)
                return fresh
            return present

    def clean(self, *, older_than: float | None = None) -> list[Path]:
        """Delete what dead writers left, under the lock and only where the owner's lock can be taken.

        Owners on other hosts count as alive, since their locks may not reach here, unless they are older than
        ``older_than`` seconds. Returns what was deleted.
        """
        removed: list[Path] = []
        with self.lock():
            manifest = self.manifest()
            listed = set() if manifest is None else {entry.number for entry in manifest.segments}
            held = [range(first, first + count) for first, count in self._reservations.read().held]

            def may_go(number: int) -> bool:
                return number not in listed and not any(number in numbers for numbers in held)

            for owner in sorted(self.scratch.glob("*.owner")):
                removed += clean_owner(owner, self.segment_path, may_go, older_than)
            for left in sorted(self.scratch.glob("*.swap")):
                left.unlink()
                removed.append(left)
            for left in sorted((*self.scratch.glob("packed-*"), *self.scratch.glob("gone-*"))):
                shutil.rmtree(left)
                removed.append(left)
            if manifest is not None:
                removed += remove_stale(self.path, manifest)
        return removed

    def _make_groups(self) -> None:
        segments = self.path / "segments"
        segments.mkdir(exist_ok=True)
        root_attributes = {"hsloader": {"format": FORMAT, "manifest": MANIFEST_NAME}}
        made = False
        for directory, attributes in ((segments, None), (self.path, root_attributes)):
            if not (directory / "zarr.json").exists():
                replace_file(directory / "zarr.json", json_bytes(group_document(attributes)), scratch=self.scratch)
                made = True
        if made:
            fsync_directory(self.path)
            fsync_directory(self.path.parent)  # where the dataset itself is an entry
