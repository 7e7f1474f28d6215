"""Where a line goes: to the ``hsloader`` logger if anybody listens to it, else to stderr."""

from __future__ import annotations

import contextlib
import logging
import sys

__all__ = ["say"]


def say(text: str, level: int = logging.INFO) -> None:
    """Say something to the user, by the rule of the package: no handler and no level is ever set by us.

    Where neither the root logger nor ``hsloader`` has a handler the text goes to stderr, so that a plain script is not
    silent; else it goes to the logger, which whoever configured it directs and filters.
    """
    logger = logging.getLogger("hsloader")
    if logger.handlers or (logger.propagate and logging.getLogger().handlers):
        logger.log(level, "%s", text)
    elif (logger.level == logging.NOTSET or logger.isEnabledFor(level)) and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # closed, or a pipe that nobody reads
            sys.stderr.write(f"hsloader: {text}\n")
            sys.stderr.flush()
