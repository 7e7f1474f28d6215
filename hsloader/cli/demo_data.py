"""Makes the demo's samples: synthetic hidden states that look and compress like real ones.

The files are what speculators 0.3/0.4 writes (``data_{i}.pt`` beside ``data_config.json`` and
``sample_lengths.json``).  The states imitate a residual stream: each layer adds to the one before it, channels differ
in scale by a heavy-tailed factor, a few channels and the first token are huge, neighbouring tokens share a context,
and equal tokens share a direction, so that a small draft model has something to learn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    _Floats = npt.NDArray[np.float32]

__all__ = ["DemoShape", "write_samples"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoShape:
    """How large the demo is: by default 16 samples, about 5,700 tokens and 190 MB."""

    samples: int = 16
    mean_length: int = 300
    hidden_size: int = 4096
    decoder_layers: int = 36
    vocabulary: int = 32_000

    @property
    def layer_ids(self) -> list[int]:
        """The layers that speculators 0.4 captures by default: three for the draft model's input, and the last."""
        n = self.decoder_layers
        return [2, n // 2, n - 3, n - 1]


def write_samples(
    folder: Path, shape: DemoShape, *, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> int:
    """Write the samples of ``shape`` into the existing ``folder``; returns their bytes on disk.

    ``progress`` is called with (samples written, samples in all) at the start and after each file.
    """
    if progress is not None:
        progress(0, shape.samples)  # importing torch takes a moment
    import torch

    lengths = {}
    size = 0
    for i, sample in enumerate(_samples(shape, seed)):
        path = folder / f"data_{i}.pt"
        torch.save(sample, path)
        lengths[str(i)] = len(sample["input_ids"])
        size += path.stat().st_size
        if progress is not None:
            progress(i + 1, shape.samples)
    (folder / "sample_lengths.json").write_text(json.dumps(lengths))
    (folder / "data_config.json").write_text(json.dumps(_data_config(shape, seed), indent=2))
    return size


def _data_config(shape: DemoShape, seed: int) -> dict[str, object]:
    """The part of speculators' ``data_config.json`` that says what the states are."""
    return {
        "version": "2.0",
        "speculators_version": "0.4.0",
        "model": {"target_model_path": "hsloader-demo/synthetic", "hidden_size": shape.hidden_size},
        "data": {"seq_length": 4 * shape.mean_length, "num_samples": shape.samples, "seed": seed},
        "hidden_states": {"layer_ids": shape.layer_ids},
        "format": {"file_pattern": "data_{idx}.pt"},
    }


def _samples(shape: DemoShape, seed: int) -> Iterator[dict[str, torch.Tensor | list[torch.Tensor]]]:
    import numpy as np
    import torch

    rng = np.random.default_rng(seed)
    channels = _channel_scales(rng, shape.hidden_size)
    directions = rng.standard_normal((256, shape.hidden_size), dtype=np.float32)  # one for each token id modulo 256
    lengths = np.clip(rng.lognormal(np.log(shape.mean_length), 0.4, shape.samples), 16, 4 * shape.mean_length)
    for length in lengths.astype(int):
        ids = rng.zipf(1.2, length) % shape.vocabulary
        prompt = int(length * rng.uniform(0.2, 0.5))
        states = _residual_stream(rng, ids, channels, directions, layers=len(shape.layer_ids))
        yield {
            "input_ids": torch.from_numpy(ids.astype(np.int64)),
            "hidden_states": [torch.from_numpy(state).to(torch.bfloat16) for state in states],
            "loss_mask": torch.from_numpy((np.arange(length) >= prompt).astype(np.int64)),
        }


def _channel_scales(rng: np.random.Generator, hidden_size: int) -> _Floats:
    import numpy as np

    scales = rng.lognormal(0.0, 0.3, hidden_size)
    massive = rng.choice(hidden_size, size=max(1, hidden_size // 1000), replace=False)
    scales[massive] *= 30.0
    return scales.astype(np.float32)


def _residual_stream(
    rng: np.random.Generator, ids: npt.NDArray[np.int64], channels: _Floats, directions: _Floats, *, layers: int
) -> Iterator[_Floats]:
    """The state after each captured layer, ``[length, hidden_size]``."""
    import numpy as np

    length, hidden_size = len(ids), len(channels)
    context = rng.standard_normal((length // 32 + 1, hidden_size), dtype=np.float32).repeat(32, axis=0)[:length]
    state = 0.5 * directions[ids % len(directions)] + 0.3 * context
    state += 0.6 * rng.standard_normal((length, hidden_size), dtype=np.float32)
    loudness = rng.lognormal(0.0, 0.15, (length, 1)).astype(np.float32)
    loudness[0] = 20.0  # the attention sink
    for _ in range(layers):
        yield state * channels * loudness
        state = 1.15 * state + 0.5 * rng.standard_normal((length, hidden_size), dtype=np.float32)
