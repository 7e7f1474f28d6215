"""Batches recorded from the trainers' own loaders, bit for bit."""

from __future__ import annotations

import sys
import types
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hsloader.batches.orders import distributed_sampler_planner, order_named  # noqa: E402
from hsloader.batches.registry import trainer_named  # noqa: E402
from hsloader.batches.trainer import SequenceParallel, Trainer  # noqa: E402
from tests.batches.golden_sources import CASES, Source, assert_same_batch, case_of, execute, read_source  # noqa: E402
from tests.shared_data import needs_shared  # noqa: E402

pytestmark = needs_shared


def runs(prefix: str) -> list[Any]:
    """(case, run number) of all cases of a family but the index lists, named by case and run."""
    if not CASES.is_dir():
        return []
    names = sorted(p.name for p in CASES.glob(f"{prefix}-*") if "multipack" not in p.name)
    return [
        pytest.param(name, number, id=f"{name}-{run['name']}")
        for name in names
        for number, run in enumerate(case_of(name)["runs"])
    ]


source_of = cache(read_source)


def expected_batches(name: str, run: dict[str, Any]) -> list[dict[str, Any]]:
    batches: list[dict[str, Any]] = torch.load(CASES / name / run["expected"], weights_only=True)
    return batches


def speculators_trainer(name: str, run: dict[str, Any], source: Source) -> Trainer:
    variant = run.get("speculator_type", "eagle3").split(" ")[0]
    return trainer_named(
        ".".join(name.split(".")[:2]),
        source.fields,
        variant=variant,
        max_tokens=run["total_seq_len"],
        hidden_states_dtype=None if run["name"] != "bf16" else "bfloat16",
    )


def specforge_trainer(name: str, run: dict[str, Any], source: Source) -> Trainer:
    slices = None
    if run.get("use_usp_preprocess"):
        slices = SequenceParallel(
            rank=run["sp_rank"], degree=run["sp_degree"], ulysses=run["ulysses"], ttt_length=run["ttt_length"]
        )
    return trainer_named(
        {"specforge-0.1.0": "specforge-0.1", "specforge-era2": "specforge-2026-06"}.get(name, "specforge-0.2"),
        source.fields,
        variant=run.get("algorithm", "eagle3"),
        batch_size=run["batch_size"],
        max_length=run["max_len"],
        sequence_parallel=slices,
    )


def batch_of(
    trainer: Trainer, source: Source, samples: list[int], bad: frozenset[int] = frozenset(), device: str = "cpu"
) -> Any:
    indices = np.array(samples, dtype=np.int64)
    layout = trainer.lay_out(indices, source.lengths[indices], bad)
    spans = execute(trainer, layout, source)
    trainer.check(layout, spans["loss_mask"].numpy())
    batch = trainer.finish(layout, {name: span.to(device) for name, span in spans.items()})
    assert all(value.device.type == device for value in batch.values() if isinstance(value, torch.Tensor))
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@pytest.mark.parametrize(("name", "number"), [p for p in runs("speculators") if "missing" not in p.values[0]])
def test_speculators(name: str, number: int) -> None:
    run, source = case_of(name)["runs"][number], source_of(name)
    trainer = speculators_trainer(name, run, source)
    first = run.get("first_file", 0)
    expected = expected_batches(name, run)
    assert len(expected) == len(run["batches"])
    for batch, theirs in zip(run["batches"], expected, strict=True):
        assert_same_batch(batch_of(trainer, source, [i + first for i in batch["indices"]]), theirs)
    # and the trainer's own order, up to the places of samples that are equally long once cut
    subset = np.arange(first, len(source.lengths))
    plan = order_named("trainer", trainer, subset, source.lengths[subset], seed=run["seed"], world=1).planner(
        run["epoch"]
    )
    cut = np.minimum(source.lengths, run["total_seq_len"])
    assert [cut[batch].tolist() for batch in plan] == [
        [int(cut[i + first]) for i in batch["indices"]] for batch in run["batches"]
    ]


@pytest.mark.parametrize(("name", "number"), runs("specforge"))
def test_specforge(name: str, number: int) -> None:
    run, source = case_of(name)["runs"][number], source_of(name)
    trainer = specforge_trainer(name, run, source)
    expected = expected_batches(name, run)
    for batch, theirs in zip(run["batches"], expected, strict=True):
        assert_same_batch(batch_of(trainer, source, batch["indices"]), theirs)
    split = "val" if "eval" in run["name"] else "train"
    assert trainer.drops_last(split) == run["drop_last"]
    plan = order_named(
        "trainer",
        trainer,
        np.arange(len(source.lengths)),
        source.lengths,
        seed=run.get("seed", 0),
        world=1,
        split=split,
        shuffle=run["shuffle"],
    ).planner(run["epoch"])
    assert [batch.tolist() for batch in plan] == [batch["indices"] for batch in run["batches"]]


def test_domino_is_dflash() -> None:
    source = source_of("specforge-0.2.0-dflash")
    dflash, domino = (
        trainer_named("specforge-0.2", source.fields, variant=variant, batch_size=3, max_length=32)
        for variant in ("dflash", "domino")
    )
    assert_same_batch(batch_of(domino, source, [0, 2, 4]), batch_of(dflash, source, [0, 2, 4]))


@pytest.mark.parametrize("name", sorted({p.values[0] for p in runs("specforge")}))
def test_distributed_sampler_orders(name: str) -> None:
    case = case_of(name)
    for entry in case["distributed_sampler"]:
        world = entry["world_size"]
        plan = distributed_sampler_planner(
            np.arange(len(case["lengths"])), 1, seed=entry["seed"], world=world, shuffle=entry["shuffle"]
        )(entry["epoch"])
        ranks = [[int(plan[i][0]) for i in range(rank, len(plan), world)] for rank in range(world)]
        assert ranks == entry["order_per_rank"]


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "number"), [p for p in runs("speculators") + runs("specforge") if "missing" not in p.values[0]]
)
def test_on_a_gpu(name: str, number: int) -> None:
    run, source = case_of(name)["runs"][number], source_of(name)
    make = speculators_trainer if name.startswith("speculators") else specforge_trainer
    trainer, first = make(name, run, source), run.get("first_file", 0)
    for batch, theirs in zip(run["batches"], expected_batches(name, run), strict=True):
        ours = batch_of(trainer, source, [i + first for i in batch["indices"]], device="cuda")
        assert_same_batch(ours, theirs)


@dataclass(frozen=True)
class RecoveryMetadata:
    """Stands for speculators' class of that name."""

    failure_count: int = 0
    locally_empty: bool = False
    fatal: bool = False
    error: str = ""


@pytest.mark.parametrize("name", ["speculators-0.7.0-missing", "speculators-0.9.0-missing"])
def test_samples_lost_while_training_leave_their_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 0 and 2 cannot be used: lost at run time, as there; the mask keeps its dtype (theirs does not)."""
    run, source = case_of(name)["runs"][0], source_of(name)
    trainer = speculators_trainer(name.removesuffix("-missing"), run, source)
    module = types.ModuleType("speculators.train.recovery")
    module.RecoveryMetadata = RecoveryMetadata  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "speculators.train.recovery", module)
    for batch, theirs in zip(run["batches"], expected_batches(name, run), strict=True):
        ours = batch_of(trainer, source, batch["indices"], bad=frozenset({0, 2}))
        if "__recovery__" in ours:
            ours["__recovery__"] = asdict(ours["__recovery__"])
        if batch["indices"] == [0]:
            assert theirs["loss_mask"].dtype == torch.bool
            theirs["loss_mask"] = theirs["loss_mask"].to(torch.int64)
        assert_same_batch(ours, theirs)
    monkeypatch.delitem(sys.modules, "speculators.train.recovery")
    assert "__recovery__" not in batch_of(trainer, source, [0], bad=frozenset({0}))
