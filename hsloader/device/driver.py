"""CUDA as a transfer needs it: streams, events, memory, and what is registered with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.errors import LoaderError

__all__ = ["CudaDriver", "Driver"]

_PORTABLE = 1  # cudaHostRegisterPortable: registered for every CUDA context of the process
_ALREADY_REGISTERED = 712
_STREAMS_ENTER = hasattr(torch.cuda.Stream, "__enter__")  # newer torch: a fifth of torch.cuda.stream()'s time


class Driver(Protocol):
    """The part of CUDA that a transfer needs; streams and events are whatever the driver makes of them."""

    side: Any

    @property
    def uuid(self) -> str:
        """The device's UUID, as ``01234567-89ab-cdef-0123-456789abcdef``; empty where torch does not tell it."""

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

    @property
    def uuid(self) -> str:
        """See ``Driver``."""
        return str(getattr(torch.cuda.get_device_properties(self.device), "uuid", ""))

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
        with cast(contextlib.AbstractContextManager[None], stream if _STREAMS_ENTER else torch.cuda.stream(stream)):
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
            if status == _ALREADY_REGISTERED:
                # By a call that ctrl-C cut short, or what lay at this address before still is, whose pages copies would
                # read instead of these.
                cudart.cudaHostUnregister(memory.ctypes.data)
                status = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE))
                self._forget_error()
        if status != 0:
            self._forget_error()
            raise LoaderError(
                f"cudaHostRegister of {memory.nbytes:,} bytes failed with CUDA error {status}; if locked memory is "
                "limited (ulimit -l, the container's memory limit), give a smaller ReadOptions(prefetch=...)"
            )

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """See ``Driver``."""
        with torch.cuda.device(self.device):
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if cudart.cudaHostUnregister(memory.ctypes.data):
                self._forget_error()

    def _forget_error(self) -> None:
        """Have CUDA forget that a call failed: it would tell so after the script's next kernel, as if that had."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)
