"""A draft model just big enough to train on: one hidden layer from the auxiliary states to the last state."""

from __future__ import annotations

import torch


class TinyDraft(torch.nn.Module):
    """Predicts the verifier's last state from the auxiliary states of the token before, ``[1, T, k * H]``."""

    def __init__(self, inputs: int, outputs: int, width: int = 64) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(inputs, width), torch.nn.SiLU(), torch.nn.Linear(width, outputs)
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Mean squared error over the supervised tokens, relative to the states' own size."""
        predicted = self.layers(batch["hidden_states"].float())
        target = batch["verifier_last_hidden_states"].float()
        mask = batch["loss_mask"].unsqueeze(-1)
        wrong = ((predicted - target).square() * mask).sum()
        return wrong / (target.square() * mask).sum().clamp(min=1e-6)


def draft_for(batch: dict[str, torch.Tensor]) -> TinyDraft:
    """A draft of the sizes that a batch has, on its device."""
    states, last = batch["hidden_states"], batch["verifier_last_hidden_states"]
    return TinyDraft(states.shape[-1], last.shape[-1]).to(states.device)
