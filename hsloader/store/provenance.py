"""Provenance: where the states of a dataset come from, as far as it is known."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["NORM_STATES", "Provenance"]

NORM_STATES = ("pre", "post", "unknown")

_NUMBER_LIMIT = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where the states come from. What is not known is None, or ``"unknown"`` for the norm state.

    ``layer_ids``: the layers of the aux states, 0-based, in the convention "after layer i"; ``layer_ids_as_written``
    and ``layer_convention`` keep what the producer wrote.  ``norm_state``: whether the last state was taken before
    (``"pre"``) or after (``"post"``) the final norm.  ``ValueError`` for a value that the manifest could not hold.
    """

    producer: str | None = None
    model: str | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    layer_ids: tuple[int, ...] | None = None
    layer_ids_as_written: tuple[int, ...] | None = None
    layer_convention: str | None = None
    norm_state: str = "unknown"
    vocab_size: int | None = None
    tokenizer: str | None = None
    source_layout: str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.norm_state not in NORM_STATES:
            raise ValueError(f"norm_state is {self.norm_state!r}; expected one of {', '.join(NORM_STATES)}")
        for key in ("producer", "model", "layer_convention", "tokenizer", "source_layout"):
            if not isinstance(getattr(self, key), str | None):
                raise ValueError(f"{key} is {getattr(self, key)!r}; expected a string or None")
        for key in ("hidden_size", "num_layers", "vocab_size"):
            if getattr(self, key) is not None:
                object.__setattr__(self, key, _number(key, getattr(self, key), 1))
        for key in ("layer_ids", "layer_ids_as_written"):
            if getattr(self, key) is not None:
                numbers = tuple(_number(key, each, -_NUMBER_LIMIT) for each in _several(key, getattr(self, key)))
                object.__setattr__(self, key, numbers)
        object.__setattr__(self, "notes", tuple(_several("notes", self.notes)))
        if not all(isinstance(note, str) for note in self.notes):
            raise ValueError(f"notes are {list(self.notes)!r}; expected strings")


def _number(key: str, value: object, low: int) -> int:
    """``value`` as a plain integer (numpy has others); ``ValueError`` if it is none or out of range."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{key}: {value!r}; expected an integer") from None
    if not low <= number <= _NUMBER_LIMIT:
        raise ValueError(f"{key}: {number}; expected {low:,} to {_NUMBER_LIMIT:,}")
    return number


def _several(key: str, value: object) -> Iterable[object]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{key}: {value!r}; expected a list")
    return value
