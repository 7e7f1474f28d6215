"""What the layouts make of a record's keys: fields, extras, and what is left out, each by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hsloader.errors import SourceError  # noqa: E402
from hsloader.formats.opening import describe_file  # noqa: E402
from hsloader.formats.source import Hints, open_sample  # noqa: E402
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


def test_sidecars_by_content(tmp_path: Path) -> None:
    assert describe_file(_saved(tmp_path, d2t=torch.arange(4), t2d=torch.ones(9).bool())).sidecar == "vocabulary map"
    torch.save({5: 2, 7: 1}, tmp_path / "counts.pt")
    assert describe_file(tmp_path / "counts.pt").sidecar == "token frequencies"


def test_a_sample_is_small_and_picklable(tmp_path: Path) -> None:
    import pickle

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
