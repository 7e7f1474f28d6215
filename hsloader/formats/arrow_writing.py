"""Write samples as speculators 0.5 to 0.9 expects them: an arrow dataset and ``hidden_states/hs_{row}.safetensors``."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hsloader.formats.arrow_rows import load_pyarrow
from hsloader.formats.casting import exact_cast
from hsloader.formats.writing import USUAL_FIELDS, checked_state, publish, safetensors_bytes
from hsloader.store.fields import Field

__all__ = ["ArrowFolderWriter"]

Array = npt.NDArray[Any]

_BATCH_ROWS = 1000  # as datasets writes them
_FILE = "data-00000-of-00001.arrow"


class ArrowFolderWriter:
    """One safetensors file a sample, rows numbered as they come; the arrow dataset is written at the end."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._ids: list[Array] = []
        self._masks: list[Array] = []
        self._mask_dtype = "int64"
        load_pyarrow()

    def __enter__(self) -> ArrowFolderWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()

    def write(
        self, name: str, values: Mapping[str, Array], fields: Mapping[str, Field], extras: Mapping[str, object]
    ) -> str:
        """Write one sample's states; ids and mask are kept for the arrow dataset. ``extras`` have no place in it."""
        states = _states(values, fields)
        ids = checked_state(values, "input_ids", "[tokens]", 1)
        ids = exact_cast(ids, fields["input_ids"].dtype, "int64", "input_ids")
        tensors = {"hidden_states": (fields["last_hidden_state"].dtype, states), "token_ids": ("int64", ids)}
        if "hidden_states_scale" in values:
            scales = values["hidden_states_scale"].reshape(-1, 1, 1)
            tensors["hidden_states_scales"] = (fields["hidden_states_scale"].dtype, scales)
        for key in values.keys() - USUAL_FIELDS - {"hidden_states_scale"}:
            tensors.setdefault(key, (fields[key].dtype, values[key]))
        name = f"hidden_states/hs_{len(self._ids)}.safetensors"
        mask = np.ones(len(ids), np.int64)
        if "loss_mask" in values:
            field = fields["loss_mask"]
            self._mask_dtype = field.source_dtype or "int64"
            mask = exact_cast(values["loss_mask"], field.dtype, self._mask_dtype, "loss_mask")
        publish(self._root / name, safetensors_bytes(tensors))
        self._ids.append(ids)
        self._masks.append(mask)
        return name

    def _finish(self) -> None:
        pyarrow, ipc = load_pyarrow()
        mask_type = pyarrow.bool_() if self._mask_dtype == "bool" else pyarrow.type_for_alias(self._mask_dtype)
        schema = pyarrow.schema(
            {
                "input_ids": pyarrow.list_(pyarrow.int64()),
                "loss_mask": pyarrow.list_(mask_type),
                "seq_len": pyarrow.int64(),
            }
        )
        out = io.BytesIO()
        with ipc.new_stream(out, schema) as stream:
            for first in range(0, len(self._ids), _BATCH_ROWS):
                rows = slice(first, first + _BATCH_ROWS)
                columns = [
                    pyarrow.array(self._ids[rows], schema.field(0).type),
                    pyarrow.array(
                        [m.astype(bool) if self._mask_dtype == "bool" else m for m in self._masks[rows]],
                        schema.field(1).type,
                    ),
                    pyarrow.array([len(ids) for ids in self._ids[rows]], pyarrow.int64()),
                ]
                stream.write_batch(pyarrow.record_batch(columns, schema=schema))
        publish(self._root / _FILE, out.getvalue())
        features = {
            "input_ids": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
            "loss_mask": {"feature": {"dtype": self._mask_dtype, "_type": "Value"}, "_type": "List"},
            "seq_len": {"dtype": "int64", "_type": "Value"},
        }
        _json(
            self._root / "dataset_info.json",
            {"citation": "", "description": "", "features": features, "homepage": "", "license": ""},
        )
        _json(
            self._root / "state.json",
            {
                "_data_files": [{"filename": _FILE}],
                "_fingerprint": "0" * 16,
                "_format_columns": None,
                "_format_kwargs": {},
                "_format_type": None,
                "_output_all_columns": False,
                "_split": None,
            },
        )


def _states(values: Mapping[str, Array], fields: Mapping[str, Field]) -> Array:
    """All layers, the last state's behind the others, as bits ``[S, L, H]``."""
    last: Array = checked_state(values, "last_hidden_state", "[tokens, hidden size]", 2)[:, None]
    if "hidden_states" not in values:
        return last
    aux = checked_state(values, "hidden_states", "[tokens, layers, hidden size]", 3)
    found = {name: (fields[name].dtype, values[name].shape[-1]) for name in ("hidden_states", "last_hidden_state")}
    if len(set(found.values())) > 1:
        raise ValueError(f"this layout holds all layers in one tensor, of one dtype and hidden size; found {found}")
    return np.concatenate([aux, last], axis=1)


def _json(path: Path, value: object) -> None:
    publish(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())
