"""Publishing: reservation, placing, listing in order, locks, cleaning, the packed samples table."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsloader.errors import DamageError, DatasetError, IncompatibleError, StoreBusyError
from hsloader.store import files, owners, publish
from hsloader.store.dataset import open_dataset
from hsloader.store.manifest import Manifest, Provenance, SegmentEntry, read_manifest
from hsloader.store.publish import Root
from hsloader.store.segment import SegmentWriter
from hsloader.store.verification import verify
from tests.store.making import FIELDS, fill_segment, random_sample, tiny_layout, tree

PROVENANCE = Provenance(norm_state="pre")


def _place(root: Root, number: int, length: int = 20, source: dict[str, Any] | None = None) -> SegmentEntry:
    with root.temporary() as temporary:
        with SegmentWriter(temporary.path, FIELDS, tiny_layout()) as writer:
            fill_segment(writer, [random_sample(np.random.default_rng(number), length)], prefix=f"{number}/")
            writer.seal(source=source)
        return root.place(temporary, number)


def test_nothing_can_be_opened_before_a_commit(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "d")
    _place(root, root.reserve())
    with pytest.raises(DatasetError):
        open_dataset(tmp_path / "d")
    assert root.manifest() is None


def test_segments_placed_in_any_order_are_listed_in_the_plans_order(tmp_path: Path) -> None:
    for name, order in (("a", (0, 1, 2)), ("b", (2, 0, 1))):
        root = Root.create(tmp_path / name)
        first = root.reserve(3, hold=True)
        entries = {number: _place(root, number) for number in order}
        for number in (0, 1, 2):
            root.append_segments([entries[number]], FIELDS, PROVENANCE)
        root.release_numbers(first, 3)
        root.pack(more_than=1)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert verify(tmp_path / "b").ok


def test_a_segment_of_a_killed_run_is_recognised_and_listed(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "d")
    first = root.reserve(2, hold=True)
    placed = _place(root, first, source={"plan": "p", "task": 0})
    again = Root.create(tmp_path / "d")
    assert again.reserve(2, hold=True, first=first) == first
    again.clean()
    found = again.placed(first)
    assert found is not None
    assert found[0] == placed
    assert found[1].source == {"plan": "p", "task": 0}
    assert again.placed(first + 1) is None
    with pytest.raises(FileExistsError):
        _place(again, first)
    again.append_segments([placed], FIELDS, PROVENANCE)
    with pytest.raises(ValueError, match="listed segments never change"):
        again.discard(first)
    assert verify(tmp_path / "d").ok


def test_numbers_are_given_out_once(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "d")
    taken: list[int] = []

    def take() -> None:
        for _ in range(5):
            taken.append(Root.create(tmp_path / "d").reserve())

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(20))
    root.release_numbers(19, 1, unused=True)
    root.release_numbers(3, 1, unused=True)  # later ones are taken
    assert root.next_number() == 19


def test_commit_is_refused_when_somebody_published_meanwhile(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "d")
    first, second = _place(root, 0), _place(root, 1)
    root.commit(None, Manifest(fields=FIELDS, segments=(first,)))
    with pytest.raises(StoreBusyError, match="somebody else published"):
        root.commit(None, Manifest(fields=FIELDS, segments=(second,)))
    listed = root.manifest()
    assert listed is not None
    with pytest.raises(ValueError, match="keeps all listed segments"):
        root.commit(listed.fingerprint, Manifest(fields=FIELDS, segments=(second,)))
    root.commit(listed.fingerprint, listed.grown([second]))
    assert len(open_dataset(tmp_path / "d")) == 2


def test_a_segment_that_is_not_there_cannot_be_listed(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "d")
    entry = _place(root, 0)
    root.discard(0)
    with pytest.raises(DamageError, match="not the one to be listed"):
        root.append_segments([entry], FIELDS, PROVENANCE)
    assert root.manifest() is None


@pytest.mark.parametrize(
    ("fields", "provenance", "words"),
    [
        (FIELDS[:3], PROVENANCE, "field loss_mask: the dataset has uint8"),
        ((*FIELDS[:3], FIELDS[2].__class__(name="loss_mask", dtype="bool")), PROVENANCE, "appended has bool"),
        (FIELDS, Provenance(norm_state="post"), "the dataset has pre, what is appended has post"),
        (FIELDS, Provenance(), "allow_unknown=True"),
        (FIELDS, Provenance(norm_state="pre", layer_ids=(1,)), "layer ids"),
    ],
)
def test_what_does_not_fit_is_not_appended(tmp_path: Path, fields: Any, provenance: Provenance, words: str) -> None:
    root = Root.create(tmp_path / "d")
    root.append_segments([_place(root, 0)], FIELDS, PROVENANCE)
    entry = _place(root, 1)
    with pytest.raises(IncompatibleError, match=words):
        root.append_segments([entry], fields, provenance)
    root.append_segments([entry], FIELDS, Provenance(), allow_unknown=True)


def test_a_directory_with_other_files_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DatasetError, match=r"found thesis\.tex"):
        Root.create(tmp_path)
    with pytest.raises(DatasetError, match="found a file"):
        Root.create(tmp_path / "thesis.tex")


def test_the_lock_excludes_other_processes_and_nests_in_a_thread(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "d")
    code = (
        "import sys; from hsloader.store.publish import Root; from hsloader.errors import StoreBusyError\n"
        "try:\n    with Root.create(sys.argv[1]).lock(timeout=0.1): print('got it')\n"
        "except StoreBusyError as error: print(error)"
    )

    def other() -> str:
        return subprocess.run(
            [sys.executable, "-c", code, str(root.path)], capture_output=True, text=True, check=True
        ).stdout

    with root.lock(), root.lock():
        assert "somebody else has held this lock" in other()
        errors: list[BaseException] = []

        def same_process() -> None:
            try:
                with Root.create(root.path).lock(timeout=0.1):
                    pass
            except StoreBusyError as error:
                errors.append(error)

        thread = threading.Thread(target=same_process)
        thread.start()
        thread.join()
        assert "another thread" in str(errors[0])
    assert other() == "got it\n"


def test_a_forked_child_neither_holds_nor_breaks_the_lock(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "d")
    with root.lock():
        child = os.fork()
        if child == 0:
            try:
                with root.lock(timeout=0.1):
                    os._exit(1)
            except StoreBusyError:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    child = os.fork()
    if child == 0:
        with root.lock(timeout=5):
            os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8


def test_a_file_system_without_flock_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root.create(tmp_path / "d")

    def no_flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_flock)
    with pytest.raises(StoreBusyError, match="-o flock"), root.lock():
        pass


def test_a_directory_that_cannot_be_fsynced_counts_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def picky(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):  # noqa: PTH112
            raise OSError(errno.EINVAL, "Invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", picky)
    root = Root.create(tmp_path / "d")
    root.append_segments([_place(root, 0)], FIELDS, PROVENANCE)
    assert len(open_dataset(tmp_path / "d")) == 1
    monkeypatch.setattr(os, "fsync", _broken_fsync)
    with pytest.raises(OSError, match="Input/output"):
        files.fsync_directory(tmp_path)


def _broken_fsync(fd: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_rename_whose_answer_was_lost_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.rename

    def lossy(self: Path, target: Path) -> Path:
        real(self, target)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    root = Root.create(tmp_path / "d")
    with root.temporary() as temporary:
        with SegmentWriter(temporary.path, FIELDS, tiny_layout()) as writer:
            fill_segment(writer, [random_sample(np.random.default_rng(0), 5)])
            writer.seal()
        monkeypatch.setattr(Path, "rename", lossy)
        entry = root.place(temporary, 0)
    monkeypatch.undo()
    root.append_segments([entry], FIELDS, PROVENANCE)
    assert verify(tmp_path / "d").ok


_DIES = """
import os, sys
import numpy as np
from tests.store.making import FIELDS, fill_segment, random_sample, tiny_layout
from hsloader.store.publish import Root
from hsloader.store.segment import SegmentWriter
root = Root.create(sys.argv[1])
with root.temporary() as temporary:
    with SegmentWriter(temporary.path, FIELDS, tiny_layout()) as writer:
        fill_segment(writer, [random_sample(np.random.default_rng(0), 5)])
        writer.seal()
    if sys.argv[2] == "placed":
        root.place(temporary, root.reserve())
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("moment", ["temporary", "placed"])
def test_cleaning_takes_what_the_dead_left_and_nothing_of_the_living(tmp_path: Path, moment: str) -> None:
    root = Root.create(tmp_path / "d")
    root.append_segments([_place(root, root.reserve())], FIELDS, PROVENANCE)
    subprocess.run([sys.executable, "-c", _DIES, str(root.path), moment], check=False)
    number = root.reserve()
    with root.temporary() as temporary:
        with SegmentWriter(temporary.path, FIELDS, tiny_layout()) as writer:
            fill_segment(writer, [random_sample(np.random.default_rng(9), 5)], prefix="9/")
            writer.seal()
        dead = {path.name for path in root.scratch.iterdir()} - {temporary.path.name, f"{temporary.path.name}.owner"}
        assert dead
        removed = {path.name for path in root.clean()}
        assert removed == dead | ({"000001"} if moment == "placed" else set())
        assert temporary.path.is_dir()
        entry = root.place(temporary, number)
        assert root.clean() == []  # placed, not listed, and its owner lives
        root.append_segments([entry], FIELDS, PROVENANCE)
    assert root.clean() == []
    assert verify(root.path).ok
    assert len(open_dataset(root.path)) == 2


def test_a_reserved_range_and_other_hosts_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root.create(tmp_path / "d")
    root.reserve(0 + 1)
    subprocess.run([sys.executable, "-c", _DIES, str(root.path), "placed"], check=False)
    root.reserve(1, hold=True, first=1)
    monkeypatch.setattr(owners.socket, "gethostname", lambda: "elsewhere")
    assert root.clean() == []
    monkeypatch.undo()
    assert [path.suffix for path in root.clean()] == [".owner"]
    assert root.placed(1) is not None


def test_another_hosts_leftovers_go_when_they_are_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root.create(tmp_path / "d")
    subprocess.run([sys.executable, "-c", _DIES, str(root.path), "temporary"], check=False)
    monkeypatch.setattr(owners.socket, "gethostname", lambda: "elsewhere")
    assert root.clean(older_than=3600) == []
    assert len(root.clean(older_than=0)) == 2


def test_many_loose_segments_are_packed_and_the_old_copy_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "LOOSE_SEGMENTS", 2)
    root = Root.create(tmp_path / "d")
    for _ in range(7):
        root.append_segments([_place(root, root.reserve())], FIELDS, PROVENANCE)
    manifest = read_manifest(root.path)
    assert manifest.packed is not None
    assert manifest.packed.segments == 6
    assert len([path for path in (root.path / "packed").iterdir() if path.is_dir()]) == 1
    opened = open_dataset(root.path)
    assert opened.lengths.tolist() == [20] * 7
    root.pack(more_than=1)
    assert open_dataset(root.path).lengths.tolist() == [20] * 7
    assert verify(root.path).ok
    assert opened.name(6) == "6/0"


def test_an_owner_killed_before_its_first_note_is_cleaned(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "d")
    (root.scratch / "123-abc.owner").touch()
    (root.scratch / "manifest.json.123.abc.swap").touch()
    assert len(root.clean()) == 2
