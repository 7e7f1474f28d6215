"""speculators 0.3 and 0.4: ``data_{i}.pt``, a dict whose ``hidden_states`` is a list of layers ``[S, H]``.

The last list entry is the output of the last layer before the final norm; the rest are the auxiliary layers.
Source: ``scripts/data_generation_offline.py`` and ``speculators/data_generation`` of v0.4.0.
"""

from __future__ import annotations

from collections.abc import Mapping

from hsloader.formats.blocks import Tensor
from hsloader.formats.records import Builder, LayoutError, shape_text

__all__ = ["build_list", "build_pair", "is_list", "is_pair"]


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
        layer = builder.states("hidden_states", value=entry) if entry is not None else None
        if layer is None or len(layer.shape) != 2:
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
    last = builder.states("target")
    aux = builder.states("hidden_state")
    builder.add_layers([builder.split(aux, last.shape[-1], "hidden_state")])
    builder.add_last(last)
    builder.mask()
