"""From the producers' files through conversion, feeder and ring to the batches that the trainers' own loaders gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hsloader  # noqa: E402
from hsloader.batches.trainer import SequenceParallel  # noqa: E402
from tests.batches.golden_sources import CASES, assert_same_batch, case_of  # noqa: E402
from tests.shared_data import needs_shared  # noqa: E402

pytestmark = needs_shared


def _runs(prefix: str) -> list[Any]:
    if not CASES.is_dir():
        return []
    names = sorted(path.name for path in CASES.glob(f"{prefix}-*") if "multipack" not in path.name)
    return [
        pytest.param(name, number, id=f"{name}-{run['name']}")
        for name in names
        for number, run in enumerate(case_of(name)["runs"])
    ]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives the converted dataset of a case's source; each source is converted once."""
    datasets: dict[Path, Path] = {}

    def dataset_of(name: str) -> Path:
        source = (CASES / name / case_of(name)["source"]).resolve()
        if source not in datasets:
            datasets[source] = tmp_path_factory.mktemp("golden") / "data.hs"
            hsloader.convert(source, datasets[source])
        return datasets[source]

    return dataset_of


def _numbers(path: Path, case: dict[str, Any]) -> dict[int, int]:
    """The case's file numbers -> dataset indices, for the files that were converted."""
    with hsloader.open_dataset(path) as dataset:
        index = {dataset.name(i): i for i in range(len(dataset))}
    return {number: index[file] for number, file in enumerate(case["files"]) if file in index}


def _expected(name: str, run: dict[str, Any]) -> list[dict[str, Any]]:
    batches: list[dict[str, Any]] = torch.load(CASES / name / run["expected"], weights_only=True)
    return batches


def _speculators(name: str, run: dict[str, Any]) -> dict[str, Any]:
    return {
        "trainer": ".".join(name.split(".")[:2]),
        "variant": run.get("speculator_type", "eagle3").split(" ")[0],
        "max_tokens": run["total_seq_len"],
        "hidden_states_dtype": "bfloat16" if run["name"] == "bf16" else None,
        "norm_state": "pre",
        "log_every": 0,
    }


def _specforge(name: str, run: dict[str, Any]) -> dict[str, Any]:
    slices = None
    if run.get("use_usp_preprocess"):
        slices = SequenceParallel(
            rank=run["sp_rank"], degree=run["sp_degree"], ulysses=run["ulysses"], ttt_length=run["ttt_length"]
        )
    return {
        "trainer": {"specforge-0.1.0": "specforge-0.1", "specforge-era2": "specforge-2026-06"}.get(
            name, "specforge-0.2"
        ),
        "variant": run.get("algorithm", "eagle3"),
        "batch_size": run["batch_size"],
        "max_length": run["max_len"],
        "sequence_parallel": slices,
        "norm_state": "post",
        "log_every": 0,
    }


@pytest.mark.parametrize(("name", "number"), _runs("speculators"))
def test_speculators(converted: Any, name: str, number: int) -> None:
    case, path = case_of(name), converted(name)
    run, known = case["runs"][number], _numbers(path, case)
    first = run.get("first_file", 0)
    wanted, expected = [], []
    for batch, theirs in zip(run["batches"], _expected(name, run), strict=True):
        # What theirs skipped while training was set aside at conversion.
        samples = [known[i + first] for i in batch["indices"] if i + first in known]
        if samples:
            wanted.append(samples)
            expected.append(theirs | ({"error_records": 0} if "error_records" in theirs else {}))
    with hsloader.DataLoader(path, batch_sampler=wanted, **_speculators(name, run)) as loader:
        assert len(loader) == len(expected)
        for ours, theirs in zip(loader, expected, strict=True):
            assert_same_batch(ours, theirs)


@pytest.mark.parametrize(("name", "number"), _runs("specforge"))
def test_specforge(converted: Any, name: str, number: int) -> None:
    """In the trainer's own order, over the files in the order in which it lists them."""
    case, path = case_of(name), converted(name)
    run, known = case["runs"][number], _numbers(path, case)
    samples = [known[i] for i in range(len(case["files"]))]
    if name != "specforge-0.1.0":  # which takes them as they come
        with hsloader.open_dataset(path) as dataset:
            assert samples == sorted(range(len(dataset)), key=dataset.name)
    with hsloader.DataLoader(
        path,
        samples=samples,
        order="trainer",
        shuffle=run["shuffle"],
        drop_last=run["drop_last"],
        seed=run.get("seed", 0),
        epoch=run["epoch"],
        **_specforge(name, run),
    ) as loader:
        for ours, theirs in zip(loader, _expected(name, run), strict=True):
            assert_same_batch(ours, theirs)


@pytest.mark.parametrize("name", [f"speculators-{version}" for version in ("0.4.0", "0.7.0", "0.9.0")])
def test_speculators_own_order_and_split(converted: Any, name: str) -> None:
    """The same samples in each batch, up to the order of samples that are equally long once cut."""
    case, path = case_of(name), converted(name)
    for run in case["runs"]:
        own = run["train_ratio"] != 1.0 if "train_ratio" in run else False
        cut = [min(length, run["total_seq_len"]) for length in case["lengths"]]
        with hsloader.DataLoader(
            path,
            order="trainer",
            split="val" if own else "all",
            split_by="trainer",
            val_ratio=0.3 if own else 0.0,
            seed=run["seed"],
            epoch=run["epoch"],
            **_speculators(name, run),
        ) as loader:
            ours = [[cut[i] for i in batch] for batch in loader.batch_sampler]
        first = run.get("first_file", 0)
        assert ours == [[cut[i + first] for i in batch["indices"]] for batch in run["batches"]]
