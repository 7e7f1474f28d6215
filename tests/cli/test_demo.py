"""hsloader demo, on fewer and smaller samples than a person gets."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import hsloader
from hsloader.cli import demo
from tests.cli.conftest import SHAPE, Run


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "DemoShape", lambda: SHAPE)
    monkeypatch.chdir(tmp_path)


def test_makes_converts_verifies_and_compares(run: Run, tmp_path: Path) -> None:
    done = run("demo")
    assert done.status == 0
    for words in ("converted 4 samples", "sound: 4 samples", "equal, bit for bit", "smaller", "rm -r hsloader-demo"):
        assert words in done.out
    assert hsloader.open_dataset(tmp_path / "hsloader-demo" / "data.hs").provenance.norm_state == "pre"


def test_a_second_demo_has_a_folder_of_its_own(run: Run, tmp_path: Path) -> None:
    (tmp_path / "hsloader-demo").mkdir()
    assert run("demo", "--json").document["folder"] == "hsloader-demo-2"
    assert not any((tmp_path / "hsloader-demo").iterdir())


def test_json_has_the_figures(run: Run) -> None:
    document = run("demo", "here", "--json").document
    assert document["convert"]["converted"] == document["compare"]["samples"] == 4
    assert document["verify"]["ok"] is True


def test_a_folder_with_something_in_it_is_left_alone(run: Run, dump: Path) -> None:
    before = sorted(dump.iterdir())
    done = run("demo", dump)
    assert done.status == 1
    assert "the folder is not empty" in done.err
    assert sorted(dump.iterdir()) == before


def test_a_difference_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_same_bits", lambda ours, theirs: ours.ndim != 3)
    done = run("demo")
    assert done.status == 1
    assert "data_0.pt: hidden_states differ" in done.err
