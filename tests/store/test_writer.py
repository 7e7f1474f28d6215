"""Writer: fields from the first sample, refusals that leave no trace, all or nothing, several at once, a full disk."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hsloader
from hsloader.errors import DatasetError, IncompatibleError
from hsloader.store.publish import Root
from hsloader.store.segment import SegmentWriter
from tests.store.making import FIELDS, random_sample, tree, write_dataset


def _sample(length: int = 10, seed: int = 0) -> dict[str, Any]:
    return random_sample(np.random.default_rng(seed), length)


def test_fields_come_from_the_first_sample(tmp_path: Path) -> None:
    with hsloader.Writer(tmp_path / "d", producer="me", norm_state="post", layer_ids=range(3)) as writer:
        writer.append(states=np.ones((5, 2, 40), np.float32), ids=[1, 2, 3, 4, 5], keep=np.zeros(5, bool))
        assert [(f.name, f.dtype, f.shape) for f in writer.fields or ()] == [
            ("states", "float32", (2, 40)),
            ("ids", "int64", ()),
            ("keep", "bool", ()),
        ]
    with hsloader.open_dataset(tmp_path / "d") as ds:
        assert ds.provenance.producer == "me"
        assert ds.provenance.layer_ids == (0, 1, 2)
        assert ds.name(0) == "000000#0"
        assert ds.loss_tokens.tolist() == [-1]


def test_a_sample_that_does_not_fit_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    good = _sample()
    cases: list[tuple[dict[str, Any], str]] = [
        ({**good, "input_ids": good["input_ids"][:-1]}, r"field input_ids: expected int32 \[10\], found int32 \[9\]"),
        ({**good, "input_ids": good["input_ids"].astype(np.int64)}, r"expected int32 \[10\], found int64 \[10\]"),
        (
            {**good, "loss_mask": good["loss_mask"][:, None]},
            r"field loss_mask: expected uint8 \[10\], found uint8 \[10, 1\]",
        ),
        ({k: v for k, v in good.items() if k != "loss_mask"}, "expected the fields hidden_states, .* found"),
        ({**good, "more": good["loss_mask"]}, "more"),
        ({k: v[:0] for k, v in good.items()}, "at least one token"),
        ({**good, "input_ids": ["a"] * 10}, "expected a torch tensor or numpy array, found list"),
    ]
    write_dataset(tmp_path / "clean", [good, good])
    with hsloader.Writer(tmp_path / "d", FIELDS, typical_length=100, shard_bytes=300_000, norm_state="pre") as writer:
        writer.append(name="s0", extras={"number": 0}, **good)
        for bad, words in cases:
            with pytest.raises((ValueError, TypeError), match=words):
                writer.append(name="bad", **bad)
        with pytest.raises(ValueError, match="JSON"):
            writer.append(name="bad", extras={"x": {1, 2}}, **good)
        with pytest.raises(ValueError, match="a sample of that name already"):
            writer.append(name="s0", **good)
        writer.append(name="s1", extras={"number": 1}, **good)
    assert tree(tmp_path / "d") == tree(tmp_path / "clean")
    assert hsloader.verify(tmp_path / "d").ok


def test_a_bad_first_sample_does_not_fix_the_fields(tmp_path: Path) -> None:
    with hsloader.Writer(tmp_path / "d") as writer:
        with pytest.raises(ValueError, match="field b: expected"):
            writer.append(a=np.zeros(3), b=np.zeros(4))
        with pytest.raises(TypeError, match="complex128"):
            writer.append(a=np.zeros(3, complex))
        writer.append(c=np.zeros(3))
    with hsloader.open_dataset(tmp_path / "d") as ds:
        assert list(ds.fields) == ["c"]


def test_an_exception_publishes_nothing(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [_sample()])
    before = tree(tmp_path / "d")

    def fail() -> None:
        with hsloader.Writer(tmp_path / "d", append=True, norm_state="pre", segment_bytes=1) as writer:
            for seed in range(3):
                writer.append(**_sample(seed=seed))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert tree(tmp_path / "d") == before
    writer = hsloader.Writer(tmp_path / "new")
    writer.append(**_sample(), name="x")
    writer.abort()
    with pytest.raises(DatasetError, match="not an hsloader dataset"):
        hsloader.open_dataset(tmp_path / "new")


def test_segments_close_at_their_size_and_publish_keeps_what_was_written(tmp_path: Path) -> None:
    writer = hsloader.Writer(tmp_path / "d", FIELDS, segment_bytes=3 * 10 * 517, norm_state="pre")
    for seed in range(7):
        writer.append(**_sample(seed=seed))
    writer.publish()
    with hsloader.open_dataset(tmp_path / "d") as ds:
        assert [s.entry.samples for s in ds.segments] == [3, 3, 1]
        assert [ds.name(i) for i in (0, 3, 6)] == ["000000#0", "000001#0", "000002#0"]
    writer.append(**_sample(seed=9))
    writer.abort()
    with hsloader.open_dataset(tmp_path / "d") as ds:
        assert len(ds) == 7
    with pytest.raises(ValueError, match="closed"):
        writer.append(**_sample())
    assert Root.open(tmp_path / "d").next_number() == 3


def test_threads_give_the_same_bytes(tmp_path: Path) -> None:
    samples = [_sample(900, seed) for seed in range(3)]
    for threads in (1, 3):
        write_dataset(tmp_path / str(threads), samples, threads=threads)
    assert tree(tmp_path / "1") == tree(tmp_path / "3")


def test_an_existing_dataset_is_only_appended_to_on_request(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [_sample()])
    with pytest.raises(DatasetError, match="append=True"):
        hsloader.Writer(tmp_path / "d")
    with pytest.raises(IncompatibleError, match="norm state"):
        hsloader.Writer(tmp_path / "d", append=True)
    with hsloader.Writer(tmp_path / "d", append=True, allow_unknown=True) as writer:
        with pytest.raises(ValueError, match="of that name already"):
            writer.append(**_sample(), name="s0")
        writer.append(**_sample())
    with hsloader.open_dataset(tmp_path / "d") as ds:
        assert [ds.name(i) for i in range(2)] == ["s0", "000001#0"]
    with pytest.raises(TypeError, match="unknown keywords modle"):
        hsloader.Writer(tmp_path / "e", modle="x")  # type: ignore[call-arg]


def test_a_writer_publishes_as_often_as_it_likes(tmp_path: Path) -> None:
    with hsloader.Writer(tmp_path / "d", norm_state="pre") as writer:
        for i in range(3):
            writer.append(**_sample(seed=i))
            writer.append(**_sample(seed=i), name=f"n{i}")
            writer.publish()
        with pytest.raises(ValueError, match="a sample of that name already"):
            writer.append(**_sample(), name="n0")
    with hsloader.open_dataset(tmp_path / "d") as ds:
        assert [ds.name(i) for i in range(6)] == ["000000#0", "n0", "000001#0", "n1", "000002#0", "n2"]


def test_names_that_another_writer_published_meanwhile_are_refused(tmp_path: Path) -> None:
    first = hsloader.Writer(tmp_path / "d", norm_state="pre")
    first.append(**_sample(), name="x")
    with hsloader.Writer(tmp_path / "d", norm_state="pre") as second:
        second.append(**_sample(), name="x")
    with pytest.raises(IncompatibleError, match="published 1 samples of the same names"):
        first.close()
    assert hsloader.verify(tmp_path / "d").ok


@pytest.mark.parametrize("place", ["begin", "append", "commit", "seal"])
def test_a_writer_that_was_interrupted_publishes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def write() -> None:
        with hsloader.Writer(tmp_path / "d", FIELDS, norm_state="pre", segment_bytes=10_000) as writer:
            writer.append(**_sample(), name="kept")
            writer.publish()
            writer.append(**_sample(), name="lost")
            with monkeypatch.context() as patched:
                patched.setattr(SegmentWriter, place, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    writer.append(**_sample(20), name="cut short")
            with pytest.raises(ValueError, match="interrupted in the middle"):
                writer.append(**_sample())

    with pytest.raises(ValueError, match="interrupted in the middle"):
        write()
    with hsloader.open_dataset(tmp_path / "d") as ds:
        assert [ds.name(i) for i in range(len(ds))] == ["kept"]
    assert list(Root(tmp_path / "d").scratch.iterdir()) == []


def test_a_forked_child_neither_uses_nor_ends_its_parents_writer(tmp_path: Path) -> None:
    with hsloader.Writer(tmp_path / "d") as writer:
        writer.append(**_sample())
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with writer:
                    writer.append(**_sample())
            except ValueError as error:
                code = 7 if "forked child" in str(error) else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        writer.append(**_sample())
    assert len(hsloader.open_dataset(tmp_path / "d")) == 2
    assert hsloader.verify(tmp_path / "d").ok


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with hsloader.Writer("d") as writer:
        monkeypatch.chdir("/")
        writer.append(**_sample())
    monkeypatch.chdir(tmp_path)
    with hsloader.open_dataset("d") as ds:
        monkeypatch.chdir("/")
        np.testing.assert_array_equal(ds.read(0, "input_ids"), _sample()["input_ids"])


_WRITES = """
import sys, numpy as np, hsloader
from tests.store.making import FIELDS, random_sample
for k in range(int(sys.argv[3])):
    with hsloader.Writer(sys.argv[1], FIELDS, append=True, norm_state="pre", segment_bytes=30_000) as writer:
        for i in range(4):
            writer.append(**random_sample(np.random.default_rng(i), 20), name=f"{sys.argv[2]}/{k}/{i}")
    print(k, flush=True)
"""


def _start(path: Path, who: str, rounds: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WRITES, str(path), who, str(rounds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_write_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    children = [_start(tmp_path / "d", who, 5) for who in "ab"]
    for child in children:
        child.communicate()
        assert child.returncode == 0
    with hsloader.open_dataset(tmp_path / "d") as ds:
        assert {ds.name(i) for i in range(len(ds))} == {
            f"{w}/{k}/{i}" for w in "ab" for k in range(5) for i in range(4)
        }
    assert hsloader.verify(tmp_path / "d").ok


def test_killed_writers_leave_a_sound_dataset_without_rests(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    promised: set[str] = set()
    steady = _start(tmp_path / "d", "steady", 8)
    for attempt in range(8):
        child = _start(tmp_path / "d", f"killed{attempt}", 100)
        assert child.stdout is not None
        promised.add(f"killed{attempt}/{child.stdout.readline().strip()}/3")  # it is running, and this round is listed
        time.sleep(float(rng.uniform(0, 0.1)))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        if (tmp_path / "d/manifest.json").exists():
            hsloader.open_dataset(tmp_path / "d").close()
    steady.communicate()
    assert steady.returncode == 0
    root = Root.open(tmp_path / "d")
    root.clean()
    report = hsloader.verify(tmp_path / "d")
    assert report.ok, str(report)
    with hsloader.open_dataset(tmp_path / "d") as ds:
        names = {ds.name(i) for i in range(len(ds))}
        listed = {entry.path for entry in ds.manifest.segments}
    assert promised <= names
    assert {f"steady/{k}/{i}" for k in range(8) for i in range(4)} <= names
    assert {p.relative_to(root.path).as_posix() for p in (root.path / "segments").iterdir() if p.is_dir()} == listed
    assert list(root.scratch.iterdir()) == []


def test_a_full_disk_gives_the_numbers_and_the_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    budget = [400_000]

    def limited(fd: int, pieces: Any, offset: int, *rest: Any) -> int:
        size = sum(len(piece) for piece in pieces)
        if size > budget[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        budget[0] -= size
        return real(fd, pieces, offset, *rest)

    write_dataset(tmp_path / "clean", [_sample(3), _sample(5)], shard_bytes=1 << 30)
    with hsloader.Writer(tmp_path / "d", FIELDS, typical_length=100, norm_state="pre") as writer:
        writer.append(name="s0", extras={"number": 0}, **_sample(3))
        monkeypatch.setattr(os, "pwritev", limited)
        big = _sample(20_000)
        with pytest.raises(OSError, match=r"sample 'big': [\d,]+ bytes are free") as caught:
            writer.append(name="big", **big)
        assert caught.value.errno == errno.ENOSPC
        monkeypatch.undo()
        writer.append(name="s1", extras={"number": 1}, **_sample(5))
    assert tree(tmp_path / "d") == tree(tmp_path / "clean")


def test_a_disk_that_is_full_at_the_end_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, pieces: Any, offset: int, *rest: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = hsloader.Writer(tmp_path / "d", FIELDS, norm_state="pre")
    writer.append(**_sample())
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match=re.escape("segment 0 with 1 samples")):
        writer.close()
    monkeypatch.undo()
    assert list(Root(tmp_path / "d").scratch.iterdir()) == []
    assert not (tmp_path / "d/manifest.json").exists()
