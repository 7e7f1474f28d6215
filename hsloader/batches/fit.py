"""Does a dataset fit a trainer: the norm state of its last layer, and which layers it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hsloader.batches.trainer import Trainer
from hsloader.errors import IncompatibleError

__all__ = ["KnownOrigin", "check_fit"]


class KnownOrigin(Protocol):
    """What is asked of a dataset's provenance."""

    @property
    def norm_state(self) -> str:
        """``"pre"``, ``"post"`` or ``"unknown"``: whether the final norm was applied to the last state."""

    @property
    def layer_ids(self) -> Sequence[int] | None:
        """The layers of ``hidden_states``, "after layer i, 0-based", in stored order; None where unknown."""


def check_fit(
    trainer: Trainer,
    origin: KnownOrigin,
    *,
    path: object,
    norm_state: str | None = None,
    layer_ids: Sequence[int] | None = None,
) -> tuple[str, ...]:
    """Refuse a dataset that would train the wrong thing; returns sentences for the log about what nobody knows.

    ``norm_state`` is the script's own word on the data and overrules the manifest; ``layer_ids`` are the layers that
    the draft model is built for.  ``IncompatibleError`` names both values and the remedy.
    """
    notes: list[str] = []
    if trainer.norm_state is not None:
        if norm_state not in (None, "pre", "post"):
            raise ValueError(f"norm_state={norm_state!r}: expected 'pre' or 'post'")
        found = norm_state or origin.norm_state
        if found not in ("pre", "post"):
            notes.append(
                f"{path} does not say whether its last state is before or after the final norm; {trainer.title} needs "
                f"{_IN_WORDS[trainer.norm_state]}: check it, then say norm_state=, or record it with --norm-state when "
                "converting"
            )
        elif found != trainer.norm_state:
            raise IncompatibleError(_norm_message(trainer, path, found))
    if layer_ids is not None:
        here = origin.layer_ids
        if here is None:
            notes.append(f"{path} does not say which layers it holds; layer_ids={list(layer_ids)} cannot be checked")
        elif list(here) != list(layer_ids):
            raise IncompatibleError(
                f"{path} holds the states after layers {list(here)} (0-based), the draft model wants "
                f"{list(layer_ids)}; convert states of those layers, or build the draft model for these"
            )
    return tuple(notes)


_IN_WORDS = {"pre": "the state before it ('pre')", "post": "the state after it ('post')"}


def _norm_message(trainer: Trainer, path: object, found: str) -> str:
    needs = trainer.norm_state
    message = (
        f"{path} holds the last state {'after' if found == 'post' else 'before'} the final norm "
        f"(norm_state={found!r}), {trainer.title} needs norm_state={needs!r}"
    )
    if needs == "pre":
        return (
            f"{message}: its model applies the norm itself, so targets would be normed twice. A norm cannot be undone: "
            "extract the states before the norm; if the manifest is wrong, overrule it with norm_state='pre'"
        )
    return (
        f"{message}: it feeds the state straight to the language-model head, so targets would not be normed at all. "
        "Apply the target model's final norm before converting; if the manifest is wrong, overrule it with "
        "norm_state='post'"
    )
