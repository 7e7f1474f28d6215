"""The hsloader command: puts the subcommands together. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import hsloader
from hsloader.cli import bench, convert, demo, doctor, export, info, inspect, output, top, verify
from hsloader.cli.common import Command

__all__ = ["app", "main"]

# Click's error of a command line that cannot be understood, wherever this version of typer has it from.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class _Group(TyperGroup):
    """With ``--json``, a command line that is refused gives a document, too, as every other error does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remember whether a document is wanted."""
        ctx.meta["hsloader.json"] = "--json" in args
        return list(super().parse_args(ctx, args))

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what is wrong with its command line comes to light here."""
        try:
            return super().invoke(ctx)
        except _UsageError as problem:
            if ctx.meta["hsloader.json"]:
                message = problem.format_message()  # type: ignore[attr-defined]
                output.print_json({"error": {"type": "UsageError", "message": message}})
            raise


app = typer.Typer(
    name="hsloader",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,  # brackets in help texts are shapes, not markup
    pretty_exceptions_enable=False,  # an unforeseen error is a bug, and its plain traceback is what a report needs
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hsloader {hsloader.__version__}")
        raise typer.Exit


@app.callback()
def _hsloader(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Convert, check and stream hidden states for draft-model training."""


app.command(cls=Command)(demo.demo)
app.command(cls=Command)(inspect.inspect)
app.command(cls=convert.ConvertCommand)(convert.convert)
app.command(cls=Command)(info.info)
app.command(cls=Command)(verify.verify)
app.command(cls=Command)(export.export)
app.command(cls=Command)(bench.bench)
app.command(cls=Command)(doctor.doctor)
app.command(cls=Command)(top.top)


def main() -> None:
    """Entry point of the ``hsloader`` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names need not be UTF-8, terminals need not speak it
    app()
