"""Convert, check and stream hidden states for draft-model training at the speed of the disk.

Importing this package is cheap: each public name is loaded on first use, so that neither the feeder process nor
``hsloader --help`` waits for torch or zarr.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hsloader.store import zarr_hook as _zarr_hook

__version__ = "0.1.0"

# Where each public name lives. The key set is the public surface; a test pins it.
_HOMES = {
    "DataLoader": "hsloader.loader",
    "HiddenStateDataset": "hsloader.torch_dataset",
    "ReadOptions": "hsloader.reader.options",
    "UniformNoise": "hsloader.batches.noise",
    "Writer": "hsloader.store.writer",
    "bench": "hsloader.benchmark.api",
    "convert": "hsloader.conversion.api",
    "export": "hsloader.conversion.export",
    "inspect": "hsloader.conversion.inspection",
    "open_dataset": "hsloader.store.dataset",
    "verify": "hsloader.store.verification",
}
_ERRORS = (
    "ConversionError",
    "DamageError",
    "DatasetError",
    "FeederError",
    "HsloaderError",
    "IncompatibleError",
    "LoaderError",
    "SettingsChangedError",
    "SourceError",
    "StateError",
    "StoreBusyError",
)
_HOMES.update(dict.fromkeys(_ERRORS, "hsloader.errors"))

__all__ = [
    "ConversionError",
    "DamageError",
    "DataLoader",
    "DatasetError",
    "FeederError",
    "HiddenStateDataset",
    "HsloaderError",
    "IncompatibleError",
    "LoaderError",
    "ReadOptions",
    "SettingsChangedError",
    "SourceError",
    "StateError",
    "StoreBusyError",
    "UniformNoise",
    "Writer",
    "bench",
    "convert",
    "export",
    "inspect",
    "open_dataset",
    "verify",
]

if TYPE_CHECKING:
    from hsloader.batches.noise import UniformNoise
    from hsloader.benchmark.api import bench
    from hsloader.conversion.api import convert
    from hsloader.conversion.export import export
    from hsloader.conversion.inspection import inspect
    from hsloader.errors import (
        ConversionError,
        DamageError,
        DatasetError,
        FeederError,
        HsloaderError,
        IncompatibleError,
        LoaderError,
        SettingsChangedError,
        SourceError,
        StateError,
        StoreBusyError,
    )
    from hsloader.loader import DataLoader
    from hsloader.reader.options import ReadOptions
    from hsloader.store.dataset import open_dataset
    from hsloader.store.verification import verify
    from hsloader.store.writer import Writer
    from hsloader.torch_dataset import HiddenStateDataset


_zarr_hook.register_with_zarr()


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hsloader' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
