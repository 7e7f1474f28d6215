"""What the layouts make of a record's keys: fields, extras, and what is left out, each by name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hsloader.errors import SourceError  # noqa: E402
from hsloader.formats.blocks import Block, checked_tensor  # noqa: E402
from hsloader.formats.layouts import record_of  # noqa: E402
from hsloader.formats.opening import describe_file  # noqa: E402
from hsloader.formats.source import Hints, open_sample  # noqa: E402
from hsloader.formats.speculators import build_layers  # noqa: E402
from tests.formats.making import HIDDEN, bits_of, described, listed, read, states  # noqa: E402


def _saved(path: Path, **record: Any) -> Path:
    torch.save(record, path / "data_0.pt")
    return path / "data_0.pt"


def _reason(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        describe_file(path)
    return caught.value.reason


def test_extras_become_fields_and_small_values(tmp_path: Path) -> None:
    path = _saved(
        tmp_path,
        **listed(8),
        **{
            "conversation id": "é",
            "nothing": None,
            "nested": {"a": [1, 2, (3,)]},
            "flags": {2, 1},
            "size": torch.Size([8]),
            "kind": torch.bfloat16,
            "Position IDs": torch.arange(8),
            "logits": states(1, 1, 8, 20),
            "embedding": states(1, 5),
            "2d": torch.arange(8),
            "nan": float("nan"),
            "raw": b"bytes",
            "scalar": torch.tensor(0.5, dtype=torch.bfloat16),
        },
    )
    sample = described(path)
    values = read(sample)
    np.testing.assert_array_equal(values["position_ids"], np.arange(8))
    np.testing.assert_array_equal(values["logits"], bits_of(states(1, 1, 8, 20)[0]))
    with open_sample(sample) as opened:
        assert opened.extras() == {
            "conversation id": "é",
            "nothing": None,
            "nested": {"a": [1, 2, [3]]},
            "flags": [1, 2],
            "size": [8],
            "kind": "torch.bfloat16",
            "scalar": 0.5,
        }
    assert sample.notes == (
        "tensor 'Position IDs' is kept as the field position_ids",
        "tensor 'logits': its leading axis of 1 is not kept",
    )
    left = dict(sample.left_out)
    assert set(left) == {"embedding", "2d", "nan", "raw"}
    assert "does not have one row for each of 8 tokens" in left["embedding"]


def test_specforge_without_auxiliary_layers(tmp_path: Path) -> None:
    path = _saved(tmp_path, input_ids=torch.arange(6), hidden_state=states(0, 1, 6, HIDDEN), aux_hidden_state=None)
    sample = described(path)
    assert [spec.name for spec in sample.specs] == ["input_ids", "last_hidden_state"]
    assert set(sample.notes) == {"aux_hidden_state is None: no auxiliary layers", "no loss_mask"}


def test_layers_of_dflash_are_split_by_a_hint_only(tmp_path: Path) -> None:
    path = _saved(tmp_path, input_ids=torch.arange(6), hidden_states=states(0, 1, 6, 5 * HIDDEN))
    assert described(path).spec("hidden_states").shape == (1, 5 * HIDDEN)
    (split,) = describe_file(path, hints=Hints(hidden_size=HIDDEN)).samples
    assert split.spec("hidden_states").shape == (5, HIDDEN)
    with pytest.raises(SourceError, match="not a multiple of the hidden size 17"):
        describe_file(path, hints=Hints(hidden_size=17))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": None}, "token ids are missing"),
        ({"input_ids": torch.rand(10)}, "input_ids holds float32"),
        ({"input_ids": torch.zeros(2, 5, dtype=torch.long)}, r"input_ids has the shape [2, 5]"),
        ({"input_ids": "text"}, "neither a tensor nor a list"),
        ({"loss_mask": torch.ones(9)}, "loss_mask has 9 values, the sample has 10 tokens"),
        ({"hidden_states": []}, "empty list"),
        ({"hidden_states": [None]}, "layer 0 of hidden_states is no tensor"),
        ({"hidden_states": [torch.zeros(10, 16, dtype=torch.int64)]}, "holds int64"),
        ({"hidden_states": [torch.zeros(10, 0)]}, "[10, 0]"),
        ({"hidden_states": [torch.zeros(10)]}, "[10]"),
        ({"hidden_states": [torch.zeros(10, 16), torch.zeros(10, 16).half()]}, "float16, layer 0 is [10, 16] float32"),
    ],
)
def test_records_that_lack_something(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in _reason(_saved(tmp_path, **{**listed(), **changes}))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"input_ids": torch.arange(6), "hidden_state": states(0, 6, 50), "target": states(1, 6, HIDDEN)},
            "width 50, not a multiple of the hidden size 16",
        ),
        ({"input_ids": torch.arange(6), "hidden_states": states(0, 6, HIDDEN)}, "2 axes next to no other states"),
        ({"input_ids": torch.arange(3), "hidden_state": states(0, 3, 3, HIDDEN)}, "fused BaldEagle"),
        ({"weight": states(0, 4, 4)}, "no known layout has these keys (weight)"),
        (
            {"input_ids": torch.arange(6)[None], "hidden_states": states(0, 1, 6, 80), "loss_mask": torch.ones(1, 6)},
            "AngelSlim DFlash",
        ),
    ],
)
def test_what_is_ambiguous_or_foreign_is_not_guessed_at(tmp_path: Path, record: dict[str, Any], words: str) -> None:
    assert words in _reason(_saved(tmp_path, **record))


@pytest.mark.parametrize("odd", [states(1, 6, 2, HIDDEN), states(1, 1, 6, 2, HIDDEN)])
@pytest.mark.parametrize(
    ("aux", "last"),
    [
        ("hidden_state", "target"),
        ("hidden_states", "target_last_hidden_states"),
        ("aux_hidden_state", "hidden_state"),
    ],
)
def test_a_last_state_of_several_rows_a_token(tmp_path: Path, aux: str, last: str, odd: torch.Tensor) -> None:
    record = {"input_ids": torch.arange(6), aux: states(0, 6, 3 * HIDDEN), last: odd}
    assert f"{last} has the shape " in _reason(_saved(tmp_path, **record))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_states": "int16"}, "hidden_states holds int16, expected floating point states"),
        ({"hidden_states_scales": "int32"}, "hidden_states_scales holds int32, expected floating point scales"),
    ],
)
def test_layers_and_scales_are_floating_point(change: dict[str, str], words: str) -> None:
    shapes = {"token_ids": ("int64", 5), "hidden_states": ("float8_e4m3fn", 5, 4, 8)}
    shapes["hidden_states_scales"] = ("float32", 5, 1, 1)
    keys: dict[object, object] = {}
    for name, (dtype, *shape) in shapes.items():
        kind = change.get(name, dtype)
        stride = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        keys[name] = checked_tensor(kind, shape, stride, 0, Block(name, 8 * int(np.prod(shape)), offset=0))
    with pytest.raises(SourceError, match=words):
        record_of("speculators-arrow", build_layers, keys, "hs_0.safetensors", Hints())


def test_the_metadata_of_a_safetensors_file_is_an_extra(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    record = {"input_ids": torch.arange(6), "hidden_state": states(0, 6, 3 * HIDDEN), "target": states(1, 6, HIDDEN)}
    path = tmp_path / "a.safetensors"
    library.save_file(record, path, metadata={"format": "pt", "conversation": "c7"})
    with open_sample(described(path)) as opened:
        assert opened.extras() == {"__metadata__": {"format": "pt", "conversation": "c7"}}
    library.save_file(record, path, metadata={"format": "pt"})
    assert not described(path).extras
    library.save_file(record, path, metadata={"story": "x" * 100_000})
    found = described(path)
    assert not found.extras
    assert found.left_out == (("__metadata__", "a text of 100000 characters, at most 65536 are kept"),)


def test_extras_are_bounded_whatever_refers_to_them_how_often(tmp_path: Path) -> None:
    numbers, text = [0] * 6000, "x" * 60_000
    path = _saved(
        tmp_path,
        **listed(4),
        **{f"n{i}": [numbers] for i in range(300)},
        texts=[text] * 5000,
        keys=[{text: 1}] * 5000,
        small="kept",
    )
    found = described(path)
    assert len([name for name in found.extras if name.startswith("n")]) <= 17
    assert len(pickle.dumps(dict(found.extras))) < 1 << 20
    left = dict(found.left_out)
    assert len(left) + len(found.extras) == 303
    assert "more than 100000 values" in left["n299"]
    alone = described(_saved(tmp_path, **listed(4), texts=[text] * 5000, small="kept"))
    assert (dict(alone.extras), [name for name, _ in alone.left_out]) == ({"small": "kept"}, ["texts"])


def test_long_names_are_left_out_not_cut(tmp_path: Path) -> None:
    long = "k" * 250
    found = described(_saved(tmp_path, **listed(4), **{long + "1": 1, long + "2": torch.tensor(2)}))
    assert not found.extras
    assert [why for _, why in found.left_out] == ["its name has 251 characters, at most 200 are kept"] * 2


def test_a_number_that_json_lacks_is_named(tmp_path: Path) -> None:
    sample = described(_saved(tmp_path, **listed(4), loss=torch.tensor(float("nan"))))
    with open_sample(sample) as opened, pytest.raises(SourceError, match="loss is nan"):
        opened.extras()


def test_sidecars_by_content(tmp_path: Path) -> None:
    assert describe_file(_saved(tmp_path, d2t=torch.arange(4), t2d=torch.ones(9).bool())).sidecar == "vocabulary map"
    torch.save({5: 2, 7: 1}, tmp_path / "counts.pt")
    assert describe_file(tmp_path / "counts.pt").sidecar == "token frequencies"


def test_a_sample_is_small_and_picklable(tmp_path: Path) -> None:
    path = _saved(tmp_path, **listed(2000))
    sample = described(path)
    assert pickle.loads(pickle.dumps(sample)) == sample
    assert len(pickle.dumps(sample)) < 2000


def test_describing_reads_no_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    path = _saved(tmp_path, **listed(20_000))
    counted = 0
    pread = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        nonlocal counted
        data = pread(fd, size, offset)
        counted += len(data)
        return data

    monkeypatch.setattr(os, "pread", counting)
    monkeypatch.setattr(os, "preadv", None)
    assert described(path).payload_bytes > 2_000_000
    assert counted < 64 << 10
