"""Every shared input case at the level of the formats: samples come out bit for bit, bad ones have their reason.

What a conversion decides (mixed folders, values that are not finite) is tested there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hsloader.errors import SourceError  # noqa: E402
from hsloader.formats.casting import exact_cast  # noqa: E402
from hsloader.formats.source import SampleSource, open_sample  # noqa: E402
from hsloader.formats.survey import survey  # noqa: E402
from hsloader.store.dtypes import dtype_of  # noqa: E402
from tests.formats.making import stepwise  # noqa: E402
from tests.shared_data import SHARED, needs_shared  # noqa: E402

pytestmark = needs_shared

# Layouts that are known by name and not read yet.
_LATER = ("vLLM", "AngelSlim", "BaldEagle", "EAGLE-1", "Model-Optimizer", "TensorRT-LLM", "NeMo", "DeepSpec")
# Judged by the values or by comparing files, which is the conversion's part.
_DECIDED_LATER = {
    "val-nan-inf",
    "val-ids-negative",
    "mix-hidden-sizes",
    "mix-layer-counts",
    "mix-dtypes",
    "mix-producers",
}


def _names() -> list[str]:
    source = SHARED / "cases" / "make_cases.py"
    if not source.is_file():
        return []
    text = source.read_text(encoding="utf-8").split(
        "# ---------------------------------------------------------------- damage to"
    )[0]
    lines = text.splitlines()
    return [b[4 : b.index("(")].replace("_", "-") for a, b in itertools.pairwise(lines) if a.startswith("@case(")]


def _canonical(sample: SampleSource) -> dict[str, Any]:
    """The sums that expect.json has of a sample."""
    with open_sample(sample) as opened:
        found = {spec.name: stepwise(opened, spec.name, 5) for spec in sample.specs}
        opened.finish()

    def total(name: str, flat: bool = True) -> str | None:
        return hashlib.sha256(np.ascontiguousarray(found[name]).tobytes()).hexdigest() if name in found else None

    for name in ("input_ids", "loss_mask"):
        if name in found:
            found[name] = exact_cast(found[name], sample.spec(name).dtype, "int64", name)
    state = sample.spec("last_hidden_state" if "last_hidden_state" in found else "hidden_states")
    widths = {n: int(np.prod(sample.spec(n).shape)) for n in ("hidden_states", "last_hidden_state") if n in found}
    return {
        "input_ids": total("input_ids"),
        "loss_mask": total("loss_mask"),
        "aux": total("hidden_states"),
        "last": total("last_hidden_state"),
        "dtype": dtype_of(state.dtype).name,
        "seq_len": sample.length,
        "aux_dim": widths.get("hidden_states", 0),
        "last_dim": widths.get("last_hidden_state", 0),
    }


@pytest.mark.parametrize("name", _names())
def test_case(cases: Path, name: str, as_root: bool) -> None:
    expect = json.loads((cases / name / "expect.json").read_text())
    found = survey(cases / name / "src", threads=2)
    bad = {item.name: item.reason for item in found.bad}
    sidecars = {item.name: item.reason for item in found.sidecars}
    samples = {sample.name: sample for sample in found.samples}
    good: dict[str, dict[str, Any]] = {}
    for sample in found.samples:
        try:
            good[sample.name] = _canonical(sample)
        except SourceError as error:
            bad[sample.name] = error.reason

    later = any(word in reason for reason in bad.values() for word in _LATER)
    for sample_name, sums in expect["bit_exact"].items():
        if sample_name in good:
            assert good[sample_name] in (sums, *expect["bit_exact_alt"].get(sample_name, ()))
        elif sample_name in expect["samples_either"]:
            _has_words(sample_name, bad[sample_name], expect) if not later else None
        else:
            assert later, f"{sample_name} is missing: {bad.get(sample_name)}"
    for sample_name in expect["samples_bad"]:
        if name in _DECIDED_LATER:
            continue
        assert sample_name not in good
        if not (later and sample_name.startswith("samples.idx")):
            _has_words(sample_name, bad[sample_name], expect)
    for sidecar in expect["sidecars"]:
        assert sidecar not in samples
        assert sidecar in sidecars or later, f"{sidecar}: {bad.get(sidecar)}"
    if "marker" in expect:
        assert not list(cases.glob("**/HSLOADER_MARKER_*"))
    if "natural_order" in expect:
        assert [sample.name for sample in found.samples] == expect["natural_order"]


def _has_words(sample: str, reason: str, expect: dict[str, Any]) -> None:
    """A reason (with the sample's name) has the words that the case asks for."""
    said = f"{sample}: {reason}".lower()
    for words in expect["reasons"][sample]:
        assert any(word.lower() in said for word in words.split("|")), f"{said!r} has none of {words}"


def test_every_layout_of_a_later_version_is_refused_by_name(cases: Path) -> None:
    wanted = {
        "fmt-vllm-safetensors": "vLLM",
        "fmt-angelslim-ranks": "AngelSlim",
        "fmt-baldeagle": "BaldEagle record (one",
        "fmt-baldeagle-fused": "fused BaldEagle",
        "fmt-eagle1-fp16": "EAGLE-1/2",
        "fmt-modelopt-nested": "Model-Optimizer",
        "fmt-trtllm-raw-list": "TensorRT-LLM",
        "fmt-nemo-dspark": "NeMo Automodel DSpark",
        "fmt-nemo-eagle3-probs": "target_probs",
        "fmt-deepspec": "DeepSpec",
    }
    for case, words in wanted.items():
        found = survey(cases / case / "src")
        assert not found.samples
        assert found.bad
        assert all(words in item.reason for item in found.bad), found.bad


def test_evil_cases_in_little_memory_and_time(cases: Path) -> None:
    """Planning and reading all hostile cases under a limit of the address space leaves no marker."""
    code = """
import os, resource, sys
import numpy
from hsloader.errors import SourceError
from hsloader.formats.survey import survey
from hsloader.formats.source import open_sample
base = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (base + (500 << 20),) * 2)
for case in sys.argv[1:]:
    for sample in survey(case + "/src", threads=1).samples:
        with open_sample(sample, scratch=os.environ["TMPDIR"]) as opened:
            for spec in sample.specs:
                opened.rows(spec.name, 0, sample.length)
            opened.finish()
print("done")
"""
    evil = [str(p) for p in sorted(cases.glob("evil-*"))]
    done = subprocess.run(
        [sys.executable, "-c", code, *evil],
        env={"HSLOADER_CASES_DIR": str(cases), "TMPDIR": str(cases), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr
    assert not list(cases.glob("**/HSLOADER_MARKER_*"))
