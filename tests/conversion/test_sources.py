"""What a conversion does about its sources: nothing unless asked, and then only what is proved."""

from __future__ import annotations

import errno
import gzip
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hsloader import (
    ConversionError,
    IncompatibleError,
    SettingsChangedError,
    convert,
    export,
    inspect,
    open_dataset,
)
from hsloader.conversion import readback, removal
from hsloader.conversion.report import Progress
from tests.conversion.sources import fill, flip_a_byte, leftovers, record, torch, tree, write

SEGMENT = 1 << 20


def names(dst: Path) -> list[str]:
    with open_dataset(dst) as dataset:
        return [dataset.name(i) for i in range(len(dataset))]


def test_delete_source_removes_what_is_proved_and_nothing_else(tmp_path: Path) -> None:
    src, store = tmp_path / "src", tmp_path / "store"
    fill(src, 7)
    flip_a_byte(src / "data_2.pt")
    write(src / "data_3.pt", {**record(3, 130), "left": torch.zeros(5)})  # a field that has no row a token
    store.mkdir()
    (src / "data_4.pt").rename(store / "data_4.pt")
    (src / "data_4.pt").symlink_to("../store/data_4.pt")
    (src / "data_config.json").write_text("{}")

    report = convert(src, tmp_path / "dst", segment_size=SEGMENT, delete_source=True)

    assert sorted(os.listdir(src)) == ["data_2.pt", "data_3.pt", "data_4.pt", "data_config.json"]
    assert (store / "data_4.pt").exists()
    assert report.deleted.files == 4
    kept = {item.name: item.reason for item in report.deleted.kept}
    assert "quarantined" in kept["data_2.pt"]
    assert "left" in kept["data_3.pt"]
    assert "link" in kept["data_4.pt"]
    assert len(names(tmp_path / "dst")) == 6

    again = convert(src, tmp_path / "dst", segment_size=SEGMENT, delete_source=True)
    assert (again.converted, again.present, again.exit_status) == (0, 6, 3)
    assert again.samples_found == report.samples_found
    assert sorted(os.listdir(src)) == ["data_2.pt", "data_3.pt", "data_4.pt", "data_config.json"]


def test_delete_source_asked_for_later(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 3)
    convert(src, dst)
    assert len(os.listdir(src)) == 3
    os.utime(src / "data_1.pt", ns=(1, 1))
    with pytest.raises(SettingsChangedError, match=r"data_1\.pt: now modified 19\S+ \S+\.000000001 .*planned: 20"):
        convert(src, dst, delete_source=True)
    report = convert(src, dst, delete_source=True, replan=True)
    assert os.listdir(src) == ["data_1.pt"]
    assert [item.name for item in report.deleted.kept] == ["data_1.pt"]


def test_nothing_is_deleted_that_was_not_read_back(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 2)
    with pytest.raises(ValueError, match="read_back"):
        convert(src, dst, read_back=False, delete_source=True)
    convert(src, dst, read_back=False)
    report = convert(src, dst, delete_source=True)
    assert len(os.listdir(src)) == 2
    assert all("read-back" in item.reason for item in report.deleted.kept)


@pytest.mark.parametrize("refused", ["nothing", "the flag", "the read"])
def test_read_back_in_small_windows_by_direct_io_or_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    fill(tmp_path / "src", 5)
    fcntl, preadv = readback.fcntl.fcntl, readback.os.preadv
    direct: set[int] = set()

    def set_flags(fd: int, command: int, flags: int) -> int:
        if refused == "the flag" and flags:
            raise OSError(errno.EINVAL, "no direct reads here")
        (direct.add if flags else direct.discard)(fd)
        return 0 if refused == "the read" else fcntl(fd, command, flags)

    def read(fd: int, buffers: Any, offset: int) -> int:
        if refused == "the read" and fd in direct:
            raise OSError(errno.EINVAL, "not aligned as this disk wants it")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(readback.fcntl, "fcntl", set_flags)
    monkeypatch.setattr(readback.os, "preadv", read)
    monkeypatch.setattr(readback, "_WINDOW", 1 << 16)
    monkeypatch.setattr(readback, "_GROUP", 1 << 18)
    assert convert(tmp_path / "src", tmp_path / "dst", threads=2).converted == 5


@pytest.mark.parametrize("field", ["hidden_states", "last_hidden_state", "input_ids"])
def test_a_difference_at_read_back_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 4)
    whole = readback.drop_from_cache

    def disk_that_lies(directory: Path) -> None:
        whole(directory)
        flip_a_byte(next((directory / field).glob("c.*")))

    with monkeypatch.context() as patched:
        patched.setattr(readback, "drop_from_cache", disk_that_lies)
        with pytest.raises(ConversionError, match="does not read back"):
            convert(src, dst, delete_source=True)
    assert len(os.listdir(src)) == 4
    assert not (dst / "manifest.json").exists()
    assert leftovers(dst) == []
    convert(src, dst)
    assert len(names(dst)) == 4


def test_lossy_deletion_must_be_asked_for_by_name(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    padded = record(0, 100)
    padded["input_ids"][60:] = 0
    padded["loss_mask"][60:] = 0
    write(src / "data_0.pt", padded)
    write(src / "data_1.pt", record(1, 90))
    with pytest.raises(ValueError, match="lossy"):
        convert(src, dst, trim_padding=True, delete_source=True)
    report = convert(src, dst, trim_padding=True, delete_source="lossy")
    assert report.trimmed_samples == 1
    assert os.listdir(src) == []
    with open_dataset(dst) as dataset:
        assert dataset.lengths.tolist() == [60, 90]
        assert torch.equal(dataset[0]["last_hidden_state"], padded["hidden_states"][3][:60])


def test_new_files_become_a_further_plan(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 3)
    whole = (src / "data_2.pt").read_bytes()
    (src / "data_2.pt").write_bytes(whole[:5000])  # still being written
    first = convert(src, dst)
    assert [q.name for q in first.quarantined] == ["data_2.pt"]
    with open_dataset(dst) as dataset:
        before = dataset.fingerprint

    (src / "data_2.pt").write_bytes(whole)
    fill(src, 2, first=10)
    second = convert(src, dst)

    assert (second.converted, second.present, second.quarantined) == (3, 2, ())
    assert names(dst) == ["data_0.pt", "data_1.pt", "data_2.pt", "data_10.pt", "data_11.pt"]
    assert not (dst / "quarantine.jsonl").exists()
    with open_dataset(dst) as dataset:
        assert dataset.manifest.fingerprints(1)[1] == before  # a grown dataset still proves what it was
    third = convert(src, dst)
    assert (third.converted, third.present) == (0, 5)


def test_a_file_that_grows_while_it_is_converted_is_left_for_the_next_run(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 3)

    def write_on(_: object) -> None:  # between planning and reading
        write(src / "data_1.pt", record(1, 200))

    first = convert(src, dst, on_plan=write_on)
    assert [q.name for q in first.quarantined] == ["data_1.pt"]
    assert "changed since it was planned" in first.quarantined[0].reason
    second = convert(src, dst)
    assert (second.converted, second.present, second.exit_status) == (1, 2, 0)
    with open_dataset(dst) as dataset:
        assert dataset.lengths.tolist() == [120, 134, 200]


def test_speculators_arrow_folders_resume_and_grow(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    fill(tmp_path / "first", 3)
    convert(tmp_path / "first", tmp_path / "store")
    src, dst = tmp_path / "src", tmp_path / "dst"
    export(tmp_path / "store", src, layout="speculators-arrow")
    missing = src / "hidden_states" / "hs_1.safetensors"
    missing.rename(tmp_path / "aside")

    first = convert(src, dst)
    assert (first.converted, [q.name for q in first.quarantined]) == (2, ["hidden_states/hs_1.safetensors"])
    assert convert(src, dst).present == 2
    (tmp_path / "aside").rename(missing)
    second = convert(src, dst)
    assert (second.converted, second.present, second.quarantined) == (1, 2, ())
    with open_dataset(dst) as dataset, open_dataset(tmp_path / "store") as store:
        assert [dataset.name(i) for i in range(3)] == [f"hidden_states/hs_{i}.safetensors" for i in (0, 2, 1)]
        for i, j in enumerate((0, 2, 1)):
            assert all(torch.equal(dataset[i][name], store[j][name]) for name in store.fields)


def test_changed_settings_are_refused_with_both_values(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 3)
    convert(src, dst, norm_state="pre", vocab_size=30000)
    with pytest.raises(
        SettingsChangedError, match=r"vocab_size: the journal has 30000, this run has 32000(?s:.*)replan"
    ):
        convert(src, dst, norm_state="pre", vocab_size=32000)
    (tmp_path / "other").mkdir()
    with pytest.raises(SettingsChangedError, match=r"another source(?s:.*)append"):
        convert(tmp_path / "other", dst, norm_state="pre", vocab_size=30000)
    assert convert(src, dst, norm_state="pre", vocab_size=30000).present == 3
    assert convert(src, dst, vocab_size=30000).present == 3  # what was recorded need not be said again
    with open_dataset(dst) as dataset:
        assert dataset.provenance.norm_state == "pre"


def test_what_the_dataset_does_not_record_cannot_be_said_later(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 3)
    convert(src, dst)
    for replan in (False, True):
        with pytest.raises(
            SettingsChangedError,
            match=r"norm_state: the dataset has 'unknown', this run has 'pre'(?s:.*)DataLoader\(norm_state='pre'\)",
        ):
            convert(src, dst, norm_state="pre", replan=replan)
        with pytest.raises(SettingsChangedError, match=r"layer_ids: the dataset has none, this run has \[1, 2, 3\]"):
            convert(src, dst, layer_ids=[1, 2, 3], replan=replan)
    assert convert(src, dst).present == 3
    report = convert(src, dst, replan=True)
    assert "unknown, and recorded as such; if you know it, give norm_state= to hsloader.DataLoader" in " ".join(
        report.notes
    )
    fill(src, 1, first=3)  # a part of the dataset that knows more than the rest is no better
    with pytest.raises(SettingsChangedError, match="norm_state: the dataset has 'unknown'"):
        convert(src, dst, norm_state="pre", replan=True, allow_unknown=True)


def test_keywords_that_are_none_are_named(tmp_path: Path) -> None:
    fill(tmp_path / "src", 1)
    wrong: Any = {"layer_ids": "2,18,33"}
    with pytest.raises(TypeError, match=r"layer_ids is '2,18,33'; expected whole numbers, for example \[2, 18, 33\]"):
        convert(tmp_path / "src", tmp_path / "dst", **wrong)
    misspelt: Any = {"normstate": "pre"}
    with pytest.raises(TypeError, match=r"no keyword normstate=: did you mean norm_state=\?"):
        convert(tmp_path / "src", tmp_path / "dst", **misspelt)


def test_each_source_has_settings_of_its_own(tmp_path: Path) -> None:
    one, two, dst = tmp_path / "one", tmp_path / "two", tmp_path / "dst"
    fill(one, 3)
    fill(two, 2, first=5)
    convert(one, dst)
    with pytest.raises(IncompatibleError, match="norm state"):
        convert(two, dst, append=True, norm_state="pre")
    report = convert(two, dst, append=True, norm_state="pre", allow_unknown=True)
    assert (report.converted, report.present) == (2, 3)
    assert report.plan is not None
    assert report.plan.norm_state == "unknown"  # as the dataset has it
    assert convert(two, dst, append=True, norm_state="pre", allow_unknown=True, replan=True).present == 5
    assert convert(one, dst).present == 5
    assert convert(two, dst, append=True, norm_state="pre").present == 5


def test_another_source_that_is_not_finished_is_finished_with_its_own_settings(tmp_path: Path) -> None:
    one, two, dst = tmp_path / "one", tmp_path / "two", tmp_path / "dst"
    fill(one, 7)
    fill(two, 2, first=8)

    def stop(progress: Progress) -> None:
        if progress.segments == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(one, dst, segment_size=SEGMENT, workers=1, progress=stop)
    with pytest.raises(SettingsChangedError, match=r"one into this destination is not finished(?s:.*)its own command"):
        convert(two, dst, append=True)
    assert convert(one, dst, segment_size=SEGMENT).converted == 4
    assert convert(two, dst, append=True).converted == 2


def test_replan_settles_a_converted_file_that_changed(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 3)
    convert(src, dst)
    os.utime(src / "data_1.pt", ns=(0, 1_700_000_000_123_456_789))
    with pytest.raises(SettingsChangedError) as refusal:
        convert(src, dst)
    (line,) = [line for line in str(refusal.value).splitlines() if "data_1" in line]
    assert re.fullmatch(
        r"  data_1\.pt: now modified 2023-11-1\d \S+\.123456789 \S+ \(planned: 20\S+ \S+ \S+\)", line
    )  # and nothing else
    assert convert(src, dst, replan=True).exit_status == 0
    fill(src, 1, first=3)
    report = convert(src, dst, delete_source=True)
    assert (report.converted, report.present) == (1, 3)
    assert "1 source file changed after conversion (for example data_1.pt)" in " ".join(report.notes)
    assert [(item.name, item.reason) for item in report.deleted.kept] == [("data_1.pt", "it changed since it was read")]
    os.utime(src / "data_1.pt", ns=(0, 1_700_000_001_000_000_000))
    with pytest.raises(SettingsChangedError, match=r"data_1\.pt: now modified"):
        convert(src, dst)


def test_a_settings_file_that_cannot_be_read_is_noted(tmp_path: Path) -> None:
    fill(tmp_path / "src", 2)
    (tmp_path / "src" / "data_config.json").write_text('{"norm')
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert [n for n in report.notes if n.startswith("data_config.json: cannot be parsed: Unterminated string")]
    assert [n for n in inspect(tmp_path / "src").notes if n.startswith("data_config.json: cannot be parsed")]


def test_changed_sources_of_an_unfinished_run(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 7)

    def stop(progress: Progress) -> None:
        if progress.segments == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(src, dst, segment_size=SEGMENT, workers=1, progress=stop)
    assert names(dst) == ["data_0.pt", "data_1.pt", "data_2.pt"]
    write(src / "data_5.pt", record(55, 60))
    (src / "data_6.pt").unlink()
    with pytest.raises(SettingsChangedError, match=r"data_5\.pt: now .* \(planned: (?s:.*)data_6\.pt: .*gone"):
        convert(src, dst, segment_size=SEGMENT)
    report = convert(src, dst, segment_size=SEGMENT, replan=True)
    assert (report.converted, report.present) == (3, 3)
    assert names(dst) == [f"data_{i}.pt" for i in range(6)]
    assert convert(src, dst, segment_size=SEGMENT).present == 6


def test_a_second_source(tmp_path: Path) -> None:
    one, two, dst = tmp_path / "one", tmp_path / "two", tmp_path / "dst"
    fill(one, 3)
    fill(two, 2, first=5)
    fill(tmp_path / "clash", 1)
    convert(one, dst)
    report = convert(two, dst, append=True)
    assert (report.converted, report.present) == (2, 3)
    assert convert(two, dst, append=True).present == 5
    assert convert(one, dst).present == 5
    with pytest.raises(ConversionError, match=r"holds already, for example data_0\.pt"):
        convert(tmp_path / "clash", dst, append=True)
    write(tmp_path / "wide" / "a.pt", record(1, 50, hidden=512))
    with pytest.raises(IncompatibleError, match="hidden_states"):
        convert(tmp_path / "wide", dst, append=True)
    assert len(names(dst)) == 5


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 4)
    report = convert(src, dst, dry_run=True)
    assert not dst.exists()
    assert report.plan is not None
    assert report.plan.samples == 4
    assert report.plan.raw_bytes == sum(torch.load(p)["input_ids"].numel() for p in src.iterdir()) * (4 * 512 + 5)
    assert 1 < report.plan.ratio < 2
    assert report.plan.seconds is not None
    with pytest.raises(RuntimeError, match="said no"):
        convert(src, dst, on_plan=_say_no)
    assert not dst.exists()
    convert(src, dst)
    before = tree(dst)
    assert convert(src, dst, dry_run=True).present == 4
    assert tree(dst) == before


def test_a_dry_run_needs_no_place_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 4)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    report = convert(src, dst, dry_run=True)
    assert report.plan is not None
    assert report.plan.samples == 4
    assert f"the destination could not be written: {tmp_path} is not writable for this user" in report.plan.notes
    with pytest.raises(ConversionError, match=f"dst: {tmp_path} is not writable for this user"):
        convert(src, dst)
    assert not dst.exists()


def _say_no(plan: object) -> None:
    raise RuntimeError("the user said no")


def test_refused_places(tmp_path: Path) -> None:
    src = tmp_path / "src"
    fill(src, 1)
    with pytest.raises(ConversionError, match="inside the source"):
        convert(src, src / "dst")
    with pytest.raises(ConversionError, match="inside the destination"):
        convert(src, tmp_path)
    with pytest.raises(FileNotFoundError, match="no such source"):
        convert(tmp_path / "nothing", tmp_path / "dst")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with pytest.raises(Exception, match="expected an empty directory or an hsloader dataset, found note"):
        convert(src, tmp_path / "full")
    assert os.listdir(src) == ["data_0.pt"]


def test_a_dataset_is_no_source(tmp_path: Path) -> None:
    fill(tmp_path / "src", 1)
    convert(tmp_path / "src", tmp_path / "dst")
    with pytest.raises(ConversionError, match="a dataset that is converted already"):
        convert(tmp_path / "dst", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_one_file_is_a_source_too(tmp_path: Path) -> None:
    fill(tmp_path / "src", 2)
    report = convert(tmp_path / "src" / "data_1.pt", tmp_path / "dst")
    assert report.converted == 1
    assert names(tmp_path / "dst") == ["data_1.pt"]
    assert convert(tmp_path / "src" / "data_1.pt", tmp_path / "dst").present == 1


def test_samples_that_all_turn_out_bad_leave_nothing(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 2)
    for path in src.iterdir():
        flip_a_byte(path)
    with pytest.raises(ConversionError, match=r"none of the 2 samples(?s:.*)data_0\.pt: .*CRC(?s:.*)data_1\.pt: .*CRC"):
        convert(src, dst)
    assert not dst.exists()


def test_a_segment_of_bad_samples_in_the_middle(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 9)
    for i in (3, 4, 5):
        flip_a_byte(src / f"data_{i}.pt")
    report = convert(src, dst, segment_size=SEGMENT)
    assert report.segments == 2
    assert [q.name for q in report.quarantined] == ["data_3.pt", "data_4.pt", "data_5.pt"]
    assert len((dst / "quarantine.jsonl").read_text().splitlines()) == 3
    again = convert(src, dst, segment_size=SEGMENT)
    assert (again.present, again.quarantined) == (6, report.quarantined)


def test_what_was_set_aside_and_is_gone_is_not_counted_any_more(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    fill(src, 4)
    flip_a_byte(src / "data_2.pt")
    write(src / "mean.pt", torch.zeros(3))
    first = convert(src, dst)
    assert [q.name for q in first.quarantined] == ["data_2.pt", "mean.pt"]
    assert "move it out of the source" in first.quarantined[1].reason
    (src / "mean.pt").rename(tmp_path / "mean.pt")
    second = convert(src, dst)
    assert ([q.name for q in second.quarantined], second.samples_found) == (["data_2.pt"], 4)
    (src / "data_2.pt").unlink()
    for replan in (False, True, False):
        report = convert(src, dst, replan=replan)
        assert (report.exit_status, report.present, report.samples_found) == (0, 3, 3)
    assert not (dst / "quarantine.jsonl").exists()
    (tmp_path / "mean.pt").rename(src / "mean.pt")
    assert convert(src, dst).exit_status == 3


def test_an_arrow_folder_that_could_not_be_read_is_no_matter_once_it_can(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    fill(tmp_path / "first", 2)
    convert(tmp_path / "first", tmp_path / "store")
    src, dst = tmp_path / "src", tmp_path / "dst"
    for name in ("a", "b"):
        export(tmp_path / "store", src / name, layout="speculators-arrow")
    state = (src / "b" / "state.json").read_bytes()
    (src / "b" / "state.json").write_bytes(b"{}")
    assert [q.name for q in convert(src, dst).quarantined] == [f"b/hidden_states/hs_{i}.safetensors" for i in (0, 1)]
    (src / "b" / "state.json").write_bytes(state)
    report = convert(src, dst)
    assert (report.converted, report.present, report.exit_status) == (2, 2, 0)


def test_sources_that_are_gone_are_right_when_their_samples_are_listed(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    fill(tmp_path / "store", 3)
    src, dst = tmp_path / "src", tmp_path / "dst"
    src.mkdir()
    for name in os.listdir(tmp_path / "store"):
        (src / name).symlink_to(tmp_path / "store" / name)
    convert(src, dst)
    (tmp_path / "store" / "data_1.pt").unlink()  # its link dangles now
    assert convert(src, dst).present == 3

    arrow = tmp_path / "arrow"
    export(dst, arrow, layout="speculators-arrow")

    def stop(progress: Progress) -> None:
        if progress.segments == 1:
            raise KeyboardInterrupt

    settings: Any = {"segment_size": SEGMENT, "typical_length": 120, "delete_source": True, "workers": 1}
    write(tmp_path / "more" / "long.pt", record(9, 900))
    convert(tmp_path / "more", dst, append=True)
    export(dst, tmp_path / "arrow4", layout="speculators-arrow")
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "arrow4", tmp_path / "dst4", progress=stop, **settings)
    assert os.listdir(tmp_path / "arrow4" / "hidden_states") == ["hs_3.safetensors"]
    report = convert(tmp_path / "arrow4", tmp_path / "dst4", **settings)
    assert (report.converted, report.present, report.exit_status) == (1, 3, 0)
    assert os.listdir(tmp_path / "arrow4" / "hidden_states") == []
    assert convert(tmp_path / "arrow4", tmp_path / "dst4", **settings).present == 4


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_is_replaced_while_it_is_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    src = tmp_path / "src"
    fill(src, 2)
    rename = os.rename

    def replaced_before(old: str, new: str) -> None:
        if str(old).endswith("data_1.pt"):  # after the look at it
            write(tmp_path / "new.pt", record(5, 40))
            rename(tmp_path / "new.pt", old)
        rename(old, new)

    def no_link(*paths: object, **options: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(removal.os, "rename", replaced_before)
    if not links:
        monkeypatch.setattr(removal.os, "link", no_link)
    report = convert(src, tmp_path / "dst", delete_source=True, workers=1)
    assert os.listdir(src) == ["data_1.pt"]
    assert torch.load(src / "data_1.pt")["input_ids"].numel() == 40
    assert [item.reason for item in report.deleted.kept] == ["it changed since it was read"]


def test_a_file_that_cannot_be_removed_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = tmp_path / "src"
    fill(src, 2)
    unlink = os.unlink

    def refused(path: Any, **options: Any) -> None:
        if ".hsloader-delete-" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, **options)

    def no_link(*paths: object, **options: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(removal.os, "unlink", refused)
    monkeypatch.setattr(removal.os, "link", no_link)
    report = convert(src, tmp_path / "dst", delete_source=True, workers=1)
    assert sorted(os.listdir(src)) == ["data_0.pt", "data_1.pt"]
    assert {item.reason for item in report.deleted.kept} == {"it cannot be removed: Input/output error"}


def test_what_stays_frees_no_room(tmp_path: Path) -> None:
    for name in ("whole", "left"):
        for i in range(8):
            more = {"left": torch.zeros(5)} if name == "left" else {}
            write(tmp_path / name / f"data_{i}.pt", {**record(i, 300), **more})
    needed = {
        (name, delete): report.plan.space_needed
        for name in ("whole", "left")
        for delete in (False, True)
        if (report := convert(tmp_path / name, tmp_path / "dst", segment_size=SEGMENT, workers=1, dry_run=True,
                              delete_source=delete)).plan is not None
    }  # fmt: skip
    assert needed["whole", True] < needed["whole", False]
    assert needed["left", True] == needed["left", False]


def test_planning_inflates_beside_the_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "raw", 2)
    (tmp_path / "src").mkdir()
    for path in (tmp_path / "raw").iterdir():
        (tmp_path / "src" / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "nowhere"))
    assert convert(tmp_path / "src", tmp_path / "dst", workers=1).converted == 2
    assert sorted(os.listdir(tmp_path)) == ["dst", "raw", "src"]
