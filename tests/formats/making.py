"""Small producers' files for the tests of the formats, and reading them the way a conversion does."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsloader.formats.opening import describe_file
from hsloader.formats.source import OpenSample, RowBuffer, SampleSource, open_sample

HIDDEN = 16


def states(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Scattered values that depend on the seed alone, minus zero and a subnormal among them."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if made.numel() > 2:
        made.view(-1)[0] = -0.0
        made.view(-1)[1] = torch.finfo(dtype).tiny / 4 if dtype.itemsize > 1 else 0.0
    return made


def listed(length: int = 10, layers: int = 4, seed: int = 0, hidden: int = HIDDEN) -> dict[str, Any]:
    """A record of the speculators list layout."""
    return {
        "input_ids": torch.arange(length) * 7 + seed,
        "hidden_states": [states(seed * 100 + i, length, hidden) for i in range(layers)],
        "loss_mask": (torch.arange(length) >= length // 3).long(),
    }


def saved(record: object, **options: Any) -> bytes:
    """The bytes that ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(record, buffer, **options)
    return buffer.getvalue()


def bits_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's bit patterns as the library hands them out, contiguous."""
    plain = tensor.detach().contiguous()
    if plain.dtype == torch.bool:
        return plain.view(torch.uint8).numpy()
    if plain.dtype.is_floating_point:
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.dtype.itemsize]
        return plain.view(kind).numpy().view(f"u{plain.dtype.itemsize}")
    return plain.numpy()


def described(path: Path) -> SampleSource:
    """The one sample of a file."""
    (sample,) = describe_file(path).samples
    return sample


def read(sample: SampleSource, step: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    """All fields of a sample as bits ``[S, *shape]``, read in steps of a few rows and checked to the end."""
    with open_sample(sample) as opened:
        values = {spec.name: stepwise(opened, spec.name, step) for spec in sample.specs}
        opened.finish()
    return values


def stepwise(opened: OpenSample, name: str, step: int) -> np.ndarray[Any, Any]:
    """One field read in steps, with two buffers in turn; floats as unsigned bits, so that every NaN counts."""
    sample, buffers = opened.sample, (RowBuffer(), RowBuffer())
    pieces = []
    for i, start in enumerate(range(0, sample.length, step)):
        arrays = opened.rows(name, start, min(start + step, sample.length), buffers[i % 2])
        assert all(a.ndim == 2 and (a.shape[1] < 2 or a.strides[1] == a.itemsize) for a in arrays)
        pieces.append(np.concatenate(arrays, axis=1).copy())
    joined = np.concatenate(pieces).reshape(sample.length, *sample.spec(name).shape)
    return joined.view(f"u{joined.itemsize}") if joined.dtype.kind == "f" else joined


# zip archives that lie --------------------------------------------------------------------------------------------


def entries_of(archive: bytes) -> list[dict[str, Any]]:
    """The members of an archive as ``raw_zip`` takes them."""
    import zipfile

    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return [{"name": info.filename, "data": opened.read(info)} for info in opened.infolist()]


def edited(archive: bytes, edit: Callable[[dict[str, Any]], dict[str, Any] | None]) -> bytes:
    """The archive written again with each member edited; ``None`` drops it."""
    return raw_zip([e for e in map(edit, entries_of(archive)) if e is not None])


def raw_zip(entries: list[dict[str, Any]], zip64: bool = False) -> bytes:
    """An archive whose entries may lie: ``method``, ``packed``, ``crc``, ``central_crc``, ``local_name``, ``flags``,
    ``local_flags``, ``header`` (offset in the directory), ``size`` (in the directory)."""
    body, central = bytearray(), bytearray()
    for entry in entries:
        data = entry["data"]
        packed, method, flags = entry.get("packed", data), entry.get("method", 0), entry.get("flags", 0x800)
        crc = entry.get("crc", zlib.crc32(data))
        name, local = entry["name"].encode(), entry.get("local_name", entry["name"]).encode()
        at = entry.get("header", len(body))
        size, stored = entry.get("size", len(data)), entry.get("stored", len(packed))
        local_flags = entry.get("local_flags", flags)
        body += struct.pack(
            "<IHHHHHIIIHH", 0x04034B50, 20, local_flags, method, 0, 0x21, crc, len(packed), len(data), len(local), 0
        )
        body += local + packed
        central += struct.pack(
            "<IHHHHHHIIIHHHHHII",
            *(0x02014B50, 20, 20, flags, method, 0, 0x21, entry.get("central_crc", crc)),
            *((0xFFFFFFFF, 0xFFFFFFFF) if zip64 else (stored, size)),
            *(len(name), 28 if zip64 else 0, 0, 0, 0, 0, 0xFFFFFFFF if zip64 else at),
        )
        central += name
        if zip64:
            central += struct.pack("<HHQQQ", 1, 24, size, stored, at)
    count, start = len(entries), len(body)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(central), start, 0)
    if zip64:
        wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(central), start)
        locator = struct.pack("<IIQI", 0x07064B50, 0, start + len(central), 1)
        end = wide + locator + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return bytes(body + central + end)
