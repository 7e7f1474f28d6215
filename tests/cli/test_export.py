"""hsloader export."""

from __future__ import annotations

from pathlib import Path

import pytest

import hsloader
from tests.cli.conftest import Run

torch = pytest.importorskip("torch")


def test_gives_the_sources_back(run: Run, dataset: Path, dump: Path, tmp_path: Path) -> None:
    done = run("export", dataset, tmp_path / "out")
    assert done.status == 0
    assert "wrote 4 samples as speculators-list" in done.out
    for path in dump.glob("*.pt"):
        before, after = torch.load(path), torch.load(tmp_path / "out" / path.name)
        assert before.keys() == after.keys()
        assert torch.equal(before["input_ids"], after["input_ids"])
        for one, other in zip(before["hidden_states"], after["hidden_states"], strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16))


def test_json(run: Run, dataset: Path, tmp_path: Path) -> None:
    document = run("export", dataset, tmp_path / "out", "--layout", "specforge-eagle3", "--json").document
    assert document["samples"] == 4
    assert document["renamed"]["data_0.pt"] == "data_0.ckpt"


def test_an_unknown_layout_is_answered_with_those_there_are(run: Run, dataset: Path, tmp_path: Path) -> None:
    done = run("export", dataset, tmp_path / "out", "--layout", "speculators")
    assert done.status == 2
    assert "speculators-list" in done.err


def test_a_folder_with_something_in_it_is_left_alone(run: Run, dataset: Path, dump: Path) -> None:
    done = run("export", dataset, dump)
    assert done.status == 1
    assert "expected an empty folder or nothing" in done.err


def test_a_state_without_a_place_in_the_layout_is_told(run: Run, dataset: Path, tmp_path: Path) -> None:
    document = run("export", dataset, tmp_path / "out", "--layout", "specforge-dflash", "--json").document
    assert document["notes"] == ["last_hidden_state has no place in this layout: it is not written"]
    with hsloader.open_dataset(dataset) as opened:
        tokens = int(opened.lengths.sum())
        per_token = sum(f.row_bytes for f in opened.fields.values() if f.name.startswith("hidden_states"))
    written = [torch.load(path) for path in (tmp_path / "out").glob("*.ckpt")]
    assert sum(record["hidden_states"].nbytes for record in written) == tokens * per_token
    assert all("last" not in key for record in written for key in record)
    assert tokens * per_token <= document["raw_bytes"] <= tokens * (per_token + 16)
