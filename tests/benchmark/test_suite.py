"""The comparison's table and its contenders, without their packages."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def suite_table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import suite_table

    yield suite_table
    sys.modules.pop("suite_table", None)


def reading(rate: float) -> dict[str, float]:
    return {"rate": rate * 1e9, "after_first": 2 * rate * 1e9, "first": 0.5, "cpu_a_gb": 0.7, "memory": 400e6}


RESULTS = {
    "sets": {
        "long": {
            "samples": 3,
            "tokens": 1750,
            "hidden": 7168,
            "bytes": 3e8,
            "disk": {"sequential": 1.5e9},
            "contenders": {
                "slow": {"name": "slow", "holds": "uint16", "cold": reading(0.1), "warm": reading(0.2), "stored": 3e8},
                "none": {"name": "none", "holds": "", "missing": "needs another Python"},
                "bad": {"name": "bad", "holds": "uint16", "failed": "a traceback\nKeyError: 'x'"},
                "fast": {
                    "name": "fast",
                    "holds": "bfloat16",
                    "cold": reading(2.0),
                    "warm": reading(3.0),
                    "stored": 2e8,
                    "conversion_rate": 1e9,
                },
            },
        }
    }
}


def test_the_table_has_the_fastest_first_and_says_what_is_missing(suite_table: Any) -> None:
    lines = suite_table.table(RESULTS).splitlines()
    assert lines[0].endswith("0.30 GB of tensors; raw disk 1.50 GB/s")
    assert lines[4] == "| fast | bfloat16 | 2.00 | 4.00 | 3.00 | 0.50 s | 0.70 | 400 MB | 0.20 GB | 1.00 |"
    assert lines[5].startswith("| slow | uint16 | 0.10 | 0.20 | 0.20 |")
    assert lines[5].endswith("| (as it is) |")
    assert "| none |  | needs another Python |" in lines
    assert "| bad | uint16 | failed: KeyError: 'x' |" in lines


def test_the_plot_is_drawn(suite_table: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    # Fonts stay open for the life of the process, so the drawing is done where nobody counts descriptors.
    import json
    import subprocess

    code = (
        f"import sys, json, pathlib; sys.path[:0] = [{str(FOLDER)!r}]; import suite_table;"
        "suite_table.plot(json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps(RESULTS), str(tmp_path / "plot.svg")], check=True)
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_every_contender_has_the_names_that_the_runner_uses() -> None:
    helpers = {"__init__", "common"}
    modules = [path for path in (FOLDER / "contenders").glob("*.py") if path.stem not in helpers]
    assert len(modules) >= 10
    for path in modules:
        tree = ast.parse(path.read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        names |= {t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if hasattr(t, "id")}
        assert {"NAME", "HOLDS"} <= names, path
        assert "MISSING" in names or {"SETTINGS", "opened"} <= names, path
