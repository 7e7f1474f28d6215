"""Trainers by name."""

from __future__ import annotations

from collections.abc import Mapping

from hsloader.batches.raw import RawTrainer
from hsloader.batches.specforge import SPECFORGE, SpecForgeTrainer
from hsloader.batches.speculators import SPECULATORS, SpeculatorsTrainer
from hsloader.batches.trainer import BatchSettings, SequenceParallel, Trainer
from hsloader.store.fields import Field

__all__ = ["TRAINER_NAMES", "trainer_named", "variants_of"]

TRAINER_NAMES = ("raw", *SPECULATORS, *SPECFORGE)


def variants_of(name: str) -> tuple[str, ...]:
    """The variants of a trainer (draft model families); none for raw.  ``ValueError`` for an unknown trainer."""
    if name == "raw":
        return ()
    if name in SPECULATORS:
        return SPECULATORS[name].variants
    if name in SPECFORGE:
        return SPECFORGE[name].variants
    raise ValueError(f"trainer {name!r}: expected one of {', '.join(TRAINER_NAMES)}")


def trainer_named(
    name: str,
    fields: Mapping[str, Field],
    *,
    variant: str | None = None,
    max_tokens: int | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    hidden_states_dtype: str | None = None,
    drop_last: bool | None = None,
    sequence_parallel: SequenceParallel | None = None,
) -> Trainer:
    """The trainer called ``name`` over a dataset's ``fields``.

    ``variant`` defaults to ``"eagle3"``.  ``max_tokens`` is the length T of a packed batch, ``batch_size`` the samples
    of a padded one, ``max_length`` the tokens used of a sample.  ``hidden_states_dtype`` (torch's name) and
    ``drop_last`` default to the trainer's own.  ``ValueError`` for settings that make no sense, ``IncompatibleError``
    if the dataset lacks a field.
    """
    known = variants_of(name)
    settings = BatchSettings(
        max_tokens=max_tokens,
        batch_size=batch_size,
        max_length=max_length,
        hidden_states_dtype=hidden_states_dtype,
        drop_last=drop_last,
        sequence_parallel=sequence_parallel,
    )
    if sequence_parallel is not None and name not in SPECFORGE:
        raise ValueError(f"trainer {name} has no sequence-parallel batches")
    if name == "raw":
        if variant is not None:
            raise ValueError(f"trainer raw has no variants, variant={variant!r} was given")
        return RawTrainer(fields, settings)
    chosen = "eagle3" if variant is None else variant
    if chosen not in known:
        raise ValueError(f"trainer {name} has no variant {chosen!r}; it has {', '.join(known)}")
    if name in SPECULATORS:
        return SpeculatorsTrainer(name, chosen, fields, settings)
    return SpecForgeTrainer(name, chosen, fields, settings)
