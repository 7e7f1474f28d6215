"""hsloader verify."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cli.conftest import Run


def test_a_sound_dataset(run: Run, dataset: Path) -> None:
    done = run("verify", dataset)
    assert done.status == 0
    assert done.out.startswith("sound: 4 samples, ")


def test_some_samples_only(run: Run, dataset: Path) -> None:
    done = run("verify", dataset, "--sample", 2)
    assert done.status == 0
    assert "2 samples of 4" in done.out


def test_damage_is_named_and_gives_status_1(run: Run, dataset: Path) -> None:
    shard = next((dataset / "segments").glob("*/hidden_states/c.0.0.0"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    done = run("verify", dataset)
    assert done.status == 1
    assert "damaged: 1 problem" in done.out
    assert str(shard) in done.out
    assert "data_0.pt" in done.out
    assert "\n3 of 4 samples were found sound. Restore" in done.out

    document = run("verify", dataset, "--json").document
    assert document["ok"] is False
    assert document["problems"][0]["samples"] == ["data_0.pt"]


def test_a_segment_that_is_gone(run: Run, dataset: Path) -> None:
    shutil.rmtree(next((dataset / "segments").glob("0*")))
    done = run("verify", dataset)
    assert "hits all 4 samples\n" in done.out
    assert "\n0 of 4 samples were found sound. Restore" in done.out
    told = run("info", dataset).err
    assert "expected a file: restore it from a copy, or convert its samples again into another dataset" in told


def test_json(run: Run, dataset: Path) -> None:
    document = run("verify", dataset, "--json").document
    assert document["ok"] is True
    assert document["checked_samples"] == 4


def test_no_dataset_is_one_line(run: Run, tmp_path: Path) -> None:
    done = run("verify", tmp_path)
    assert done.status == 1
    assert done.err.startswith(f"error: {tmp_path}: not an hsloader dataset")
    assert "Traceback" not in done.err
