"""Holds: which slots are kept although their batches were handed out, until somebody lets go or is collected."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Self

from hsloader.reader.lease import Slot

__all__ = ["Holds"]


class _Owner(weakref.ref[object]):
    """Whoever holds a slot. The callback must be a method in C: no signal can fall into that."""

    __slots__ = ("number",)
    number: int

    def __new__(cls, number: int, owner: object, gone: Callable[[Any], object]) -> Self:
        made = super().__new__(cls, owner, gone)
        made.number = number
        return made

    def __init__(self, number: int, owner: object, gone: Callable[[Any], object]) -> None:
        super().__init__(owner, gone)  # type: ignore[call-arg] # weakref.ref has one, typeshed does not say so


class Holds:
    """Numbered holds of slots. ``release`` and the end of an owner may come in any thread and in finalizers."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._owners: dict[int, _Owner] = {}
        self._released: deque[int | _Owner] = deque()
        self._serial = 0

    @property
    def slots(self) -> Iterable[Slot]:
        """The slots that are held, as often as they are."""
        return self._slots.values()

    def hold(self, slot: Slot, owner: object | None) -> int:
        """Hold a slot until ``release`` of the number returned, or until ``owner`` is collected."""
        self._serial += 1
        number = self._serial
        # In this order: whatever ctrl-C leaves of it is released with the owner.
        if owner is not None:
            self._owners[number] = _Owner(number, owner, self._released.append)
        self._slots[number] = slot
        slot.holds.add(number)
        return number

    def release(self, number: int) -> None:
        """End a hold; a second time does nothing."""
        self._released.append(number)

    def collect(self) -> None:
        """Take in what was released. An interrupted call is made good by the next one."""
        while self._released:
            released = self._released[0]
            number = released if isinstance(released, int) else released.number
            slot = self._slots.get(number)
            if slot is not None:
                slot.holds.discard(number)
            self._slots.pop(number, None)
            self._owners.pop(number, None)
            self._released.popleft()

    def clear(self) -> None:
        """Forget every hold."""
        self._slots.clear()
        self._owners.clear()
