"""What is written back is what was read: keys, dtypes, shapes and values, in every layout that can be written."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hsloader.errors import ConversionError  # noqa: E402
from hsloader.formats.source import SampleSource, open_sample  # noqa: E402
from hsloader.formats.survey import survey  # noqa: E402
from hsloader.formats.writing import WRITABLE, file_name, publish, sample_writer  # noqa: E402
from hsloader.store.fields import Field  # noqa: E402
from tests.formats.making import HIDDEN, bits_of, listed, states  # noqa: E402
from tests.shared_data import SHARED, needs_shared  # noqa: E402


def _copy(sample: SampleSource, layout: str, out: Path) -> str:
    """Read one sample and write it in a layout."""
    fields = {
        s.name: Field(name=s.name, dtype=s.dtype, shape=s.shape, source_dtype=s.source_dtype) for s in sample.specs
    }
    with open_sample(sample) as opened:
        values = {s.name: opened.whole(s.name) for s in sample.specs}
        extras = opened.extras()
        opened.finish()
    with sample_writer(layout, out) as writer:
        return writer.write(sample.name, values, fields, extras)


def _same(a: Any, b: Any) -> None:
    """Two loaded values are alike: types, dtypes, shapes, bits."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(bits_of(a), bits_of(b))
    elif isinstance(a, Mapping):
        assert set(a) == set(b)
        for key in a:
            _same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _same(x, y)
    else:
        assert a == b


def _load(path: Path) -> Any:
    data = path.read_bytes()
    return torch.load(io.BytesIO(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data), weights_only=True)


def _records() -> dict[str, dict[str, Any]]:
    base = {"input_ids": torch.arange(10), "loss_mask": (torch.arange(10) > 3)}
    aux, last = states(1, 10, 3 * HIDDEN), states(2, 10, HIDDEN)
    return {
        "speculators-list": {**listed(), "note": "text", "position_ids": torch.arange(10)},
        "speculators-pair": {**base, "hidden_state": aux, "target": last},
        "specforge-eagle3": {**base, "hidden_state": last[None], "aux_hidden_state": aux[None]},
        "specforge-dspark": {**base, "hidden_states": aux[None], "target_last_hidden_states": last[None]},
        "specforge-dflash": {**base, "hidden_states": aux[None]},
    }


@pytest.mark.parametrize("layout", list(_records()))
@pytest.mark.parametrize("packed", [False, True])
def test_torch_layouts(tmp_path: Path, layout: str, packed: bool) -> None:
    record = _records()[layout]
    suffix = (".ckpt.gz" if packed else ".ckpt") if layout.startswith("specforge") else ".pt"
    name = f"rows_0-2000/data_3{suffix}"
    (tmp_path / "src" / "rows_0-2000").mkdir(parents=True)
    buffer = io.BytesIO()
    torch.save(record, buffer)
    data = buffer.getvalue()
    (tmp_path / "src" / name).write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    (sample,) = survey(tmp_path / "src").samples
    assert sample.layout == layout
    assert _copy(sample, layout, tmp_path / "out") == name
    _same(_load(tmp_path / "out" / name), record)
    with pytest.raises(FileExistsError):
        _copy(sample, layout, tmp_path / "out")
    assert len(list((tmp_path / "out" / "rows_0-2000").iterdir())) == 1


def test_specforge_without_layers(tmp_path: Path) -> None:
    record = {**_records()["specforge-eagle3"], "aux_hidden_state": None}
    (tmp_path / "src").mkdir()
    torch.save(record, tmp_path / "src" / "data_0.ckpt")
    (sample,) = survey(tmp_path / "src").samples
    _copy(sample, "specforge-eagle3", tmp_path / "out")
    _same(_load(tmp_path / "out" / "data_0.ckpt"), record)


@needs_shared
@pytest.mark.parametrize("name", ["speculators-0.9.0", "speculators-0.7.0-dflash", "speculators-0.9.0-fp8"])
def test_arrow_folders(tmp_path: Path, name: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    library = pytest.importorskip("safetensors.torch")
    source = SHARED / "golden" / "cases" / name / "source"
    samples = survey(source).samples
    with sample_writer("speculators-arrow", tmp_path / "out") as writer:
        for sample in samples:
            fields = {
                s.name: Field(name=s.name, dtype=s.dtype, shape=s.shape, source_dtype=s.source_dtype)
                for s in sample.specs
            }
            with open_sample(sample) as opened:
                values = {s.name: opened.whole(s.name) for s in sample.specs}
            written = writer.write(sample.name, values, fields, {})
            _same(library.load_file(tmp_path / "out" / written), library.load_file(source / written))
    tables = []
    for folder in (source, tmp_path / "out"):
        with pyarrow.OSFile(str(folder / "data-00000-of-00001.arrow")) as file:
            tables.append(pyarrow.ipc.open_stream(file).read_all())
    assert tables[0].schema.equals(tables[1].schema)
    assert tables[0].to_pylist() == tables[1].to_pylist()
    assert [s.name for s in survey(tmp_path / "out").samples] == [s.name for s in samples]


def test_names_stay_below_the_folder() -> None:
    for name in ("../data_0.pt", "/data_0.pt", "a/../../b.pt", ""):
        with pytest.raises(ValueError, match="no path below a folder"):
            file_name("speculators-list", name)
    assert file_name("specforge-eagle3", "rows/data_1.pt") == "rows/data_1.ckpt"
    assert file_name("speculators-list", "dump.pt#3") == "dump.pt-3.pt"
    with pytest.raises(ValueError, match="cannot be written"):
        sample_writer("vllm", ".")
    assert len(WRITABLE) == 6


def test_names_that_are_taken_or_too_long(tmp_path: Path) -> None:
    fields = {"hidden_states": Field(name="hidden_states", dtype="float32", shape=(1, HIDDEN))}
    values = {"hidden_states": np.zeros((2, 1, HIDDEN), np.float32)}
    longest = "n" * 252 + ".pt"
    names = ["a.pt", "a.ckpt", "a#1.ckpt", "a-1.ckpt", "b/a.pt", longest, longest[1:-3] + "\udcff.pt"]
    with sample_writer("specforge-dflash", tmp_path) as writer:
        written = [writer.write(name, values, fields, {}) for name in names]
    assert written[:5:4] == ["a.ckpt", "b/a.ckpt"]
    assert len({*written}) == len(names)
    assert sorted(written) == sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    with sample_writer("speculators-pair", tmp_path / "same") as writer:
        pair = {**values, "last_hidden_state": values["hidden_states"][:, 0]}
        both = {**fields, "last_hidden_state": Field(name="last_hidden_state", dtype="float32", shape=(HIDDEN,))}
        assert writer.write(longest, pair, both, {}) == longest


def _pair() -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Field]]:
    made = [_made("hidden_states", "float32", 1, HIDDEN), _made("last_hidden_state", "float32", HIDDEN)]
    return {f.name: v for f, v in made}, {f.name: f for f, _ in made}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["a.pt", "a.pt/b.pt"],
            r"sample 'a\.pt/b\.pt' .*'a\.pt' is no folder, but the file of 'a\.pt'; .*arrow numbers",
        ),
        (["a.ckpt", "a.pt/b/c.pt"], r"'a\.pt/b/c\.pt' .*'a\.pt' is no folder, but the file of 'a\.ckpt'"),
        (["a.pt/b.pt", "a.pt"], r"sample 'a\.pt' .*a folder already, for 'a\.pt/b\.pt'; .*open_dataset"),
        (
            ["x" * 256 + "/b.pt"],
            r"sample 'x{256}/b\.pt' .*a part of it has 256 bytes .*255 bytes for a name.*open_dataset",
        ),
        (["/".join(["x" * 250] * 17) + "/b.pt"], "too long as a whole"),
    ],
)
def test_names_that_no_files_can_have(tmp_path: Path, names: list[str], words: str) -> None:
    values, fields = _pair()
    with sample_writer("speculators-pair", tmp_path) as writer:
        for name in names[:-1]:
            writer.write(name, values, fields, {})
        with pytest.raises(ConversionError, match=words):
            writer.write(names[-1], values, fields, {})
    assert not list(tmp_path.rglob(".hsloader-*"))


def test_a_name_of_the_right_suffix_that_is_too_long(tmp_path: Path) -> None:
    values, fields = _pair()
    with sample_writer("speculators-pair", tmp_path) as writer:
        written = writer.write("a/" + "n" * 300 + ".pt", values, fields, {})
    assert (tmp_path / written).is_file()
    assert len(Path(written).name) == 255


def _arrow_sample(seed: int, tokens: int) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Field]]:
    fields = {
        "last_hidden_state": Field(name="last_hidden_state", dtype="float32", shape=(1,)),
        "input_ids": Field(name="input_ids", dtype="int32", source_dtype="int64"),
        "loss_mask": Field(name="loss_mask", dtype="uint8", source_dtype="bool"),
    }
    values = {
        "last_hidden_state": np.zeros((tokens, 1), np.uint32),
        "input_ids": np.arange(tokens, dtype=np.int32) + seed,
        "loss_mask": (np.arange(tokens) % 3 == 0).astype(np.uint8),
    }
    return values, fields


def test_an_arrow_folder_is_written_batch_by_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from hsloader.formats import arrow_writing

    monkeypatch.setattr(arrow_writing, "_BATCH_TOKENS", 10_000)
    tokens, final = 8000, tmp_path / "data-00000-of-00001.arrow"
    with sample_writer("speculators-arrow", tmp_path) as writer:
        for i in range(3):
            writer.write("", *_arrow_sample(i, tokens), {})
        assert [p.stat().st_size > 2 * 8 * tokens for p in tmp_path.glob(".hsloader-*")] == [True]
        tracemalloc.start()
        for i in range(3, 60):
            writer.write("", *_arrow_sample(i, tokens), {})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert not final.exists()
    assert peak < 12 * 8 * tokens  # a few samples' ids and states; all of them would be 57 times 9 * tokens
    with pyarrow.OSFile(str(final)) as file:
        reader = pyarrow.ipc.open_stream(file)
        batches = list(reader)
    assert [batch.num_rows for batch in batches] == [2] * 30
    rows = pyarrow.Table.from_batches(batches).to_pydict()
    assert rows["seq_len"] == [tokens] * 60
    assert [ids[:2] for ids in rows["input_ids"]] == [[i, i + 1] for i in range(60)]
    assert rows["loss_mask"][59][:4] == [True, False, False, True]
    assert not list(tmp_path.glob(".hsloader-*"))


def test_an_arrow_folder_that_fails_has_no_arrow_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    from hsloader.formats import arrow_writing

    monkeypatch.setattr(arrow_writing, "_BATCH_TOKENS", 10)
    other = _arrow_sample(1, 20)
    other[0]["loss_mask"][3] = 2
    with contextlib.suppress(KeyError), sample_writer("speculators-arrow", tmp_path / "two") as writer:
        writer.write("a", *_arrow_sample(0, 20), {})
        assert list((tmp_path / "two").glob(".hsloader-*"))
        with pytest.raises(ValueError, match="the loss_mask of b holds the value 2"):
            writer.write("b", *other, {})
        raise KeyError
    assert [p.name for p in (tmp_path / "two").iterdir()] == ["hidden_states"]
    with sample_writer("speculators-arrow", tmp_path / "none"):
        pass
    names = ["data-00000-of-00001.arrow", "dataset_info.json", "state.json"]
    assert sorted(p.name for p in (tmp_path / "none").iterdir()) == names


def _made(name: str, dtype: str, *shape: int, **more: Any) -> tuple[Field, np.ndarray[Any, Any]]:
    field = Field(name=name, dtype=dtype, shape=shape, **more)
    return field, np.ones((4, *shape), field.type.bits)


@pytest.mark.parametrize(
    ("layout", "made", "words"),
    [
        ("speculators-list", [_made("hidden_states", "float32", 3, 48)], "needs last_hidden_state, which"),
        ("speculators-arrow", [_made("hidden_states", "float32", 3, 48)], "needs last_hidden_state, which"),
        ("speculators-pair", [_made("last_hidden_state", "float32", 48)], "needs hidden_states, which"),
        ("specforge-dspark", [_made("last_hidden_state", "float32", 48)], "needs hidden_states, which"),
        ("specforge-dflash", [_made("last_hidden_state", "float32", 48)], "needs hidden_states, which"),
        ("speculators-list", [_made("hidden_states", "float32", 144)], r"layers, hidden size.*has it as \[4, 144\]"),
        ("speculators-arrow", [_made("hidden_states", "float32", 144)], r"layers, hidden size.*has it as \[4, 144\]"),
        ("speculators-arrow", [_made("hidden_states", "bfloat16", 3, 48)], "one dtype and hidden size"),
        ("speculators-arrow", [_made("hidden_states", "float32", 3, 40)], "one dtype and hidden size"),
        ("speculators-arrow", [_made("last_hidden_state", "float32", 48)], "needs input_ids, which"),
        ("speculators-list", [_made("hidden_states", "float8_e4m3fn", 3, 48, scale="s")], "speculators-arrow"),
    ],
)
def test_layouts_that_cannot_hold_the_states(tmp_path: Path, layout: str, made: list[Any], words: str) -> None:
    if "last_hidden_state" not in words and made[0][0].name != "last_hidden_state":
        made = [*made, _made("last_hidden_state", "float32", 48)]
    if "input_ids" not in words:
        made = [*made, _made("input_ids", "int32")]
    fields, values = {f.name: f for f, _ in made}, {f.name: v for f, v in made}
    if layout == "speculators-arrow":
        pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=words), sample_writer(layout, tmp_path) as writer:
        writer.write("data_0.pt", values, fields, {})
    assert not list(tmp_path.rglob("*.*"))


def test_fields_of_their_own_are_written_in_their_order(tmp_path: Path) -> None:
    made = [_made("last_hidden_state", "float32", 48), _made("input_ids", "int32")]
    made += [_made(f"extra_{i}", "int16", 2) for i in (5, 3, 1, 4, 2)]
    fields, values = {f.name: f for f, _ in made}, {f.name: v for f, v in made}
    with sample_writer("speculators-list", tmp_path) as writer:
        writer.write("data_0.pt", values, fields, {})
    assert list(_load(tmp_path / "data_0.pt"))[-5:] == [f"extra_{i}" for i in (5, 3, 1, 4, 2)]
    pytest.importorskip("pyarrow")
    with sample_writer("speculators-arrow", tmp_path / "arrow") as writer:
        writer.write("data_0.pt", values, fields, {})
    (sample,) = survey(tmp_path / "arrow").samples
    assert {s.name for s in sample.specs} == {*fields, "loss_mask"}


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*paths: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", no_link)
    publish(tmp_path / "a", b"one")
    with pytest.raises(FileExistsError):
        publish(tmp_path / "a", b"two")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"one"}
