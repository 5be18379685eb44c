"""The command line: parse, call, print. A `UserError` becomes one sentence and exit code 2."""

from __future__ import annotations

import sys

import typer

from auto_research.runtime.errors import EXIT_CODE, UserError

app = typer.Typer(
    name="auto-research",
    help="Papers made runnable, proven on the accelerator they claim, improved by controlled experiments.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _register() -> None:
    """Adds the commands; their modules import nothing heavy at the top."""
    from auto_research.cli.audit import audit_app
    from auto_research.cli.catalogue import list_papers, show
    from auto_research.cli.doctor import doctor
    from auto_research.cli.prepare import prepare
    from auto_research.cli.reproduce import reproduce

    app.command("list")(list_papers)
    app.command("show")(show)
    app.command("reproduce")(reproduce)
    app.add_typer(audit_app, name="audit")
    app.command("prepare")(prepare)
    app.command("doctor")(doctor)


def main() -> None:
    """Entry point of the `auto-research` program."""
    _register()
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)
