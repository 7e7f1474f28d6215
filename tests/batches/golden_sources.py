"""The sources of the golden cases as the fields that a converted dataset would hold, without any code of ours."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hsloader.batches.layout import BatchLayout
from hsloader.batches.trainer import Trainer
from hsloader.store.fields import Field
from tests.shared_data import SHARED

CASES = SHARED / "golden/cases"


@dataclass
class Source:
    """Fields of a dataset and its samples, tensor by field name; None for a sample that has no states."""

    fields: dict[str, Field]
    samples: list[dict[str, torch.Tensor] | None]
    lengths: np.ndarray


def case_of(name: str) -> dict[str, Any]:
    case: dict[str, Any] = json.loads((CASES / name / "case.json").read_text())
    return case


def read_source(name: str) -> Source:
    case = case_of(name)
    folder = (CASES / name / case["source"]).resolve()
    if "speculators" in name and not case["source_format"].startswith("P1"):
        samples, mask_dtype = _arrow_samples(folder, case["files"])
    else:
        samples, mask_dtype = [_file_sample(folder / file) for file in case["files"]], "int64"
    first = next(sample for sample in samples if sample is not None)
    fields = {key: _field(key, value, mask_dtype, "hidden_states_scale" in first) for key, value in first.items()}
    return Source(fields, samples, np.array(case["lengths"], dtype=np.int64))


def _field(name: str, value: torch.Tensor, mask_dtype: str, scaled: bool) -> Field:
    dtype = str(value.dtype).removeprefix("torch.")
    source = {"input_ids": "int64", "loss_mask": mask_dtype}.get(name, dtype)
    scale = "hidden_states_scale" if scaled and name in ("hidden_states", "last_hidden_state") else None
    return Field(name=name, dtype=dtype, shape=tuple(value.shape[1:]), source_dtype=source, scale=scale)


def _tokens(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids.to(torch.int32), "loss_mask": mask.to(torch.uint8)}


def _arrow_samples(folder: Path, files: list[str]) -> tuple[list[dict[str, torch.Tensor] | None], str]:
    pa = pytest.importorskip("pyarrow")
    load_file = pytest.importorskip("safetensors.torch").load_file
    with pa.memory_map(str(folder / "data-00000-of-00001.arrow")) as stream:
        table = pa.ipc.open_stream(stream).read_all()
    boolean = pa.types.is_boolean(table.schema.field("loss_mask").type.value_type)
    samples: list[dict[str, torch.Tensor] | None] = []
    for row, file in enumerate(files):
        if not (folder / file).is_file():
            samples.append(None)
            continue
        data = load_file(folder / file)
        states = data["hidden_states"]
        sample = {"hidden_states": states[:, :-1], "last_hidden_state": states[:, -1]}
        if "hidden_states_scales" in data:
            sample["hidden_states_scale"] = data["hidden_states_scales"].reshape(-1)
        mask = torch.tensor(table.column("loss_mask")[row].as_py())
        samples.append(sample | _tokens(data["token_ids"], mask))
    return samples, "bool" if boolean else "int64"


def _file_sample(path: Path) -> dict[str, torch.Tensor]:
    raw = path.read_bytes()
    data = torch.load(io.BytesIO(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw), weights_only=True)
    tokens = _tokens(data["input_ids"], data["loss_mask"])
    if isinstance(data.get("hidden_states"), list):  # speculators .pt
        *layers, last = data["hidden_states"]
        return {"hidden_states": torch.stack(layers, dim=1), "last_hidden_state": last} | tokens
    aux = data["aux_hidden_state"] if "aux_hidden_state" in data else data["hidden_states"]
    last = data.get("hidden_state", data.get("target_last_hidden_states"))
    sample = {"hidden_states": aux.squeeze(0).reshape(aux.shape[1], -1, 48)}
    if last is not None:
        sample["last_hidden_state"] = last.squeeze(0)
    return sample | tokens


def execute(trainer: Trainer, layout: BatchLayout, source: Source) -> dict[str, torch.Tensor]:
    """What the reader does: zeroed spans, with the rows that the pieces name."""
    spans = {
        span.name: torch.zeros((layout.rows[span.name], *span.field.shape), dtype=getattr(torch, span.field.dtype))
        for span in trainer.spans
    }
    for piece in layout.pieces:
        span = trainer.spans[piece["span"]]
        sample = source.samples[piece["sample"]]
        assert sample is not None
        rows = sample[span.field.name][piece["start"] : piece["stop"]]
        assert len(rows) == piece["stop"] - piece["start"]
        spans[span.name][piece["row"] : piece["row"] + len(rows)] = rows
    return spans


def assert_same_batch(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Same keys, dtypes, shapes, bits; python values of the same type."""
    assert got.keys() == expected.keys()
    for key, theirs in expected.items():
        ours = got[key]
        if not isinstance(theirs, torch.Tensor):
            assert type(ours) is type(theirs), key
            assert ours == theirs, key
            continue
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), key
        bits = {2: torch.int16, 4: torch.int32}.get(theirs.dtype.itemsize) if theirs.is_floating_point() else None
        assert torch.equal(ours.contiguous().view(bits) if bits else ours, theirs.view(bits) if bits else theirs), key
