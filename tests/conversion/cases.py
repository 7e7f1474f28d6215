"""Runs the shared input cases: generation, one conversion each, and the comparison with what each case expects."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hsloader import HsloaderError, convert, open_dataset
from hsloader.store.dataset import Dataset
from tests.shared_data import SHARED

GENERATOR = SHARED / "cases" / "make_cases.py"


def case_names() -> list[str]:
    """The names of all input cases, read from the generator's source (generating them takes seconds)."""
    if not GENERATOR.exists():
        return []
    lines = GENERATOR.read_text().splitlines()
    return sorted(
        following.split("def ")[1].split("(")[0].replace("_", "-")
        for line, following in itertools.pairwise(lines)
        if line.startswith('@case("a")')
    )


def generate(out: Path) -> None:
    """Write all cases below ``out``."""
    subprocess.run(
        [sys.executable, str(GENERATOR), str(out)],
        check=True,
        capture_output=True,
        env={**os.environ, "HSLOADER_CASES_DIR": str(out)},
    )


@dataclass
class Outcome:
    """What a run said: its report as JSON values, or the error it ended with."""

    report: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def kind(self) -> str:
        if self.error:
            return "refuse"
        return "quarantine" if self.report["exit_status"] == 3 else "convert"

    @property
    def reasons(self) -> dict[str, str]:
        return {item["name"]: item["reason"] for item in self.report.get("quarantined", ())}


def run(src: Path, dst: Path) -> Outcome:
    """Convert in this process. The source's own path is taken out of errors: it may hold the words looked for."""
    try:
        return Outcome(report=json.loads(convert(src, dst).to_json()))
    except HsloaderError as error:
        return Outcome(error=str(error).replace(str(src), "SRC"))


def run_limited(src: Path, dst: Path, limits: dict[str, int], env: dict[str, str]) -> Outcome:
    """Convert in a process that may not use more memory, time or disk than the case allows."""

    def limit() -> None:
        memory, disk = limits["rss_mb"] << 20, limits["disk_mb"] << 20
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_FSIZE, (disk, disk))

    done = subprocess.run(
        [sys.executable, "-m", "tests.conversion.cases", str(src), str(dst)],
        capture_output=True,
        text=True,
        timeout=limits["seconds"],
        preexec_fn=limit,
        env={**os.environ, **env},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Outcome(**json.loads(done.stdout))


def snapshot(src: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below ``src``: type, mode, size, times, target or content."""
    found: dict[str, tuple[Any, ...]] = {}
    for folder, folders, files in os.walk(src):
        for name in (*folders, *files):
            path = Path(folder, name)
            stat = path.lstat()
            content = ""
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file() and os.access(path, os.R_OK):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path)] = (stat.st_mode, 0 if path.is_dir() else stat.st_size, stat.st_mtime_ns, content)
    return found


def canonical(dataset: Dataset, i: int) -> dict[str, Any]:
    """One sample of a dataset as ``expect.json`` describes it."""

    def sha(name: str, dtype: type | None = None) -> str | None:
        if name not in dataset.fields:
            return None
        bits = dataset.read(i, name)
        bits = bits.astype(dtype) if dtype is not None else bits
        return hashlib.sha256(np.ascontiguousarray(bits).tobytes()).hexdigest()

    fields = dataset.fields
    aux, last = fields.get("hidden_states"), fields.get("last_hidden_state")
    state = last or aux
    assert state is not None
    return {
        "input_ids": sha("input_ids", np.int64),
        "loss_mask": sha("loss_mask", np.int64),
        "aux": sha("hidden_states"),
        "last": sha("last_hidden_state"),
        "dtype": state.dtype,
        "seq_len": int(dataset.lengths[i]),
        "aux_dim": aux.width if aux is not None else 0,
        "last_dim": last.width if last is not None else 0,
    }


def says(text: str, words: list[str]) -> list[str]:
    """Those of ``words`` (``a|b``: one of them) that the text lacks."""
    lower = text.lower()
    return [word for word in words if not any(one.lower() in lower for one in word.split("|"))]


def check(expect: dict[str, Any], outcome: Outcome, dst: Path) -> None:
    """Compare one run with what its case expects."""
    wanted = {expect["outcome"], *expect["also_accept"]}
    wanted = {"convert" if kind == "skip-sidecar" else kind for kind in wanted}
    assert outcome.kind in wanted, outcome.error or outcome.reasons
    if outcome.kind == "refuse":
        if expect["outcome"] == "refuse":
            assert not says(outcome.error, expect["reason_contains"]), outcome.error
        assert not (dst / "manifest.json").exists()
        assert not (dst / "zarr.json").exists()
        return
    report, reasons = outcome.report, outcome.reasons
    with open_dataset(dst) as dataset:
        names = [dataset.name(i) for i in range(len(dataset))]
        found = {name: canonical(dataset, i) for i, name in enumerate(names)}
    bad, either = set(expect["samples_bad"]), set(expect["samples_either"])
    assert len(names) == len(set(names))
    assert set(expect["bit_exact"]) - either <= set(names), reasons
    assert set(names) <= set(expect["bit_exact"])
    assert bad <= set(reasons)
    assert set(reasons) <= bad | either
    assert not set(reasons) & set(names)
    assert either <= set(reasons) | set(names)
    for name in names:
        exact = [expect["bit_exact"][name], *expect["bit_exact_alt"].get(name, [])]
        assert found[name] in exact, name
    for name, reason in reasons.items():
        assert not says(f"{name}: {reason}", expect["reasons"].get(name, [])), f"{name}: {reason}"
    assert not set(expect["sidecars"]) & (set(names) | set(reasons))
    if outcome.kind == expect["outcome"] == "quarantine":
        assert not says(" ".join(f"{n}: {r}" for n, r in reasons.items()), expect["reason_contains"])
    if "report_should_say" in expect:
        assert not says(" ".join(report["notes"]), [expect["report_should_say"]]), report["notes"]
    if "natural_order" in expect:
        assert names == expect["natural_order"]
    assert report["samples_found"] == report["converted"] + report["present"] + len(report["quarantined"])
    assert report["converted"] + report["present"] == len(names)


if __name__ == "__main__":
    result = run(Path(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps({"report": result.report, "error": result.error}))
