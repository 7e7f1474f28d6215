"""Export writes back what the source had: keys, dtypes, shapes and values, for each layout."""

from __future__ import annotations

import contextlib
import gzip
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hsloader import ConversionError, convert, export, inspect, open_dataset

torch = pytest.importorskip("torch")

H = 48  # wide enough for the states not to be token fields


def values(seed: int, *shape: int, dtype: Any = None) -> Any:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype or torch.bfloat16)


def speculators(i: int, length: int) -> dict[str, Any]:
    return {
        "input_ids": torch.arange(length) + i,
        "hidden_states": [values(4 * i + k, length, H) for k in range(4)],
        "loss_mask": (torch.arange(length) > 2).long(),
    }


def specforge(i: int, length: int) -> dict[str, Any]:
    return {
        "input_ids": torch.arange(length) + i,
        "loss_mask": (torch.arange(length) > 2).long(),
        "hidden_state": values(2 * i, 1, length, H, dtype=torch.float16),
        "aux_hidden_state": values(2 * i + 1, 1, length, 3 * H, dtype=torch.float16),
    }


def specforge_without_aux(i: int, length: int) -> dict[str, Any]:
    return {**specforge(i, length), "aux_hidden_state": None}


def odd_tokens(i: int, length: int) -> dict[str, Any]:
    """int32 ids, a bool mask, values of a sample and an array of its own."""
    return {
        **speculators(i, length),
        "input_ids": torch.arange(length, dtype=torch.int32),
        "loss_mask": torch.arange(length) % 2 == 0,
        "conversation_id": f"c{i}",
        "positions": torch.arange(length, dtype=torch.int16),
    }


def load(path: Path) -> Any:
    data = path.read_bytes()
    return torch.load(io.BytesIO(gzip.decompress(data) if path.suffix == ".gz" else data), weights_only=True)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (speculators, "rows_{r}/data_{i}.pt"),
        (specforge, "rows_{r}/data_{i}.ckpt"),
        (specforge, "rows_{r}/data_{i}.ckpt.gz"),
        (specforge_without_aux, "data_{i}.ckpt"),
        (odd_tokens, "data_{i}.pt"),
    ],
)
def test_export_equals_source(tmp_path: Path, make: Callable[[int, int], dict[str, Any]], name: str) -> None:
    src = tmp_path / "src"
    files = {}
    for i in range(5):
        path = src / name.format(i=i, r=i // 2)
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(make(i, 3 + 7 * i), buffer)
        path.write_bytes(gzip.compress(buffer.getvalue()) if path.suffix == ".gz" else buffer.getvalue())
        files[str(path.relative_to(src))] = make(i, 3 + 7 * i)
    convert(src, tmp_path / "dst")

    report = export(tmp_path / "dst", tmp_path / "out")

    assert report.samples == 5
    assert not report.renamed
    written = {str(p.relative_to(tmp_path / "out")): load(p) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert written.keys() == files.keys()
    assert all(same(written[key], files[key]) for key in files)
    assert inspect(tmp_path / "out").kinds == inspect(src).kinds


def test_one_layout_as_the_other(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    torch.save(speculators(1, 20), tmp_path / "src" / "data_1.pt")
    convert(tmp_path / "src", tmp_path / "dst", norm_state="pre")

    report = export(tmp_path / "dst", tmp_path / "out", layout="specforge-eagle3")

    assert report.renamed == {"data_1.pt": "data_1.ckpt"}
    (note,) = report.notes  # its trainers would take the state for a normed one
    assert "pre-norm" in note
    assert "post-norm" in note
    assert not export(tmp_path / "dst", tmp_path / "same").notes
    expected = speculators(1, 20)["hidden_states"]
    found = load(tmp_path / "out" / "data_1.ckpt")
    assert torch.equal(found["aux_hidden_state"], torch.cat(expected[:3], dim=1)[None])
    assert torch.equal(found["hidden_state"], expected[3][None])


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    torch.save(speculators(1, 20), tmp_path / "src" / "data_1.pt")
    convert(tmp_path / "src", tmp_path / "dst")
    with pytest.raises(ValueError, match="speculators-list"):
        export(tmp_path / "dst", tmp_path / "out", layout="no-such-layout")
    with pytest.raises(ConversionError, match="expected an empty folder"):
        export(tmp_path / "dst", tmp_path / "src")
    with pytest.raises(ConversionError, match="inside the dataset"):
        export(tmp_path / "dst", tmp_path / "dst" / "out")
    assert not (tmp_path / "dst" / "out").exists()


def test_the_texts_of_a_safetensors_header_come_back(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    library = pytest.importorskip("safetensors.torch")
    (tmp_path / "src").mkdir()
    torch.save(speculators(1, 20), tmp_path / "src" / "data_1.pt")
    convert(tmp_path / "src", tmp_path / "dst")
    export(tmp_path / "dst", tmp_path / "arrow", layout="speculators-arrow")
    path = tmp_path / "arrow" / "hidden_states" / "hs_0.safetensors"
    said = {"format": "pt", "conversation": "c7"}
    library.save_file(library.load_file(path), path, metadata=said)
    report = convert(tmp_path / "arrow", tmp_path / "dst2", delete_source=True)
    assert not path.exists()
    assert (report.deleted.files, report.left_out) == (1, {})
    with open_dataset(tmp_path / "dst2") as dataset:
        assert dataset.extras(0) == {"__metadata__": said}
    assert not export(tmp_path / "dst2", tmp_path / "back").notes
    with safe_open(tmp_path / "back" / "hidden_states" / "hs_0.safetensors") as metadata:
        assert metadata == said

    export(tmp_path / "dst", tmp_path / "long", layout="speculators-arrow")
    path = tmp_path / "long" / "hidden_states" / "hs_0.safetensors"
    library.save_file(library.load_file(path), path, metadata={"story": "x" * 100_000})
    report = convert(tmp_path / "long", tmp_path / "dst3", delete_source=True)
    assert path.exists()  # what is left out keeps the file
    assert [(k.name, k.reason) for k in report.deleted.kept] == [
        ("hidden_states/hs_0.safetensors", "field __metadata__ was left out")
    ]


@contextlib.contextmanager
def safe_open(path: Path) -> Iterator[Any]:
    """The texts of a safetensors header, as the library reads them."""
    library = pytest.importorskip("safetensors")
    with library.safe_open(path, "pt") as opened:
        yield opened.metadata()


def test_names_that_cannot_be_files_together(tmp_path: Path) -> None:
    for name in ("a.pt", "b/a.pt"):
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(speculators(1, 20), tmp_path / "src" / name)
    convert(tmp_path / "src" / "b", tmp_path / "dst")
    (tmp_path / "src" / "a.pt").rename(tmp_path / "aside")
    (tmp_path / "src" / "a.pt").mkdir()
    (tmp_path / "aside").rename(tmp_path / "src" / "a.pt" / "c.pt")
    (tmp_path / "src" / "b" / "a.pt").unlink()
    convert(tmp_path / "src", tmp_path / "dst", append=True)
    with pytest.raises(ConversionError, match=r"sample 'a\.pt/c\.pt' .*the file of 'a\.pt'.*speculators-arrow"):
        export(tmp_path / "dst", tmp_path / "out")
    pytest.importorskip("pyarrow")
    assert export(tmp_path / "dst", tmp_path / "arrow", layout="speculators-arrow").samples == 2


def test_what_an_arrow_folder_has_no_place_for_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    made = odd_tokens(1, 20)
    del made["loss_mask"]
    (tmp_path / "src").mkdir()
    torch.save(made, tmp_path / "src" / "data_1.pt")
    convert(tmp_path / "src", tmp_path / "dst")
    lost, mask = export(tmp_path / "dst", tmp_path / "out", layout="speculators-arrow").notes
    assert "extras of 1 sample have" in lost
    assert "every token is written as supervised" in mask
    found = inspect(tmp_path / "out")
    assert found.samples == 1
    assert "positions int16" in found.kinds[0][0]
