"""A removal that a kill cuts short: what it hid is neither a sample again nor lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hsloader import convert, export, open_dataset
from hsloader.conversion import removal
from hsloader.formats.discover import REMOVING
from tests.conversion.sources import fill, flip_a_byte, record, torch, write


class Killed(BaseException):
    """Stands for a kill: nothing that comes after it runs."""


def killed_while_it_removes(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, *, number: int = 2, replaced: bool = False
) -> Path:
    """Convert with deletion and stop where so many files had a hidden name; another replaced the last just before."""
    rename, hidden = os.rename, []

    def rename_and_die(old: str, new: str) -> None:
        if REMOVING not in str(new):
            rename(old, new)
            return
        if len(hidden) == number - 1 and replaced:
            write(src.parent / "new.pt", record(50, 40))
            rename(src.parent / "new.pt", old)
        rename(old, new)
        hidden.append(new)
        if len(hidden) == number:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(removal.os, "rename", rename_and_die)
        with pytest.raises(Killed):
            convert(src, dst, delete_source=True, workers=1)
    return Path(hidden[-1])


def test_the_next_run_finishes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src / "a", 3)
    sizes = [(src / "a" / f"data_{i}.pt").stat().st_size for i in range(3)]
    hidden = killed_while_it_removes(src, dst, monkeypatch)
    assert hidden.name.startswith(REMOVING)
    assert hidden.name.endswith("-data_1.pt")
    report = convert(src, dst)  # without deletion nothing is touched
    assert (report.present, report.converted, report.exit_status) == (3, 0, 0)
    (left,) = [item for item in report.skipped if item.name == f"a/{hidden.name}"]
    assert "the same command with --delete-source finishes that" in left.reason
    assert hidden.exists()
    report = convert(src, dst, delete_source=True)
    assert (report.present, report.converted, report.exit_status) == (3, 0, 0)
    assert os.listdir(src / "a") == []
    assert report.deleted.files == 2
    assert report.deleted.bytes == sizes[1] + sizes[2]
    assert report.deleted.kept == ()


def test_in_an_arrow_folder_and_by_a_name_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    fill(tmp_path / "first", 3)
    convert(tmp_path / "first", tmp_path / "store")
    export(tmp_path / "store", tmp_path / "arrow", layout="speculators-arrow")
    hidden = killed_while_it_removes(tmp_path / "arrow", tmp_path / "arrow.hs", monkeypatch)
    (left,) = [s for s in convert(tmp_path / "arrow", tmp_path / "arrow.hs").skipped if hidden.name in s.name]
    assert "--delete-source" in left.reason
    convert(tmp_path / "arrow", tmp_path / "arrow.hs", delete_source=True)
    assert os.listdir(tmp_path / "arrow" / "hidden_states") == []

    long = tmp_path / "long"
    for i in range(3):
        write(long / ("n" * 250 + f"{i}.pt"), record(i, 50))
    hidden = killed_while_it_removes(long, tmp_path / "long.hs", monkeypatch)
    assert len(hidden.name) == len(REMOVING) + 16
    convert(long, tmp_path / "long.hs", delete_source=True)
    assert os.listdir(long) == []


def test_a_file_that_is_not_the_converted_one_gets_its_name_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 3)
    hidden = killed_while_it_removes(src, dst, monkeypatch, replaced=True)
    assert torch.load(hidden)["input_ids"].numel() == 40
    report = convert(src, dst, delete_source=True)
    assert os.listdir(src) == ["data_1.pt"]
    assert torch.load(src / "data_1.pt")["input_ids"].numel() == 40
    assert [(k.name, k.reason) for k in report.deleted.kept] == [
        ("data_1.pt", "an interrupted run had hidden it to remove it; it has its name again")
    ]
    with open_dataset(dst) as dataset:
        assert dataset.lengths.tolist() == [120, 127, 134]


def test_a_name_that_is_taken_by_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 3)
    hidden = killed_while_it_removes(src, dst, monkeypatch, replaced=True)
    write(src / "data_1.pt", record(60, 30))
    report = convert(src, dst, delete_source=True, replan=True)
    assert sorted(os.listdir(src)) == [hidden.name, "data_1.pt"]
    kept = {item.name: item.reason for item in report.deleted.kept}
    assert "another file is called data_1.pt now" in kept[hidden.name]
    (src / "data_1.pt").unlink()
    os.link(hidden, src / "data_1.pt")  # a kill between these two names
    convert(src, dst, delete_source=True, replan=True)
    assert os.listdir(src) == ["data_1.pt"]


def test_what_this_dataset_does_not_prove_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = tmp_path / "src"
    fill(src, 4)
    hidden = killed_while_it_removes(src, tmp_path / "one", monkeypatch)
    report = convert(src, tmp_path / "two", delete_source=True)  # another dataset, of what is left
    assert (report.converted, report.exit_status) == (2, 0)
    assert os.listdir(src) == [hidden.name]
    assert [s.name for s in report.skipped] == [hidden.name]


def test_a_sample_that_was_bad_first_and_converted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 3)
    flip_a_byte(src / "data_1.pt")
    assert convert(src, dst).exit_status == 3
    fill(src, 1, first=1)
    killed_while_it_removes(src, dst, monkeypatch, number=3)  # the first plan knows it, the second converted it
    report = convert(src, dst, delete_source=True)
    assert os.listdir(src) == []
    assert (report.deleted.files, report.deleted.kept, report.exit_status) == (1, (), 0)


def test_a_link_to_a_file_that_was_converted_and_removed(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 2)
    (src / "alias.pt").symlink_to("data_1.pt")
    first = convert(src, dst, delete_source=True)
    assert (first.converted, first.exit_status) == (2, 0)
    assert [s.name for s in first.skipped] == ["alias.pt"]
    assert os.listdir(src) == ["alias.pt"]
    again = convert(src, dst, delete_source=True)
    assert (again.present, again.exit_status) == (2, 0)
