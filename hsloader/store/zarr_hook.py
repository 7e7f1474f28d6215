"""Registers bfloat16 with zarr as soon as both hsloader and zarr are imported, in whichever order.

zarr 3.1 collects the entry point ``zarr.data_type`` but never loads it when it opens an array, so the type has to be
registered by hand; importing zarr for that would cost each process that imports hsloader half a second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    # importlib asks for the methods, not for the classes, whose import would cost a tenth of the feeder's start.
    Loader = MetaPathFinder = object

__all__ = ["register_with_zarr"]


def register_with_zarr() -> None:
    """Register bfloat16 now if zarr is imported, else right after its import.  Imports nothing itself until then."""
    if "zarr" in sys.modules:
        _register()
    elif not any(isinstance(finder, _ZarrFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ZarrFinder())


def _register() -> None:
    try:
        from hsloader.store.bfloat16 import register

        register()
    except Exception as error:  # a zarr that differs must still be usable for whoever imported it
        import logging

        told = "zarr cannot read bfloat16 arrays: registering the type failed: %r"
        logging.getLogger("hsloader").warning(told, error)


class _ZarrFinder(MetaPathFinder):
    """Finds zarr through the other finders and has its loader call ``_register`` at the end."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "zarr":
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ThenRegister(spec.loader, self)
                return spec
        return None


class _ThenRegister(Loader):
    """Runs zarr with its own loader, takes the hook away without a trace and registers the type.

    Only an import runs it: whoever just looks whether zarr exists leaves the finder in place.
    """

    def __init__(self, loader: Loader, finder: _ZarrFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _register()
