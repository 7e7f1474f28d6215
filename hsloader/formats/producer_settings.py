"""What a producer's own settings file says about its states: ``data_config.json`` of speculators 0.3 and 0.4.

Source: ``DataGenerationConfig`` of ``speculators/data_generation/config_generator.py``.  A file that cannot be read is
no reason to refuse samples: it says nothing then, and a note says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hsloader.errors import SourceError
from hsloader.formats.reading import read_small

__all__ = ["SETTINGS_FILE", "ProducerSettings", "read_settings"]

SETTINGS_FILE = "data_config.json"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """What the file says; ``None`` where it does not.

    ``layer_ids`` as written, the last state's included (convention "after layer i, 0-based").  ``norm_state`` is known
    from the producer's version: its code takes the last state before the final norm.
    """

    name: str
    producer: str | None = None
    model: str | None = None
    hidden_size: int | None = None
    layer_ids: tuple[int, ...] | None = None
    layer_convention: str | None = None
    norm_state: str | None = None


def read_settings(path: Path | str, name: str) -> ProducerSettings:
    """The settings in ``path`` (called ``name`` in reports); ``SourceError`` if it holds none that can be read."""
    try:
        found = json.loads(read_small(str(path), _MAX_BYTES).decode("utf-8"))
    except OSError as error:
        raise SourceError(name, f"cannot be read: {error.strerror or error}; nothing is taken from it") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(name, f"cannot be parsed: {str(error)[:200]}; nothing is taken from it") from None
    if not isinstance(found, dict):
        raise SourceError(name, f"holds a JSON {type(found).__name__}, expected an object; nothing is taken from it")
    model, states = _part(found, "model"), _part(found, "hidden_states")
    layer_ids = states.get("layer_ids", found.get("layer_ids"))
    if not isinstance(layer_ids, list) or not all(type(i) is int and 0 <= i < 10_000 for i in layer_ids):
        layer_ids = None
    hidden = model.get("hidden_size", found.get("hidden_size"))
    written = found.get("speculators_version")
    version = written[:40] if isinstance(written, str) else None
    path_of_model = model.get("target_model_path")
    return ProducerSettings(
        name=name,
        producer=f"speculators {version}" if version else None,
        model=path_of_model[:500] if isinstance(path_of_model, str) else None,
        hidden_size=hidden if type(hidden) is int and 0 < hidden < 1 << 24 else None,
        layer_ids=tuple(layer_ids) if layer_ids else None,
        layer_convention="after" if layer_ids else None,
        norm_state="pre" if version else None,
    )


def _part(found: Mapping[str, object], key: str) -> Mapping[str, object]:
    part = found.get(key)
    return part if isinstance(part, dict) else {}
