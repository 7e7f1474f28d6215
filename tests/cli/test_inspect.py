"""hsloader inspect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run

torch = pytest.importorskip("torch")


def test_says_what_is_there_and_what_to_type_next(run: Run, dump: Path) -> None:
    done = run("inspect", dump)
    assert done.status == 0
    for words in ("speculators-list (4 samples)", "producer speculators 0.4.0", "hidden_states bfloat16 [3, 128]"):
        assert words in done.out
    assert f"next: hsloader convert {dump} DST" in done.out


def test_json(run: Run, dump: Path) -> None:
    document = run("inspect", dump, "--json").document
    assert document["samples"] == 4
    assert document["convertible"] is True
    assert {item["name"] for item in document["skipped"]} == {"data_config.json", "sample_lengths.json"}


def test_a_bad_file_is_listed_and_gives_converts_status(run: Run, dump: Path) -> None:
    (dump / "data_1.pt").write_bytes(b"")
    done = run("inspect", dump)
    assert done.status == 3
    assert "data_1.pt: the file is empty" in done.out


def test_a_folder_without_samples_says_what_is_there_instead(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("nothing")
    done = run("inspect", tmp_path)
    assert done.status == 1
    assert "no samples found" in done.out
    assert "notes.md: document" in done.out


def test_a_missing_source_is_one_line(run: Run, tmp_path: Path) -> None:
    assert run("inspect", tmp_path / "nothing").err == f"error: {tmp_path}/nothing: there is no such source\n"


def test_a_mixed_folder_is_refused_as_convert_would(run: Run, dump: Path) -> None:
    for i in (0, 1):
        sample = torch.load(dump / f"data_{i}.pt")
        sample["hidden_states"] = [state.float() for state in sample["hidden_states"]]
        torch.save(sample, dump / f"data_{i}.pt")
    done = run("inspect", dump)
    assert done.status == 1
    assert "convert each from a folder of its own" in done.out
