"""Batches under way, what they need while they are, and what must be undone when the transfers end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.device.driver import Driver
from hsloader.device.packing import Packing

__all__ = ["Gear", "Memory", "Parcel"]


class Parcel:
    """A batch under way.  Whoever reads its slot must keep it until the slot is not read any more."""

    __slots__ = ("__weakref__", "bytes", "gear", "host", "over", "place", "sent", "spans", "stream", "taken", "timed")

    def __init__(self, stream: Any, gear: Gear) -> None:
        self.stream = stream
        self.gear = gear
        self.timed = False
        self.sent = False
        self.over = False  # the transfer was seen to have ended
        self.taken = False  # the batch was handed out
        self.place = (0, 0)  # (ring, slot) that it is copied from
        self.bytes = 0
        self.spans: dict[str, torch.Tensor] = {}
        self.host: dict[str, torch.Tensor] = {}


class Gear:
    """What a parcel needs on its way, used again by later parcels: events, and pinned memory for what is small."""

    __slots__ = ("done", "packing", "places", "ready", "staged", "staging", "started")

    def __init__(self, driver: Driver) -> None:
        self.ready = driver.event()
        self.started = driver.event(timed=True)
        self.done = driver.event(timed=True)
        self.staging: torch.Tensor | None = None
        self.packing: Packing | None = None  # of ``places``, and of ``staged``, which is all of them
        self.places: list[NDArray[np.generic]] = []
        self.staged: torch.Tensor | None = None

    def pack(self, packing: Packing, sources: Sequence[NDArray[np.generic]], driver: Driver) -> torch.Tensor:
        """Copy ``sources`` to their places in pinned memory, which is returned."""
        if self.packing is not packing:
            self.packing = None
            if self.staging is None or self.staging.numel() < packing.bytes:
                self.staging = driver.pinned(packing.bytes)
            self.places, self.staged = packing.on_host(self.staging), packing.staged(self.staging)
            self.packing = packing
        for place, source in zip(self.places, sources, strict=True):
            np.copyto(place, source, casting="unsafe")
        assert self.staged is not None
        return self.staged


class Memory:
    """What must be undone when the transfers end: apart from them, so that they can be collected."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.owner = os.getpid()
        self.moving: list[Parcel] = []
        self.registered: dict[tuple[int, int], tuple[NDArray[np.uint8], torch.Tensor]] = {}
        self.replaced: set[tuple[int, int]] = set()  # those of rings that a newer one has replaced

    def register(self, place: tuple[int, int], memory: NDArray[np.uint8]) -> None:
        """Register a slot.  A place in a newer ring than any before makes all others places in a replaced one."""
        self.driver.register(memory)
        self.registered[place] = memory, torch.from_numpy(memory)
        newest = max(ring for ring, _ in self.registered)
        self.replaced = {known for known in self.registered if known[0] < newest}

    def forget_replaced(self) -> None:
        """Unregister the slots of replaced rings that nothing moves from; a batch may still come from one later."""
        for place in self.replaced - {parcel.place for parcel in self.moving}:
            self.replaced.discard(place)
            # Kept until it is unregistered, as this may be all that keeps it mapped.
            memory = self.registered.pop(place, None)
            if memory is not None:
                self.driver.unregister(memory[0])

    def mark(self, parcel: Parcel) -> None:
        """Give a parcel whose sending was interrupted its event: behind whatever was started of it."""
        if not parcel.sent:
            parcel.bytes = 0
            self.driver.record(parcel.gear.done, self.driver.side)
            parcel.sent = True

    def shut(self) -> None:
        if self.owner != os.getpid():  # CUDA does not survive a fork, and all of this is the parent's
            self.moving.clear()
            self.registered.clear()
            return
        try:
            for parcel in self.moving:
                self.mark(parcel)
                self.driver.synchronize(parcel.gear.done)
        finally:  # also if CUDA is broken by then: memory must not be unmapped before
            self.moving.clear()
            while self.registered:
                self.driver.unregister(self.registered.popitem()[1][0])
