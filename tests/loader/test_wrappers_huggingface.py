"""Under the Hugging Face Trainer and accelerate: every batch once, exact resume."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from hsloader import DataLoader  # noqa: E402
from tests.loader.making import PACKED, ROOT, ids_of  # noqa: E402

SMALL: dict[str, Any] = {**PACKED, "max_tokens": 120}

pytestmark = pytest.mark.filterwarnings("ignore")


def wanted(path: Path, *epochs: int) -> list[Any]:
    found = []
    for epoch in epochs:
        with DataLoader(path, **{**SMALL, "epoch": epoch}) as loader:
            found += [ids_of(batch) for batch in loader]
    return found


class Toy(torch.nn.Module):
    """Sees batches and notes them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(192))
        self.seen: list[Any] = []

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen.append(ids_of(batch))
        return {"loss": (batch["hidden_states"].float() @ self.weight).square().mean() + self.weight.sum()}


class StopAt(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Saves the loader's state with a checkpoint and ends the run there."""

    def __init__(self, loader: DataLoader, step: int) -> None:
        self.loader, self.step = loader, step
        self.state: dict[str, Any] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.state = self.loader.state_dict()
            control.should_save = control.should_training_stop = True


def _trainer(loader: DataLoader, folder: Path, callbacks: list[Any], model: Toy) -> Any:
    class Trainer(transformers.Trainer):  # type: ignore[misc,name-defined]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader)

    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ignore_data_skip=True,  # the loader goes on by itself
        logging_strategy="no",
    )
    return Trainer(model=model, args=arguments, callbacks=callbacks, train_dataset=[0])


def test_the_trainer_sees_every_batch_of_every_epoch(path: Path, tmp_path: Path) -> None:
    model = Toy()
    with DataLoader(path, **SMALL) as loader:
        _trainer(loader, tmp_path, [], model).train()
    assert model.seen == wanted(path, 0, 1, 2)


def test_the_trainer_resumes_exactly(path: Path, tmp_path: Path) -> None:
    everything = wanted(path, 0, 1, 2)
    stop = len(wanted(path, 0)) + 2  # in the middle of the second epoch
    first, second = Toy(), Toy()
    with DataLoader(path, **SMALL) as loader:
        stopping = StopAt(loader, stop)
        _trainer(loader, tmp_path, [stopping], first).train()
    with DataLoader(path, **SMALL) as loader:
        loader.load_state_dict(stopping.state)
        _trainer(loader, tmp_path, [], second).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert first.seen == everything[:stop]
    assert second.seen == everything[stop:]


SCRIPT = """
import json, os, sys
import accelerate
import hsloader
accelerator = accelerate.Accelerator(cpu=True)
loader = hsloader.DataLoader(sys.argv[1], trainer="speculators-0.9", max_tokens=120, log_every=0)
prepared = accelerator.prepare(loader)
assert prepared is loader
seen = [batch["input_ids"].sum(dim=-1).tolist() for _ in range(2) for batch in prepared]
with open(os.path.join(sys.argv[2], os.environ["RANK"]), "w") as file:
    json.dump(seen, file)
loader.close()
accelerator.end_training()
"""


def test_accelerate_with_two_processes(path: Path, tmp_path: Path) -> None:
    import json

    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python",
         sys.executable, "-W", "ignore", "-c", SCRIPT, str(path), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shares = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    expected = []
    for epoch in (0, 1):
        batches = wanted(path, epoch)
        expected += batches[: len(batches) // 2 * 2]
    assert [tuple(batch) for step in zip(*shares, strict=True) for batch in step] == expected
