"""Where states come from: what the user says, what a producer's own settings file says, and never a guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hsloader.conversion.settings import ConvertSettings
from hsloader.formats.layouts import LAYOUTS
from hsloader.formats.producer_settings import ProducerSettings
from hsloader.monitor.words import plural
from hsloader.store.fields import Field
from hsloader.store.manifest import Provenance

__all__ = ["LAYER_CONVENTIONS", "advice", "provenance_of"]

_Value = TypeVar("_Value")

# What an id j means, as the layer after which the state was taken (0-based; -1: the embeddings).
LAYER_CONVENTIONS = {
    "after": 0,  # the output of layer j: speculators 0.3/0.4, Model-Optimizer, DeepSpec, NeMo; SGLang's flag
    "before": -1,  # the input of layer j: vLLM, speculators 0.5 and later
    "hf": -1,  # hidden_states[j] of transformers: EAGLE, BaldEagle
}


def provenance_of(
    settings: ConvertSettings, fields: Sequence[Field], layouts: Sequence[str], told: Sequence[ProducerSettings] = ()
) -> Provenance:
    """The manifest's provenance: what ``settings`` say, else what the producer's own files agree on (``told``).

    ``ValueError`` if layer ids that the user named do not fit the states; a file's that do not fit are left out.
    """
    by_name = {field.name: field for field in fields}
    aux = by_name.get("hidden_states")
    states = aux or by_name.get("last_hidden_state")
    width = states.shape[-1] if states is not None and states.shape else None
    written, convention = settings.layer_ids, settings.layer_convention or "after"
    after = None if written is None else _after_layer(written, convention, aux)
    if written is None:
        written = _agreed([item.layer_ids for item in told])
        convention = _agreed([item.layer_convention for item in told]) or "after"
        if written is not None:
            try:
                after = _after_layer(written, convention, aux)
            except ValueError:
                written = None
    return Provenance(
        producer=settings.producer or _agreed([item.producer for item in told]),
        model=settings.model or _agreed([item.model for item in told]),
        hidden_size=settings.hidden_size or width,
        num_layers=settings.num_layers,
        layer_ids=after,
        layer_ids_as_written=written,
        layer_convention=None if written is None else convention,
        norm_state=settings.norm_state or _agreed([item.norm_state for item in told]) or "unknown",
        vocab_size=settings.vocab_size,
        tokenizer=settings.tokenizer,
        source_layout=", ".join(sorted(layouts)) or None,
        notes=settings.notes,
    )


def _agreed(values: Sequence[_Value | None]) -> _Value | None:
    """The value if all name the same one."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def advice(provenance: Provenance, layouts: Sequence[str], looks_like: str, recorded: bool) -> list[str]:
    """Lines for the plan about what neither files nor user told; ``recorded``: the dataset says so already."""
    lines = []
    if recorded:
        if provenance.norm_state == "unknown":
            lines.append(
                "norm state of the last state: unknown, and recorded as such; if you know it, give norm_state= to "
                "hsloader.DataLoader"
            )
        if provenance.layer_ids is None:
            lines.append("layer ids: unknown, and recorded as such")
        return lines
    if provenance.norm_state == "unknown":
        known = [x for x in LAYOUTS if x.name in layouts and x.usual_norm_state != "unknown"]
        usual = sorted({f"{x.producer}: {x.usual_norm_state}-norm" for x in known})
        hints = [*(["what their producers usually write: " + ", ".join(usual)] if usual else [])]
        if looks_like != "unknown":
            hints.append(f"the values look {looks_like}-norm")
        lines.append(
            "norm state of the last state: unknown, and recorded as such; say norm_state='pre' or norm_state='post' if "
            "you know it" + (f" ({'; '.join(hints)})" if hints else "")
        )
    if provenance.layer_ids is None:
        lines.append("layer ids: unknown; say layer_ids=... if you know them (0-based, after which layer)")
    return lines


def _after_layer(written: Sequence[int], convention: str, states: Field | None) -> tuple[int, ...]:
    """The ids in the convention "after layer i, 0-based"; that of the last state may be named behind the others."""
    if convention not in LAYER_CONVENTIONS:
        raise ValueError(f"layer_convention is {convention!r}; expected one of {', '.join(LAYER_CONVENTIONS)}")
    after = tuple(i + LAYER_CONVENTIONS[convention] for i in written)
    if states is not None and len(states.shape) == 2:
        layers = states.shape[0]
        if len(after) == layers + 1:
            after = after[:-1]
        if len(after) != layers:
            raise ValueError(
                f"layer_ids names {plural(len(written), 'layer')} ({', '.join(map(str, written))}), the samples "
                f"have {layers} in hidden_states; name exactly those (the last state's may follow)"
            )
    if any(i < -1 for i in after):
        raise ValueError(f"layer_ids {list(written)} has a number below the embeddings (convention {convention!r})")
    return after
