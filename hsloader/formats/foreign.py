"""Records of producers that are known by name and not read yet, and files that are sidecars by content."""

from __future__ import annotations

from collections.abc import Mapping

from hsloader.formats.records import as_tensor

__all__ = ["foreign_layout", "sidecar_kind"]


def sidecar_kind(value: object) -> str | None:
    """What a file is that holds no samples by intention, or ``None``."""
    if not isinstance(value, dict) or not value:
        return None
    if "d2t" in value and "t2d" in value:
        return "vocabulary map"
    if all(type(k) is int for k in value) and all(type(v) in (int, float) for v in value.values()):
        return "token frequencies"
    return None


def foreign_layout(value: object) -> str | None:
    """The producer of a record that this version does not read, with the reason; ``None`` if it is unknown."""
    if isinstance(value, list):
        if value and all(isinstance(entry, dict) and "hidden_state" in entry for entry in value):
            return _unsupported("a raw TensorRT-LLM dump (a list of samples)")
        return None
    if not isinstance(value, Mapping):
        return None
    if "target_probs" in value or "target_probs_values" in value:
        return (
            "a NeMo Automodel EAGLE-3 cache: it holds target_probs (probabilities over a draft vocabulary) and no last "
            "hidden state, so it cannot be converted"
        )
    if "target_hidden_states" in value:
        return _unsupported("a NeMo Automodel DSpark cache (samples stacked in shards)")
    if "token_ids" in value and "hidden_states" in value:
        return _unsupported("a vLLM hidden-states file (no arrow dataset of speculators lies beside it)")
    if "hidden_states" in value and "target_hiddens" in value:
        return _unsupported("an AngelSlim record")
    if "hidden_states" in value and "aux_hidden_states" in value:
        return _unsupported("a Model-Optimizer record")
    if "hidden_state_features" in value:
        return _unsupported("a TensorRT-LLM record")
    if "hidden_state" in value:
        return _single_state(value)
    if "hidden_states" in value:
        states, ids = as_tensor(value["hidden_states"]), as_tensor(value.get("input_ids"))
        if "attention_mask" in value or (ids is not None and len(ids.shape) == 2):
            return _unsupported("an AngelSlim DFlash record")
        axes = len(states.shape) if states is not None else 0
        return f"hidden_states with {axes} axes next to no other states: ambiguous, so it is not guessed at"
    return None


def _single_state(value: Mapping[object, object]) -> str:
    """The producers that write ``hidden_state`` and nothing beside it."""
    states = as_tensor(value["hidden_state"])
    shape = states.shape if states is not None else ()
    if len(shape) == 2:
        return _unsupported("an EAGLE-1/2 or HASS record (one state [S, H])")
    if len(shape) == 3 and shape[0] == 1:
        return _unsupported(
            "a BaldEagle record (one state [1, S, H]; SpecForge without auxiliary layers looks the same)"
        )
    if len(shape) == 3:
        return _unsupported(f"a fused BaldEagle record ({shape[0]} layers first)")
    return "hidden_state is no tensor of hidden states"


def _unsupported(what: str) -> str:
    return f"{what}: this version of hsloader reads speculators and SpecForge files, that layout is not supported yet"
