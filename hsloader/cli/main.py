"""The hsloader command: puts the subcommands together. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import hsloader
from hsloader.cli import bench, convert, demo, doctor, export, info, inspect, top, verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="hsloader",
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


app.command()(demo.demo)
app.command()(inspect.inspect)
app.command(cls=convert.Command)(convert.convert)
app.command()(info.info)
app.command()(verify.verify)
app.command()(export.export)
app.command()(bench.bench)
app.command()(doctor.doctor)
app.command()(top.top)


def main() -> None:
    """Entry point of the ``hsloader`` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names need not be UTF-8, terminals need not speak it
    app()
