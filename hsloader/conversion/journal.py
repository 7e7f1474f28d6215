"""The journal of a destination: its plans, and which segments were proved. It is what makes a rerun a resumption.

::

    DST/.hsloader/convert/lock               flocked while a conversion runs; never renamed or deleted
    DST/.hsloader/convert/plan-000000.json   plans in their order; fsynced before their first segment is begun
    DST/.hsloader/convert/settled.jsonl      a line a segment: read back, or empty because all its samples are bad

What is *listed* is the manifest's to say.  A line of ``settled.jsonl`` is written before the manifest lists the
segment, so a listed segment without one was never proved, and no source is deleted for it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hsloader.conversion.plan import Plan
from hsloader.conversion.report import Quarantined
from hsloader.errors import StoreBusyError
from hsloader.store.files import fsync_directory, replace_file
from hsloader.store.locks import release, try_flock

__all__ = ["Journal", "Settled", "quarantine_lines"]


@dataclass(frozen=True, slots=True)
class Settled:
    """A segment that is done: ``digest`` as the manifest lists it (None: no sample of it came out).

    ``read_back``: it was read back from the disk and equal.  ``quarantined`` is kept here only for an empty segment;
    the others keep theirs in their metadata.
    """

    number: int
    digest: str | None
    read_back: bool
    quarantined: tuple[Quarantined, ...] = ()


class Journal:
    """The journal of the dataset at ``root``; reading it needs no lock."""

    def __init__(self, root: Path) -> None:
        self.directory = root / ".hsloader" / "convert"
        self._settled_file = self.directory / "settled.jsonl"

    @property
    def exists(self) -> bool:
        """Whether a conversion was ever begun here."""
        return self.directory.is_dir()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the destination for one conversion; ``StoreBusyError`` at once if another one has it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not try_flock(fd, path):
                raise StoreBusyError(
                    f"{path}: another conversion into this dataset is running ({_holder(fd)}); wait until it has "
                    "ended, or stop it, and run the same command again"
                )
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()}".encode(), 0)
            yield
        finally:
            release(fd)

    def plans(self) -> list[Plan]:
        """All plans in their order."""
        paths = sorted(self.directory.glob("plan-*.json")) if self.exists else []
        return [Plan.from_json(path.read_bytes(), path) for path in paths]

    def add_plan(self, plan: Plan) -> None:
        """Record one more plan, durably."""
        number = len(list(self.directory.glob("plan-*.json")))
        path = self.directory / f"plan-{number:06d}.json"
        replace_file(path, plan.to_json(), scratch=self.directory)
        fsync_directory(self.directory.parent)

    def replace_plan(self, number: int, plan: Plan) -> None:
        """Put another plan in the place of plan ``number``, durably."""
        replace_file(self.directory / f"plan-{number:06d}.json", plan.to_json(), scratch=self.directory)

    def unfinished(self, listed: Collection[int]) -> int:
        """Samples that are planned and wait for a run: of segments that are not ``listed`` nor known to be empty."""
        empty = {number for number, settled in self.settled().items() if settled.digest is None}
        paths = sorted(self.directory.glob("plan-*.json")) if self.exists else []
        segments = [s for path in paths for s in json.loads(path.read_bytes())["segments"]]
        return sum(len(s["samples"]) for s in segments if s["number"] not in empty and s["number"] not in listed)

    def settled(self) -> dict[int, Settled]:
        """The segments that are done, by number; a line that a kill cut short does not count."""
        found: dict[int, Settled] = {}
        if not self._settled_file.exists():
            return found
        for line in self._settled_file.read_bytes().split(b"\n"):
            try:
                value = json.loads(line)
                quarantined = tuple(Quarantined(name, reason) for name, reason in value["quarantined"])
                settled = Settled(value["segment"], value["digest"], value["read_back"], quarantined)
            except (ValueError, KeyError, TypeError):
                continue
            found[settled.number] = settled
        return found

    def settle(self, settled: Settled) -> None:
        """Record a segment as done, durably."""
        value = {
            "segment": settled.number,
            "digest": settled.digest,
            "read_back": settled.read_back,
            "quarantined": [[q.name, q.reason] for q in settled.quarantined],
        }
        # The newline comes first: a line that a kill cut short must not swallow this one.
        with open(self._settled_file, "ab") as file:
            file.write(b"\n" + json.dumps(value).encode("ascii"))
            file.flush()
            os.fsync(file.fileno())
        fsync_directory(self.directory)

    def discard(self) -> None:
        """Forget everything: for a run that left nothing behind (the lock stays)."""
        for path in (*self.directory.glob("plan-*.json"), self._settled_file):
            path.unlink(missing_ok=True)


def _holder(fd: int) -> str:
    return os.pread(fd, 100, 0).decode("ascii", "replace") or "a process that just began"


def quarantine_lines(quarantined: Sequence[Quarantined]) -> bytes:
    """``quarantine.jsonl``: a JSON object a line with ``name`` and ``reason``."""
    return b"".join(json.dumps({"name": q.name, "reason": q.reason}).encode("ascii") + b"\n" for q in quarantined)
