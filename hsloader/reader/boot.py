"""Entry of the feeder process: imports as little as it can, so that the first batch is there soon.

Nearly all of the feeder's start is imports. ``import numcodecs`` loads every codec and the installed packages'
metadata, ``import crc32c`` the metadata too: the feeder needs one extension module of each, and imports it without its
package's ``__init__``. Whatever is unusual about an installation, the ordinary import takes over.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.machinery
import os
import sys
import types
from typing import Any, NoReturn

from hsloader._launch import Parent

__all__ = ["main"]


def main(parent: Parent) -> None:
    """Prepare the imports, then be a feeder."""
    gc.disable()  # while modules are loaded nothing becomes garbage; to look for it takes a tenth of the time
    import_light()
    # The thread that failed; all of them would push the reason out of the 4 KiB that are told.
    faulthandler.enable(all_threads=False)
    from hsloader.reader import feeder

    gc.freeze()  # no collection goes through what stays for good, nor copies the pages that helpers share
    gc.enable()
    feeder.main(parent)


def import_light() -> None:
    """Import ``numcodecs.blosc`` and ``crc32c`` without the rest of their packages."""
    _light_blosc()
    _light("crc32c", "_crc32c", ("crc32c",))


def _light(package: str, module: str, names: tuple[str, ...]) -> Any:
    """Import ``package.module`` under an empty package that has its ``names``; None and no change if that fails."""
    if package in sys.modules:
        return None
    before = set(sys.modules)
    try:
        spec = importlib.machinery.PathFinder.find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            return None
        light = types.ModuleType(package)
        light.__path__ = list(spec.submodule_search_locations)
        light.__spec__ = spec
        sys.modules[package] = light
        inner = importlib.import_module(f"{package}.{module}")
        for name in names:
            setattr(light, name, getattr(inner, name))
    except (ImportError, AttributeError):
        for name in set(sys.modules) - before:
            if name == package or name.startswith(package + "."):
                del sys.modules[name]
        return None
    return inner


def _light_blosc() -> None:
    """Import ``numcodecs.blosc`` without ``multiprocessing``, which it asks for a lock before it decodes.

    The lock guards Blosc's own threads, which this process never lets it start (see ``store.codec``), and with it come
    ``subprocess``, ``tempfile`` and twenty more. Where there can be no lock, numcodecs does without.
    """
    if "multiprocessing" in sys.modules:
        _light("numcodecs", "blosc", ())
        return
    importlib.import_module("numpy")  # before: it is to find everything as it is
    sys.modules["multiprocessing"] = _without_locks()
    try:
        blosc = _light("numcodecs", "blosc", ())
    finally:
        del sys.modules["multiprocessing"]
    try:
        if blosc is not None:
            blosc.decompress(blosc.compress(b"hsloader", b"zstd", 1, 0))
    except Exception:  # another numcodecs, which wants more of it; an extension module is not imported twice
        blosc.multiprocessing = importlib.import_module("multiprocessing")


def _without_locks() -> types.ModuleType:
    """All that numcodecs asks of ``multiprocessing``."""

    def no_lock() -> NoReturn:
        raise ImportError("this process has no locks to share with others")

    def current_process() -> types.SimpleNamespace:
        return types.SimpleNamespace(name="MainProcess", pid=os.getpid())

    module = types.ModuleType("multiprocessing")
    vars(module).update(Lock=no_lock, current_process=current_process)
    return module
