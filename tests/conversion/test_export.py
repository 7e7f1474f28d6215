"""Export writes back what the source had: keys, dtypes, shapes and values, for each layout."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hsloader import ConversionError, convert, export, inspect

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


def test_what_an_arrow_folder_has_no_place_for_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    made = odd_tokens(1, 20)
    del made["loss_mask"]
    (tmp_path / "src").mkdir()
    torch.save(made, tmp_path / "src" / "data_1.pt")
    convert(tmp_path / "src", tmp_path / "dst")
    lost, mask = export(tmp_path / "dst", tmp_path / "out", layout="speculators-arrow").notes
    assert "extras of 1 samples" in lost
    assert "every token is written as supervised" in mask
    found = inspect(tmp_path / "out")
    assert found.samples == 1
    assert "positions int16" in found.kinds[0][0]
