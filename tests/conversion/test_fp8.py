"""The lossy codec fp8: exactly torch's float8_e4m3fn of value / scale, told, proved, asked for by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import hsloader
from hsloader import convert, export, open_dataset, verify
from hsloader.conversion.fp8 import Fp8Encoder, restored_bits, with_fp8_states
from hsloader.formats.writing import sample_writer
from hsloader.store.fields import Field
from tests.conversion.sources import fill, record, tree, write

torch = pytest.importorskip("torch")

BITS = {torch.bfloat16: "<u2", torch.float16: "<f2", torch.float32: "<f4"}


def reference(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """hs-connectors 0.9.0, ``fp8_utils.py``, for ``[S, H]``."""
    whole = values.float()
    scale = (whole.abs().amax(dim=1, keepdim=True) / 448).clamp(min=1e-12)
    return (whole / scale).to(torch.float8_e4m3fn), scale


def demand_exact(values: torch.Tensor) -> None:
    """Encoding and restoring rows ``[S, H]`` gives what torch gives."""
    name = str(values.dtype).removeprefix("torch.")
    (field,) = (
        f for f in with_fp8_states([Field(name="hidden_states", dtype=name, shape=values.shape[1:])]) if f.shape
    )
    integers = values.view({2: torch.int16, 4: torch.int32}[values.itemsize])
    bits = integers.numpy().view(BITS[values.dtype])
    half = values.shape[1] // 3
    made = Fp8Encoder(field, len(bits))([bits[:, :half], bits[:, half:]])
    expected, scale = reference(values)
    assert np.array_equal(made.bits, expected.view(torch.uint8).numpy())
    assert np.array_equal(made.scale, scale[:, 0].numpy())
    restored = (expected.to(torch.bfloat16) * scale.to(torch.bfloat16)).to(values.dtype)
    limit = min(torch.finfo(values.dtype).max, torch.finfo(torch.bfloat16).max)
    found = restored_bits(made.bits, made.scale, name).view(f"i{values.itemsize}")
    assert torch.equal(torch.from_numpy(found), restored.clamp(-limit, limit).view(integers.dtype))
    error = (expected.float() * scale.to(torch.bfloat16).float() - values.float()).double().norm(dim=1)
    relative = error / values.double().norm(dim=1).clamp(min=1e-300)
    assert made.loss.loss().max == pytest.approx(float(relative.max()), rel=2e-3, abs=1e-6)
    assert made.loss.loss().mean == pytest.approx(float(relative.mean()), rel=2e-3, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_beside_many_scales(dtype: torch.dtype) -> None:
    patterns = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = patterns[torch.isfinite(patterns)]
    signed = torch.where(torch.arange(len(finite)) % 2 == 0, finite, -finite)
    binade = len(finite) // (255 if dtype == torch.bfloat16 else 31)
    for top in range(257, len(finite) + 1, 1409):  # a row of all magnitudes that do not vanish beside its largest
        demand_exact(signed[max(0, top - 21 * binade) : top][None])
    demand_exact(torch.cat([finite, -finite])[None])


def test_ties_of_float32_and_odd_rows() -> None:
    exact = torch.tensor([m * 2.0**e for e in range(-10, 8) for m in (8, 8.5, 9, 9.5, 15.5)])
    near = torch.cat([exact, torch.nextafter(exact, exact * 0), torch.nextafter(exact, exact * 2)])
    row = torch.cat([near[near < 448], torch.tensor([448.0])])
    demand_exact(torch.stack([row, -row, row * 0, row * 1e-30, row * 2.0**-136, row * 1e30]))
    demand_exact(
        torch.randn(300, 1000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 9, 300)[:, None]
    )


def test_which_fields() -> None:
    def names(*fields: Field) -> dict[str, str]:
        return {f.name: f.dtype for f in with_fp8_states(fields)}

    wide = Field(name="hidden_states", dtype="float16", shape=(3, 64))
    assert names(wide) == {"hidden_states": "float8_e4m3fn", "hidden_states_scale": "float32"}
    for kept in (
        Field(name="hidden_states", dtype="float8_e4m3fn", shape=(3, 64), scale="other"),
        Field(name="hidden_states", dtype="float64", shape=(3, 64)),
        Field(name="last_hidden_state", dtype="bfloat16", shape=(64,)),  # 64 bytes: would be a token field
        Field(name="logits", dtype="bfloat16", shape=(64, 64)),
    ):
        assert with_fp8_states([kept]) == (kept,)
    with pytest.raises(ValueError, match=r"hidden_states_scale.*lossless"):
        names(wide, Field(name="hidden_states_scale", dtype="float32"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    src = tmp_path_factory.mktemp("source")
    fill(src, 12)
    bad = record(9, 100)
    bad["hidden_states"][1][70, 3] = float("nan")
    write(src / "data_9.pt", bad)
    return src


def test_from_files_to_restored_files(source: Path, tmp_path: Path) -> None:
    dst, out = tmp_path / "dst", tmp_path / "out"
    report = convert(source, dst, codec="fp8", segment_size=1 << 20)
    assert [q.name for q in report.quarantined] == ["data_9.pt"]
    assert report.loss.keys() == {"hidden_states", "last_hidden_state"}
    assert all(0.02 < loss.mean < loss.max < 0.04 for loss in report.loss.values())
    assert any(note.startswith("codec fp8 is lossy: hidden_states") for note in report.notes)
    assert report.ratio > 1.9
    assert json.loads(report.to_json())["loss"]["hidden_states"]["mean"] == report.loss["hidden_states"].mean
    assert not verify(dst).problems
    with open_dataset(dst) as dataset:
        assert dataset.fields["hidden_states"].scale == "hidden_states_scale"
        assert dataset.segments[0].meta.source is not None
        assert dataset.segments[0].meta.source["loss"].keys() == report.loss.keys()
        found = dataset[2]
        given = record(2, 120 + 14)
        for name, state in (
            ("hidden_states", torch.cat(given["hidden_states"][:3], dim=1)),
            ("last_hidden_state", given["hidden_states"][3]),
        ):
            bits, scale = reference(state)
            assert found[name].dtype == torch.float8_e4m3fn
            assert torch.equal(found[name].flatten(1).view(torch.uint8), bits.view(torch.uint8))
            assert torch.equal(found[f"{name}_scale"], scale[:, 0])
    exported = export(dst, out)
    assert "restored" in exported.notes[0]
    written = torch.load(out / "data_2.pt", weights_only=True)
    assert written.keys() == given.keys()
    bits, scale = reference(given["hidden_states"][3])
    assert torch.equal(written["hidden_states"][3], bits.to(torch.bfloat16) * scale.to(torch.bfloat16))
    assert convert(source, dst, codec="fp8", segment_size=1 << 20).loss == report.loss


def test_threads_and_a_resumption_change_no_byte(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "one", codec="fp8", segment_size=1 << 20, workers=1, threads=1)

    def stop(progress: object) -> None:
        if getattr(progress, "segments", 0) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "two", codec="fp8", segment_size=1 << 20, workers=1, progress=stop)
    convert(source, tmp_path / "two", codec="fp8", segment_size=1 << 20, workers=2, threads=3)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_deleting_the_source_is_asked_for_by_name(tmp_path: Path) -> None:
    fill(tmp_path / "src", 2)
    with pytest.raises(ValueError, match=r"codec fp8 rounds.*delete_source='lossy'"):
        convert(tmp_path / "src", tmp_path / "dst", codec="fp8", delete_source=True)
    report = convert(tmp_path / "src", tmp_path / "dst", codec="fp8", delete_source="lossy")
    assert report.deleted.files == 2
    assert not list((tmp_path / "src").iterdir())


def test_batches_hold_restored_values(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "dst", codec="fp8", norm_state="pre", layer_ids=[1, 2, 3])
    with hsloader.DataLoader(
        tmp_path / "dst", trainer="speculators-0.9", max_tokens=512, samples=[3], shuffle=False
    ) as loader:
        batch = next(iter(loader))
    given = record(3, 120 + 21)
    bits, scale = reference(torch.cat(given["hidden_states"][:3], dim=1))
    expected = bits.to(torch.bfloat16) * scale.to(torch.bfloat16)
    assert batch["hidden_states"].dtype == torch.bfloat16
    assert any(torch.equal(batch["hidden_states"][0, :140], expected[start : start + 140]) for start in (0, 1))


def test_sources_in_fp8_keep_their_scale_and_resume(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    src, dst = tmp_path / "src", tmp_path / "dst"
    fields = {
        "hidden_states": Field(
            name="hidden_states", dtype="float8_e4m3fn", shape=(3, 256), scale="hidden_states_scale"
        ),
        "last_hidden_state": Field(
            name="last_hidden_state", dtype="float8_e4m3fn", shape=(256,), scale="hidden_states_scale"
        ),
        "input_ids": Field(name="input_ids", dtype="int32"),
        "loss_mask": Field(name="loss_mask", dtype="uint8"),
        "hidden_states_scale": Field(name="hidden_states_scale", dtype="float32"),
    }
    rng = np.random.default_rng(0)
    with sample_writer("speculators-arrow", src) as writer:
        for i in range(4):
            values = {
                name: np.ones((400, *f.shape), f.type.bits) * (0.1 + i)
                if f.dtype == "float32"
                else rng.integers(0, 2 if name == "loss_mask" else 100, (400, *f.shape)).astype(f.type.bits)
                for name, f in fields.items()
            }
            writer.write(f"{i}", values, fields, {})

    def stop(progress: object) -> None:
        if getattr(progress, "segments", 0) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(src, dst, codec="fp8", segment_size=1 << 20, workers=1, progress=stop)
    report = convert(src, dst, codec="fp8", segment_size=1 << 20)
    assert (report.converted + report.present, report.quarantined, report.loss) == (4, (), {})
    with open_dataset(dst) as dataset:
        assert {f.name: f.scale for f in dataset.fields.values() if f.scale} == {
            "hidden_states": "hidden_states_scale",
            "last_hidden_state": "hidden_states_scale",
        }
        assert float(dataset[3]["hidden_states_scale"][0]) == pytest.approx(3.1)
