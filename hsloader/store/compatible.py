"""Whether new segments fit a dataset: same fields, same layers, same norm state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hsloader.errors import IncompatibleError
from hsloader.store.fields import Field
from hsloader.store.manifest import Manifest, Provenance

__all__ = ["check_compatible", "check_fields"]


def check_compatible(
    path: Path, manifest: Manifest, fields: Sequence[Field], provenance: Provenance, *, allow_unknown: bool
) -> None:
    """``IncompatibleError`` naming both values unless segments of ``fields`` and ``provenance`` may join.

    A field's codec and its source's dtype may differ (each segment records its own). ``allow_unknown``: what one side
    does not know may join what the other side knows.
    """
    check_fields(path, manifest.fields, fields)
    for what, there, here, unknown in (
        ("norm state of the last state", manifest.provenance.norm_state, provenance.norm_state, "unknown"),
        ("layer ids (after layer i, 0-based)", manifest.provenance.layer_ids, provenance.layer_ids, None),
    ):
        if there == here:
            continue
        if unknown in (there, here):
            if not allow_unknown:
                raise IncompatibleError(
                    f"{path}: {what}: the dataset has {_value(there)}, what is appended has {_value(here)}; say which "
                    "it is, or allow it: --allow-unknown (in Python allow_unknown=True)"
                )
            continue
        raise IncompatibleError(
            f"{path}: {what}: the dataset has {_value(there)}, what is appended has {_value(here)}; "
            "write it to a dataset of its own"
        )


def check_fields(path: Path, listed: Sequence[Field], appended: Sequence[Field]) -> None:
    """``IncompatibleError`` unless both have the same fields of the same types, shapes and scales, in any order."""
    old, new = _described(listed), _described(appended)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise IncompatibleError(
                f"{path}: field {name}: the dataset has {old.get(name, 'no such field')}, "
                f"what is appended has {new.get(name, 'no such field')}; write it to a dataset of its own"
            )


def _described(fields: Sequence[Field]) -> dict[str, str]:
    return {
        field.name: field.dtype
        + (f" {list(field.shape)}" if field.shape else "")
        + (f" scaled by {field.scale}" if field.scale else "")
        for field in fields
    }


def _value(value: object) -> str:
    return "unknown" if value is None else str(value)
