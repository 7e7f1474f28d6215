"""Frames: what numcodecs makes of ours, what we make of numcodecs', and what damage does."""

from __future__ import annotations

import hashlib
import struct
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numcodecs
import numpy as np
import pytest
import zstandard
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from hsloader.store.codec import CRC_BYTES, Codec, FrameError
from hsloader.store.dtypes import DTYPES
from hsloader.store.fields import Field

Array = np.ndarray[Any, Any]

# -0.0, infinities, quiet and signalling NaNs with payloads, subnormals, the largest number, in bits of each float.
SPECIAL_BITS = {
    "float16": [0x8000, 0x7C00, 0xFC00, 0x7E01, 0x7C01, 0xFFFF, 0x0001, 0x83FF, 0x7BFF],
    "bfloat16": [0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x7F81, 0xFFFF, 0x0001, 0x807F, 0x7F7F],
    "float32": [0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 1, 0x807FFFFF, 0x7F7FFFFF],
    "float64": [1 << 63, 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1, 2**64 - 1, 1, (1 << 63) + 1],
    "float8_e4m3fn": [0x80, 0x7F, 0xFF, 0x01, 0x81, 0x7E],
    "float8_e5m2": [0x80, 0x7C, 0xFC, 0x7D, 0xFF, 0x01],
}


def values(field: Field, rows: int, kind: str, seed: int = 0) -> Array:
    """Bits ``[rows, width]``: ``noise``, ``zeros``, ``special`` patterns, or ``states`` (normally distributed)."""
    rng = np.random.default_rng(seed)
    bits, shape = field.type.bits, (rows, field.width)
    if kind == "zeros":
        return np.zeros(shape, bits)
    if field.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if kind == "special" and field.dtype in SPECIAL_BITS:
        word = np.dtype(f"<u{field.type.item_size}")
        return rng.choice(np.array(SPECIAL_BITS[field.dtype], word), shape).view(bits)
    if kind == "states":
        numbers = rng.normal(0, 3, shape)
        if field.dtype == "bfloat16":
            return (numbers.astype("<f4").view("<u4") >> 16).astype("<u2")
        return (numbers if bits.kind == "f" else numbers.astype(np.int64)).astype(bits)
    return rng.integers(0, 256, (rows, field.row_bytes), np.uint8).view(bits).reshape(shape)


def padded(field: Field, chunk_rows: int, array: Array) -> bytes:
    """The chunk that ``array`` should decode to."""
    return array.tobytes() + bytes((chunk_rows - len(array)) * field.row_bytes)


def decoded(codec: Codec, frame: memoryview | bytes, verify: bool = True) -> bytes:
    """The chunk, decoded between two guards that must stay as they are."""
    guarded = np.full(codec.chunk_bytes + 128, 0xA5, np.uint8)
    try:
        codec.decode(memoryview(frame), guarded[64:-64], verify)
    finally:
        assert (guarded[:64] == 0xA5).all()
        assert (guarded[-64:] == 0xA5).all()
    return guarded[64:-64].tobytes()


def sealed(body: bytes) -> bytes:
    """``body`` with its crc32c: damage that the checksum does not see."""
    return body + crc32c(body).to_bytes(CRC_BYTES, "little")


def hidden(shape: tuple[int, ...] = (3, 64), dtype: str = "bfloat16", codec: str = "lossless") -> Field:
    return Field(name="hidden_states", dtype=dtype, shape=shape, codec=codec)


@st.composite
def chunks(draw: st.DrawFn) -> tuple[Codec, Array, list[Array]]:
    """A codec, the rows of a chunk, and the same rows cut into parts, some of them strided."""
    width = draw(st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 1000, 1536, 300_001])))
    most = max(1, 400_000 // width)
    chunk_rows = draw(st.one_of(st.integers(1, min(most, 70)), st.sampled_from([1, min(most, 4096), min(most, 5003)])))
    codec = draw(st.sampled_from(["lossless", "lossless", "none"]))
    field = hidden((width,), draw(st.sampled_from(sorted(DTYPES))), codec)
    rows = draw(st.sampled_from(sorted({1, chunk_rows, draw(st.integers(1, chunk_rows))})))
    array = values(
        field, rows, draw(st.sampled_from(["noise", "zeros", "special", "states"])), draw(st.integers(0, 2**32))
    )
    cuts = sorted({0, width, *draw(st.lists(st.integers(0, width), max_size=3))})
    parts = []
    for start, stop in pairwise(cuts):
        part = np.empty((rows, 2, stop - start), array.dtype) if draw(st.booleans()) else None
        if part is None:
            parts.append(array[:, start:stop])
        else:
            part[:, 1] = array[:, start:stop]
            parts.append(part[:, 1])
    return Codec(field, chunk_rows), array, parts


@given(chunks())
@settings(max_examples=150)
def test_numcodecs_and_we_decode_our_frames(drawn: tuple[Codec, Array, list[Array]]) -> None:
    codec, array, parts = drawn
    frame = codec.encoder().encode(parts)
    chunk = padded(codec.field, codec.chunk_rows, array)
    assert len(frame) <= codec.max_frame_bytes
    assert decoded(codec, frame) == chunk
    body = bytes(frame[:-CRC_BYTES])
    assert bytes(frame[-CRC_BYTES:]) == crc32c(body).to_bytes(CRC_BYTES, "little")
    if codec.field.codec == "lossless":
        assert numcodecs.Blosc().decode(body) == chunk
    else:
        assert body == chunk


@given(chunks(), st.integers(0, 9), st.sampled_from([0, 64, 1000, 4096, 1 << 17]))
@settings(max_examples=60)
def test_we_decode_numcodecs_frames(drawn: tuple[Codec, Array, list[Array]], level: int, block: int) -> None:
    codec, array, _ = drawn
    chunk = padded(codec.field, codec.chunk_rows, array)
    size = codec.field.type.item_size
    blosc = numcodecs.Blosc("zstd", clevel=level, shuffle=numcodecs.Blosc.SHUFFLE, blocksize=block, typesize=size)
    body = chunk if codec.field.codec == "none" else bytes(blosc.encode(chunk))
    assert decoded(codec, sealed(body)) == chunk


@given(chunks())
@settings(max_examples=30)
def test_the_bytes_do_not_depend_on_parts_or_earlier_chunks(drawn: tuple[Codec, Array, list[Array]]) -> None:
    codec, array, parts = drawn
    first = bytes(codec.encoder().encode([array]))
    used = codec.encoder()
    used.encode([values(codec.field, codec.chunk_rows, "noise", 1)])
    assert bytes(used.encode(parts)) == first


@pytest.mark.parametrize(
    ("dtype", "shape", "digest"),
    [
        ("bfloat16", (3, 64), "b9864b50b39ed342"),
        ("float32", (4096,), "e12deae1d961d886"),
        ("int32", (), "48224560835d67f0"),
        ("uint8", (), "421d8de9b837658a"),
        ("int64", (3,), "6692f3c81d25ae10"),
    ],
)
def test_the_bytes_are_those_of_other_installations(dtype: str, shape: tuple[int, ...], digest: str) -> None:
    """Neither numcodecs nor zarr has a say in them; zstandard's zstd does."""
    if zstandard.ZSTD_VERSION != (1, 5, 7):
        pytest.skip(f"the digests are those of zstd 1.5.7, this is {zstandard.ZSTD_VERSION}")
    field = hidden(shape, dtype)
    rows = 3000 if field.is_token_field else 60
    noise = np.frombuffer(np.random.Generator(np.random.PCG64(5)).bytes(rows * field.width * 4), np.uint8)
    triangular = noise.reshape(rows, field.width, 4).sum(2, dtype=np.int64) << 8 * (field.type.item_size - 1) >> 3
    bits = triangular.astype(f"<u{field.type.item_size}").view(field.type.bits)
    frame = Codec(field, rows + 4).encoder().encode([bits])
    assert hashlib.sha256(frame).hexdigest()[:16] == digest


def test_blocks_divide_the_chunk_and_small_ones_are_not_split() -> None:
    for shape, rows in [((3, 7168), 64), ((7168,), 256), ((300_000,), 4), ((5,), 5003), ((1,), 1 << 20)]:
        codec = Codec(hidden(shape), rows)
        assert codec.chunk_bytes % codec.block_bytes == 0
        assert min(codec.chunk_bytes, 128 * 1024) <= codec.block_bytes <= 512 * 1024
    prime = Codec(hidden((300_007,)), 4)
    assert prime.block_bytes == prime.chunk_bytes // 4
    frames = [Codec(hidden((width,)), 1).encoder().encode([np.zeros((1, width), "<u2")]) for width in (127, 128)]
    assert [bool(frame[2] & 0x10) for frame in frames] == [True, False]


def test_states_shrink_and_noise_does_not_grow() -> None:
    field = hidden((3, 512))
    codec = Codec(field, 64)
    states = codec.encoder().encode([values(field, 64, "states")])
    assert codec.chunk_bytes / len(states) > 1.4
    noise = codec.encoder().encode([values(field, 64, "noise")])
    assert len(noise) == codec.max_frame_bytes == codec.chunk_bytes + 16 + CRC_BYTES


def test_half_empty_planes_and_padding_are_found() -> None:
    bf16 = values(hidden((512,)), 64, "states")
    field = hidden((512,), "float32")
    upcast = (bf16.astype("<u4") << 16).view("<f4")
    frame = Codec(field, 64).encoder().encode([upcast])
    assert Codec(field, 64).chunk_bytes / len(frame) > 2.7
    codec = Codec(hidden((512,)), 64)
    one_row = codec.encoder().encode([bf16[:1]])
    assert len(one_row) < 3 * 1024


def test_every_flipped_byte_and_every_truncation_is_noticed() -> None:
    field = hidden((40,))
    codec = Codec(field, 8)
    frame = bytes(codec.encoder().encode([values(field, 7, "states")]))
    for place in range(len(frame)):
        flipped = bytearray(frame)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(FrameError):
            decoded(codec, flipped)
        with pytest.raises(FrameError):
            decoded(codec, frame[:place])
    with pytest.raises(FrameError, match="bytes"):
        decoded(codec, frame + b"x")


@given(st.data())
@settings(max_examples=400)
def test_a_hostile_frame_raises_or_decodes_but_never_leaves_its_place(data: st.DataObject) -> None:
    """Numbers of the frame replaced under a right checksum; the guards around ``out`` are checked by ``decoded``."""
    codec, array, _ = data.draw(chunks().filter(lambda drawn: drawn[0].chunk_bytes < 100_000))
    body = bytearray(codec.encoder().encode([array])[:-CRC_BYTES])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.one_of(st.integers(0, min(47, len(body) - 1)), st.integers(0, len(body) - 1)))
        if data.draw(st.booleans()) and place + 4 <= len(body):
            struct.pack_into("<I", body, place, data.draw(st.one_of(st.integers(0, 2**32 - 1), st.integers(0, 300))))
        else:
            body[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 5]))
    for verify in (True, False):
        try:
            chunk = decoded(codec, sealed(bytes(body[: len(body) - cut])), verify)
        except FrameError:
            continue
        assert len(chunk) == codec.chunk_bytes


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (0, b"\x03", "format"),
        (2, b"\x21", "zstd"),
        (2, b"\x85", "byte shuffle"),
        (3, b"\x04", "item size"),
        (4, b"\xff\xff\xff\x7f", "bytes"),
        (8, b"\xff\xff\xff\x7f", "a block of"),
        (8, b"\x00\x00\x00\x00", "a block of 0"),
        (8, b"\x01\x00\x00\x00", "block starts"),
        (12, b"\xff\xff\xff\x7f", "a frame of"),
        (16, b"\xff\xff\xff\xff", "begins at byte"),
        (16, b"\x00\x00\x00\x00", "begins at byte"),
        (20, b"\xff\xff\xff\xff", "a stream of"),
        (20, b"\x00\x00\x00\x00", "a stream of 0"),
    ],
)
def test_the_error_says_which_number_is_wrong(offset: int, value: bytes, words: str) -> None:
    field = hidden((64,))
    codec = Codec(field, 8)
    body = bytearray(codec.encoder().encode([values(field, 8, "states")])[:-CRC_BYTES])
    body[offset : offset + len(value)] = value
    with pytest.raises(FrameError, match=words):
        decoded(codec, sealed(bytes(body)))


def test_threads_encode_and_decode_at_once() -> None:
    field = hidden((3, 256))
    codec = Codec(field, 64)
    arrays = [values(field, 64, "states", seed) for seed in range(16)]

    def there_and_back(array: Array) -> bool:
        encoder = codec.encoder()
        return all(decoded(codec, encoder.encode([array])) == array.tobytes() for _ in range(5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(there_and_back, arrays))


def test_arguments_that_do_not_fit_are_refused() -> None:
    field = hidden((4,))
    codec = Codec(field, 8)
    encoder = codec.encoder()
    for parts in (
        [np.zeros((9, 4), "<u2")],
        [np.zeros((8, 3), "<u2")],
        [np.zeros((8, 4), "<f2")],
        [np.zeros((8, 2), "<u2"), np.zeros((7, 2), "<u2")],
        [np.zeros(32, "<u2")],
        [],
    ):
        with pytest.raises(ValueError, match="hidden_states: expected uint16 parts"):
            encoder.encode(parts)
    frame = encoder.encode([np.zeros((8, 4), "<u2")])
    for out in (np.zeros(63, np.uint8), np.zeros(64, np.int8), np.zeros(128, np.uint8)[::2]):
        with pytest.raises(ValueError, match="out"):
            codec.decode(frame, out)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a chunk of"):
        Codec(hidden((7168,)), 1 << 20)
