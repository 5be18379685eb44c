"""``python -m auto_research.rehearsal [options] script.py ARGS...``: rehearse any script written for CUDA."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from auto_research.runtime.errors import UserError

from . import children
from .api import install, record_uncaught
from .memory import CARDS, card_profile
from .report import Report
from .rules import Recorder, suppress_pattern
from .session import Session

CLEAN, FAULTS, NOT_REHEARSABLE = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m auto_research.rehearsal",
        description="Run a script written for CUDA on this machine without a card, and list what a card would refuse.",
        epilog="Exit code: 0 clean, 1 findings, 2 the script could not be rehearsed.",
    )
    p.add_argument("--card", default="a30", metavar="NAME", help=f"card profile: {', '.join(CARDS)} (default: a30)")
    p.add_argument("--memory", metavar="SIZE", help="the card's memory instead of the profile's, such as 24GiB")
    p.add_argument("--devices", type=int, default=1, metavar="N", help="how many cards the script sees (default: 1)")
    mode = p.add_mutually_exclusive_group()
    mode.add_argument("--keep-going", action="store_true", help="list every fault of the run (default)")
    mode.add_argument("--stop", action="store_true", help="raise what CUDA raises at the first fault")
    p.add_argument(
        "--fail-on", default="fault", metavar="WHAT", help="fault (default), warning, never, or rules: DEV-1,DTY-1"
    )
    p.add_argument(
        "--ignore", action="append", default=[], metavar="RULE[:PATH]", help="leave findings out; may be repeated"
    )
    p.add_argument("--json", metavar="FILE", help="write the report as JSON")
    p.add_argument("--html", metavar="FILE", help="write the report as one HTML page")
    p.add_argument("-m", dest="module", metavar="MODULE", help="run a module instead of a script")
    p.add_argument("script", nargs="?", help="the script")
    p.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return p


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the script with its own (which may look like ours)."""
    takes_value = {"--card", "--memory", "--devices", "--fail-on", "--ignore", "--json", "--html"}
    i = 0
    while i < len(argv):
        word = argv[i]
        if word == "--":
            return [*argv[:i]], [*argv[i + 1 :]]
        if word == "-m":
            return [*argv[: i + 2]], [*argv[i + 2 :]]
        if not word.startswith("-"):
            return [*argv[:i]], [*argv[i:]]
        i += 2 if word in takes_value else 1
    return [*argv], []


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse a script; returns the exit code."""
    ours, rest = _split(list(sys.argv[1:] if argv is None else argv))
    options = parser().parse_args(ours)
    try:
        return _rehearse(options, rest)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return NOT_REHEARSABLE


def _rehearse(options: argparse.Namespace, rest: list[str]) -> int:
    if options.module is None:
        if not rest:
            raise UserError("Name the script to rehearse: python -m auto_research.rehearsal train.py ARGS...")
        if not os.path.isfile(rest[0]):
            raise UserError(f"There is no script '{rest[0]}'.")
    if options.devices < 1:
        raise UserError("--devices must be at least 1.")
    recorder = Recorder(stop=options.stop, ignore=tuple(suppress_pattern(entry) for entry in options.ignore))
    session = Session(
        card_profile(options.card, options.memory), device_count=options.devices, recorder=recorder, check_memory=True
    )
    report = Report(session)
    report.failing(options.fail_on)  # an unknown rule is an error before the run, not after it
    with children.followed(options) as folder:
        stop = install(session)
        try:
            outcome = _run(options.module, rest, session)
        finally:
            stop()
        children.merge(folder, session)
    report.finish()
    report.print_table()
    if options.json:
        report.write_json(options.json)
    if options.html:
        report.write_html(options.html)
    if report.failing(options.fail_on):
        return FAULTS
    return NOT_REHEARSABLE if outcome else CLEAN


def _run(module: str | None, rest: list[str], session: Session) -> str:
    """Run the user's program; returns why it ended early, or ''."""
    argv = sys.argv
    path = list(sys.path)
    try:
        if module is not None:
            sys.argv = [module, *rest]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(rest)
            sys.path.insert(0, os.path.dirname(os.path.abspath(rest[0])))
            runpy.run_path(rest[0], run_name="__main__")
        return ""
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            sys.stderr.write(f"{exit_.code}\n")  # as the interpreter does
        text = _exit_reason(exit_.code)
        if text:
            session.note(text)
        return text
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        record_uncaught(session, error)
        traceback.print_exc()
        text = f"the script ended early: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        session.note(text)
        return text
    finally:
        sys.argv, sys.path[:] = argv, path


def _exit_reason(code: Any) -> str:
    return "" if code in (None, 0) else f"the script exited with {code}"


if __name__ == "__main__":
    raise SystemExit(main())
