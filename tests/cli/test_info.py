"""hsloader info."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run


def test_says_what_the_dataset_holds(run: Run, dataset: Path) -> None:
    done = run("info", dataset)
    assert done.status == 0
    for words in (
        "samples      4",
        "the-model",
        "before the final norm",
        "hidden_states",
        "[tokens, 3, 128]",
        "median",
    ):
        assert words in done.out


def test_json(run: Run, dataset: Path) -> None:
    document = run("info", dataset, "--json").document
    assert document["samples"] == 4
    assert document["provenance"]["norm_state"] == "pre"
    assert document["fields"]["last_hidden_state"]["stored_bytes"] > 0
    assert document["quarantine"] == []


def test_what_was_set_aside_is_remembered(run: Run, dump: Path, tmp_path: Path) -> None:
    (dump / "data_2.pt").write_bytes(b"")
    run("convert", dump, tmp_path / "new.hs")
    assert "data_2.pt: the file is empty" in run("info", tmp_path / "new.hs").out


def test_names_cannot_move_the_cursor(run: Run, dump: Path, tmp_path: Path) -> None:
    (dump / "data_9\x1b[2J\n.pt").write_bytes(b"")
    run("convert", dump, tmp_path / "new.hs")
    out = run("info", tmp_path / "new.hs").out
    assert "\x1b" not in out
    assert r"data_9\x1b[2J\n.pt" in out
