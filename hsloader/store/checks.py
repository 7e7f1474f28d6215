"""Reading JSON that may be damaged: every value is checked for type and range before anything is done with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hsloader.errors import DamageError

__all__ = ["Node", "parse_json"]

_SHOWN = 80


def parse_json(data: bytes, path: object) -> Node:
    """The JSON object in ``data`` as a ``Node``; ``DamageError`` naming ``path`` for anything else.

    Refused: bytes that are not UTF-8, NaN and infinities, keys that occur twice, nesting that exhausts the stack,
    integers of thousands of digits.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise DamageError(f"{path}: JSON nested too deep to be a file of ours") from None
    except ValueError as error:
        raise DamageError(f"{path}: not the JSON it should be: {error}") from error
    if not isinstance(value, dict):
        raise DamageError(f"{path}: expected a JSON object, found {_shown(value)}")
    return Node(value, path, "")


class Node:
    """One JSON object of a file, read key by key; what is missing, mistyped or out of range is ``DamageError``."""

    __slots__ = ("path", "value", "where")

    def __init__(self, value: dict[str, Any], path: object, where: str) -> None:
        self.value = value
        self.path = path
        self.where = where

    def fail(self, key: str, expected: str, found: object) -> DamageError:
        """The error for ``key``: the caller raises it."""
        return DamageError(f"{self.path}: {self.where}{key}: expected {expected}, found {_shown(found)}")

    def integer(self, key: str, low: int, high: int) -> int:
        """An integer in ``low..high``."""
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(key, f"an integer of {low:,} to {high:,}", value)
        return value

    def text(self, key: str) -> str:
        """A string."""
        value = self._get(key)
        if not isinstance(value, str):
            raise self.fail(key, "a string", value)
        return value

    def optional_text(self, key: str) -> str | None:
        """A string, or None where the key is absent or null."""
        return None if self.value.get(key) is None else self.text(key)

    def hex_digest(self, key: str) -> str:
        """64 hexadecimal digits: a sha256."""
        value = self.text(key)
        if len(value) != 64 or not set(value) <= set("0123456789abcdef"):
            raise self.fail(key, "64 hexadecimal digits", value)
        return value

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in ``low..high``."""
        value = self._list(key)
        for item in value:
            if not isinstance(item, int) or isinstance(item, bool) or not low <= item <= high:
                raise self.fail(key, f"integers of {low:,} to {high:,}", item)
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty where the key is absent."""
        if key not in self.value:
            return ()
        value = self._list(key)
        for item in value:
            if not isinstance(item, str):
                raise self.fail(key, "strings", item)
        return tuple(value)

    def node(self, key: str) -> Node:
        """An object."""
        value = self._get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "an object", value)
        return Node(value, self.path, f"{self.where}{key}.")

    def nodes(self, key: str) -> list[Node]:
        """A list of objects."""
        value = self._list(key)
        for item in value:
            if not isinstance(item, dict):
                raise self.fail(key, "objects", item)
        return [Node(item, self.path, f"{self.where}{key}[{i}].") for i, item in enumerate(value)]

    def _list(self, key: str) -> list[Any]:
        value = self._get(key)
        if not isinstance(value, list):
            raise self.fail(key, "a list", value)
        return value

    def _get(self, key: str) -> object:
        if key not in self.value:
            raise DamageError(f"{self.path}: {self.where}{key} is missing")
        return self.value[key]


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object holds the same key twice")
    return made


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than repr writes
        text = "a number of thousands of digits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
