"""Small sources for the conversion tests, written as their producers write them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

H = 256
TOKEN_BYTES = 4 * H * 2 + 4 + 1


def record(seed: int, length: int, *, layers: int = 4, hidden: int = H) -> dict[str, Any]:
    """A speculators record of bf16 states."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(1, 30000, (length,), generator=generator),
        "hidden_states": [torch.randn(length, hidden, generator=generator).to(torch.bfloat16) for _ in range(layers)],
        "loss_mask": (torch.arange(length) >= length // 3).long(),
    }


def write(path: Path, value: Any) -> Path:
    """``torch.save`` that makes the folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def fill(src: Path, count: int, *, first: int = 0, length: int = 120) -> None:
    """``count`` samples ``data_{i}.pt`` of slightly different lengths (about 250 KB each)."""
    for i in range(first, first + count):
        write(src / f"data_{i}.pt", record(i, length + 7 * (i % 5)))


def flip_a_byte(path: Path) -> None:
    """Damage a value inside a file; its sizes and headers stay."""
    data = bytearray(path.read_bytes())
    data[2 * len(data) // 5] ^= 0x10
    path.write_bytes(data)


def tree(dst: Path) -> dict[str, str]:
    """Every file of a dataset but its private ones, with a digest."""
    return {
        str(path.relative_to(dst)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(dst.rglob("*"))
        if path.is_file() and ".hsloader" not in path.parts
    }


def leftovers(dst: Path) -> list[str]:
    """What lies in the dataset's scratch folder."""
    return sorted(path.name for path in (dst / ".hsloader" / "tmp").iterdir())
