"""hsloader info."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import hsloader
from hsloader.conversion.report import Progress
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


def test_an_interrupted_conversion_is_not_taken_for_a_whole_one(run: Run, dump: Path, tmp_path: Path) -> None:
    target = tmp_path / "new.hs"
    run("convert", dump, target)
    shutil.copy(dump / "data_0.pt", dump / "data_9.pt")

    def stop(progress: Progress) -> None:
        if progress.stage == "convert":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hsloader.convert(dump, target, workers=1, progress=stop)
    assert run("info", target, "--json").document["unfinished"] == 1
    assert "1 more sample planned" in run("info", target).out
    run("convert", dump, target)
    document = run("info", target, "--json").document
    assert (document["samples"], document["unfinished"]) == (5, 0)
    assert "unfinished" not in run("info", target).out


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


def test_states_that_were_rounded_are_said_to_be(run: Run, dump: Path, tmp_path: Path) -> None:
    report = hsloader.convert(dump, tmp_path / "eight.hs", codec="fp8", norm_state="pre")
    document = run("info", tmp_path / "eight.hs", "--json").document
    assert (document["raw_bytes"], document["stored_bytes"]) == (report.raw_bytes, report.stored_bytes)
    states = document["fields"]["hidden_states"]
    assert (states["codec"], states["source_dtype"], states["raw_bytes"]) == (
        "fp8",
        "bfloat16",
        2 * 3 * 128 * document["tokens"],
    )
    assert document["fields"]["hidden_states_scale"]["raw_bytes"] == 0
    assert run("info", tmp_path / "eight.hs").out.count("fp8, lossy (was bfloat16)") == 2
