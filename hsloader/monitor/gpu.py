"""GPU utilisation through NVML, where ``nvidia-ml-py`` is installed (``pip install 'hsloader[gpu]'``)."""

from __future__ import annotations

import importlib
from typing import Any

from hsloader.monitor.samples import GpuSample

__all__ = ["GpuReader"]

_ABSENT = "GPU utilisation is not shown: nvidia-ml-py is not installed (pip install 'hsloader[gpu]')"


class GpuReader:
    """Samples every GPU that NVML shows; says why where there is none."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._busy: list[list[int]] = []
        self._note = ""
        try:
            pynvml: Any = importlib.import_module("pynvml")
        except ImportError:
            self._note = _ABSENT
            return
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self._note = f"GPU utilisation is not shown: NVML says {error}"
        self._busy = [[] for _ in self._handles]

    def sample(self) -> None:
        """Take one reading of every GPU (NVML's own mean over its last period of at most a second)."""
        for handle, busy in zip(self._handles, self._busy, strict=True):
            try:
                busy.append(int(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
            except self._nvml.NVMLError:  # MIG devices have no utilisation
                continue

    def result(self) -> tuple[list[GpuSample] | None, str]:
        """The means of the readings, or None and the reason; NVML is shut down."""
        if self._nvml is None:
            return None, self._note
        found = []
        for index, (handle, busy) in enumerate(zip(self._handles, self._busy, strict=True)):
            try:
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                name = self._nvml.nvmlDeviceGetName(handle)
                pids = tuple(int(p.pid) for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
                uuid = _text(self._nvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-")
            except self._nvml.NVMLError:
                continue
            if busy:
                share = sum(busy) / len(busy) / 100
                found.append(GpuSample(index, _text(name), share, int(memory.used), int(memory.total), pids, uuid))
        self._nvml.nvmlShutdown()
        return found or None, self._note or ("" if found else "GPU utilisation is not shown: NVML shows no GPU")


def _text(name: object) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
