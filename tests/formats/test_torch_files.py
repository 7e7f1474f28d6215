"""Torch files of every dtype and stride come out bit for bit; what lies or is damaged is refused with its reason."""

from __future__ import annotations

import errno
import gzip
import os
import pickle
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hsloader.errors import SourceError  # noqa: E402
from hsloader.formats.gz import read_zip_head  # noqa: E402
from hsloader.formats.pickle_reader import MAX_PICKLE  # noqa: E402
from hsloader.formats.source import open_sample  # noqa: E402
from hsloader.formats.torch_legacy import LEGACY_MAGIC, read_torch_legacy  # noqa: E402
from tests.formats.making import (  # noqa: E402
    HIDDEN,
    bits_of,
    described,
    edited,
    entries_of,
    listed,
    raw_zip,
    read,
    saved,
    states,
)


def _refused(path: Path, data: bytes) -> str:
    """Why a file is not taken."""
    path.write_bytes(data)
    with pytest.raises(SourceError) as caught:
        read(described(path))
    return caught.value.reason


def _check(path: Path, record: dict[str, Any], layers: list[Any], step: int = 3) -> None:
    """A written file of the list layout gives the layers and the tokens of the record."""
    values = read(described(path), step)
    np.testing.assert_array_equal(values["hidden_states"], np.stack([bits_of(x) for x in layers[:-1]], 1))
    np.testing.assert_array_equal(values["last_hidden_state"], bits_of(layers[-1]))
    np.testing.assert_array_equal(values["input_ids"], np.asarray(record["input_ids"]))
    np.testing.assert_array_equal(values["loss_mask"], np.asarray(record["loss_mask"]))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("length", [1, 2, 10])
def test_every_state_dtype(tmp_path: Path, name: str, length: int) -> None:
    record = listed(length)
    record["hidden_states"] = [x.to(getattr(torch, name)) for x in record["hidden_states"]]
    torch.save(record, tmp_path / "data_0.pt")
    _check(tmp_path / "data_0.pt", record, record["hidden_states"])
    spec = described(tmp_path / "data_0.pt").spec("hidden_states")
    assert (spec.dtype, spec.source_dtype, spec.shape) == (name, name, (3, HIDDEN))


@pytest.mark.parametrize("ids", ["int16", "int32", "int64", "uint8", "uint16"])
@pytest.mark.parametrize("mask", ["bool", "uint8", "int32", "int64", "float32", "bfloat16"])
def test_every_token_dtype(tmp_path: Path, ids: str, mask: str) -> None:
    record = listed()
    record["input_ids"] = record["input_ids"].to(getattr(torch, ids))
    record["loss_mask"] = record["loss_mask"].to(getattr(torch, mask))
    torch.save(record, tmp_path / "data_0.pt")
    sample = described(tmp_path / "data_0.pt")
    values = read(sample)
    assert values["input_ids"].dtype == np.int32
    assert values["loss_mask"].dtype == np.uint8
    np.testing.assert_array_equal(values["input_ids"], record["input_ids"].long().numpy())
    np.testing.assert_array_equal(values["loss_mask"], record["loss_mask"].long().numpy())
    assert (sample.spec("input_ids").source_dtype, sample.spec("loss_mask").source_dtype) == (ids, mask)


def test_a_token_that_does_not_fit_is_named_never_changed(tmp_path: Path) -> None:
    record = listed()
    record["input_ids"][4] = 2**31
    record["loss_mask"] = record["loss_mask"].float()
    record["loss_mask"][2] = 0.5
    torch.save(record, tmp_path / "data_0.pt")
    with open_sample(described(tmp_path / "data_0.pt")) as opened:
        with pytest.raises(SourceError, match=r"input_ids holds the value 2147483648 .*int32 cannot hold"):
            opened.whole("input_ids")
        assert opened.whole("input_ids", "int64")[4] == 2**31
        with pytest.raises(SourceError, match=r"loss_mask holds the value 0\.5"):
            opened.whole("loss_mask")


def _strided() -> dict[str, tuple[list[Any], Any]]:
    """Layers of odd strides, by name."""
    full = states(5, 12, 4, HIDDEN)
    big = states(6, 4000, HIDDEN)
    row = states(7, 1, HIDDEN)
    return {
        "layers of one storage": [full[:, i] for i in range(4)],
        "layers in front": list(full.transpose(0, 1).contiguous()),
        "transposed": [states(i, HIDDEN, 12).t() for i in range(4)],
        "rows far inside": [big[100 * i + 7 : 100 * i + 19] for i in range(4)],
        "every second row": [big[i : i + 24 : 2] for i in range(4)],
        "every second column": [states(i, 12, 2 * HIDDEN)[:, ::2] for i in range(4)],
        "overlapping windows": [states(i, 12 + HIDDEN).unfold(0, HIDDEN, 1)[:12] for i in range(4)],
        "one row for all": [row.expand(12, HIDDEN)] * 4,
        "the same tensor again": [full[:, 0]] * 4,
        "backwards in the storage": [full[:, i] for i in (3, 1, 2, 0)],
        "parameters": [torch.nn.Parameter(full[:, i].clone()) for i in range(4)],
        "leading axis": [full[:, i].clone()[None] for i in range(4)],
    }


@pytest.mark.parametrize("name", list(_strided()))
@pytest.mark.parametrize("form", ["zip", "legacy", "gzip"])
def test_strides(tmp_path: Path, name: str, form: str) -> None:
    layers = _strided()[name]
    record = {**listed(12), "hidden_states": layers}
    data = saved(record, _use_new_zipfile_serialization=form != "legacy")
    path = tmp_path / "data_0.pt"
    path.write_bytes(gzip.compress(data) if form == "gzip" else data)
    for step in (1, 5, 12):
        _check(path, record, [x[0] if x.dim() == 3 else x for x in layers], step)


def test_a_large_transposed_tensor_is_read_once_into_memory(tmp_path: Path) -> None:
    layers = [states(i, 512, 6000).t() for i in range(3)]
    record = {**listed(6000), "hidden_states": layers}
    torch.save(record, tmp_path / "data_0.pt")
    _check(tmp_path / "data_0.pt", record, layers, step=2500)


@pytest.mark.parametrize("options", [{"pickle_protocol": 3}, {"pickle_protocol": 4}, {"pickle_protocol": 5}])
def test_pickle_protocols(tmp_path: Path, options: dict[str, Any]) -> None:
    record = listed()
    torch.save(record, tmp_path / "data_0.pt", **options)
    _check(tmp_path / "data_0.pt", record, record["hidden_states"])


def test_python_lists_and_numpy_arrays(tmp_path: Path) -> None:
    record = listed()
    for protocol in (2, 5):
        torch.save(
            {
                **record,
                "input_ids": record["input_ids"].tolist(),
                "loss_mask": record["loss_mask"].numpy(),
                "score": np.float64(0.25),
                "count": torch.tensor(7),
            },
            tmp_path / "data_0.pt",
            pickle_protocol=protocol,
        )
        _check(tmp_path / "data_0.pt", record, record["hidden_states"])
        with open_sample(described(tmp_path / "data_0.pt")) as opened:
            assert opened.extras() == {"score": 0.25, "count": 7}


def test_prefix_names_and_zip64(tmp_path: Path) -> None:
    record = listed()
    path = tmp_path / "déjà vu.pt"
    torch.save(record, path)  # the prefix of its members is the name of the file
    _check(path, record, record["hidden_states"])
    path.write_bytes(raw_zip(entries_of(saved(record)), zip64=True))
    _check(path, record, record["hidden_states"])


def test_a_missing_checksum_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "data_0.pt"
    path.write_bytes(edited(saved(listed()), lambda e: {**e, "crc": 0}))
    assert any("not verified" in note for note in described(path).notes)
    read(described(path))


def _lies() -> dict[str, tuple[Any, str]]:
    """Edits of an archive's members, and words of the reason."""

    def only(suffix: str, **changes: Any) -> Any:
        return lambda e: {**e, **changes} if e["name"].endswith(suffix) else e

    def deflated(e: dict[str, Any]) -> dict[str, Any]:
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        return {**e, "packed": packer.compress(e["data"]) + packer.flush(), "method": 8}

    return {
        "deflated": (deflated, "compressed"),
        "deflated record": (lambda e: deflated(e) if e["name"].endswith("data/1") else e, "compressed"),
        "encrypted": (only("data/1", flags=0x801), "encrypted"),
        "encrypted local header": (only("data/1", local_flags=0x801), "disagrees"),
        "another local name": (only("data/1", local_name="archive/data/x"), "names another member"),
        "overlap": (only("data/2", header=0), "overlap|twice|another member"),
        "header outside": (only("data/2", header=10**6), "overlap"),
        "wrong crc": (only("data/1", central_crc=12345, crc=12345), "CRC-32"),
        "crc of the directory": (only("data/1", central_crc=12345), "disagrees|CRC-32"),
        "wrong crc of the pickle": (only("data.pkl", central_crc=12345, crc=12345), "CRC-32"),
        "record longer in the directory": (only("data/1", size=10**6, stored=10**6), "holds|overlap"),
        "no version": (lambda e: None if e["name"].endswith("/version") else e, "version"),
        "no pickle": (lambda e: None if e["name"].endswith("data.pkl") else e, "data.pkl"),
        "no record": (lambda e: None if e["name"].endswith("data/1") else e, "data/1"),
        "big-endian": (only("byteorder", data=b"big"), "big-endian"),
        "two of one name": (only("data/1", name="archive/data/2", local_name="archive/data/2"), "twice"),
    }


@pytest.mark.parametrize("name", list(_lies()))
def test_archives_that_lie(tmp_path: Path, name: str) -> None:
    edit, words = _lies()[name]
    reason = _refused(tmp_path / "data_0.pt", edited(saved(listed()), edit))
    assert any(word in reason for word in words.split("|")), reason


@pytest.mark.parametrize("form", ["zip", "legacy", "gzip"])
def test_every_truncation_is_refused(tmp_path: Path, form: str) -> None:
    data = saved(listed(2, 2), _use_new_zipfile_serialization=form != "legacy")
    if form == "gzip":
        data = gzip.compress(data)
    for size in range(0, len(data), 7 if form == "zip" else 3):
        reason = _refused(tmp_path / "data_0.pt", data[:size])
        assert reason
    assert "truncated" in _refused(tmp_path / "data_0.pt", data[:-1])


def test_damage_in_a_record_is_found_wherever_it_lies(tmp_path: Path) -> None:
    record = listed(12)
    big = states(1, 400, HIDDEN)
    record["hidden_states"] = [big[100:112], big[200:212]]
    data = bytearray(saved(record))
    start = bytes(data).index(bits_of(big).tobytes())
    for at in (0, 100 * HIDDEN * 2, 150 * HIDDEN * 2, 400 * HIDDEN * 2 - 1):  # before, in, between and after the rows
        damaged = bytearray(data)
        damaged[start + at] ^= 1
        assert "CRC-32" in _refused(tmp_path / "data_0.pt", bytes(damaged))


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "data_0.pt"
    torch.save(listed(), path)
    sample = described(path)
    with open_sample(sample) as opened:
        opened.rows("hidden_states", 0, 2)
        path.write_bytes(path.read_bytes() + b"more")
        with pytest.raises(SourceError, match="changed since it was planned"):
            opened.finish()
    with pytest.raises(SourceError, match="changed since it was planned"):
        open_sample(sample)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "data_0.pt"
    torch.save(listed(400), path)
    with open_sample(described(path)) as opened:
        opened.rows("hidden_states", 0, 2)
        with path.open("r+b") as file:
            file.truncate(3000)
        with pytest.raises(SourceError, match="truncated while it was read"):
            opened.rows("hidden_states", 300, 400)


_MARK = "import pathlib;pathlib.Path({path!r}).touch()"


def _evil(marker: Path) -> dict[str, bytes]:
    """Pickles that run code, or take memory, in an unpickler that obeys."""

    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, (_MARK.format(path=str(marker)),)

    class Takes:
        def __reduce__(self) -> tuple[Any, ...]:
            return bytearray, (3 << 30,)

    bomb = b"\x80\x02" + b"K\x01" + b"".join(b"h%c\x86q%c" % (0, 0) for _ in range(3)) + b"."
    return {
        "exec": pickle.dumps(Runs(), 2),
        "bytearray": pickle.dumps(Takes(), 2),
        "memo index": b"\x80\x02Nr\xff\xff\xff\x1f.",
        "text of 4 GiB": b"\x80\x02X\xff\xff\xff\xffabc.",
        "number of 2 GiB": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
        "frame of 8 EiB": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        "marks": b"\x80\x02" + b"(" * 100_000 + b".",
        "lists": b"\x80\x02" + b"]" * 1_000_000 + b".",
        "nested pairs": bomb,
        "pairs of pairs as key": b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * 60 + b"Ns.",
        "encodings": b"\x80\x02c_codecs\nencode\nq\x00X\x00\x00\x01\x00"
        + b"a" * 65536
        + b"X\x06\x00\x00\x00latin1\x86q\x01"
        + b"h\x00h\x01R" * 100_000
        + b".",
        "ext registry": b"\x80\x02\x82\x01.",
        "instance": b"\x80\x02(cposix\nsystem\n.",
        "text opcode": b"\x80\x02I5\n.",
        "empty stack": b"\x80\x02R.",
        "attribute": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        "dotted": b"\x80\x04\x8c\x0btorch._utils\x8c\x10os.path.basename\x93.",
    }


@pytest.mark.parametrize("name", list(_evil(Path())))
def test_hostile_pickles_run_nothing_and_take_nothing(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    body = _evil(marker)[name]
    files = {
        "zip": edited(saved(listed()), lambda e: {**e, "data": body} if e["name"].endswith("data.pkl") else e),
        "legacy": saved({}, _use_new_zipfile_serialization=False).split(b"}q\x00.")[0].rpartition(b"\x80")[0] + body,
        "bare": body,
    }
    for form, data in files.items():
        for packed in (data, gzip.compress(data)):
            reason = _refused(tmp_path / f"{form}.pt", packed)
            assert len(reason) < 600
    assert not marker.exists()


def test_hostile_files_fit_into_little_memory(tmp_path: Path) -> None:
    """The same files under a limit of the address space, in a process of its own."""
    for i, body in enumerate(_evil(tmp_path / "marker").values()):
        data = edited(
            saved(listed()), lambda e, body=body: {**e, "data": body} if e["name"].endswith("data.pkl") else e
        )
        (tmp_path / f"data_{i}.pt").write_bytes(data)
    head = b"\x80\x02\x8a\x0a" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little") + b"."
    (tmp_path / "legacy.pt").write_bytes(head + b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b"x")
    (tmp_path / "bomb.pt").write_bytes(gzip.compress(b"PK\x03\x04" + bytes(1 << 28)))
    (tmp_path / "header.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}" + bytes(100))
    code = (
        "import resource, sys; from hsloader.formats.survey import survey;"
        "import numpy; base = int(open('/proc/self/statm').read().split()[0]) * 4096;"
        "resource.setrlimit(resource.RLIMIT_AS, (base + (400 << 20),) * 2);"
        "s = survey(sys.argv[1], threads=1); print(len(s.samples), len(s.bad))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["0", str(len(_evil(tmp_path)) + 3)], done.stderr
    assert not (tmp_path / "marker").exists()


def test_a_global_that_is_not_known_is_named_and_never_imported(tmp_path: Path) -> None:
    body = b"\x80\x02cno_such_module_here\nThing\n)R."
    data = edited(saved(listed()), lambda e: {**e, "data": body} if e["name"].endswith("data.pkl") else e)
    assert "no_such_module_here.Thing" in _refused(tmp_path / "data_0.pt", data)
    assert "no_such_module_here" not in sys.modules


def test_tensors_that_are_not_plain_are_refused_by_name(tmp_path: Path) -> None:
    kinds = {
        "meta": torch.empty(8, HIDDEN, device="meta"),
        "sparse": torch.eye(8).to_sparse(),
        "complex": torch.zeros(8, HIDDEN, dtype=torch.complex64),
    }
    with pytest.warns(UserWarning, match="quantized"):  # torch says that quantized tensors are deprecated
        kinds["quantized"] = torch.quantize_per_tensor(torch.ones(8, HIDDEN), 0.1, 0, torch.qint8)
    for word, tensor in kinds.items():
        record = {**listed(8, 1), "hidden_states": [tensor]}
        reason = _refused(tmp_path / "data_0.pt", saved(record)).lower()
        assert {"complex": "complexfloatstorage", "quantized": "rebuild_qtensor"}.get(word, word) in reason, reason


def test_gzip_bombs_and_trailing_bytes(tmp_path: Path) -> None:
    data = saved(listed())
    path = tmp_path / "data_0.ckpt.gz"
    assert "size limit" in _refused(path, gzip.compress(data + bytes(64 << 20)))
    assert "follow the end" in _refused(path, gzip.compress(data) + b"tail")
    path.write_bytes(gzip.compress(data[:1000]) + gzip.compress(data[1000:]))
    record = listed()
    _check(path, record, record["hidden_states"])
    assert "gzip" in _refused(path, gzip.compress(gzip.compress(data)))
    flipped = bytearray(gzip.compress(data))
    flipped[-6] ^= 1
    assert "damaged" in _refused(path, bytes(flipped))


def test_inflating_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "data_0.ckpt.gz"
    path.write_bytes(gzip.compress(saved(listed())))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with open_sample(described(path), scratch=scratch) as opened:
        opened.rows("hidden_states", 0, 2)
        assert list(scratch.iterdir()) == []
        opened.finish()


def test_a_negated_view_is_not_taken_for_its_bytes(tmp_path: Path) -> None:
    imaginary = torch.view_as_complex(torch.rand(8, HIDDEN, 2)).conj().imag
    assert imaginary.is_neg()
    assert "negated" in _refused(tmp_path / "data_0.pt", saved({**listed(8, 1), "hidden_states": [imaginary]}))


def _nested(kind: type, depth: int = 100) -> Any:
    """A value of ``depth`` pairs, each twice in the next: small as a pickle, without end as text or as a hash."""
    value = kind()
    for _ in range(depth):
        value = kind((value, value))
    return value


@pytest.mark.parametrize(
    ("protocol", "keys", "words"),
    [
        (_nested(list), [], "legacy torch file of protocol a list"),
        (1001, [[1]], "list of storages"),
        (1001, [_nested(tuple)], "list of storages"),
        (1001, {"0": 1}, "list of storages"),
    ],
)
def test_legacy_headers_of_odd_values(tmp_path: Path, protocol: object, keys: object, words: str) -> None:
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    body = b"".join(pickle.dumps(value, 2) for value in (protocol, system, {"a": 1}, keys))
    assert words in _refused(tmp_path / "data_0.pt", LEGACY_MAGIC + body)


def test_a_storage_of_a_nested_number_of_elements(tmp_path: Path) -> None:
    place = b"X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    body = b"\x80\x02(" + place + pickle.dumps(_nested(list), 2)[2:-1] + b"tQ."
    data = edited(saved(listed()), lambda e: {**e, "data": body} if e["name"].endswith("data.pkl") else e)
    assert "storage 0 claims a list elements" in _refused(tmp_path / "data_0.pt", data)


@pytest.mark.parametrize("form", ["legacy", "gzip"])
def test_no_more_is_looked_at_than_a_pickle_may_have(form: str) -> None:
    asked: list[int] = []

    class Endless:
        def first(self, count: int) -> bytes:
            asked.append(count)
            return (start + b"\x80\x02\x8e" + struct.pack("<Q", 1 << 40)).ljust(count, b"x")[:count]

    if form == "legacy":
        start = LEGACY_MAGIC + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
        with pytest.raises(SourceError, match="truncated"):
            read_torch_legacy(Endless(), "data_0.pt", None, 0)
    else:
        start = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, 0, 0, 8, 0) + b"data.pkl"
        with pytest.raises(SourceError, match="truncated"):
            read_zip_head(Endless(), "data_0.pt.gz")
    assert max(asked) <= MAX_PICKLE + len(start)


@pytest.mark.parametrize("form", ["zip", "gzip"])
def test_a_disk_that_cannot_read_is_the_samples_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    data = saved(listed(2000))
    path = tmp_path / "data_0.pt"
    path.write_bytes(gzip.compress(data, 0) if form == "gzip" else data)
    sample = described(path)
    pread = os.pread

    def broken(fd: int, size: int, offset: int) -> bytes:
        if 20_000 < offset < len(data) - 10_000:  # behind what planning reads; of a record its local header
            raise OSError(errno.EIO, "Input/output error")
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(SourceError, match="Input/output error"):
        read(sample)
