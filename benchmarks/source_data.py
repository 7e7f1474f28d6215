"""The samples all contenders get: ``.pt`` files as speculators 0.4 writes them, states that compress as real ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

LAYERS = 4


def write_source(folder: Path, *, samples: int, tokens: int, hidden: int, spread: float) -> int:
    """Write ``samples`` files of about ``tokens`` tokens (log-normal with ``spread``); bytes of their tensors."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    # Channels of different scale, loud and quiet tokens, few exponents: the top byte of bf16 has about 3 bits.
    scales = rng.lognormal(0.0, 0.5, (LAYERS, 1, hidden)).astype(np.float32)
    pool = rng.standard_normal((1024, hidden), dtype=np.float32)
    lengths, size = {}, 0
    for number in range(samples):
        length = max(16, int(tokens * rng.lognormal(-spread * spread / 2, spread)))
        loud = rng.lognormal(0.0, 0.15, (length, 1)).astype(np.float32)
        states = []
        for layer in range(LAYERS):
            values = pool[rng.integers(0, len(pool), length)] * scales[layer] * loud
            states.append(torch.from_numpy(values).to(torch.bfloat16))
        sample = {
            "input_ids": torch.from_numpy(rng.integers(0, 100_000, length)),
            "hidden_states": states,
            "loss_mask": torch.from_numpy((np.arange(length) >= length // 3).astype(np.int64)),
        }
        torch.save(sample, folder / f"data_{number}.pt")
        lengths[str(number)] = length
        size += sum(state.nbytes for state in states) + 16 * length
    (folder / "sample_lengths.json").write_text(json.dumps(lengths))
    return size
