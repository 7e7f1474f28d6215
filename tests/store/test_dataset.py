"""Reading: every dtype bit for bit, cuts at every boundary, only the chunks needed, pickles, forks, descriptors."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hsloader
from hsloader.errors import DatasetError, IncompatibleError
from hsloader.store import dataset as dataset_module
from hsloader.store.dtypes import DTYPES
from hsloader.store.fields import Field
from hsloader.store.lending import LentMemory
from hsloader.store.stored_segment import ShardCache
from tests.store.making import FIELDS, Sample, random_sample, write_dataset

SHAPES: dict[str, tuple[int, ...]] = {"scalar": (), "vector": (3,), "wide": (40,), "layers": (2, 24)}


def _awkward(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Every kind of bit pattern: for 16 bits and less all of them, else zeros, subnormals, infinities, NaN payloads."""
    bits = DTYPES[dtype].bits
    if dtype == "bool":
        values = np.array([False, True])
    elif bits.itemsize <= 2:
        values = np.arange(1 << (8 * bits.itemsize), dtype=f"<u{bits.itemsize}")
    elif dtype == "float32":
        values = np.array(
            [0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x3F800000], "<u4"
        )
    elif dtype == "float64":
        values = np.array([0, 1 << 63, 1, 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1, (1 << 64) - 1], "<u8")
    else:
        info = np.iinfo(bits)
        values = np.array([info.min, info.max, 0, 1, info.max // 3], bits)
    rows = -(-len(values) // int(np.prod(shape, dtype=int)))
    return np.resize(values.view(bits), (max(rows, 70), *shape))


@pytest.mark.parametrize("codec", ["lossless", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_comes_back_bit_for_bit(tmp_path: Path, dtype: str, codec: str) -> None:
    fields = tuple(Field(name=name, dtype=dtype, shape=shape, codec=codec) for name, shape in SHAPES.items())
    for name, shape in SHAPES.items():
        bits = _awkward(dtype, shape)
        field = tuple(f for f in fields if f.name == name)
        write_dataset(tmp_path / name, [{name: bits}, {name: bits[:1]}], fields=field, typical_length=20)
        with hsloader.open_dataset(tmp_path / name) as ds:
            found = ds.read(0, name)
            assert found.dtype == DTYPES[dtype].bits
            assert found.tobytes() == bits.tobytes()
            assert ds.read(1, name).tobytes() == bits[:1].tobytes()


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """One-token samples, and one below, at and one above a chunk (256 rows) and a shard (768 rows)."""
    rng = np.random.default_rng(0)
    return [random_sample(rng, n) for n in (1, 255, 256, 257, 767, 768, 769, 1, 1, 1600)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, samples: list[Sample]) -> Path:
    path = tmp_path_factory.mktemp("datasets") / "d"
    write_dataset(path, samples[:6], model="m", layer_ids=[1, 2])
    write_dataset(path, samples[6:], first=6, append=True, model="m", layer_ids=[1, 2])
    return path


def test_samples_around_chunk_and_shard_boundaries(path: Path, samples: list[Sample]) -> None:
    with hsloader.open_dataset(path) as ds:
        array = ds.segments[0].array("hidden_states")
        assert (array.chunk_rows, array.shard_chunks) == (256, 3)
        assert len(ds) == len(samples)
        assert ds.lengths.tolist() == [len(sample["input_ids"]) for sample in samples]
        for i, sample in enumerate(samples):
            assert ds.name(i) == f"s{i}"
            assert ds.extras(i) == {"number": i}
            length = len(sample["input_ids"])
            cuts = {0, 1, 2, 255, 256, 257, 511, 512, 513, 767, 768, 769, length // 2, length - 1, length}
            for name, bits in sample.items():
                for start in (cut for cut in cuts if cut <= length):
                    for stop in (cut for cut in cuts if start <= cut <= length):
                        np.testing.assert_array_equal(ds.read(i, name, start, stop), bits[start:stop])


def test_reading_into_a_buffer_of_the_caller(path: Path, samples: list[Sample]) -> None:
    with hsloader.open_dataset(path) as ds:
        out = np.empty((300, 3, 64), "<u2")
        assert ds.read(9, "hidden_states", 100, 400, out=out) is out
        np.testing.assert_array_equal(out, samples[9]["hidden_states"][100:400])
        for wrong in (out[:299], out.astype("<u4"), out[::-1], np.broadcast_to(np.uint16(0), out.shape)):
            with pytest.raises(ValueError, match="out: expected writable"):
                ds.read(9, "hidden_states", 100, 400, out=wrong)


def test_only_the_chunks_needed_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        read.append(size)
        return real(fd, size, offset)

    with hsloader.open_dataset(path) as ds:
        ds.read(9, "hidden_states", 0, 1)  # the shard's index is known from here on
        index = ds.segments[1].array("hidden_states").index(2)
        monkeypatch.setattr(dataset_module.os, "pread", counting)
        ds.read(9, "hidden_states", 300, 301)
        monkeypatch.undo()
    assert len(read) == 1
    assert read[0] in index[:, 1]


def test_indexes_are_pythons(path: Path, samples: list[Sample]) -> None:
    with hsloader.open_dataset(path) as ds:
        np.testing.assert_array_equal(ds.read(-1, "input_ids"), samples[-1]["input_ids"])
        assert ds.name(np.int64(3)) == "s3"  # type: ignore[arg-type]
        for wrong in (10, -11):
            with pytest.raises(IndexError, match="of a dataset of 10"):
                ds.read(wrong, "input_ids")
        with pytest.raises(IndexError, match="not within"):
            ds.read(0, "input_ids", 0, 2)
        with pytest.raises(KeyError, match="it has hidden_states, last_hidden_state, input_ids, loss_mask"):
            ds.read(0, "hidden")
        with pytest.raises(TypeError):
            ds.read("0", "input_ids")  # type: ignore[arg-type]


def test_columns_and_metadata(path: Path, samples: list[Sample]) -> None:
    with hsloader.open_dataset(path) as ds:
        masks = [sample["loss_mask"] for sample in samples]
        assert ds.loss_tokens.tolist() == [int(mask.sum()) for mask in masks]
        assert ds.first_supervised.tolist() == [int(m.argmax()) if m.any() else -1 for m in masks]
        assert ds.segment_of.tolist() == [0] * 6 + [1] * 4
        assert ds.keys.dtype == np.uint64
        assert len(set(ds.keys.tolist())) == 10
        assert list(ds.fields) == [field.name for field in FIELDS]
        assert ds.metadata["samples"] == 10
        assert ds.metadata["tokens"] == sum(map(len, masks))
        assert ds.metadata["provenance"]["layer_ids"] == (1, 2)
        assert "10 samples" in repr(ds)


def test_tensors_have_the_fields_types(path: Path, samples: list[Sample]) -> None:
    torch = pytest.importorskip("torch")
    with hsloader.open_dataset(path) as ds:
        whole, part = ds[4], ds[4, 250:-3]
        assert whole["hidden_states"].dtype is torch.bfloat16
        assert whole["hidden_states"].shape == (767, 3, 64)
        assert whole["input_ids"].dtype is torch.int32
        bits = samples[4]["hidden_states"]
        assert (whole["hidden_states"].view(torch.int16).numpy().view("<u2") == bits).all()
        assert (part["hidden_states"].view(torch.int16).numpy().view("<u2") == bits[250:-3]).all()
        assert ds[4, 5:2]["input_ids"].shape == (0,)
        for wrong in ((4, 3), (4, slice(None, None, 2)), (4, 1, 2), (4,), slice(0, 2), "4", None):
            with pytest.raises(TypeError, match="start:stop"):
                ds[wrong]  # type: ignore[index]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bool", "float16", "uint16", "int64"])
def test_torch_types_go_in_and_come_out(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    bits = torch.arange(256).to(torch.uint8)
    tensor = bits.view(getattr(torch, dtype)) if dtype.startswith("float8") else bits.to(getattr(torch, dtype))
    with hsloader.Writer(tmp_path / "d") as writer:
        writer.append(value=tensor.reshape(4, 64), strided=tensor.reshape(64, 4).T)
    with hsloader.open_dataset(tmp_path / "d") as ds:
        found = ds[0]
    assert found["value"].dtype is tensor.dtype
    assert (found["value"].reshape(-1).view(torch.uint8) == tensor.view(torch.uint8)).all()
    assert (
        found["strided"].contiguous().view(torch.uint8) == tensor.reshape(64, 4).T.contiguous().view(torch.uint8)
    ).all()


def test_a_pickle_opens_the_same_samples_again(path: Path, samples: list[Sample], tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", samples[:2])
    with hsloader.open_dataset(tmp_path / "d") as ds:
        ds.read(0, "input_ids")
        kept = pickle.dumps(ds)
    write_dataset(tmp_path / "d", samples[2:3], first=2, append=True)
    with pickle.loads(kept) as again:
        assert len(again) == 2
        np.testing.assert_array_equal(again.read(1, "hidden_states"), samples[1]["hidden_states"])
    (tmp_path / "d").rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        pickle.loads(kept)
    write_dataset(tmp_path / "d", samples[3:5])
    with pytest.raises(IncompatibleError, match="replaced by another"):
        pickle.loads(kept)


def test_forked_children_and_threads_read_what_the_parent_opened(path: Path, samples: list[Sample]) -> None:
    with hsloader.open_dataset(path) as ds:
        ds.read(9, "hidden_states")
        children = []
        for _ in range(3):
            child = os.fork()
            if child == 0:
                same = all((ds.read(i, name) == bits).all() for i, s in enumerate(samples) for name, bits in s.items())
                os._exit(0 if same else 1)
            children.append(child)
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
        wrong: list[int] = []

        def read_all() -> None:
            for i, sample in enumerate(samples):
                if not all((ds.read(i, name) == bits).all() for name, bits in sample.items()):
                    wrong.append(i)

        threads = [threading.Thread(target=read_all) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_few_shards_are_open_at_a_time(path: Path, samples: list[Sample]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with hsloader.open_dataset(path) as ds:
        ds._shards = ShardCache(2)
        for i in range(len(ds)):
            for name in ds.fields:
                np.testing.assert_array_equal(ds.read(i, name), samples[i][name])
                assert len(os.listdir("/proc/self/fd")) <= before + 3
    assert len(os.listdir("/proc/self/fd")) == before


def test_results_do_not_change_while_anything_of_them_is_held() -> None:
    memory = LentMemory()
    first = memory.empty((1 << 20,), np.dtype("<u2"))
    part = first[5:10].reshape(5, 1)
    first[:] = 7
    del first
    second = memory.empty((1 << 20,), np.dtype("<u2"))
    second[:] = 8
    assert part.tolist() == [[7]] * 5
    address = second.ctypes.data
    del second
    assert memory.empty((1 << 20,), np.dtype("<u2")).ctypes.data == address
    small = memory.empty((3, 4), np.dtype("<f4"))
    assert small.shape == (3, 4)


def test_opening_imports_neither_torch_nor_zarr(path: Path) -> None:
    code = (
        "import sys, hsloader; ds = hsloader.open_dataset(sys.argv[1]); ds.read(0, 'hidden_states'); ds.name(0)\n"
        "print(sorted({'torch', 'zarr'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_what_is_no_dataset_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such dataset"):
        hsloader.open_dataset(tmp_path / "nothing")
    with pytest.raises(DatasetError, match="hsloader convert"):
        hsloader.open_dataset(tmp_path)


def test_zarr_opens_a_dataset_as_it_is(path: Path, samples: list[Sample]) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(path, mode="r")
    assert group.attrs["hsloader"] == {"format": 1, "manifest": "manifest.json"}
    segment = group["segments/000001"]
    table = segment["samples"][:]
    ends = segment["names_end"][:]
    assert bytes(segment["names"][: ends[0]]) == b"s6"
    for position, sample in enumerate(samples[6:]):
        first, length = table[0, position], table[1, position]
        for name, bits in sample.items():
            np.testing.assert_array_equal(segment[name][first : first + length], bits)


def test_running_out_of_descriptors_is_not_called_damage(path: Path) -> None:
    code = (
        "import resource, sys, hsloader; ds = hsloader.open_dataset(sys.argv[1]); ds.segments[0].array('input_ids')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "try: ds.read(0, 'input_ids')\nexcept OSError as error: print(error.errno)"
    )
    found = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert found.stdout == f"{errno.EMFILE}\n"
