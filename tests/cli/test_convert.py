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
    assert re.search(
        r"\n  time +(under a second|[0-9.]+ s or more), with \d+ process", done.out
    )  # the disk is not in it
    assert f"in training: for batch in hsloader.DataLoader('{tmp_path}/new.hs', trainer=...)" in done.out
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
    assert done.out.endswith("\na dry run: nothing was written\n")
    assert not (tmp_path / "new.hs").exists()


def test_delete_source_stands_alone(run: Run, dump: Path, tmp_path: Path) -> None:
    done = run("convert", dump, tmp_path / "new.hs", "--delete-source")
    assert done.status == 0
    assert "4 source files" in done.out
    assert not list(dump.glob("*.pt"))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--norm-state=nearly", "--norm-state is 'nearly'; expected one of pre, post"),
        ("--layer-ids=2,x", "expected for example 2,18,33"),
        ("--layer-ids=2", "--layer-ids names 1 layer (2), the samples have 3"),
        ("--typical-length=0", "--typical-length is 0; expected"),
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


def test_keywords_of_the_api_are_options_here(run: Run, dump: Path, tmp_path: Path) -> None:
    delete = run("convert", dump, tmp_path / "new.hs", "--delete-source", "--codec", "fp8")
    assert "ask for it as --delete-source=lossy, or leave --delete-source out" in " ".join(delete.err.split())
    assert "--read-back" not in run("convert", dump, tmp_path / "new.hs", "--delete-source", "--no-read-back").err
    (dump / "data_config.json").unlink(missing_ok=True)  # it says which norm state it is
    run("convert", dump, tmp_path / "new.hs")
    other = run("convert", dump, tmp_path / "new.hs", "--vocab-size", "99999")
    assert "  --vocab-size: the journal has none, this run has 99999\n" in other.err
    assert "or say --replan: it keeps" in other.err
    norm = run("convert", dump, tmp_path / "new.hs", "--norm-state", "pre").err
    assert "--norm-state: the dataset has 'unknown', this run has 'pre'" in norm
    assert "say hsloader.DataLoader(norm_state='pre') when training" in norm


def test_the_size_of_segments_is_of_no_matter_to_those_that_are_made(run: Run, dump: Path, tmp_path: Path) -> None:
    run("convert", dump, tmp_path / "new.hs", "--segment-size", "2MB")
    assert "nothing to do: all 4 samples are in the dataset" in run("convert", dump, tmp_path / "new.hs").out


def test_what_was_set_aside_is_not_said_to_be_there(run: Run, dump: Path, tmp_path: Path) -> None:
    (dump / "data_1.pt").write_bytes(b"")
    run("convert", dump, tmp_path / "new.hs")
    again = run("convert", dump, tmp_path / "new.hs")
    assert again.status == 3
    assert "nothing new to convert: 3 samples are in the dataset already" in again.out
    assert "set aside: 1 sample of 4" in again.out


def test_one_of_a_thing_is_said_as_one(run: Run, dump: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    record = torch.load(dump / "data_0.pt")
    del record["loss_mask"]
    (tmp_path / "one").mkdir()
    torch.save(record, tmp_path / "one" / "data_0.pt")
    (tmp_path / "one" / "sample_lengths.json").write_text("{}")
    out = run("convert", tmp_path / "one", tmp_path / "one.hs").out
    tokens = len(record["input_ids"])
    assert re.search(rf"\n  samples +1, {tokens} tokens\n", out)
    assert re.search(r"\n  other files +1 that is no sample: sample_lengths\.json\n", out)
    assert "no loss_mask (1 sample)\n" in out
    assert f"\ntokens a sample: {tokens}\n" in run("info", tmp_path / "one.hs").out


def test_a_source_without_a_good_sample(run: Run, dump: Path, tmp_path: Path) -> None:
    done = run("convert", dump, tmp_path / "new.hs", "--vocab-size", "10")
    assert done.status == 1
    assert f"{dump}: none of the 4 samples can be taken, so nothing was written\ncannot be converted (4):" in done.err


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


@pytest.mark.parametrize("arguments", [["convert", "dump"], ["verify", "--sample", "x"], ["info", "--no-such"]])
def test_a_wrong_command_line_is_a_document_with_json(run: Run, arguments: list[str]) -> None:
    done = run(*arguments, "--json")
    assert done.status == 2
    assert done.document["error"]["type"] == "UsageError"
    assert done.document["error"]["message"] in " ".join(done.err.split())


def test_traceback_shows_where_an_error_comes_from(run: Run, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run("convert", tmp_path / "nothing", tmp_path / "new.hs", "--traceback")
