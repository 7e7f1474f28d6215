"""Every shared input case has its stated outcome, and every rule of the cases' README holds for each."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.conversion import cases
from tests.shared_data import needs_shared

pytest.importorskip("torch")  # the generator needs it; the conversion does not
pytestmark = needs_shared

# Producers whose files are recognised and not read yet. Each is strict: it must be taken off when its layout arrives.
_VLLM = "vLLM and speculators 0.5-0.9 safetensors"
_MODELOPT = "Model-Optimizer records"
_NEMO = "NeMo Automodel caches"
_DEEPSPEC = "DeepSpec folders"
NOT_YET: dict[str, str] = {
    "dir-being-written": _VLLM,
    "dir-wrong-suffix": _VLLM,
    "dmg-truncated-safetensors": _VLLM,
    "evil-safetensors-header": _VLLM,
    "evil-safetensors-offsets": _VLLM,
    "fmt-speculators-fp8": _VLLM,
    "fmt-vllm-safetensors": _VLLM,
    "fmt-modelopt-nested": _MODELOPT,
    "fmt-modelopt-no-mask": _MODELOPT,
    "fmt-modelopt-vllm-strided": _MODELOPT,
    "fmt-rows-of-2000-pt": _MODELOPT,
    "pt-batch-axis-variants": _MODELOPT,
    "pt-odd-strides": _MODELOPT,
    "pt-requires-grad-and-parameter": _MODELOPT,
    "pt-saved-on-cuda": _MODELOPT,
    "pt-small-view-of-big-storage": _MODELOPT,
    "dmg-nemo-incomplete": _NEMO,
    "dmg-nemo-missing-shard": _NEMO,
    "fmt-nemo-dspark": _NEMO,
    "dmg-deepspec-index": _DEEPSPEC,
    "dmg-deepspec-short-shard": _DEEPSPEC,
    "fmt-deepspec": _DEEPSPEC,
    "fmt-angelslim-ranks": "AngelSlim records",
    "fmt-baldeagle": "BaldEagle records",
    "fmt-baldeagle-fused": "BaldEagle records",
    "fmt-eagle1-fp16": "EAGLE-1/2 records",
    "fmt-trtllm-raw-list": "TensorRT-LLM dumps",
}

CASES = [
    pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=NOT_YET[name])) if name in NOT_YET else name
    for name in cases.case_names()
]


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cases")
    cases.generate(out)
    return out


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, generated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, dst = generated / name, tmp_path / "dst"
    expect = json.loads((case / "expect.json").read_text())
    env = {"HSLOADER_CASES_DIR": str(generated)}
    monkeypatch.setenv("HSLOADER_CASES_DIR", str(generated))
    before = cases.snapshot(case / "src")

    limits = expect.get("limits")
    outcome = cases.run_limited(case / "src", dst, limits, env) if limits else cases.run(case / "src", dst)
    cases.check(expect, outcome, dst)
    again = cases.run(case / "src", dst)

    assert cases.snapshot(case / "src") == before
    assert (again.kind, again.error, again.reasons) == (outcome.kind, outcome.error, outcome.reasons)
    if not outcome.error:
        assert again.report["converted"] == 0
        assert again.report["present"] == outcome.report["converted"]
        assert again.report["fingerprint"] == outcome.report["fingerprint"]
    if "marker" in expect:
        for place in (generated, case, case / "src", Path.cwd(), dst):
            assert not os.path.lexists(place / expect["marker"])


def test_all_cases_are_here() -> None:
    assert len(CASES) == 91
    assert set(NOT_YET) <= set(cases.case_names())
