"""Mutated and made-up files: only ``SourceError`` comes out, in bounded time, and what is read is within bounds."""

from __future__ import annotations

import gzip
import struct
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from hsloader.errors import SourceError  # noqa: E402
from hsloader.formats.blocks import Block, Tensor  # noqa: E402
from hsloader.formats.opening import describe_file  # noqa: E402
from hsloader.formats.pickle_globals import GLOBALS, PickleError, Storage  # noqa: E402
from hsloader.formats.pickle_reader import read_pickle  # noqa: E402
from hsloader.formats.source import open_sample  # noqa: E402
from hsloader.formats.writing import safetensors_bytes  # noqa: E402
from tests.formats.making import bits_of, entries_of, listed, raw_zip, saved, states  # noqa: E402

_SLOW = 5.0  # seconds that no small file may take, on a busy machine
_MANY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def _seeds() -> tuple[bytes, ...]:
    """Valid small files, one of each container and some of another make-up."""
    record = listed(3, 2)
    numpy_record = {**record, "input_ids": record["input_ids"].numpy(), "extra": {"a": [1, (2, None)], "b": {3}}}
    ids = record["input_ids"].numpy()
    layers = bits_of(torch.stack(record["hidden_states"], 1))
    packed = safetensors_bytes({"hidden_states": ("bfloat16", layers), "token_ids": ("int64", ids)})
    return (
        saved(record),
        saved(numpy_record, pickle_protocol=5),
        saved(record, _use_new_zipfile_serialization=False),
        raw_zip(entries_of(saved(record)), zip64=True),
        packed,
        gzip.compress(saved({**record, "hidden_states": [states(0, 3, 4).t().contiguous().t()]}), mtime=0),
    )


def _survives(data: bytes) -> None:
    """Describing and reading the bytes either works or is a ``SourceError``, soon."""
    began, reason = time.monotonic(), "none"
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        Path(file.name).write_bytes(data)
        try:
            for sample in describe_file(file.name).samples:
                assert sample.payload_bytes <= max(8 << 20, 16 * len(data))
                with open_sample(sample) as opened:
                    for spec in sample.specs:
                        opened.rows(spec.name, 0, sample.length)
                    opened.tokens()
                    opened.extras()
                    opened.finish()
        except SourceError as error:
            reason = error.reason
    assert 0 < len(reason) < 1000
    assert time.monotonic() - began < _SLOW


@_MANY
@given(st.data())
def test_mutated_files(data: st.DataObject) -> None:
    mutated = bytearray(data.draw(st.sampled_from(_seeds())))
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["byte", "number", "cut", "insert", "copy"]))
        at = data.draw(st.integers(0, max(0, len(mutated) - 1)))
        if kind == "byte":
            mutated[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        elif kind == "number":
            number = data.draw(st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]))
            mutated[at : at + 8] = struct.pack("<Q", number)
        elif kind == "cut":
            del mutated[at : at + data.draw(st.integers(1, 64))]
        elif kind == "insert":
            mutated[at:at] = data.draw(st.binary(max_size=16))
        else:
            start = data.draw(st.integers(0, max(0, len(mutated) - 1)))
            mutated[at : at + 32] = mutated[start : start + 32]
    _survives(bytes(mutated))


@_MANY
@given(st.data())
def test_mutated_pickles_in_a_sound_archive(data: st.DataObject) -> None:
    entries = entries_of(data.draw(st.sampled_from(_seeds()[:2])))
    pickle = bytearray(entries[0]["data"])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(pickle) - 1))
        if data.draw(st.booleans()):
            pickle[at] = data.draw(st.integers(0, 255))
        else:
            pickle[at:at] = data.draw(_opcodes())
    entries[0]["data"] = bytes(pickle)
    _survives(raw_zip(entries))


def _opcodes() -> st.SearchStrategy[bytes]:
    """One opcode with its argument, often one that makes sense."""
    short = st.text("abcdefghij_.", max_size=8).map(lambda s: bytes([0x8C, len(s)]) + s.encode())
    named = st.sampled_from(sorted(GLOBALS)).map(lambda g: b"c" + g[0].encode() + b"\n" + g[1].encode() + b"\n")
    number = st.integers(-(2**80), 2**80).map(
        lambda n: (
            bytes([0x8A, (n.bit_length() + 8) // 8]) + n.to_bytes((n.bit_length() + 8) // 8, "little", signed=True)
        )
    )
    small = st.integers(0, 255).map(lambda n: b"K" + bytes([n]))
    memo = st.tuples(st.sampled_from([b"q", b"h"]), st.integers(0, 5)).map(lambda t: t[0] + bytes([t[1]]))
    plain = st.sampled_from([bytes([c]) for c in b"(t)]}useaQRbN20.1\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94\x81"])
    return st.one_of(plain, plain, small, memo, short, named, number)


@_MANY
@given(st.lists(_opcodes(), max_size=60), st.integers(0, 3))
def test_made_up_pickles(codes: list[bytes], copies: int) -> None:
    """Programs of opcodes end with a value or a ``PickleError``; every tensor lies within its block."""

    def find_storage(reference: tuple[object, ...]) -> Storage:
        return Storage("bfloat16", Block("0", 64))

    began = time.monotonic()
    try:
        value, end = read_pickle(b"\x80\x04" + b"".join(codes) * (1 + copies) + b".", find_storage)
    except PickleError:
        pass
    else:
        assert end > 2
        if isinstance(value, Tensor) and value.nbytes and value.shape:
            assert value.span(0, value.shape[0])[1] <= value.block.size
    assert time.monotonic() - began < _SLOW


@_MANY
@given(
    shape=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    stride=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    offset=st.integers(0, 60),
    step=st.integers(1, 5),
    crc=st.booleans(),
)
def test_rows_of_any_strides(shape: list[int], stride: list[int], offset: int, step: int, crc: bool) -> None:
    """Rows of a strided tensor are what numpy sees, whether read from a file or from memory, with or without CRC."""
    import os
    import zlib

    import numpy as np

    from hsloader.formats.blocks import BlockError, checked_tensor
    from hsloader.formats.reading import BlockReader, RowBuffer, read_rows

    held = np.arange(512, dtype=np.uint16)
    block = Block("0", held.nbytes, offset=16, crc=zlib.crc32(held.tobytes()) if crc else 0)
    try:
        tensor = checked_tensor("bfloat16", shape, stride[: len(shape)], offset, block)
    except BlockError:
        return
    if not tensor.nbytes:
        return
    expected = np.lib.stride_tricks.as_strided(held[offset:], shape, [2 * s for s in stride[: len(shape)]])
    with tempfile.TemporaryFile() as file:
        file.write(bytes(16) + held.tobytes() + bytes(16))
        file.flush()
        reader = BlockReader(os.dup(file.fileno()), "file")
        reader.expect(block)
        buffer = RowBuffer()
        for start in range(0, shape[0], step):
            stop = min(start + step, shape[0])
            rows = np.concatenate(read_rows(reader, [tensor, tensor], start, stop, buffer), axis=1)
            flat = expected[start:stop].reshape(stop - start, -1)
            np.testing.assert_array_equal(rows, np.concatenate([flat, flat], axis=1))
        reader.finish()
        reader.close()
