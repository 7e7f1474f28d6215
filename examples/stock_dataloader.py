"""Keep torch's own DataLoader, and give it hsloader's dataset.

    python examples/stock_dataloader.py data.hs [--workers 0]

``batch_size=None`` says that the dataset yields whole batches.  Without workers the dataset reads ahead by itself, in a
process of its own; with workers torch copies every batch through /dev/shm.
"""

from __future__ import annotations

import argparse

import torch
from draft import draft_for

import hsloader


def main() -> None:
    """Parse the arguments and train for two epochs."""
    parser = argparse.ArgumentParser(description="hidden states through torch.utils.data.DataLoader")
    parser.add_argument("dataset")
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    dataset = hsloader.HiddenStateDataset(arguments.dataset, trainer="speculators-0.9", max_tokens=1024)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=arguments.workers, persistent_workers=arguments.workers > 0
    )
    model = optimizer = None
    for epoch in range(2):
        dataset.set_epoch(epoch)
        for batch in loader:
            if model is None:
                model = draft_for(batch)
                optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: {len(loader)} batches, loss {loss.item():.3f}")
    dataset.close()


if __name__ == "__main__":
    main()
