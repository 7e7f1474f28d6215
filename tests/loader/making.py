"""Small datasets for the loader's tests, and what their batches must be according to ``dataset.read``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsloader.batches.registry import trainer_named
from hsloader.batches.states import tensor_of
from hsloader.store.dataset import Dataset, open_dataset
from hsloader.store.writer import Writer

ROOT = Path(__file__).resolve().parents[2]

HIDDEN = 64
PACKED: dict[str, Any] = {"trainer": "speculators-0.9", "max_tokens": 200, "log_every": 0}
PADDED: dict[str, Any] = {"trainer": "specforge-0.2", "batch_size": 3, "norm_state": "post", "log_every": 0}
RAW: dict[str, Any] = {"trainer": "raw", "batch_size": 2, "log_every": 0}


def write(path: Path, samples: int = 24, *, first: int = 0, longest: int = 90, **settings: Any) -> Path:
    """A dataset of random samples, numbered from ``first`` on; a second call appends."""
    rng = np.random.default_rng(first)
    settings = {"typical_length": 40, "norm_state": "pre", "layer_ids": [1, 3, 5], "append": True, **settings}
    with Writer(path, **settings) as writer:
        for _ in range(samples):
            length = int(rng.integers(3, longest))
            mask = torch.zeros(length, dtype=torch.int64)
            mask[length // 3 :] = 1
            writer.append(
                input_ids=torch.from_numpy(rng.integers(0, 1000, length)),
                loss_mask=mask,
                hidden_states=_states(rng, length, 3, HIDDEN),
                last_hidden_state=_states(rng, length, HIDDEN),
            )
    return path


def _states(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(size=shape).astype(np.float32)).to(torch.bfloat16)


def reference(dataset: Dataset, samples: Sequence[int], settings: dict[str, Any], bad: Sequence[int] = ()) -> Any:
    """The batch that ``samples`` must give, built from ``dataset.read`` row by row."""
    known = ("variant", "max_tokens", "batch_size", "max_length", "hidden_states_dtype")
    trainer = trainer_named(
        settings["trainer"], dataset.fields, **{key: settings[key] for key in known if key in settings}
    )
    indices = np.array(samples, dtype=np.int64)
    layout = trainer.lay_out(indices, dataset.lengths[indices], bad)
    spans = {}
    for number, span in enumerate(trainer.spans):
        bits = np.zeros((layout.rows[span.name], *span.field.shape), span.field.type.bits)
        for piece in layout.pieces[layout.pieces["span"] == number]:
            rows = dataset.read(int(piece["sample"]), span.field.name, int(piece["start"]), int(piece["stop"]))
            bits[piece["row"] : piece["row"] + len(rows)] = rows
        spans[span.name] = tensor_of(bits, span.field)
    return trainer.finish(layout, spans)


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal keys, types, shapes and bits, through lists and dicts."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.contiguous().cpu().view(torch.uint8).equal(theirs.contiguous().cpu().view(torch.uint8))
    else:
        assert ours == theirs


def clone(batch: Any) -> Any:
    """A copy of a batch that shares nothing with it."""
    if isinstance(batch, list):
        return [clone(part) for part in batch]
    if isinstance(batch, dict):
        return {key: clone(value) for key, value in batch.items()}
    return batch.clone() if isinstance(batch, torch.Tensor) else batch


def ids_of(batch: Any) -> tuple[int, ...]:
    """What tells a batch from others: the sums of its token ids."""
    if isinstance(batch, list):
        return tuple(int(sample["input_ids"].sum()) for sample in batch)
    return tuple(batch["input_ids"].sum(dim=-1).tolist())


def opened(path: Path) -> Dataset:
    return open_dataset(path)


def run_script(code: str, *arguments: object, seconds: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with the package importable; it must end by itself."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        cwd=ROOT,
        **options,
    )
