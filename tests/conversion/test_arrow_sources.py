"""Arrow folders of speculators 0.5 to 0.9 as sources: the masks are in files of their own, which may change, too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hsloader import ConversionError, SettingsChangedError, convert, export, open_dataset
from hsloader.conversion.report import Progress
from tests.conversion.sources import fill, torch, tree, write

pyarrow = pytest.importorskip("pyarrow")

FILE = "data-00000-of-00001.arrow"
SETTINGS: dict[str, Any] = {"segment_size": 1 << 20, "typical_length": 120, "workers": 1}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """Seven samples of about 250 KB: three segments of 1 MiB, all masks in one arrow file."""
    fill(tmp_path / "first", 7)
    convert(tmp_path / "first", tmp_path / "store")
    export(tmp_path / "store", tmp_path / "src", layout="speculators-arrow")
    return tmp_path / "src"


def rows(folder: Path, file: str = FILE) -> list[dict[str, Any]]:
    with pyarrow.OSFile(str(folder / file)) as source:
        found: list[dict[str, Any]] = pyarrow.ipc.open_stream(source).read_all().to_pylist()
    return found


def write_rows(folder: Path, *files: list[dict[str, Any]], names: list[str] | None = None) -> None:
    """Write the rows anew, each list as an arrow file, and list the files in ``state.json``."""
    names = names or [f"data-{i:05}-of-{len(files):05}.arrow" for i in range(len(files))]
    for name, content in zip(names, files, strict=True):
        table = pyarrow.Table.from_pylist(content)
        with pyarrow.OSFile(str(folder / "new"), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
        (folder / "new").rename(folder / name)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def with_other_masks(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "loss_mask": [1 - value for value in row["loss_mask"]]} for row in content]


def masks(dst: Path) -> dict[str, list[int]]:
    with open_dataset(dst) as dataset:
        return {dataset.name(i): dataset[i]["loss_mask"].tolist() for i in range(len(dataset))}


def interrupted(src: Path, dst: Path, **options: Any) -> None:
    """A conversion that is stopped when its first segment is listed."""

    def stop(progress: Progress) -> None:
        if progress.segments == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(src, dst, progress=stop, **SETTINGS, **options)


def states(number: int) -> str:
    return f"hidden_states/hs_{number}.safetensors"


def test_masks_that_were_rewritten_are_refused_and_kept_by_replan(src: Path, tmp_path: Path) -> None:
    dst, old = tmp_path / "dst", rows(src)
    convert(src, dst)
    assert "changed" not in " ".join(convert(src, dst).notes)
    before = tree(dst)
    write_rows(src, with_other_masks(old))
    with pytest.raises(SettingsChangedError, match=rf"{FILE}: now modified .* \(planned: (?s:.*)replan"):
        convert(src, dst)
    report = convert(src, dst, replan=True)
    assert (report.converted, report.present, report.exit_status) == (0, 7, 0)
    assert f"1 source file changed after conversion (for example {FILE})" in " ".join(report.notes)
    assert tree(dst) == before
    assert masks(dst) == {states(i): row["loss_mask"] for i, row in enumerate(old)}
    report = convert(src, dst)  # settled by the replan, and still said
    assert (report.converted, report.present, report.exit_status) == (0, 7, 0)
    assert f"1 source file changed after conversion (for example {FILE})" in " ".join(report.notes)
    write_rows(src, old)
    with pytest.raises(SettingsChangedError, match="1 source file is not as planned"):
        convert(src, dst)


def test_a_resumed_run_mixes_no_masks(src: Path, tmp_path: Path) -> None:
    dst, old = tmp_path / "dst", rows(src)
    interrupted(src, dst)
    done = len(masks(dst))
    assert 0 < done < 7
    new = with_other_masks(old)
    write_rows(src, new)
    with pytest.raises(SettingsChangedError, match=rf"{FILE}: now modified .* \(planned: (?s:.*)replan"):
        convert(src, dst, **SETTINGS)
    assert len(masks(dst)) == done

    interrupted(src, dst, replan=True)  # what replan planned anew can be resumed without it
    report = convert(src, dst, **SETTINGS)
    assert (report.converted + report.present, report.exit_status) == (7, 0)
    assert f"(for example {FILE})" in " ".join(report.notes)  # still said: the first samples are of the old one
    assert masks(dst) == {states(i): (old if i < done else new)[i]["loss_mask"] for i in range(7)}


def test_a_resumed_run_ends_as_an_undisturbed_one(src: Path, tmp_path: Path) -> None:
    interrupted(src, tmp_path / "dst")
    convert(src, tmp_path / "dst", **SETTINGS)
    convert(src, tmp_path / "other", **SETTINGS)
    assert tree(tmp_path / "dst") == tree(tmp_path / "other")


def test_an_arrow_file_that_is_gone(src: Path, tmp_path: Path) -> None:
    dst, content = tmp_path / "dst", rows(src)
    interrupted(src, dst)
    write_rows(src, content, names=["other.arrow"])
    (src / FILE).unlink()
    with pytest.raises(SettingsChangedError, match=rf"{FILE}: it is planned, not converted yet, and gone"):
        convert(src, dst, **SETTINGS)


def test_masks_that_are_in_another_file_now(src: Path, tmp_path: Path) -> None:
    dst, content = tmp_path / "dst", rows(src)
    convert(src, dst)
    write_rows(src, with_other_masks(content), names=["other.arrow"])  # the planned file lies there as it was
    with pytest.raises(SettingsChangedError, match=rf"hs_0.*planned in {FILE} \(row 0 .*now it is in other\.arrow"):
        convert(src, dst)
    report = convert(src, dst, replan=True)
    assert (report.converted, report.present) == (0, 7)
    assert "7 source files changed after conversion" in " ".join(report.notes)


def test_new_rows_in_a_file_of_their_own_are_added(src: Path, tmp_path: Path) -> None:
    dst, content = tmp_path / "dst", rows(src)
    (src / "hidden_states" / "hs_6.safetensors").rename(tmp_path / "aside")
    write_rows(src, content[:6])
    assert convert(src, dst).converted == 6
    write_rows(src, content[6:], names=["more.arrow"])
    (src / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in (FILE, "more.arrow")]}))
    (tmp_path / "aside").rename(src / "hidden_states" / "hs_6.safetensors")
    report = convert(src, dst)
    assert (report.converted, report.present, report.exit_status) == (1, 6, 0)
    assert masks(dst) == {states(i): row["loss_mask"] for i, row in enumerate(content)}


def test_a_file_without_converted_rows_may_be_mended(src: Path, tmp_path: Path) -> None:
    dst, content = tmp_path / "dst", rows(src)
    other_ids = [{**row, "input_ids": [7] * row["seq_len"]} for row in content[5:6]]  # known when the sample is read
    too_short = [{key: value[:5] for key, value in content[6].items() if key != "seq_len"}]  # known when it is planned
    write_rows(src, content[:5], [*other_ids], too_short)
    first = convert(src, dst)
    assert [q.name for q in first.quarantined] == [states(5), states(6)]
    assert convert(src, dst).quarantined == first.quarantined
    write_rows(src / "hidden_states", content[5:6], content[6:])  # only these two files become others
    for i in (1, 2):
        (src / "hidden_states" / f"data-0000{i - 1}-of-00002.arrow").replace(src / f"data-0000{i}-of-00003.arrow")
    (src / "hidden_states" / "state.json").unlink()
    report = convert(src, dst)
    assert (report.converted, report.present, report.exit_status) == (2, 5, 0)
    assert masks(dst) == {states(i): row["loss_mask"] for i, row in enumerate(content)}


def test_an_arrow_file_that_changes_during_the_run(src: Path, tmp_path: Path) -> None:
    content = with_other_masks(rows(src))
    write(tmp_path / "both" / "a.pt", torch.load(tmp_path / "first" / "data_0.pt"))
    src.rename(tmp_path / "both" / "arrow")
    report = convert(
        tmp_path / "both", tmp_path / "dst", on_plan=lambda _: write_rows(tmp_path / "both" / "arrow", content)
    )
    assert (report.converted, len(report.quarantined)) == (1, 7)
    assert f"the arrow file arrow/{FILE} changed since it was planned" in report.quarantined[0].reason
    report = convert(tmp_path / "both", tmp_path / "dst")  # nothing of the old file was converted
    assert (report.converted, report.present, report.exit_status) == (7, 1, 0)
    assert masks(tmp_path / "dst")[f"arrow/{states(3)}"] == content[3]["loss_mask"]


def test_delete_source_leaves_the_arrow_dataset(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    interrupted(src, dst, delete_source=True)
    report = convert(src, dst, delete_source=True, **SETTINGS)
    assert sorted(os.listdir(src)) == [FILE, "dataset_info.json", "hidden_states", "state.json"]
    assert os.listdir(src / "hidden_states") == []
    assert report.deleted.kept == ()
    assert (report.converted + report.present, report.exit_status) == (7, 0)
    assert convert(src, dst, delete_source=True, **SETTINGS).present == 7


def as_an_older_version_wrote(dst: Path) -> None:
    """Take out of the journal's plans what versions before this one did not record."""
    for path in (dst / ".hsloader" / "convert").glob("plan-*.json"):
        plan = json.loads(path.read_bytes())
        plan["files"] = [file for file in plan["files"] if not file[0].endswith(".arrow")]
        for kind in plan["kinds"]:
            del kind["arrow"]
        path.write_text(json.dumps(plan))


def test_a_finished_journal_of_an_older_version(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    convert(src, dst)
    as_an_older_version_wrote(dst)
    report = convert(src, dst)
    assert (report.present, report.exit_status) == (7, 0)
    assert "7 samples: converted by an older version, which did not record their arrow files" in " ".join(report.notes)


def test_an_unfinished_journal_of_an_older_version(src: Path, tmp_path: Path) -> None:
    dst, content = tmp_path / "dst", rows(src)
    interrupted(src, dst)
    as_an_older_version_wrote(dst)
    with pytest.raises(SettingsChangedError, match=r"older version.*arrow files of .*src.*another destination.*replan"):
        convert(src, dst, **SETTINGS)
    report = convert(src, dst, replan=True, **SETTINGS)
    assert (report.converted + report.present, report.exit_status) == (7, 0)
    assert masks(dst) == {states(i): row["loss_mask"] for i, row in enumerate(content)}
    assert convert(src, dst, **SETTINGS).present == 7


def test_an_arrow_file_that_cannot_be_read_is_told_with_what_needs_it(src: Path, tmp_path: Path) -> None:
    dst, whole = tmp_path / "dst", (src / FILE).read_bytes()
    interrupted(src, dst)
    done = len(masks(dst))
    os.truncate(src / FILE, 300)
    with pytest.raises(SettingsChangedError) as refusal:
        convert(src, dst, **SETTINGS)
    text = str(refusal.value)
    assert f"{FILE}: now 300 bytes (planned: {len(whole):,})" in text
    assert f"{states(done)} and {6 - done} more: there is no mask for it, since {FILE} beside hidden_states/" in text
    assert "gone" not in text

    report = convert(src, dst, replan=True, **SETTINGS)
    assert [q.name for q in report.quarantined] == [states(i) for i in range(done, 7)]
    assert (report.samples_found, report.present, report.exit_status) == (7, done, 3)
    again = convert(src, dst, **SETTINGS)
    assert (again.quarantined, again.present) == (report.quarantined, done)
    assert len(list((dst / ".hsloader" / "convert").glob("plan-*.json"))) == 2  # nothing new: no further plan

    with pytest.raises(
        ConversionError, match=r"none of the 7 samples can be taken(?s:.*)hs_0\.safetensors: there is no"
    ):
        convert(src, tmp_path / "fresh")

    (src / FILE).write_bytes(whole)
    report = convert(src, dst, replan=True, **SETTINGS)
    assert (report.converted + report.present, report.exit_status) == (7, 0)


def test_an_unreadable_arrow_folder_is_taken_once_it_can_be_read(src: Path, tmp_path: Path) -> None:
    write(tmp_path / "both" / "a.pt", torch.load(tmp_path / "first" / "data_0.pt"))
    src.rename(tmp_path / "both" / "arrow")
    path = tmp_path / "both" / "arrow" / FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:300])
    report = convert(tmp_path / "both", tmp_path / "dst")
    assert (report.converted, len(report.quarantined), report.samples_found) == (1, 7, 8)
    path.write_bytes(whole)
    report = convert(tmp_path / "both", tmp_path / "dst")
    assert (report.converted, report.present, report.exit_status) == (7, 1, 0)


def test_notes_count_each_sample_once_after_a_replan(src: Path, tmp_path: Path) -> None:
    interrupted(src, tmp_path / "dst")
    report = convert(src, tmp_path / "dst", replan=True, **SETTINGS)
    assert report.converted + report.present == 7
    note = next(note for note in report.notes if "no checksums" in note)
    assert note.endswith("(7 samples)")
