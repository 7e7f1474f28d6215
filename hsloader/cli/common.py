"""What every command shares: its common options, and how errors become exit codes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, ParamSpec

import typer

from hsloader.cli import output
from hsloader.errors import HsloaderError

__all__ = ["FAILED", "INTERRUPTED", "SET_ASIDE", "Json", "Quiet", "Traceback", "clear_errors"]

FAILED = 1
SET_ASIDE = 3
INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where in the code an error came from.")]

P = ParamSpec("P")


def clear_errors(command: Callable[P, int | None]) -> Callable[P, None]:
    """Wrap a command that returns its exit status: expected errors become one clear message and exit status 1.

    With ``--json`` the message is also the document, ``{"error": {"type": ..., "message": ...}}``. Anything but
    :class:`HsloaderError` and :class:`OSError` is a bug and keeps its traceback.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            status = command(*args, **kwargs)
        except BrokenPipeError:
            raise typer.Exit(FAILED) from None  # whoever read our output went away; nobody is left to be told
        except (HsloaderError, OSError) as problem:
            if kwargs.get("traceback"):
                raise
            if kwargs.get("as_json"):
                output.print_json({"error": {"type": type(problem).__name__, "message": str(problem)}})
            output.error(problem)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            output.line("interrupted", style="bad", err=True)
            raise typer.Exit(INTERRUPTED) from None
        raise typer.Exit(status or 0)

    return wrapped
