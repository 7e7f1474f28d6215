"""Delivery: from a filled slot of the ring to the batch that a script gets, on the CPU or on a GPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch

from hsloader.batches.layout import BatchLayout
from hsloader.batches.noise import GaussianNoise, UniformNoise, noise_keys
from hsloader.batches.states import restored, torch_dtype
from hsloader.batches.trainer import Trainer
from hsloader.device.driver import CudaDriver, Driver
from hsloader.device.noising import add_noise
from hsloader.device.packing import part_of
from hsloader.device.parcels import Parcel
from hsloader.device.plans import SpanPlan
from hsloader.device.transfers import Transfers
from hsloader.loading.settings import LoaderSettings
from hsloader.loading.stream import BatchStream, Fetched
from hsloader.monitor.counters import TrainerCounter
from hsloader.monitor.ranges import stage
from hsloader.order.mixing import noise_seed
from hsloader.reader.lease import Filled
from hsloader.store.lending import LentMemory

__all__ = ["Delivered", "Delivery", "DeviceDelivery", "HostDelivery", "make_delivery", "pinned"]

_ALIGNMENT = 512
_ANY_SIZE = 1 << 48
_OURS = 2  # slots that are never lent: the reader must be able to fill one while the other is due

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Delivered:
    """A batch's parts on its device: spans by name, and the layout's small arrays where they were sent along."""

    layout: BatchLayout
    spans: Tensors
    host: Tensors | None


class Delivery(Protocol):
    """How batches are handed out."""

    def take(self, stream: BatchStream, number: int, following: int | None) -> Delivered:
        """The batch of that number; ``following`` is the one that will probably be taken next."""

    def drop(self) -> None:
        """Forget what was prepared: another iteration begins."""

    def close(self) -> None:
        """Let go of the ring; call it before the ring goes."""


def _span_plans(
    trainer: Trainer, noise: UniformNoise | GaussianNoise | None, casts: Mapping[str, torch.dtype]
) -> tuple[SpanPlan, ...]:
    """What becomes of each of the trainer's spans; ``casts``: dtypes of spans that are no states."""
    noisy = noise_keys(noise, trainer) if noise is not None else ()
    states = {state.span: state for state in trainer.states}
    plans = []
    for span in trainer.spans:
        state = states.get(span.name)
        stored = torch_dtype(span.field.dtype)
        dtype = casts.get(span.name, stored) if state is None else torch_dtype(state.dtype)
        scale = None if state is None else state.scale
        plans.append(SpanPlan(span.name, span.field, dtype, scale, state is not None and state.key in noisy))
    return tuple(plans)


def _noise_rows(layout: BatchLayout, plans: Sequence[SpanPlan]) -> list[Any]:
    return [layout.filled(at) if plan.noisy else None for at, plan in enumerate(plans)]


def _tensors(whole: torch.Tensor, filled: Filled, plans: Sequence[SpanPlan]) -> Tensors:
    """The spans as they lie in their slot, of which ``whole`` is the memory (uint8)."""
    return {
        plan.name: part_of(whole, offset, plan.stored, (rows, *plan.field.shape)).data  # see ``strided``
        for plan, offset, rows in zip(plans, filled.offsets, filled.rows, strict=True)
    }


def pinned(batch: Any) -> Any:
    """A trainer's batch with each of its tensors in pinned memory; those that are there already stay as they are.

    The spans are; positions, documents and what ``Trainer.finish`` widened are not: small tensors.
    """
    if isinstance(batch, list):
        return [pinned(part) for part in batch]
    if isinstance(batch, dict):
        return {key: pinned(value) for key, value in batch.items()}
    return batch.pin_memory() if isinstance(batch, torch.Tensor) else batch


class HostDelivery:
    """Batches in host memory: views of their slot where they can be, else copies in memory that is used again.

    A view is lent only while two slots stay ours, so that a script may keep every batch it ever got.  Batches in
    another dtype, with noise or pinned are always copies.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        noise: UniformNoise | GaussianNoise | None,
        seed: int,
        pin_memory: bool,
    ) -> None:
        self._plans = _span_plans(trainer, noise, {})  # ids and masks stay views: finish() casts them
        self._noise = noise
        self._seed = seed
        self._pinned = pin_memory
        self._lends = not pin_memory and not any(plan.changes for plan in self._plans)
        self._memory = LentMemory(largest=_ANY_SIZE)

    def take(self, stream: BatchStream, number: int, following: int | None) -> Delivered:
        """See ``Delivery``."""
        fetched = stream.fetch(number)
        client = stream.client
        if self._lends and client.slots - client.held > _OURS:
            spans = self._lent(stream, fetched)
        else:
            spans = self._copied(fetched)
        stream.done(fetched.key)
        stream.refill()
        return Delivered(fetched.layout, spans, None)

    def drop(self) -> None:
        """See ``Delivery``."""

    def close(self) -> None:
        """See ``Delivery``."""
        self._memory.clear()

    def _lent(self, stream: BatchStream, fetched: Fetched) -> Tensors:
        """The spans as tensors on the slot, which comes back when the last tensor on this memory is gone."""
        memory = fetched.filled.memory
        # numpy and torch keep the lease alive as the owner of the memory, through any number of views.
        lease = (ctypes.c_char * memory.nbytes).from_buffer(cast(Any, memory))
        stream.client.hold(fetched.key, owner=lease)
        whole = torch.from_numpy(np.frombuffer(memoryview(lease), np.uint8))
        return _tensors(whole, fetched.filled, self._plans)

    def _copied(self, fetched: Fetched) -> Tensors:
        stored = _tensors(torch.from_numpy(fetched.filled.memory), fetched.filled, self._plans)
        spans = self._allocated([tuple(stored[plan.name].shape) for plan in self._plans])
        for plan in self._plans:
            scale = stored[plan.scale] if plan.scale else None
            restored(stored[plan.name], plan.dtype, scale, out=spans[plan.name])
        if self._noise is not None:
            generator = torch.Generator()
            generator.manual_seed(noise_seed(self._seed, fetched.epoch, fetched.number))
            for plan, runs in zip(self._plans, _noise_rows(fetched.layout, self._plans), strict=True):
                if runs is not None:
                    add_noise(self._noise, spans[plan.name], runs, generator)
        return spans

    def _allocated(self, shapes: Sequence[tuple[int, ...]]) -> Tensors:
        """Uninitialised tensors for a batch's spans, side by side in one block."""
        places = []
        end = 0
        for plan, shape in zip(self._plans, shapes, strict=True):
            size = plan.dtype.itemsize * math.prod(shape)
            places.append((end, end + size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._pinned:
            block = torch.empty(end, dtype=torch.uint8, pin_memory=True)
        else:
            block = torch.from_numpy(self._memory.empty((end,), np.dtype(np.uint8)))
        return {
            plan.name: block[start:stop].view(plan.dtype).reshape(shape)
            for plan, (start, stop), shape in zip(self._plans, places, shapes, strict=True)
        }


class DeviceDelivery:
    """Batches on a GPU, sent one ahead of the one that is handed out."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        driver: Callable[[], Driver],
        noise: UniformNoise | GaussianNoise | None,
        seed: int,
    ) -> None:
        self._plans = _span_plans(trainer, noise, trainer.token_dtypes)
        self._make_driver = driver
        self._noise = noise
        self._seed = seed
        self._transfers: Transfers | None = None  # made by the first batch: CUDA is not touched before
        self._ahead: dict[int, tuple[Parcel, BatchLayout]] = {}

    def take(self, stream: BatchStream, number: int, following: int | None) -> Delivered:
        """See ``Delivery``."""
        transfers = self._begun(stream)
        current = transfers.current()
        transfers.retire()
        sent = self._ahead.pop(number, None)
        if sent is None:
            sent = self._send(transfers, stream, stream.fetch(number), current)
        parcel, layout = sent
        delivered = Delivered(layout, *transfers.hand_out(parcel, current))
        if following is not None and following not in self._ahead:
            fetched = stream.peek(following)
            if fetched is not None:
                self._ahead = {following: self._send(transfers, stream, fetched, current)}
        del parcel, sent  # if its transfer is over, its slot is free for what is asked now
        stream.refill()  # last: it wakes the decoders, which compete with this thread for caches and cores
        return delivered

    def drop(self) -> None:
        """See ``Delivery``."""
        self._ahead.clear()

    def close(self) -> None:
        """See ``Delivery``."""
        self._ahead.clear()
        if self._transfers is not None:
            self._transfers.close()

    def _begun(self, stream: BatchStream) -> Transfers:
        if self._transfers is None:
            client = stream.client

            def moved(nanoseconds: int, size: int) -> None:
                counters = client.counters
                counters[TrainerCounter.TRANSFER_NS] += nanoseconds
                counters[TrainerCounter.TRANSFER_BYTES] += size

            driver = self._make_driver()
            if driver.uuid:  # monitors count the machine's GPUs, this process only those that it may see
                client.tell(gpu=driver.uuid)
            self._transfers = Transfers(driver, self._plans, self._noise, moved)
            stream.relieve = self._transfers.retire
            stream.receive = self._transfers.register
        return self._transfers

    def _send(
        self, transfers: Transfers, stream: BatchStream, fetched: Fetched, current: Any
    ) -> tuple[Parcel, BatchLayout]:
        with stage("send"):
            parcel = transfers.prepare(current)
            stream.client.hold(fetched.key, owner=parcel)  # the slot is read until the parcel is let go
            transfers.send(
                parcel,
                fetched.filled,
                shapes=fetched.layout.shapes,
                host=fetched.layout.host,
                noisy=_noise_rows(fetched.layout, self._plans) if self._noise is not None else (),
                seed=noise_seed(self._seed, fetched.epoch, fetched.number) if self._noise is not None else 0,
            )
            stream.done(fetched.key)
            return parcel, fetched.layout


def make_delivery(trainer: Trainer, settings: LoaderSettings) -> Delivery:
    """The delivery to the settings' device; ``ValueError`` for a device that batches cannot go to."""
    device, noise, seed = torch.device(settings.device), settings.noise, settings.seed
    if device.type == "cpu":
        return HostDelivery(trainer, noise=noise, seed=seed, pin_memory=settings.pin_memory)
    if device.type != "cuda":
        raise ValueError(f"device={settings.device!r}: expected 'cpu' or a CUDA device")
    if settings.pin_memory:
        raise ValueError("pin_memory=True is for device='cpu'; the way to a GPU needs no pinned batches")
    return DeviceDelivery(trainer, driver=lambda: CudaDriver(device), noise=noise, seed=seed)
