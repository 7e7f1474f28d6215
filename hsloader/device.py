"""The way of a batch from the ring into the memory of a GPU: side stream, cast, noise, and when a slot is free again.

The rules, each of which has cost somebody a corrupted batch:

* A batch's memory is allocated on the stream that is current in ``next()``.  The side stream waits for that stream
  (its allocator may hand out memory that earlier work there still reads), then copies.
* The stream that is current at hand-out waits for the copy.  Only if it is another one is ``record_stream`` needed.
* A slot is free when the event behind its copy has completed, which ``query()`` tells: the host never waits.
* A batch that was sent and is not wanted any more keeps its memory until that event, too.
* The ring is registered with CUDA slot by slot, as they are first used, and unregistered before it is unmapped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.batches.noise import GaussianNoise, UniformNoise
from hsloader.batches.states import restored, tensor_of
from hsloader.errors import LoaderError
from hsloader.store.fields import Field

__all__ = ["CudaDriver", "Driver", "Parcel", "SpanPlan", "Transfers", "add_noise"]

_ALIGNMENT = 512
_PORTABLE = 1  # cudaHostRegisterPortable: registered for every CUDA context of the process
_ALREADY_REGISTERED = 712  # by a call that ctrl-C cut short


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """What becomes of a span on its way: its dtype in the batch, the span with its fp8 scales, whether it is noised."""

    name: str
    field: Field
    dtype: torch.dtype
    scale: str | None
    noisy: bool

    @property
    def changes(self) -> bool:
        """Whether its values are not simply copied."""
        return self.noisy or self.dtype != getattr(torch, self.field.dtype)


class Driver(Protocol):
    """The part of CUDA that a transfer needs; streams and events are whatever the driver makes of them."""

    side: Any

    def check_not_capturing(self) -> None:
        """Raise ``LoaderError`` while the current stream is captured into a graph."""

    def current(self) -> Any:
        """The current stream."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory, allocated on the current stream."""

    def pinned(self, size: int) -> torch.Tensor:
        """uint8 host memory that a copy may read asynchronously, reused once copies from it are over."""

    def event(self, *, timed: bool = False) -> Any:
        """A new event."""

    def record(self, event: Any, stream: Any) -> None:
        """The event completes when what the stream holds now is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """What the stream gets from now on waits for the event."""

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        """Call ``work`` with ``stream`` current."""

    def completed(self, event: Any) -> bool:
        """Whether the event has completed; never waits."""

    def synchronize(self, event: Any) -> None:
        """Wait for the event."""

    def milliseconds(self, first: Any, last: Any) -> float:
        """Time between two completed, timed events."""

    def used_on(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell the allocator that a stream other than the one of the allocation uses the tensor."""

    def generator(self, seed: int) -> torch.Generator:
        """A generator of the device, of that seed."""

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Let the device read this host memory directly."""

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """Undo ``register``."""


class CudaDriver:
    """CUDA through torch, on one device."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise LoaderError(f"device={str(device)!r}: torch sees no CUDA device; use device='cpu'")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._generator = torch.Generator(self.device)

    def check_not_capturing(self) -> None:
        """See ``Driver``."""
        if torch.cuda.is_current_stream_capturing():
            raise LoaderError(
                "next() of a loader while a CUDA graph is captured: the graph would replay the copy of this one batch; "
                "fetch batches outside the capture and copy them into the graph's static inputs"
            )

    def current(self) -> torch.cuda.Stream:
        """See ``Driver``."""
        return torch.cuda.current_stream(self.device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See ``Driver``."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def pinned(self, size: int) -> torch.Tensor:
        """See ``Driver``."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def event(self, *, timed: bool = False) -> torch.cuda.Event:
        """See ``Driver``."""
        return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """See ``Driver``."""
        event.record(stream)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See ``Driver``."""
        stream.wait_event(event)

    def run(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """See ``Driver``."""
        with cast(AbstractContextManager[None], torch.cuda.stream(stream)):
            work()

    def completed(self, event: torch.cuda.Event) -> bool:
        """See ``Driver``."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronize(self, event: torch.cuda.Event) -> None:
        """See ``Driver``."""
        event.synchronize()

    def milliseconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """See ``Driver``."""
        return float(first.elapsed_time(last))

    def used_on(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """See ``Driver``."""
        tensor.record_stream(stream)

    def generator(self, seed: int) -> torch.Generator:
        """See ``Driver``."""
        return self._generator.manual_seed(seed)

    def register(self, memory: NDArray[np.uint8]) -> None:
        """See ``Driver``."""
        with torch.cuda.device(self.device):
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE))
        if status not in (0, _ALREADY_REGISTERED):
            raise LoaderError(
                f"cudaHostRegister of {memory.nbytes:,} bytes failed with CUDA error {status}; if locked memory is "
                "limited (ulimit -l, the container's memory limit), give a smaller ReadOptions(prefetch=...)"
            )

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """See ``Driver``."""
        with torch.cuda.device(self.device):
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(memory.ctypes.data)


class Parcel:
    """A batch under way.  Whoever reads its slot must keep it until the slot is not read any more."""

    def __init__(self, stream: Any, started: Any, done: Any) -> None:
        self.stream = stream
        self.started = started
        self.done = done
        self.sent = False
        self.bytes = 0
        self.spans: dict[str, torch.Tensor] = {}
        self.host: dict[str, torch.Tensor] = {}


class _Memory:
    """What must be undone when the transfers end: apart from them, so that they can be collected."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.moving: list[Parcel] = []
        self.registered: dict[tuple[int, int], NDArray[np.uint8]] = {}

    def mark(self, parcel: Parcel) -> None:
        """Give a parcel whose sending was interrupted its event: behind whatever was started of it."""
        if not parcel.sent:
            parcel.bytes = 0
            self.driver.record(parcel.done, self.driver.side)
            parcel.sent = True

    def shut(self) -> None:
        for parcel in self.moving:
            self.mark(parcel)
            self.driver.synchronize(parcel.done)
        self.moving.clear()
        while self.registered:
            self.driver.unregister(self.registered.popitem()[1])


class Transfers:
    """Sends batches to a device, one copy a span.

    ``plans``: the spans in the order of the ring's.  ``moved`` is called with (nanoseconds, bytes) of each transfer
    that is over.
    """

    def __init__(
        self,
        driver: Driver,
        plans: Sequence[SpanPlan],
        noise: UniformNoise | GaussianNoise | None,
        moved: Callable[[int, int], None],
    ) -> None:
        self._driver = driver
        self._plans = tuple(plans)
        self._noise = noise
        self._moved = moved
        self._memory = _Memory(driver)
        self._finalizer = weakref.finalize(self, _Memory.shut, self._memory)

    @property
    def moving(self) -> int:
        """Transfers whose end was not seen yet."""
        return len(self._memory.moving)

    def check_not_capturing(self) -> None:
        """Raise ``LoaderError`` during graph capture, before anything that CUDA forbids then, as asking an event."""
        self._driver.check_not_capturing()

    def prepare(self) -> Parcel:
        """A parcel for a batch, kept from now on until its transfer is over.

        Whoever has the slot's lease hang on the parcel's life can be interrupted anywhere.
        """
        return Parcel(self._driver.current(), self._driver.event(timed=True), self._driver.event(timed=True))

    def send(
        self,
        parcel: Parcel,
        *,
        place: tuple[int, int],
        memory: NDArray[np.uint8],
        spans: Sequence[NDArray[np.generic]],
        host: Mapping[str, NDArray[np.generic]],
        filled: Sequence[NDArray[np.int64] | None],
        seed: int,
    ) -> None:
        """Start the copies of a batch.

        ``place`` and ``memory``: the slot, for registration; ``spans``: bits of each span in it; ``host``: small
        arrays; ``filled[i]``: int64 [runs, 2] rows of span i that get noise, None for none; ``seed`` of the noise.
        """
        driver, plans = self._driver, self._plans
        if place not in self._memory.registered:
            driver.register(memory)
            self._memory.registered[place] = memory
        parcel.spans = {
            plan.name: driver.empty(bits.shape, plan.dtype) for plan, bits in zip(plans, spans, strict=True)
        }
        packed, views = _packed(host, driver.pinned)
        target = driver.empty(packed.shape, torch.uint8)
        parcel.host = {name: _part(target, *view) for name, view in views.items()}
        parcel.bytes = sum(bits.nbytes for bits in spans) + packed.nbytes
        batch = parcel.spans

        def work() -> None:
            self._copy(batch, spans)
            target.copy_(packed, non_blocking=True)
            if self._noise is not None:
                generator = driver.generator(seed)
                for plan, runs in zip(plans, filled, strict=True):
                    if runs is not None:
                        add_noise(self._noise, batch[plan.name], runs, generator)

        self._memory.moving.append(parcel)  # first: what an interrupted call has started is waited for, too
        ready = driver.event()
        driver.record(ready, parcel.stream)
        driver.wait(driver.side, ready)
        driver.record(parcel.started, driver.side)
        driver.run(driver.side, work)
        driver.record(parcel.done, driver.side)
        parcel.sent = True

    def hand_out(self, parcel: Parcel) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(spans, host arrays) of a parcel on the device, for the stream that is current now."""
        driver = self._driver
        stream = driver.current()
        driver.wait(stream, parcel.done)
        spans, host = parcel.spans, parcel.host
        if stream != parcel.stream:
            for tensor in (*spans.values(), *host.values()):
                driver.used_on(tensor, stream)
        parcel.spans, parcel.host = {}, {}  # the caller's alone: dropped early, the memory is free early
        return spans, host

    def retire(self) -> None:
        """Let go of the parcels whose transfer is over, and with them of their slots."""
        still = []
        for parcel in self._memory.moving:
            self._memory.mark(parcel)
            if not self._driver.completed(parcel.done):
                still.append(parcel)
            elif parcel.bytes:
                self._moved(int(self._driver.milliseconds(parcel.started, parcel.done) * 1e6), parcel.bytes)
        self._memory.moving[:] = still

    def close(self) -> None:
        """Wait for what is under way and unregister the ring.  Call it before the ring goes."""
        self._finalizer()

    def _copy(self, batch: Mapping[str, torch.Tensor], spans: Sequence[NDArray[np.generic]]) -> None:
        """Every span to the device, and into the batch's dtype."""
        copied = {}
        for plan, bits in zip(self._plans, spans, strict=True):
            source, out = tensor_of(bits, plan.field), batch[plan.name]
            # What is only staged here is allocated, used and freed on the side stream.
            copied[plan.name] = out if out.dtype == source.dtype else torch.empty_like(source, device=out.device)
            copied[plan.name].copy_(source, non_blocking=True)
        for plan in self._plans:
            if copied[plan.name] is not batch[plan.name]:
                scale = copied[plan.scale] if plan.scale else None
                restored(copied[plan.name], plan.dtype, scale, out=batch[plan.name])


def add_noise(
    noise: UniformNoise | GaussianNoise, states: torch.Tensor, runs: NDArray[np.int64], generator: torch.Generator
) -> None:
    """Add noise in place to the rows ``runs`` (int64 [n, 2]: first row, number of rows) of ``states``.

    As speculators' ``AddUniformNoise`` and ``AddGaussianNoise``, drawn in the dtype of the states.
    """
    for first, count in _merged(runs):
        rows = states[first : first + count]
        drawn = torch.empty_like(rows)
        if isinstance(noise, UniformNoise):
            drawn.uniform_(generator=generator).sub_(0.5).mul_(2 * noise.std)
        else:
            drawn.normal_(generator=generator).mul_(noise.std)
        rows.add_(drawn)


def _merged(runs: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Runs of rows, neighbouring ones joined."""
    merged: list[tuple[int, int]] = []
    for first, count in runs[np.argsort(runs[:, 0], kind="stable")].tolist():
        if merged and merged[-1][0] + merged[-1][1] == first:
            merged[-1] = merged[-1][0], merged[-1][1] + count
        else:
            merged.append((first, count))
    return merged


_View = tuple[int, torch.dtype, tuple[int, ...]]


def _packed(
    host: Mapping[str, NDArray[np.generic]], allocate: Callable[[int], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, _View]]:
    """Small arrays side by side in one allocation, and where each lies: one copy for them all."""
    views: dict[str, _View] = {}
    end = 0
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in host.items()}
    for name, tensor in tensors.items():
        views[name] = end, tensor.dtype, tuple(tensor.shape)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = allocate(end)
    for name, tensor in tensors.items():
        _part(packed, *views[name]).copy_(tensor)
    return packed, views


def _part(whole: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that lies at ``offset`` of uint8 memory."""
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return whole[offset : offset + size].view(dtype).reshape(shape)
