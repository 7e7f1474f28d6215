"""Noise on states, where they are."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.batches.noise import GaussianNoise, UniformNoise

__all__ = ["add_noise"]


def add_noise(
    noise: UniformNoise | GaussianNoise, states: torch.Tensor, runs: NDArray[np.int64], generator: torch.Generator
) -> None:
    """Add noise in place to the rows ``runs`` (int64 [n, 2]: first row, number of rows) of ``states``.

    As speculators' ``AddUniformNoise`` and ``AddGaussianNoise``, drawn in the dtype of the states.
    """
    for first, count in _merged(runs):
        rows = states[first : first + count]
        drawn = torch.empty_like(rows)
        if isinstance(noise, UniformNoise):
            drawn.uniform_(generator=generator).sub_(0.5).mul_(2 * noise.std)
        else:
            drawn.normal_(generator=generator).mul_(noise.std)
        rows.add_(drawn)


def _merged(runs: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Runs of rows, neighbouring ones joined."""
    merged: list[tuple[int, int]] = []
    for first, count in runs[np.argsort(runs[:, 0], kind="stable")].tolist():
        if merged and merged[-1][0] + merged[-1][1] == first:
            merged[-1] = merged[-1][0], merged[-1][1] + count
        else:
            merged.append((first, count))
    return merged
