"""Train a tiny draft model in a plain PyTorch loop, with validation, a checkpoint and exact resume.

    python examples/train_plain.py data.hs [--epochs 2] [--checkpoint last.pt]

Run it again with the same checkpoint and it goes on where that was saved, in the middle of an epoch too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from draft import draft_for

import hsloader


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description="train a tiny draft model on a dataset of hidden states")
    parser.add_argument("dataset")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--checkpoint", type=Path, default=None)
    parser.add_argument("--save-every", type=int, default=100, help="batches between two checkpoints")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    common = {"trainer": "speculators-0.9", "max_tokens": arguments.max_tokens, "val_ratio": 0.2, "device": device}
    with (
        hsloader.DataLoader(arguments.dataset, split="train", noise=hsloader.UniformNoise(0.05), **common) as train,
        hsloader.DataLoader(arguments.dataset, split="val", **common) as val,
    ):
        model = draft_for(next(iter(val)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if arguments.checkpoint is not None and arguments.checkpoint.exists():
            saved = torch.load(arguments.checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            train.load_state_dict(saved["loader"])

        def save() -> None:
            if arguments.checkpoint is not None:
                states = {"model": model, "optimizer": optimizer, "loader": train}
                torch.save({name: part.state_dict() for name, part in states.items()}, arguments.checkpoint)

        while (epoch := train.state_dict()["epoch"]) < arguments.epochs:
            for done, batch in enumerate(train, 1):
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if done % arguments.save_every == 0:
                    save()
            save()
            val.set_epoch(0)
            with torch.no_grad():
                checked = [model(batch) for batch in val]
            print(f"epoch {epoch}: train {loss.item():.3f}, val {torch.stack(checked).mean().item():.3f}")


if __name__ == "__main__":
    main()
