"""hsloader convert."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hsloader
from tests.cli.conftest import Run


def test_says_what_it_will_do_and_what_it_did(run: Run, dump: Path, tmp_path: Path) -> None:
    done = run("convert", dump, tmp_path / "new.hs", "--norm-state", "pre", "--layer-ids", "2,4,5")
    assert done.status == 0
    for words in ("speculators-list (4 samples)", "after layer 2, 4, 5; the last before the final norm", "size now"):
        assert words in done.out
    assert re.search(r"\n  time +[0-9.]+ s or more, with \d+ process", done.out)  # the disk is not in it
    assert "converted 4 samples" in done.out
    assert "read back and compared" in done.out
    assert "next: hsloader info" in done.out
    assert len(hsloader.open_dataset(tmp_path / "new.hs")) == 4


def test_json_is_the_only_thing_on_stdout(run: Run, dump: Path, tmp_path: Path) -> None:
    done = run("convert", dump, tmp_path / "new.hs", "--json")
    assert done.document["converted"] == 4
    assert done.document["exit_status"] == done.status == 0
    assert done.document["plan"]["samples"] == 4


def test_a_bad_file_is_listed_with_its_reason_and_gives_status_3(run: Run, dump: Path, tmp_path: Path) -> None:
    whole = (dump / "data_1.pt").read_bytes()
    (dump / "data_1.pt").write_bytes(whole[: len(whole) // 2])
    done = run("convert", dump, tmp_path / "new.hs")
    assert done.status == 3
    assert "set aside: 1 sample of 4" in done.out
    assert "data_1.pt: truncated" in done.out


def test_the_same_command_again_has_nothing_to_do(run: Run, dump: Path, tmp_path: Path) -> None:
    run("convert", dump, tmp_path / "new.hs")
    done = run("convert", dump, tmp_path / "new.hs")
    assert done.status == 0
    assert "nothing to do: all 4 samples are in the dataset" in done.out


def test_dry_run_writes_nothing(run: Run, dump: Path, tmp_path: Path) -> None:
    done = run("convert", dump, tmp_path / "new.hs", "--dry-run")
    assert done.status == 0
    assert "4, " in done.out
    assert not (tmp_path / "new.hs").exists()


def test_delete_source_stands_alone(run: Run, dump: Path, tmp_path: Path) -> None:
    done = run("convert", dump, tmp_path / "new.hs", "--delete-source")
    assert done.status == 0
    assert "4 source files" in done.out
    assert not list(dump.glob("*.pt"))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--norm-state=nearly", "expected one of pre, post"),
        ("--layer-ids=2,x", "expected for example 2,18,33"),
        ("--layer-ids=2", "layer_ids names 1 layers"),
        ("--segment-size=big", "expected for example 500MB"),
        ("--delete-source=all", "takes no value but lossy"),
        ("--workers=0", "expected a number of at least 1"),
        ("--no-such-option", "No such option"),
    ],
)
def test_a_wrong_option_is_a_usage_error(run: Run, dump: Path, tmp_path: Path, option: str, words: str) -> None:
    done = run("convert", dump, tmp_path / "new.hs", option)
    assert done.status == 2
    assert words in " ".join(done.err.split())
    assert not (tmp_path / "new.hs").exists()


@pytest.mark.parametrize(("text", "size"), [("1MiB", 1 << 20), ("2mb", 2_000_000), ("1.5 MB", 1_500_000)])
def test_sizes_have_units(run: Run, dump: Path, tmp_path: Path, text: str, size: int) -> None:
    from hsloader.cli.common import parse_size

    assert parse_size(text) == size
    assert run("convert", dump, tmp_path / "new.hs", "--segment-size", text).status == 0


def test_a_missing_source_is_one_line(run: Run, tmp_path: Path) -> None:
    done = run("convert", tmp_path / "nothing", tmp_path / "new.hs")
    assert done.status == 1
    assert done.err == f"error: {tmp_path}/nothing: there is no such source\n"
    assert done.out == ""


def test_an_error_is_the_document_with_json(run: Run, tmp_path: Path) -> None:
    done = run("convert", tmp_path / "nothing", tmp_path / "new.hs", "--json")
    assert done.status == 1
    assert done.document["error"]["type"] == "FileNotFoundError"
    assert "there is no such source" in done.document["error"]["message"]


def test_traceback_shows_where_an_error_comes_from(run: Run, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run("convert", tmp_path / "nothing", tmp_path / "new.hs", "--traceback")
