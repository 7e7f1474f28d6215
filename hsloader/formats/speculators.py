"""speculators: ``data_{i}.pt`` of 0.3 and 0.4, and the safetensors files of 0.5 to 0.9.

The former has a list of layers ``[S, H]`` under ``hidden_states``, the latter one tensor ``[S, L, H]``.  The last layer
is the output of the last decoder layer before the final norm; the rest are the auxiliary layers.
Source: ``scripts/data_generation_offline.py`` of v0.4.0, ``speculators.train.data`` of 0.9.0.
"""

from __future__ import annotations

from collections.abc import Mapping

from hsloader.formats.blocks import Tensor
from hsloader.formats.records import STATE_DTYPES, Builder, LayoutError, shape_text

__all__ = ["build_layers", "build_list", "build_pair", "is_list", "is_pair"]


def is_list(keys: Mapping[object, object]) -> bool:
    """Whether a record is of the list layout."""
    return type(keys.get("hidden_states")) in (list, tuple)


def build_list(builder: Builder) -> None:
    """Take the fields of the list layout."""
    builder.ids()
    entries = builder.keys["hidden_states"]
    assert isinstance(entries, (list, tuple))
    if not entries:
        raise LayoutError("hidden_states is an empty list")
    layers: list[Tensor] = []
    for i, entry in enumerate(entries):
        layer = builder.states("hidden_states", entry, f"layer {i} of hidden_states")
        if len(layer.shape) != 2:
            raise LayoutError(f"layer {i} of hidden_states is not [tokens, hidden size]")
        if layers and (layer.shape != layers[0].shape or layer.dtype != layers[0].dtype):
            raise LayoutError(
                f"layer {i} of hidden_states is {shape_text(layer.shape)} {layer.dtype}, layer 0 is "
                f"{shape_text(layers[0].shape)} {layers[0].dtype}"
            )
        layers.append(layer)
    if len(layers) > 1:
        builder.add_layers(layers[:-1])
    builder.add_last(layers[-1])
    builder.mask()


def is_pair(keys: Mapping[object, object]) -> bool:
    """Whether a record is of the older layout, ``hidden_state`` ``[S, k*H]`` and ``target`` ``[S, H]``."""
    return "hidden_state" in keys and "target" in keys


def build_pair(builder: Builder) -> None:
    """Take the fields of the older layout."""
    builder.ids()
    last = builder.last_state("target")
    aux = builder.states("hidden_state")
    builder.add_layers([builder.split(aux, last.shape[-1], "hidden_state")])
    builder.add_last(last)
    builder.mask()


def build_layers(builder: Builder) -> None:
    """Take ``hidden_states`` ``[S, L, H]``, whose last layer is the last state, ids, mask and scales."""
    builder.ids("token_ids")
    states = builder.keys["hidden_states"]
    builder.taken.add("hidden_states")
    if not isinstance(states, Tensor) or len(states.shape) != 3 or 0 in states.shape:
        raise LayoutError("hidden_states is not [tokens, layers, hidden size]")
    if states.shape[0] != builder.length:
        raise LayoutError(
            f"hidden_states has the shape {shape_text(states.shape)}: expected {builder.length} rows, one a token"
        )
    if states.dtype not in STATE_DTYPES:
        raise LayoutError(f"hidden_states holds {states.dtype}, expected floating point states")
    scale = builder.scales("hidden_states_scales", "hidden_states_scale")
    if states.dtype.startswith("float8") and scale is None:
        raise LayoutError(f"hidden_states holds {states.dtype} and there are no hidden_states_scales")
    layers = states.shape[1]
    if layers > 1:
        builder.add_layers([states.narrow(1, 0, layers - 1)], scale)
    builder.add_last(states.select(1, layers - 1), scale)
    builder.mask()
