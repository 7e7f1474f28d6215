"""Under Lightning's fit, with validation: every batch once, exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from hsloader import DataLoader  # noqa: E402
from tests.loader.making import PACKED, ids_of  # noqa: E402

SMALL: dict[str, Any] = {**PACKED, "max_tokens": 120, "val_ratio": 0.3}

pytestmark = pytest.mark.filterwarnings("ignore")


def wanted(path: Path, *epochs: int, split: str = "train") -> list[Any]:
    found = []
    for epoch in epochs:
        with DataLoader(path, split=split, **{**SMALL, "epoch": epoch}) as loader:
            found += [ids_of(batch) for batch in loader]
    return found


class Toy(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(192))
        self.seen: list[Any] = []
        self.checked: list[Any] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.seen.append(ids_of(batch))
        return (batch["hidden_states"].float() @ self.weight).square().mean() + self.weight.sum()

    def validation_step(self, batch: Any, _: int) -> None:
        self.checked.append(ids_of(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def _fit(path: Path, folder: Path, steps: int, checkpoint: str | None = None) -> Toy:
    model = Toy()
    trainer = lightning.Trainer(
        max_steps=steps,
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[ModelCheckpoint(folder, "last", every_n_train_steps=steps)] if steps > 0 else [],
        enable_checkpointing=steps > 0,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        num_sanity_val_steps=1,
    )
    with DataLoader(path, **SMALL) as train, DataLoader(path, split="val", **SMALL) as val:
        trainer.fit(model, train, val, ckpt_path=checkpoint, **({"weights_only": False} if checkpoint else {}))
    return model


def test_fit_sees_every_batch_and_validates(path: Path, tmp_path: Path) -> None:
    model = _fit(path, tmp_path, -1)
    assert model.seen == wanted(path, 0, 1, 2)
    val = wanted(path, 0, split="val")
    assert model.checked == val[:1] + 3 * val  # a sanity check first


def test_fit_resumes_exactly(path: Path, tmp_path: Path) -> None:
    """Lightning keeps the state of loaders that have one in its checkpoint."""
    everything = wanted(path, 0, 1, 2)
    stop = len(wanted(path, 0)) + 2
    first = _fit(path, tmp_path, stop)
    assert first.seen == everything[:stop]
    second = _fit(path, tmp_path, -1, str(tmp_path / "last.ckpt"))
    assert second.seen == everything[stop:]
