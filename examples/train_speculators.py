"""Hand the loader to the real speculators Trainer (0.9.0), and train a tiny EAGLE-3 draft for a few steps.

    python examples/train_speculators.py data.hs --vocabulary 1000 --layers 1 3 4 [--epochs 2]

The Trainer needs nothing but ``train_loader`` and ``val_loader``: what it would build from a folder of samples is here
a ``hsloader.DataLoader``.  The verifier is a random LLaMA of the dataset's hidden size, which stands in for the real
one (whose norm and head the draft copies); on a machine without a GPU the Trainer is told to use the CPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.trainer import Trainer, TrainerConfig
from transformers import LlamaConfig, LlamaForCausalLM

import hsloader

TTT_STEPS = 2


class CpuTrainer(Trainer):
    """The Trainer where there is no accelerator: it takes one for granted."""

    def setup_trainer(self) -> None:
        """As the original, on the CPU."""
        self.local_rank = "cpu"
        self.device_type = "cpu"
        torch.accelerator.synchronize = lambda *_: None
        super().setup_trainer()


def tiny_llama(hidden: int, vocabulary: int, layers: int) -> LlamaConfig:
    """A LLaMA of that hidden size, as small as it can be."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
    )


def draft_model(folder: Path, hidden: int, vocabulary: int, layer_ids: list[int]) -> Eagle3DraftModel:
    """An EAGLE-3 draft for states of these layers; the verifier is written to ``folder``."""
    verifier = LlamaForCausalLM(tiny_llama(hidden, vocabulary, max(layer_ids) + 2))
    verifier.to(torch.bfloat16).save_pretrained(folder)
    config = tiny_llama(hidden, vocabulary, 1)
    config._attn_implementation = "eager"
    return Eagle3DraftModel.from_training_args(
        config,
        verifier_name_or_path=str(folder),
        draft_vocab_size=vocabulary,
        norm_before_residual=True,
        ttt_steps=TTT_STEPS,
        target_layer_ids=layer_ids,
        draft_attn_impl="eager",
    )


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description="train EAGLE-3 with speculators on a dataset of hidden states")
    parser.add_argument("dataset")
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--layers", type=int, nargs="+", required=True, help="the layers whose states are stored")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    common: dict[str, Any] = {
        "trainer": "speculators-0.9",
        "variant": "eagle3",
        "max_tokens": arguments.max_tokens,
        "val_ratio": 0.2,
        "device": "cuda" if cuda else "cpu",
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        hsloader.DataLoader(arguments.dataset, split="train", **common) as train,
        hsloader.DataLoader(arguments.dataset, split="val", **common) as val,
    ):
        hidden = next(iter(val))["verifier_last_hidden_states"].shape[-1]
        val.set_epoch(0)
        model = draft_model(Path(folder) / "verifier", hidden, arguments.vocabulary, arguments.layers)
        call, val_call = Eagle3DraftModel.get_trainer_kwargs(
            loss_fn="kl_div", ttt_steps=TTT_STEPS, ttt_step_loss_decay=1.0, loss_implementation="eager"
        )
        config = TrainerConfig(
            lr=1e-3,
            num_epochs=arguments.epochs,
            save_path=str(Path(folder) / "checkpoints"),
            train_call_kwargs=call,
            val_call_kwargs=val_call,
        )
        trainer = (Trainer if cuda else CpuTrainer)(model, config, train, val)
        trainer.run_training()
        print(f"{trainer.global_step} steps, {len(train)} batches an epoch")


if __name__ == "__main__":
    main()
