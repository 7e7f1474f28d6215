"""What Writer is given by mistake: refused with the right words at once, and whatever it takes can be read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hsloader
from hsloader.store.fields import Field


def _nested(depth: int) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    for _ in range(depth):
        extras = {"a": extras}
    return extras


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden_size": 0}, "hidden_size: 0; expected 1 to"),
        ({"hidden_size": True}, "hidden_size: True; expected an integer"),
        ({"vocab_size": 2**50}, "vocab_size: .* expected 1 to"),
        ({"model": 5}, "model is 5; expected a string or None"),
        ({"layer_ids": ["a"]}, "layer_ids: 'a'; expected an integer"),
        ({"layer_ids": 5}, "layer_ids: 5; expected a list"),
        ({"notes": "one"}, "notes: 'one'; expected a list"),
        ({"notes": [1]}, "notes are .1.; expected strings"),
        ({"norm_state": "before"}, "norm_state"),
        ({"typical_length": 0}, "typical_length is 0; expected at least 1"),
        ({"threads": 0}, "threads is 0; expected at least 1"),
        ({"segment_bytes": -1}, "segment_bytes is -1; expected at least 1"),
        ({"shard_bytes": 0}, "shard_bytes is 0; expected at least 1"),
        ({"codec": "gzip"}, "codec is 'gzip'; expected one of lossless, none"),
        ({"bf16_as": "half"}, "bf16_as is 'half'; expected one of"),
        ({"fields": {}}, "0 fields; expected 1 to 256"),
        ({"fields": [Field(name="x", dtype="int8")] * 2}, "x occurs twice"),
        ({"fields": {"x": "float128"}}, "unknown data type 'float128'"),
        ({"fields": {"x": ("int8", (1,) * 17)}}, "17 axes a token; expected at most 16"),
        ({"fields": {"x": ("float64", (1 << 30,))}}, "bytes a token .* expected at most"),
    ],
)
def test_options_are_refused_before_anything_is_made(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hsloader.Writer(tmp_path / "d", **options)
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_become_plain_ones(tmp_path: Path) -> None:
    fields = {"x": ("float32", (np.int64(3),))}
    with hsloader.Writer(tmp_path / "d", fields, layer_ids=np.arange(3), hidden_size=np.int32(4)) as writer:  # type: ignore[arg-type]
        writer.append(x=np.ones((2, 3), np.float32))
    with hsloader.open_dataset(tmp_path / "d") as ds:
        assert (ds.provenance.layer_ids, ds.provenance.hidden_size) == ((0, 1, 2), 4)
        assert ds.read(0, "x").shape == (2, 3)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"name": 5}, "a sample's name is a string, found 5"),
        ({"name": "\ud800"}, r"sample '.ud800': a name is text"),
        ({"name": "\udcc3\udca9"}, "os.fsdecode"),  # the bytes of another name: that of an e with an accent
        ({"extras": [1]}, "extras must be a dict, found list"),
        ({"extras": {"x": float("inf")}}, "JSON can hold"),
        ({"extras": {"x": np.float32(1)}}, "JSON can hold"),
        ({"extras": {(1, 2): 3}}, "JSON can hold"),
        ({"extras": {"x": 10**5000}}, "JSON can hold"),
        ({"extras": _nested(101)}, "nested more than 100 deep"),
        ({"extras": _nested(2000)}, "nested more than 100 deep"),
        ({"x": np.ma.masked_array([1, 2], [True, False])}, "field x: expected an array whose values are all there"),
        ({"x": [[1], [2, 3]]}, "field x: expected a torch tensor or numpy array, found list"),
        ({"x": "abc"}, "field x: .* found str"),
        ({"x": None}, "field x: .* found NoneType"),
        ({"x": [2**70]}, "field x: .* found list"),
        ({"x": 3}, "field x: expected int64 .0., found int64 ..|at least one token"),
        ({"x": np.zeros(0, np.int64)}, "sample.*, field x: expected at least one token"),
        ({"x": np.zeros((2, 0), np.int64)}, "field x: expected int64 .2., found int64 .2, 0."),
        ({"x": np.zeros(2, np.longdouble)}, "field x: expected int64 .2., found float128"),
    ],
)
def test_samples_are_refused_by_name_and_the_writer_goes_on(tmp_path: Path, sample: dict[str, Any], words: str) -> None:
    with hsloader.Writer(tmp_path / "d", {"x": "int64"}) as writer:
        with pytest.raises((ValueError, TypeError), match=words):
            writer.append(**{"x": np.arange(2), **sample})
        writer.append(x=[7])
    with hsloader.open_dataset(tmp_path / "d") as ds:
        assert ds.lengths.tolist() == [1]
        assert ds.read(0, "x").tolist() == [7]
    assert hsloader.verify(tmp_path / "d").ok


NAMES = (" ", "a\nb", "...", "a/..b#2", "\udce9.pt", "\N{SNOWMAN}", "x" * 10_000, "000000#1")
EXTRAS: tuple[dict[str, Any], ...] = (
    {"\udc80": "\ud800\n"},
    {"x": [None, True, -0.0, 1e300, 2**200]},
    _nested(99),
    {"": {}},
)


def test_odd_names_and_extras_come_back(tmp_path: Path) -> None:
    with hsloader.Writer(tmp_path / "d") as writer:
        for i, name in enumerate(NAMES):
            writer.append(name=name, extras=EXTRAS[i % len(EXTRAS)], x=[i])
    with hsloader.open_dataset(tmp_path / "d") as ds:
        assert tuple(ds.name(i) for i in range(len(ds))) == NAMES
        assert [ds.extras(i) for i in range(len(ds))] == [EXTRAS[i % len(EXTRAS)] for i in range(len(NAMES))]
    assert hsloader.verify(tmp_path / "d").ok


@pytest.mark.parametrize("name", ["", ".", "/", "/e", "../e", "a/../e", "a/..", "a\0b"])
def test_names_that_no_exported_file_could_have(tmp_path: Path, name: str) -> None:
    with hsloader.Writer(tmp_path / "d") as writer:
        with pytest.raises(ValueError, match="is no path below a folder"):
            writer.append(name=name, x=[1])
        assert writer.fields is None
        writer.append(name="e", x=[1])
    with hsloader.open_dataset(tmp_path / "d") as ds:
        assert [ds.name(i) for i in range(len(ds))] == ["e"]


@pytest.mark.parametrize("place", ["d\udcff\udc80", "d\n\N{SNOWMAN}", "link"])
def test_paths_of_any_bytes_and_links(tmp_path: Path, place: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real", target_is_directory=True)
    path = tmp_path / place
    for append in (False, True):
        with hsloader.Writer(path, append=append, allow_unknown=True) as writer:
            writer.append(x=[1, 2])
    with hsloader.open_dataset(path) as ds:
        assert ds.read(1, "x").tolist() == [1, 2]
    assert hsloader.verify(path).ok


def test_tensors_of_every_kind_come_in_as_their_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Named(torch.Tensor):  # type: ignore[misc,name-defined]
        pass

    states = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)
    sample = {
        "subclass": states.as_subclass(Named),
        "grad": states.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(states.clone()),
        "expanded": states[:1].expand(4, 3),
        "reversed": states.flip(0)[:, ::2],
        "negated": torch.complex(torch.zeros(4), torch.arange(4.0)).conj().imag,
    }
    with hsloader.Writer(tmp_path / "d") as writer:
        for wrong in (torch.eye(4).to_sparse(), torch.ones(4, device="meta")):
            with pytest.raises(TypeError, match="field x: expected a dense tensor"):
                writer.append(x=wrong)
        writer.append(**sample)
    with hsloader.open_dataset(tmp_path / "d") as ds:
        found = ds[0]
    for name, tensor in sample.items():
        assert torch.equal(found[name], tensor.detach().as_subclass(torch.Tensor)), name
