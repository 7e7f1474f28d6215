"""Entry of the feeder process: imports as little as it can, so that the first batch is there soon.

``import numcodecs`` loads every codec and the installed packages' metadata, ``import crc32c`` the metadata too; half of
the feeder's start would be theirs. The feeder needs one extension module of each, and imports it without its package's
``__init__``; whatever is unusual about an installation, the ordinary import takes over.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.machinery
import sys
import types

from hsloader._launch import Parent

__all__ = ["main"]


def main(parent: Parent) -> None:
    """Prepare the imports, then be a feeder."""
    import_light()
    # The thread that failed; all of them would push the reason out of the 4 KiB that are told.
    faulthandler.enable(all_threads=False)
    from hsloader.reader import feeder

    feeder.main(parent)


def import_light() -> None:
    """Import ``numcodecs.blosc`` and ``crc32c`` without the rest of their packages."""
    _light("numcodecs", "blosc", ())
    _light("crc32c", "_crc32c", ("crc32c",))


def _light(package: str, module: str, names: tuple[str, ...]) -> None:
    """Import ``package.module`` under an empty package that has its ``names``; nothing happens if that fails."""
    if package in sys.modules:
        return
    before = set(sys.modules)
    try:
        spec = importlib.machinery.PathFinder.find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            return
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
