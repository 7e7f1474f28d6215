"""The errors of hsloader, split by what the caller can do about them.

::

    HsloaderError
    ├── SourceError            a producer's file cannot be taken as it is
    ├── ConversionError        a conversion was refused, or stopped and can be resumed
    │   └── SettingsChangedError    a rerun asks for something else than the run it would resume
    ├── DatasetError           what lies at DST is not a dataset this version can open
    │   ├── DamageError        the dataset is damaged: missing, truncated, swapped or flipped bytes
    │   └── IncompatibleError  the data are sound but do not fit: another format version, other
    │                          fields, another norm state or layer set than was asked for
    ├── StoreBusyError         somebody else holds a lock, or the file system has no locks
    └── LoaderError            the running loader cannot go on
        ├── FeederError        the reading process died, and restarting it did not help
        └── StateError         a state does not belong to this loader, or comes at the wrong moment

Builtins are raised where they fit: ``FileNotFoundError`` for a path that is not there, ``ValueError`` and
``TypeError`` for arguments.  Every message says what failed, where, what was expected, what was found and what
to do.
"""

from __future__ import annotations

__all__ = [
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
]


class HsloaderError(Exception):
    """Base of every error that hsloader raises on its own account."""


class SourceError(HsloaderError):
    """A producer's file cannot be taken as it is; ``reason`` is the sentence that a report lists for it."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason

    def __reduce__(self) -> tuple[type[SourceError], tuple[str, str]]:
        return type(self), (self.path, self.reason)


class ConversionError(HsloaderError):
    """A conversion was refused before it began, or stopped in a state that can be resumed."""


class SettingsChangedError(ConversionError):
    """A rerun differs in its settings or sources from the run whose journal it found."""


class DatasetError(HsloaderError):
    """The path does not hold a dataset that this version can open."""


class DamageError(DatasetError):
    """Bytes of the dataset are missing, truncated, swapped or changed."""


class IncompatibleError(DatasetError):
    """The dataset is sound, but not what the caller needs (version, fields, norm state, layers)."""


class StoreBusyError(HsloaderError):
    """A lock is held by somebody else, or cannot be had on this file system."""


class LoaderError(HsloaderError):
    """The running loader cannot go on."""


class FeederError(LoaderError):
    """The feeder process died and restarting it did not help."""


class StateError(LoaderError):
    """A state does not belong to this loader, or is loaded at the wrong moment."""
