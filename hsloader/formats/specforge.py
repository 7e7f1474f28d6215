"""SpecForge: ``rows_{a}-{b}/data_{i}.ckpt`` or ``.ckpt.gz``, states with a leading axis of 1.

Three kinds of record: eagle3 (``aux_hidden_state`` ``[1, S, k*H]`` or None, ``hidden_state`` ``[1, S, H]``), dspark
(``hidden_states`` ``[1, S, k*H]``, ``target_last_hidden_states`` ``[1, S, H]``) and dflash (``hidden_states`` alone).
Source: ``scripts/prepare_hidden_states.py`` of v0.1.0, 9a1c9803 and 0.2.0.
"""

from __future__ import annotations

from collections.abc import Mapping

from hsloader.formats.blocks import Tensor
from hsloader.formats.records import Builder

__all__ = ["build_dflash", "build_dspark", "build_eagle3", "is_dflash", "is_dspark", "is_eagle3"]


def is_eagle3(keys: Mapping[object, object]) -> bool:
    """Whether a record is of the eagle3 kind."""
    return "hidden_state" in keys and "aux_hidden_state" in keys


def build_eagle3(builder: Builder) -> None:
    """Take the fields of the eagle3 kind."""
    builder.ids()
    last = builder.last_state("hidden_state")
    if builder.keys["aux_hidden_state"] is None:
        builder.taken.add("aux_hidden_state")
        builder.notes.append("aux_hidden_state is None: no auxiliary layers")
    else:
        aux = builder.states("aux_hidden_state")
        builder.add_layers([builder.split(aux, last.shape[-1], "aux_hidden_state")])
    builder.add_last(last)
    builder.mask()


def is_dspark(keys: Mapping[object, object]) -> bool:
    """Whether a record is of the dspark kind."""
    return isinstance(keys.get("hidden_states"), Tensor) and "target_last_hidden_states" in keys


def build_dspark(builder: Builder) -> None:
    """Take the fields of the dspark kind."""
    builder.ids()
    last = builder.last_state("target_last_hidden_states")
    aux = builder.states("hidden_states")
    builder.add_layers([builder.split(aux, last.shape[-1], "hidden_states")])
    builder.add_last(last)
    builder.mask()


def is_dflash(keys: Mapping[object, object]) -> bool:
    """Whether a record is of the dflash kind: ids ``[S]``, states ``[1, S, k*H]``, and no other states."""
    states, ids = keys.get("hidden_states"), keys.get("input_ids")
    return (
        isinstance(states, Tensor)
        and len(states.shape) == 3
        and states.shape[0] == 1
        and isinstance(ids, Tensor)
        and len(ids.shape) == 1
        and not any(isinstance(k, str) and k != "hidden_states" and "hidden" in k for k in keys)
        and "attention_mask" not in keys
        and "token_ids" not in keys
    )


def build_dflash(builder: Builder) -> None:
    """Take the fields of the dflash kind; only a hint tells how many layers the width holds."""
    builder.ids()
    aux = builder.states("hidden_states")
    hidden = builder.hints.hidden_size
    if hidden is None:
        builder.notes.append(
            f"no last state tells the hidden size: {aux.shape[-1]} values a token are kept as one layer "
            "(say hidden_size=... to split them)"
        )
        hidden = aux.shape[-1]
    builder.add_layers([builder.split(aux, hidden, "hidden_states")])
    builder.notes.append("no last hidden state")
    builder.mask()
