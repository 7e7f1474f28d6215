"""LoaderState: where a run stands, as small JSON, and when it may be taken up again.

A state belongs to a dataset (by the fingerprint of its first ``segments`` segments), a seed and a contract: the
settings that decide which samples make up which batch.  It does not belong to a number of ranks, unless the contract
names one.  What does not fit is refused with both values; nothing is adapted silently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields

from hsloader.errors import StateError
from hsloader.order.sequence import MOST_EPOCHS

__all__ = ["STATE_FORMAT", "ContractValue", "LoaderState", "check_position", "check_state"]

STATE_FORMAT = 1

ContractValue = str | int | float | bool | None
"""What a setting in a contract may be: comparable after a trip through JSON."""


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """``position`` global batches of ``epoch`` are done (by all ranks together); the rest is what they are part of."""

    segments: int
    fingerprint: str
    seed: int
    epoch: int
    position: int
    contract: dict[str, ContractValue]
    format: int = STATE_FORMAT

    def to_json(self) -> dict[str, object]:
        """A dict of plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> LoaderState:
        """The state in ``value`` (a dict as ``to_json`` made it); ``StateError`` says what is wrong with another."""
        if not isinstance(value, Mapping):
            raise StateError(f"a loader state is a dict, not {type(value).__name__}")
        version = value.get("format")
        if version is None:
            raise StateError(f"this is no loader state: it has {', '.join(map(str, value)) or 'nothing in it'}")
        if version != STATE_FORMAT:
            raise StateError(
                f"loader state of format {version!r}: this version reads format {STATE_FORMAT}; load it with the "
                "hsloader that wrote it"
            )
        names = {item.name for item in fields(cls)}
        if missing := sorted(names - value.keys()):
            raise StateError(f"loader state lacks {', '.join(missing)}; is it the state of something else?")
        for name in ("segments", "seed", "epoch", "position"):
            number = value[name]
            if isinstance(number, bool) or not isinstance(number, int) or (number < 0 and name != "seed"):
                raise StateError(f"loader state: {name} is {number!r}, expected a whole number from 0")
        if value["epoch"] >= MOST_EPOCHS:
            raise StateError(f"loader state: epoch is {value['epoch']}, expected at most {MOST_EPOCHS - 1:,}")
        if not isinstance(value["fingerprint"], str) or not isinstance(value["contract"], Mapping):
            raise StateError("loader state: expected a text as fingerprint and a dict as contract")
        return cls(**{**{name: value[name] for name in names}, "contract": dict(value["contract"])})


def check_state(
    state: LoaderState,
    *,
    segments: int,
    fingerprint_of: Callable[[int], str],
    seed: int,
    contract: Mapping[str, ContractValue],
    path: object = "the dataset",
) -> None:
    """Refuse a state that this loader cannot continue: ``StateError`` with what the state has and what is here.

    ``segments`` is how many segments the opened dataset has, ``fingerprint_of(n)`` the fingerprint of its first n.
    """
    if state.segments > segments:
        raise StateError(
            f"the state was taken on a dataset of {state.segments} segments, {path} has {segments}: it is another "
            "dataset, or an older copy of it"
        )
    found = fingerprint_of(state.segments)
    if found != state.fingerprint:
        raise StateError(
            f"the state belongs to another dataset: its first {state.segments} segments had fingerprint "
            f"{state.fingerprint}, those of {path} have {found}"
        )
    if state.seed != seed:
        raise StateError(f"the state was taken with seed={state.seed}, this loader has seed={seed}; build it with that")
    here = json.loads(json.dumps(dict(contract)))
    for name in sorted(state.contract.keys() | here.keys()):
        then, now = state.contract.get(name, _ABSENT), here.get(name, _ABSENT)
        if then != now or isinstance(then, bool) != isinstance(now, bool):
            raise StateError(_contract_message(name, then, now))


def check_position(epoch: int, position: int, batches: int) -> None:
    """Refuse a position beyond its epoch of ``batches`` global batches (``StateError``)."""
    if position > batches:
        raise StateError(f"the state stands at batch {position} of epoch {epoch}, which has {batches} batches")


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


def _contract_message(name: str, then: object, now: object) -> str:
    if name == "world_size":
        return (
            f"the state was taken with world_size={then!r}, this loader has world_size={now!r}: a trainer's own order "
            "is made for one number of ranks; go on with as many, or use hsloader's order, which is elastic"
        )
    return (
        f"the state was taken with {name}={then!r}, this loader has {name}={now!r}: its batches are other batches; "
        "build the loader with the settings of the state, or start a new epoch without it"
    )
