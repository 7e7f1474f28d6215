"""Damage: found by verify by name, refused by the reader where it is touched, everything else still reads."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

import hsloader
from hsloader.errors import DamageError, DatasetError
from hsloader.store import dataset as dataset_module
from hsloader.store.dataset import Dataset
from hsloader.store.shard import index_bytes
from tests.shared_data import SHARED, needs_shared
from tests.store.making import FIELDS, Sample, random_sample, tree, write_dataset

KINDS = (
    "append-to-shard",
    "delete-shard",
    "edited-shape",
    "flip-chunk-byte",
    "flip-index-byte",
    "manifest-huge-number",
    "shard-is-a-folder",
    "shard-unreadable",
    "swap-shards",
    "truncate-shard-by-one",
    "truncate-shard-to-half",
    "truncate-shard-to-zero",
    "truncated-zarr-json",
)

LENGTHS = (600, 300, 1, 257, 900, 40, 800, 512)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    return [random_sample(rng, length) for length in LENGTHS]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, samples: list[Sample]) -> Path:
    """Two segments; shards of three chunks of 256 rows."""
    path = tmp_path_factory.mktemp("sound") / "dataset"
    write_dataset(path, samples[:6])
    write_dataset(path, samples[6:], first=6, append=True)
    return path


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory, sound: Path) -> Path:
    """A folder a kind, with ``dataset`` and ``expect.json``."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    out = tmp_path_factory.mktemp("damaged")
    assert sorted(_make_cases().damage(sound, out)) == sorted(KINDS)
    return out


def _make_cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_cases", SHARED / "cases" / "make_cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read(ds: Dataset, i: int, samples: list[Sample], fields: tuple[str, ...] | None = None) -> None:
    """Read sample i, and demand that the values are right if it can be read."""
    for name in fields or tuple(samples[i]):
        np.testing.assert_array_equal(ds.read(i, name), samples[i][name])


@needs_shared
@pytest.mark.parametrize("kind", KINDS)
def test_every_shared_kind_of_damage(damaged: Path, samples: list[Sample], kind: str) -> None:
    expect = json.loads((damaged / kind / "expect.json").read_text())
    path = damaged / kind / "dataset"
    files = [str(path / name) for name in expect["files"]]
    report = hsloader.verify(path)
    if kind == "shard-unreadable" and os.geteuid() == 0:
        assert report.ok
        return
    assert not report.ok
    assert all(any(problem.path == file for problem in report.problems) for file in files)
    if expect["rows_affected"] is None:
        if kind == "manifest-huge-number":
            with pytest.raises(DamageError, match=r"manifest\.json"):
                hsloader.open_dataset(path)
            return
        with hsloader.open_dataset(path) as ds, pytest.raises(DamageError, match=expect["files"][0]):
            ds.read(0, "hidden_states")
        return
    first, last = expect["rows_affected"]
    with hsloader.open_dataset(path) as ds:
        starts, ends = ds.first_rows, ds.first_rows + ds.lengths
        hit = (ds.segment_of == 0) & (starts < last) & (ends > first)
        assert 0 < hit.sum() < len(ds)
        named = {name for problem in report.problems for name in problem.samples}
        assert named == {f"s{i}" for i in np.flatnonzero(hit)}
        for i in range(len(ds)):
            if hit[i]:
                names = "|".join(file.replace(".", r"\.") for file in files)
                with pytest.raises(DamageError, match=f"({names}).*dataset {path}, .*sample {i} 's{i}'"):
                    ds.read(i, "hidden_states")
            else:
                _read(ds, i, samples)


def _flip(path: Path, at: int = 10) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _pack(path: Path) -> Path:
    from hsloader.store.publish import Root

    Root.open(path).pack(more_than=1)
    return next((path / "packed").glob("*/c.0.0"))


def _recompute_index(path: Path, change: Callable[[Any], None]) -> None:
    """Change the index of the first hidden_states shard (three slots) and write a right checksum over it."""
    shard = path / "segments/000000/hidden_states/c.0.0.0"
    data = shard.read_bytes()
    tail = index_bytes(3)
    index = np.frombuffer(data[-tail:-4], "<u8").reshape(3, 2).copy()
    change(index)
    shard.write_bytes(data[:-tail] + index.tobytes() + struct.pack("<I", crc32c(index.tobytes())))


def _swap_rows(index: Any) -> None:
    index[[0, 1]] = index[[1, 0]]


def _fill_gap(path: Path) -> None:
    shard = path / "segments/000000/hidden_states/c.0.0.0"
    data = bytearray(shard.read_bytes())
    index = np.frombuffer(bytes(data[-index_bytes(3) : -4]), "<u8").reshape(3, 2)
    ends = index.sum(axis=1)
    gaps = [(int(end), int(start)) for end, start in zip(ends[:-1], index[1:, 0], strict=True) if start > end]
    data[gaps[0][0]] = 1
    shard.write_bytes(data)


def _swap_segments(path: Path) -> None:
    (path / "segments/000000").rename(path / "x")
    (path / "segments/000001").rename(path / "segments/000000")
    (path / "x").rename(path / "segments/000001")


def _folder_for_names(path: Path) -> None:
    names = path / "segments/000000/names/c.0"
    names.unlink()
    names.mkdir()


OTHERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "names": (lambda p: _flip(p / "segments/000000/names/c.0", 1), "segments/000000"),
    "names_end": (lambda p: _flip(p / "segments/000000/names_end/c.0"), "segments/000000"),
    "extras": (lambda p: _flip(p / "segments/000001/extras/c.0"), "segments/000001"),
    "samples": (lambda p: _flip(p / "segments/000000/samples/c.0.0"), "segments/000000/samples"),
    "samples gone": (lambda p: shutil.rmtree(p / "segments/000001/samples"), "segments/000001/samples"),
    "segment gone": (lambda p: shutil.rmtree(p / "segments/000001"), "segments/000001"),
    "segment's metadata": (lambda p: _flip(p / "segments/000000/zarr.json", 300), "segments/000000"),
    "segments swapped": (_swap_segments, "segments/000000"),
    "packed": (lambda p: _flip(_pack(p)), "packed/"),
    "packed gone": (lambda p: shutil.rmtree(_pack(p).parent), "packed/"),
    "index exchanged": (lambda p: _recompute_index(p, _swap_rows), "hidden_states/c.0.0.0"),
    "gap": (_fill_gap, "hidden_states/c.0.0.0"),
    "a file too many": (lambda p: (p / "segments/000000/hidden_states/c.9.0.0").touch(), "hidden_states/c.9.0.0"),
    "root group": (lambda p: (p / "zarr.json").unlink(), "zarr.json"),
    "a folder for a table": (_folder_for_names, "segments/000000"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_damage_is_found_and_never_read_as_data(
    tmp_path: Path, sound: Path, samples: list[Sample], kind: str
) -> None:
    path = tmp_path / "dataset"
    shutil.copytree(sound, path)
    change, where = OTHERS[kind]
    change(path)
    report = hsloader.verify(path)
    assert not report.ok
    assert any(where in problem.path for problem in report.problems), str(report)
    assert str(report)
    try:
        ds = hsloader.open_dataset(path)
    except DatasetError as error:
        assert where in str(error)  # noqa: PT017 - refusing at once is as good as refusing later
        return
    with ds:
        for i in range(len(ds)):
            for use, expected in ((ds.name, f"s{i}"), (ds.extras, {"number": i}), (_Reads(ds, samples), None)):
                try:
                    found = use(i)
                except DamageError as error:
                    assert where in str(error)  # noqa: PT017
                else:
                    assert found == expected


class _Reads:
    def __init__(self, ds: Dataset, samples: list[Sample]) -> None:
        self.ds, self.samples = ds, samples

    def __call__(self, i: int) -> None:
        _read(self.ds, i, self.samples)


def test_a_frame_rewritten_with_a_right_checksum_is_found_by_verify(tmp_path: Path, samples: list[Sample]) -> None:
    write_dataset(tmp_path / "d", samples[:2], codec="none", fields=[replace(f, codec="none") for f in FIELDS])
    shard = tmp_path / "d/segments/000000/hidden_states/c.0.0.0"
    data = bytearray(shard.read_bytes())
    size = 256 * 3 * 64 * 2
    data[100] ^= 1
    data[size : size + 4] = struct.pack("<I", crc32c(bytes(data[:size])))
    shard.write_bytes(data)
    (problem,) = hsloader.verify(tmp_path / "d").problems
    assert (problem.kind, problem.path) == ("shard", str(shard))
    assert "digest" in problem.text


def test_a_shard_that_shrinks_while_it_is_open_is_damage_not_a_crash(
    tmp_path: Path, sound: Path, samples: list[Sample]
) -> None:
    path = tmp_path / "dataset"
    shutil.copytree(sound, path)
    with hsloader.open_dataset(path) as ds:
        _read(ds, 0, samples)
        os.truncate(path / "segments/000000/hidden_states/c.0.0.0", 1000)
        with pytest.raises(DamageError, match=r"c\.0\.0\.0.*the file ends after"):
            ds.read(0, "hidden_states")


def test_large_samples_are_asked_for_their_shards_before_memory_is_taken(
    tmp_path: Path, sound: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dataset"
    shutil.copytree(sound, path)
    monkeypatch.setattr(dataset_module, "_TRUSTED_BYTES", 1000)
    (path / "segments/000000/hidden_states/c.1.0.0").unlink()
    with hsloader.open_dataset(path) as ds:
        _read(ds, 1, samples, ("input_ids",))
        monkeypatch.setattr(ds._memory, "empty", lambda *_: pytest.fail("memory was taken"))
        with pytest.raises(DamageError, match=r"c\.1\.0\.0.*shard 1, sample 1 's1'.; run: hsloader verify"):
            ds.read(1, "hidden_states")


def test_a_sample_check_finds_what_it_reads_and_misses_what_it_does_not(tmp_path: Path, sound: Path) -> None:
    path = tmp_path / "dataset"
    shutil.copytree(sound, path)
    assert hsloader.verify(path, sample=3).checked_samples == 3
    _flip(path / "segments/000000/hidden_states/c.0.0.0", 1000)
    assert not hsloader.verify(path, sample=1).ok  # the first sample is always among them
    shutil.copy(sound / "segments/000000/hidden_states/c.0.0.0", path / "segments/000000/hidden_states/c.0.0.0")
    _flip(path / "segments/000000/hidden_states/c.1.0.0", 1000)
    assert hsloader.verify(path, sample=1).ok
    (path / "segments/000000/hidden_states/c.1.0.0").unlink()
    assert not hsloader.verify(path, sample=1).ok


def test_verify_changes_nothing_and_tells_its_progress(sound: Path) -> None:
    before = tree(sound)
    seen: list[tuple[int, int]] = []
    report = hsloader.verify(sound, progress=lambda done, total: seen.append((done, total)), threads=2)
    assert report.ok
    assert (report.samples, report.checked_samples, report.segments) == (8, 8, 2)
    assert seen[-1] == (report.bytes_read, report.bytes_read)
    assert "sound" in str(report)
    assert tree(sound) == before


def test_verify_refuses_what_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hsloader.verify(tmp_path / "nothing")
    with pytest.raises(DatasetError):
        hsloader.verify(tmp_path)
