"""The walk: natural order, links, special files, other datasets; everything is in one of the lists."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hsloader.formats.discover import Discovery, discover, natural_key
from hsloader.formats.survey import survey


def _made(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def _names(found: Discovery) -> list[str]:
    return [file.name for file in found.files]


def test_natural_order_over_folders(tmp_path: Path) -> None:
    _made(tmp_path, *(f"rows_{a}-{a + 2000}/data_{i}.pt" for a in (8000, 0, 10000) for i in (a, a + 10, a + 9)))
    assert _names(discover(tmp_path)) == [
        f"rows_{a}-{a + 2000}/data_{i}.pt" for a in (0, 8000, 10000) for i in (a, a + 9, a + 10)
    ]
    names = ["a", "a1", "a01", "a2", "a10", "a10b", "a" + "9" * 5000, "b/1", "b1", "é2", "é10"]
    assert sorted(names, key=natural_key) == ["a", "a01", "a1", "a2", "a10", "a10b", names[6], "b/1", "b1", "é2", "é10"]
    assert sorted(["data_10.pt", "data_9.pt", "data_٣.pt"], key=natural_key)[0] == "data_9.pt"


def test_links_and_loops(tmp_path: Path) -> None:
    src = tmp_path / "src"
    _made(src, "z/data_1.pt")
    _made(tmp_path, "elsewhere/data_2.pt")
    (src / "a").symlink_to("z")
    (src / "out").symlink_to("../elsewhere")
    (src / "z" / "up").symlink_to("..")
    (src / "self.pt").symlink_to("self.pt")
    (src / "gone.pt").symlink_to("nowhere.pt")
    (src / "notes.md").symlink_to("nowhere.md")
    found = discover(src)
    assert _names(found) == ["out/data_2.pt", "z/data_1.pt"]
    assert {s.name for s in found.sidecars} == {"a", "z/up"}
    reasons = {s.name: s.reason for s in found.bad}
    assert "loop" in reasons["self.pt"]
    assert "dangling link (to nowhere.pt)" in reasons["gone.pt"]


def test_a_link_to_a_file_of_the_source_is_no_second_sample(tmp_path: Path) -> None:
    src = tmp_path / "src"
    _made(src, "z/data_1.pt", ".cache/blob", "plain.pt")
    _made(tmp_path, "elsewhere/data_2.pt")
    (src / "a.pt").symlink_to("z/data_1.pt")
    (src / "b.pt").symlink_to("a.pt")
    (src / "c10.pt").symlink_to("../elsewhere/data_2.pt")
    (src / "c9.pt").symlink_to(tmp_path / "elsewhere" / "data_2.pt")
    (src / "d.pt").symlink_to(".cache/blob")  # the file itself is set aside: this is its only name
    os.link(src / "plain.pt", src / "hard.pt")
    found = discover(src)
    assert _names(found) == ["c9.pt", "d.pt", "hard.pt", "plain.pt", "z/data_1.pt"]
    assert {s.name: s.reason for s in found.sidecars if s.name != ".cache/blob"} == {
        "a.pt": "link to a file that was already found (z/data_1.pt)",
        "b.pt": "link to a file that was already found (z/data_1.pt)",
        "c10.pt": "link to a file that was already found (c9.pt)",
    }
    assert not found.bad


def test_special_files_are_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data_0.pt")
    os.mkfifo(tmp_path / "DATA_1.PT")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(tmp_path)
        try:
            server.bind("socket.ckpt")
        finally:
            os.chdir(here)
        found = discover(tmp_path)
    assert not found.files
    assert {s.name for s in found.bad} == {"data_0.pt", "DATA_1.PT", "socket.ckpt"}
    assert {s.name for s in found.sidecars} == {"pipe"}


def test_sidecars_hidden_files_and_other_datasets(tmp_path: Path) -> None:
    sidecars = {
        "token_freq.pt",
        "vocab_mapping/vocab_mapping.pt",
        "d2t.npy",
        "t2d-32000.npy",
        "sample_lengths.json",
        "data_config.json",
        "data_0.pt.lock",
        "x.tmp",
        "optimizer.pt",
        "target_embeddings.safetensors",
        "target_weights.safetensors",
        "README.md",
        "run.log",
        "._data_0.pt",
        ".DS_Store",
        ".data_1.pt.swp",
        ".ipynb_checkpoints/data_0.pt",
        "unknown.xyz",
    }
    _made(tmp_path, "data_0.pt", "old/zarr.json", "old/data_9.pt", *sidecars)
    found = discover(tmp_path)
    assert _names(found) == ["data_0.pt"]
    assert {s.name for s in found.sidecars} == {*sidecars, "old"}
    assert found.files[0].lock


def test_a_container_of_an_unknown_name_is_found_by_its_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "sample.blob").write_bytes(b"PK\x03\x04" + bytes(50))
    assert _names(discover(tmp_path)) == ["sample.blob"]


def test_one_file_and_no_file(tmp_path: Path) -> None:
    _made(tmp_path, "data_0.pt")
    assert _names(discover(tmp_path / "data_0.pt")) == ["data_0.pt"]
    with pytest.raises(FileNotFoundError):
        discover(tmp_path / "nothing")


def test_a_folder_that_cannot_be_read_is_reported(tmp_path: Path, as_root: bool) -> None:
    if as_root:
        pytest.skip("permissions do not bind root")
    _made(tmp_path, "closed/data_0.pt")
    (tmp_path / "closed").chmod(0)
    try:
        (bad,) = discover(tmp_path).bad
    finally:
        (tmp_path / "closed").chmod(0o700)
    assert "Permission denied" in bad.reason


def test_a_held_lock_means_being_written(tmp_path: Path) -> None:
    _made(tmp_path, "data_0.pt", "data_0.pt.lock", "data_1.pt", "data_1.pt.lock")
    with (tmp_path / "data_0.pt.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held, stale = survey(tmp_path).bad
        assert survey(tmp_path / "data_0.pt").bad == [held]
    assert held.reason == "being written: its producer holds the lock file"
    assert "a lock file lies beside it" in stale.reason


def test_a_pipe_in_place_of_a_settings_file_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data_config.json")
    os.mkfifo(tmp_path / "state.json")
    _made(tmp_path, "dataset_info.json", "a.arrow", "hidden_states/hs_0.safetensors")
    found = survey(tmp_path)
    assert not found.settings
    assert "does not list the files of an arrow dataset" in found.bad[0].reason


def test_settings_of_the_producer(tmp_path: Path) -> None:
    written = {
        "version": "2.0",
        "speculators_version": "0.4.0",
        "model": {"target_model_path": "example/model", "hidden_size": 64},
        "hidden_states": {"layer_ids": [2, 4, 5, 7]},
    }
    (tmp_path / "data_config.json").write_text(json.dumps(written))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "data_config.json").write_text("[" * 100_000)
    (settings,) = survey(tmp_path).settings
    assert (settings.name, settings.producer, settings.model) == (
        "data_config.json",
        "speculators 0.4.0",
        "example/model",
    )
    assert (settings.hidden_size, settings.layer_ids, settings.norm_state) == (64, (2, 4, 5, 7), "pre")


def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xff.pt"))).write_bytes(b"x")
    (name,) = _names(discover(tmp_path))
    assert os.fsencode(name) == b"d\xff.pt"


def test_the_strict_readers_import_nothing_large() -> None:
    code = (
        "import importlib, pkgutil, sys; import hsloader.formats as room;"
        "[importlib.import_module(f'hsloader.formats.{m.name}') for m in pkgutil.iter_modules(room.__path__)];"
        "print(sorted({'torch', 'zarr', 'pyarrow', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
