"""Which files below SRC may be samples: a recursive walk in natural order that opens almost nothing.

Known sidecars, hidden files, locks and other datasets are set aside with a reason; pipes, sockets and devices are
never opened; every folder is visited once, however it is linked, and a link to a file that was found is no second
sample.  Whether a file *is* a sample is told by its content
later (``opening.py``): a name only decides that a file is one of the known sidecars.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hsloader.formats.torch_zip import LOCAL_MAGIC

__all__ = ["REMOVING", "REMOVING_REASON", "Discovery", "FoundFile", "Skipped", "discover", "natural_key"]

# How the name begins that a file has while ``delete_source`` removes it (``conversion/removal.py``).
REMOVING = ".hsloader-delete-"
REMOVING_REASON = (
    "left by a --delete-source run that was killed while it removed this file: the same command with --delete-source "
    "finishes that, or gives the file its name again if it is not the one that was converted"
)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file (in ``Discovery.folders``: a folder) by its name below SRC and its path; ``lock`` if one lies beside."""

    name: str
    path: str
    size: int = 0
    lock: bool = False


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that is no sample, and why."""

    name: str
    reason: str


@dataclass
class Discovery:
    """What a walk found: ``files`` that may hold samples, in natural order; ``folders`` that are arrow datasets with
    hidden states; ``sidecars`` and other things set aside; ``bad`` ones that look like samples and cannot be opened.
    """

    src: str
    files: list[FoundFile] = field(default_factory=list)
    folders: list[FoundFile] = field(default_factory=list)
    sidecars: list[Skipped] = field(default_factory=list)
    bad: list[Skipped] = field(default_factory=list)


_SAMPLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors", ".gz")
_SIDECARS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), reason)
    for pattern, reason in (
        (re.escape(REMOVING), REMOVING_REASON),
        (r"\.", "hidden file"),
        (r".*(\.lock|\.tmp|\.part|\.partial|\.swp|~)\Z", "lock or temporary file"),
        (r"token_freq.*\.pt\Z", "token frequencies"),
        (r"vocab_mapping.*\.(pt|npy)\Z", "vocabulary map"),
        (r"(d2t|t2d).*\.(npy|pt)\Z", "vocabulary map"),
        (r"(optimizer|scheduler|rng_state|training_args|trainer_state).*\.(pt|pth|bin|json)\Z", "training checkpoint"),
        (r"target_(embeddings|weights)\.safetensors\Z", "weights of the target model"),
        (r"(sample_lengths|data_config|dataset_info|state|manifest)\.json\Z", "index or settings of the producer"),
        (r".*\.(json|jsonl|md|txt|log|ya?ml|toml|csv|tsv|py|sh|html?|pdf|png|jpe?g|svg)\Z", "document"),
        (r".*\.(npy|npz|arrow|parquet)\Z", "no container of hidden states"),
    )
)
_ZARR = ("zarr.json", ".zgroup", ".zarray")


def natural_key(name: str) -> tuple[object, ...]:
    """Sort key: path parts in order, numbers inside them by value, ties by the plain text."""
    parts = []
    for part in name.split("/"):
        pieces = re.split(r"([0-9]+)", part)
        # text and numbers alternate, so equal places are always of one kind; a number sorts by digits, then by text
        parts.append(tuple((len(p.lstrip("0")), p.lstrip("0")) if i % 2 else p for i, p in enumerate(pieces)))
    return (tuple(parts), name)


def discover(src: str | os.PathLike[str]) -> Discovery:
    """Walk ``src``, a folder or one file. ``FileNotFoundError`` if it is not there."""
    root = os.path.abspath(os.fspath(src))
    found = Discovery(root)
    if not os.path.lexists(root):
        raise FileNotFoundError(f"{root}: there is no such source")
    itself = Path(root).stat()
    if not stat.S_ISDIR(itself.st_mode):
        _Walk(found).file(Path(root).name, root, itself, lock=os.path.lexists(f"{root}.lock"))
        return found
    walk = _Walk(found)
    walk.run(root)
    for files in (found.files, found.folders):
        files.sort(key=lambda f: natural_key(f.name))
    for skipped in (found.sidecars, found.bad):
        skipped.sort(key=lambda s: natural_key(s.name))
    return found


class _Walk:
    def __init__(self, found: Discovery) -> None:
        self.found = found
        self.visited: set[tuple[int, int]] = set()
        self.links: list[tuple[str, str]] = []  # linked folders: visited after all real ones
        self.file_links: list[tuple[str, str, os.stat_result, bool]] = []  # linked files: sorted in after all real ones
        self.by_inode: dict[tuple[int, int], list[FoundFile]] = {}

    def run(self, root: str) -> None:
        """Visit the folder and all below it, without recursion."""
        todo = [("", root)]
        while todo or self.links:
            name, path = todo.pop() if todo else self.links.pop(0)
            try:
                identity = Path(path).stat()
                if (identity.st_dev, identity.st_ino) in self.visited:
                    self.found.sidecars.append(Skipped(name, "link to a folder that was already visited"))
                    continue
                self.visited.add((identity.st_dev, identity.st_ino))
                with os.scandir(path) as entries:
                    todo.extend(self.folder(name, path, sorted(entries, key=lambda e: e.name)))
            except OSError as error:
                self.found.bad.append(Skipped(name or ".", f"folder cannot be read: {error.strerror}"))
        for name, path, target, lock in sorted(self.file_links, key=lambda link: natural_key(link[0])):
            there = self._same_file(path, target)
            if there is None:
                self.file(name, path, target, lock)
            else:
                self.found.sidecars.append(Skipped(name, f"link to a file that was already found ({there[:200]})"))

    def _same_file(self, path: str, target: os.stat_result) -> str | None:
        """The name under which a link's file was found, if it was. Hard links are files of their own."""
        for file in self.by_inode.get((target.st_dev, target.st_ino), ()):
            if os.path.realpath(file.path) == os.path.realpath(path):
                return file.name
        return None

    def folder(self, prefix: str, path: str, entries: list[os.DirEntry[str]]) -> Iterable[tuple[str, str]]:
        """Sort one folder's entries; returns the folders to visit next."""
        names = {e.name for e in entries}
        if prefix and not names.isdisjoint(_ZARR):
            self.found.sidecars.append(Skipped(prefix, "another zarr dataset"))
            return []
        inner: list[tuple[str, str]] = []
        claimed: set[str] = set()
        if {"dataset_info.json", "state.json"} <= names and any(n.endswith(".arrow") for n in names):
            self.found.folders.append(FoundFile(prefix, path))
            claimed.add("hidden_states")
        if {"manifest.json", "samples.idx"} <= names:
            self._deepspec(prefix, names)
            claimed |= {n for n in names if n.endswith((".bin", ".idx"))}
        for entry in entries:
            if entry.name in claimed:
                continue
            name = f"{prefix}/{entry.name}" if prefix else entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name.startswith(".") or entry.name == "__pycache__":
                        self._hidden(name, entry.path)
                    else:
                        inner.append((name, entry.path))
                elif entry.is_symlink():
                    self._link(name, entry, names)
                else:
                    self.file(name, entry.path, entry.stat(follow_symlinks=False), f"{entry.name}.lock" in names)
            except OSError as error:
                self.found.bad.append(Skipped(name, f"cannot be looked at: {error.strerror}"))
        return reversed(inner)

    def file(self, name: str, path: str, found: os.stat_result, lock: bool) -> None:
        """Sort one file in by its name, its type and, where neither says enough, its first bytes."""
        base = name.rsplit("/", 1)[-1]
        reason = next((r for pattern, r in _SIDECARS if pattern.match(base)), None)
        if reason is not None:
            self.found.sidecars.append(Skipped(name, reason))
        elif not stat.S_ISREG(found.st_mode):
            where = self.found.bad if base.lower().endswith(_SAMPLE_SUFFIXES) else self.found.sidecars
            where.append(Skipped(name, "a pipe, socket or device, not a regular file: it was not opened"))
        elif base.lower().endswith(_SAMPLE_SUFFIXES) or _may_hold_tensors(path):
            file = FoundFile(name, path, found.st_size, lock)
            self.found.files.append(file)
            self.by_inode.setdefault((found.st_dev, found.st_ino), []).append(file)
        else:
            self.found.sidecars.append(Skipped(name, "not a container of tensors"))

    def _link(self, name: str, entry: os.DirEntry[str], names: set[str]) -> None:
        try:
            target = Path(entry.path).stat()
        except OSError as error:
            what = "a link that leads in a loop" if error.errno == errno.ELOOP else "a dangling link"
            goal = os.readlink(entry.path)
            self.found.bad.append(Skipped(name, f"{what} (to {goal[:200]}): {error.strerror}"))
            return
        if not stat.S_ISDIR(target.st_mode):
            self.file_links.append((name, entry.path, target, f"{entry.name}.lock" in names))
        elif entry.name.startswith("."):
            self.found.sidecars.append(Skipped(name, "hidden folder"))
        else:
            self.links.append((name, entry.path))

    def _hidden(self, name: str, path: str) -> None:
        """Set a hidden folder aside, each of its files by name if there are few."""
        inside = []
        with os.scandir(path) as entries:
            for entry, _ in zip(entries, range(100), strict=False):
                inside.append(f"{name}/{entry.name}")
        for item in inside if 0 < len(inside) < 100 else [name]:
            self.found.sidecars.append(Skipped(item, "in a hidden folder" if item != name else "hidden folder"))

    def _deepspec(self, prefix: str, names: set[str]) -> None:
        index = f"{prefix}/samples.idx" if prefix else "samples.idx"
        shards = sum(n.endswith(".bin") for n in names)
        self.found.bad.append(
            Skipped(
                index, f"a DeepSpec cache ({shards} shards): this version of hsloader does not read that layout yet"
            )
        )


def _may_hold_tensors(path: str) -> bool:
    """Whether a file of an unknown name begins like a container of tensors."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        head = os.pread(fd, 9, 0)
    finally:
        os.close(fd)
    return head.startswith((LOCAL_MAGIC, b"\x1f\x8b", b"\x80\x02")) or (
        len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < 1 << 27
    )
