"""What "as the rest" means: the most frequent (dtype, shape) of every field, and who differs from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hsloader.conversion.fp8 import with_fp8_states
from hsloader.conversion.report import Quarantined
from hsloader.errors import ConversionError, IncompatibleError
from hsloader.formats.layouts import LAYOUTS
from hsloader.formats.source import SampleSource
from hsloader.store.fields import Field

__all__ = ["LEAST_SHARE", "Agreement", "Kind", "agree", "field_text", "fields_of", "kind_text", "kinds_of"]

LEAST_SHARE = 0.9

_USUAL_ORDER = ("hidden_states", "last_hidden_state", "input_ids", "loss_mask")
_USUAL_NORM = {layout.name: layout.usual_norm_state for layout in LAYOUTS}
_SHOWN = 6

# The norm state that this producer usually writes, and for each field its name, dtype and per-token shape.
Kind = tuple[str, tuple[tuple[str, str, tuple[int, ...]], ...]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """``samples`` that agree, in their order, and ``refused`` ones with what is different about each."""

    samples: tuple[SampleSource, ...]
    refused: tuple[Quarantined, ...]


def agree(samples: Sequence[SampleSource], codec: str = "lossless", fields: Sequence[Field] | None = None) -> Agreement:
    """Split ``samples`` by the most frequent kind; ``fields`` are those of the dataset they are to join.

    Raises ``ConversionError`` with the groups if fewer than 90 % agree, ``IncompatibleError`` if what they agree on
    is not what the dataset has.
    """
    groups = kinds_of(samples)
    (kind, count), *_ = groups.most_common(1)
    if count < LEAST_SHARE * len(samples):
        raise ConversionError(_disagreement(samples, groups))
    agreed = tuple(sample for sample in samples if kind_of(sample) == kind)
    if fields is not None:
        _demand_same_fields(fields_of(agreed[:1], codec), fields)
    refused = [
        Quarantined(sample.name, _difference(kind_of(sample), kind, count / len(samples)))
        for sample in samples
        if kind_of(sample) != kind
    ]
    return Agreement(agreed, tuple(refused))


def fields_of(samples: Sequence[SampleSource], codec: str) -> tuple[Field, ...]:
    """The dataset's fields for samples that agree, the usual ones first; ``source_dtype`` is the most frequent one.

    ``ValueError`` if the codec cannot be used for them.
    """
    by_name = {spec.name: spec for spec in samples[0].specs}
    sources: dict[str, Counter[str]] = {name: Counter() for name in by_name}
    for sample in samples:
        for spec in sample.specs:
            sources[spec.name][spec.source_dtype] += 1
    order = [*(name for name in _USUAL_ORDER if name in by_name), *sorted(set(by_name) - set(_USUAL_ORDER))]
    fields = tuple(
        Field(
            name=name,
            dtype=by_name[name].dtype,
            shape=by_name[name].shape,
            codec="lossless" if codec == "fp8" else codec,
            source_dtype=sources[name].most_common(1)[0][0],
            scale=by_name[name].scale,
        )
        for name in order
    )
    return with_fp8_states(fields) if codec == "fp8" else fields


def kinds_of(samples: Sequence[SampleSource]) -> Counter[Kind]:
    """The kinds of samples there are, with their numbers."""
    return Counter(kind_of(sample) for sample in samples)


def kind_of(sample: SampleSource) -> Kind:
    """What must agree about a sample."""
    fields = tuple(sorted((spec.name, spec.dtype, spec.shape) for spec in sample.specs))
    return _USUAL_NORM.get(sample.layout, "unknown"), fields


def _disagreement(samples: Sequence[SampleSource], groups: Counter[Kind]) -> str:
    examples: dict[Kind, SampleSource] = {}
    layouts: dict[Kind, set[str]] = {}
    for sample in samples:
        examples.setdefault(kind_of(sample), sample)
        layouts.setdefault(kind_of(sample), set()).add(sample.layout)
    lines = [
        f"  {count:,} ({100 * count / len(samples):.0f} %): {', '.join(sorted(layouts[kind]))} "
        f"(norm state usually {kind[0]}): {kind_text(kind)}; for example {examples[kind].name}"
        for kind, count in groups.most_common(_SHOWN)
    ]
    if len(groups) > _SHOWN:
        lines.append(f"  and {len(groups) - _SHOWN} more kinds")
    return (
        f"the {len(samples):,} samples are of different kinds; expected at least {LEAST_SHARE:.0%} to agree in norm "
        "state, dtypes and shapes, found\n" + "\n".join(lines) + "\nConvert each kind from a folder of its own"
    )


def _difference(kind: Kind, usual: Kind, share: float) -> str:
    found = {name: (dtype, shape) for name, dtype, shape in kind[1]}
    expected = {name: (dtype, shape) for name, dtype, shape in usual[1]}
    parts = [
        f"{name} is {field_text(found.get(name))} where {share:.0%} of the samples have "
        f"{field_text(expected.get(name))}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if kind[0] != usual[0]:
        words = {"pre": "before", "post": "after", "unknown": "before or after (not known)"}
        parts.append(
            f"its producer takes the last state {words[kind[0]]} the final norm, that of the rest {words[usual[0]]}"
        )
    return "not as the rest: " + "; ".join(parts)


def _demand_same_fields(new: Sequence[Field], present: Sequence[Field]) -> None:
    there = {field.name: (field.dtype, field.shape) for field in present}
    here = {field.name: (field.dtype, field.shape) for field in new}
    states_differ = any(
        there.get(name, ("", ()))[1] != here.get(name, ("", ()))[1]
        or (not _is_narrowed(name) and there.get(name) != here.get(name))
        for name in there.keys() | here.keys()
    )
    if states_differ:
        raise IncompatibleError(
            f"the new samples are not what the dataset holds: expected {_fields_text(there)}, found "
            f"{_fields_text(here)}; convert them to a dataset of their own"
        )


def _is_narrowed(name: str) -> bool:
    """Whether a field's dtype in the dataset may be another than the planned one (see ``probe.py``)."""
    return name in ("input_ids", "loss_mask")


def kind_text(kind: Kind) -> str:
    """The fields of a kind for a person."""
    return _fields_text({name: (dtype, shape) for name, dtype, shape in kind[1]})


def _fields_text(fields: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {field_text(what)}" for name, what in sorted(fields.items()))


def field_text(what: tuple[str, tuple[int, ...]] | None) -> str:
    """A field's dtype and per-token shape for a person."""
    if what is None:
        return "missing"
    return f"{what[0]} {list(what[1])}" if what[1] else what[0]
