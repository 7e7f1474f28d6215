"""Write samples as speculators 0.5 to 0.9 expects them: an arrow dataset and ``hidden_states/hs_{row}.safetensors``."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hsloader.formats.arrow_rows import load_pyarrow
from hsloader.formats.casting import exact_cast
from hsloader.formats.writing import (
    USUAL_FIELDS,
    checked_state,
    name_file,
    publish,
    safetensors_bytes,
    safetensors_metadata,
)
from hsloader.store.fields import Field

__all__ = ["ArrowFolderWriter"]

Array = npt.NDArray[Any]

_BATCH_ROWS = 1000  # as datasets writes them
_BATCH_TOKENS = 1 << 20  # or fewer rows of so many tokens, which are held in memory
_FILE = "data-00000-of-00001.arrow"


class ArrowFolderWriter:
    """One safetensors file a sample, rows numbered as they come.

    The arrow dataset is written batch by batch to a temporary file, which gets its name at the end; after an error
    there is none.  The mask's type is that of the first sample.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rows = 0
        self._ids: list[Array] = []  # of the rows that are not written yet
        self._masks: list[Array] = []
        self._mask_dtype: str | None = None
        self._temporary = root / f".hsloader-{os.getpid()}-arrow.tmp"
        self._open = contextlib.ExitStack()
        self._stream: Any = None
        load_pyarrow()

    def __enter__(self) -> ArrowFolderWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with self._open:
                    self._write_batch()
                self._finish()
            else:
                with contextlib.suppress(OSError):  # of a disk that was full before
                    self._open.close()
        finally:
            self._temporary.unlink(missing_ok=True)

    def write(
        self, name: str, values: Mapping[str, Array], fields: Mapping[str, Field], extras: Mapping[str, object]
    ) -> str:
        """Write one sample's states; its ids and mask go to the arrow dataset. Of ``extras`` only a safetensors
        header's metadata has a place."""
        states = _states(values, fields)
        ids = checked_state(values, "input_ids", "[tokens]", 1)
        ids = exact_cast(ids, fields["input_ids"].dtype, "int64", "input_ids")
        tensors = {"hidden_states": (fields["last_hidden_state"].dtype, states), "token_ids": ("int64", ids)}
        if "hidden_states_scale" in values:
            scales = values["hidden_states_scale"].reshape(-1, 1, 1)
            tensors["hidden_states_scales"] = (fields["hidden_states_scale"].dtype, scales)
        for key in values.keys() - USUAL_FIELDS - {"hidden_states_scale"}:
            tensors.setdefault(key, (fields[key].dtype, values[key]))
        mask = self._mask(name, values, fields, len(ids))
        name = f"hidden_states/hs_{self._rows}.safetensors"
        publish(self._root / name, safetensors_bytes(tensors, safetensors_metadata(extras)))
        self._rows += 1
        self._ids.append(ids)
        self._masks.append(mask)
        if len(self._ids) >= _BATCH_ROWS or sum(map(len, self._ids)) >= _BATCH_TOKENS:
            self._write_batch()
        return name

    def _mask(self, name: str, values: Mapping[str, Array], fields: Mapping[str, Field], length: int) -> Array:
        """A sample's mask in the type that all rows have."""
        field = fields["loss_mask"] if "loss_mask" in values else None
        if self._mask_dtype is None:
            self._mask_dtype = (field.source_dtype if field is not None else None) or "int64"
        if field is None:
            return np.ones(length, self._mask_dtype)
        return exact_cast(values["loss_mask"], field.dtype, self._mask_dtype, f"the loss_mask of {name}")

    def _schema(self) -> Any:
        pyarrow, _ = load_pyarrow()
        dtype = self._mask_dtype or "int64"
        mask = pyarrow.bool_() if dtype == "bool" else pyarrow.type_for_alias(dtype)
        return pyarrow.schema(
            {
                "input_ids": pyarrow.list_(pyarrow.int64()),
                "loss_mask": pyarrow.list_(mask),
                "seq_len": pyarrow.int64(),
            }
        )

    def _write_batch(self) -> None:
        """Append the rows that are held to the arrow stream, and begin the stream before the first of them."""
        pyarrow, ipc = load_pyarrow()
        schema = self._schema()
        if self._stream is None:
            self._root.mkdir(parents=True, exist_ok=True)
            file = self._open.enter_context(self._temporary.open("wb"))
            self._stream = self._open.enter_context(ipc.new_stream(file, schema))
        if not self._ids:
            return
        masks = [mask.astype(bool) for mask in self._masks] if self._mask_dtype == "bool" else self._masks
        columns = [
            pyarrow.array(self._ids, schema.field(0).type),
            pyarrow.array(masks, schema.field(1).type),
            pyarrow.array([len(ids) for ids in self._ids], pyarrow.int64()),
        ]
        self._stream.write_batch(pyarrow.record_batch(columns, schema=schema))
        self._ids.clear()
        self._masks.clear()

    def _finish(self) -> None:
        """Publish the arrow file, and the descriptions beside it."""
        name_file(self._temporary, self._root / _FILE)
        features = {
            "input_ids": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
            "loss_mask": {"feature": {"dtype": self._mask_dtype or "int64", "_type": "Value"}, "_type": "List"},
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
