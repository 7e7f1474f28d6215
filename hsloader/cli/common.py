"""What every command shares: its common options, and how errors become exit codes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec

import typer
from typer.core import TyperCommand

from hsloader.cli import output
from hsloader.errors import HsloaderError

__all__ = ["FAILED", "INTERRUPTED", "SET_ASIDE", "Command", "Json", "Quiet", "Traceback", "clear_errors", "parse_size"]

FAILED = 1
SET_ASIDE = 3
INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where in the code an error came from.")]

P = ParamSpec("P")


class Command(TyperCommand):
    """Shows arguments in the usage line as every other program does: ``SRC``, not ``{SRC}``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Options and arguments as the usage line has them."""
        return [piece.removeprefix("{").removesuffix("}") for piece in super().collect_usage_pieces(ctx)]


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*\Z", flags=re.IGNORECASE)


def parse_size(text: str) -> int:
    """The bytes that ``500MB``, ``8GiB`` or a plain number mean."""
    match = _SIZE.match(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; expected for example 500MB, 8GiB or a number of bytes")
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}[match[2].lower()]
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


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
