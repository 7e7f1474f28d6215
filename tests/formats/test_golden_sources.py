"""The golden sources of speculators and SpecForge: real files of each layout, compared with what torch reads."""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hsloader.errors import SourceError  # noqa: E402
from hsloader.formats.source import SampleSource, open_sample  # noqa: E402
from hsloader.formats.survey import survey  # noqa: E402
from tests.formats.making import bits_of, read  # noqa: E402
from tests.shared_data import SHARED, needs_shared  # noqa: E402

pytestmark = needs_shared
_GOLDEN = SHARED / "golden" / "cases"


def _load(path: str) -> dict[str, Any]:
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return torch.load(io.BytesIO(data), weights_only=True)


def _expected(sample: SampleSource) -> dict[str, Any]:
    """What the file holds, through torch's or safetensors' own reader."""
    if sample.layout == "speculators-arrow":
        safetensors = pytest.importorskip("safetensors.torch")
        record = safetensors.load_file(sample.path)
        states = record["hidden_states"]
        made = {"hidden_states": states[:, :-1], "last_hidden_state": states[:, -1], "input_ids": record["token_ids"]}
        if "hidden_states_scales" in record:
            made["hidden_states_scale"] = record["hidden_states_scales"].flatten()
        return made
    record = _load(sample.path)
    made = {"input_ids": record["input_ids"], "loss_mask": record["loss_mask"]}
    if sample.layout == "speculators-list":
        *aux, last = record["hidden_states"]
        return {**made, "hidden_states": torch.stack(aux, 1), "last_hidden_state": last}
    aux = record["aux_hidden_state" if sample.layout == "specforge-eagle3" else "hidden_states"]
    last = record.get("hidden_state", record.get("target_last_hidden_states"))
    layers = sample.spec("hidden_states").shape
    made["hidden_states"] = aux[0].unflatten(1, layers)
    if last is not None:
        made["last_hidden_state"] = last[0]
    return made


def _names() -> list[str]:
    return [*sorted(p.name for p in _GOLDEN.glob("spec*") if (p / "source").is_dir()), "torchspec-6f21829c"]


@pytest.mark.parametrize("name", _names())
def test_golden_source(name: str) -> None:
    case = json.loads((_GOLDEN / name / "case.json").read_text())
    pytest.importorskip("pyarrow")
    found = survey(_GOLDEN / name / "source", threads=2)
    assert found.samples
    lengths = dict(zip(case["files"], case["lengths"], strict=True))
    for sample in found.samples:
        assert lengths[sample.name] == sample.length
        if "missing" in name and sample.name.endswith("hs_2.safetensors"):
            continue
        values, expected = read(sample, 7), _expected(sample)
        for field, tensor in expected.items():
            np.testing.assert_array_equal(values[field], bits_of(tensor), err_msg=f"{sample.name} {field}")
        states = values["hidden_states"]
        assert states.shape[1:] == sample.spec("hidden_states").shape
        if sample.layout != "specforge-dflash":
            assert states.shape[1:] == (case["aux_layers"], case["hidden_size"])


def test_masks_of_an_arrow_folder() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    for name, dtype in (("speculators-0.9.0", "int64"), ("speculators-0.7.0-dflash", "bool")):
        source = _GOLDEN / name / "source"
        with pyarrow.OSFile(str(source / "data-00000-of-00001.arrow")) as file:
            masks = pyarrow.ipc.open_stream(file).read_all()["loss_mask"].to_pylist()
        for sample in survey(source).samples:
            assert sample.spec("loss_mask").source_dtype == dtype
            np.testing.assert_array_equal(read(sample)["loss_mask"], np.array(masks[sample.row or 0], np.uint8))


def test_an_arrow_folder_reports_what_is_missing_or_foreign() -> None:
    pytest.importorskip("pyarrow")
    found = survey(_GOLDEN / "speculators-0.9.0-missing" / "source")
    (missing,) = found.bad
    assert missing.name == "hidden_states/hs_0.safetensors"
    assert "not found" in missing.reason
    (foreign,) = [s for s in found.samples if s.row == 2]
    with pytest.raises(SourceError, match="token_ids differ from the arrow row's input_ids"):
        open_sample(foreign)


def test_each_file_beside_a_damaged_arrow_file_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    source = tmp_path / "source"
    shutil.copytree(_GOLDEN / "speculators-0.9.0" / "source", source, copy_function=shutil.copyfile)
    source.chmod(0o700)
    arrow = source / "data-00000-of-00001.arrow"
    whole = arrow.read_bytes()
    for data in (b"", whole[:100], whole[:3000], whole[:-8], b"x" * 100, whole[:700] + b"\xff" * 300 + whole[1000:]):
        arrow.write_bytes(data)
        found = survey(source)
        assert not found.samples
        names = sorted(f"hidden_states/{path.name}" for path in (source / "hidden_states").glob("hs_*.safetensors"))
        assert sorted(bad.name for bad in found.bad) == names
        for bad in found.bad:
            assert bad.reason.startswith(
                "there is no mask for it, since data-00000-of-00001.arrow beside hidden_states/"
            )
    arrow.unlink()
    os.mkfifo(arrow)
    assert "not a regular file" in survey(source).bad[0].reason


def test_an_arrow_folder_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    found = survey(_GOLDEN / "speculators-0.9.0" / "source")
    assert not found.samples
    assert found.bad
    assert all("pip install pyarrow" in bad.reason for bad in found.bad)


def test_a_held_lock_in_an_arrow_folder_and_columns_of_other_things(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    shutil.copytree(_GOLDEN / "speculators-0.9.0" / "source", tmp_path / "src", copy_function=shutil.copyfile)
    for folder in (tmp_path / "src", tmp_path / "src" / "hidden_states"):
        folder.chmod(0o700)
    data = tmp_path / "src" / "data-00000-of-00001.arrow"
    with pyarrow.OSFile(str(data)) as file:
        table = pyarrow.ipc.open_stream(file).read_all()
    table = table.append_column("messages", pyarrow.array(["text"] * table.num_rows))
    data.unlink()
    with pyarrow.OSFile(str(data), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    held = sorted((tmp_path / "src" / "hidden_states").iterdir())[0]
    with held.with_name(f"{held.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = survey(tmp_path / "src")
    assert [(item.name, item.reason) for item in found.bad if "lock" in item.reason] == [
        (f"hidden_states/{held.name}", "being written: its producer holds the lock file")
    ]
    assert found.samples
    for sample in found.samples:
        assert "column messages of the arrow dataset is not converted" in sample.notes
        assert not sample.left_out  # the file of the states has nothing else: it may be deleted
