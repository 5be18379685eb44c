"""The command line: parse, call, print. A `UserError` becomes one sentence and exit code 2."""

from __future__ import annotations

import importlib
import os
import sys

# Looking for pydantic plugins reads the metadata of every installed package, at every start.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

import typer

from auto_research.runtime.errors import EXIT_CODE, UserError

COMMANDS = {
    "list": "catalogue:list_papers",
    "show": "catalogue:show",
    "reproduce": "reproduce:reproduce",
    "audit": "audit:audit_app",
    "rehearse": "rehearse:rehearse",
    "evolve": "evolve:evolve_app",
    "prepare": "prepare:prepare",
    "doctor": "doctor:doctor",
}
"""Command -> module of this folder and the function or the group of commands in it."""


def build(words: list[str]) -> typer.Typer:
    """The program for a command line; only the module of the command that it names is imported."""
    app = typer.Typer(
        name="auto-research",
        help="Papers made runnable, proven on the accelerator they claim, improved by controlled experiments.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(lambda: None)  # keeps a single registered command a command
    named = words[:1] if words[:1] and words[0] in COMMANDS else list(COMMANDS)
    for name in named:
        module, function = COMMANDS[name].split(":")
        command = getattr(importlib.import_module(f"auto_research.cli.{module}"), function)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def main() -> None:
    """Entry point of the `auto-research` program."""
    try:
        build(sys.argv[1:])()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)
