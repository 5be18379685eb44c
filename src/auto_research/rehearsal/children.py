"""Child processes: each gets a virtual card of its own and leaves its findings in a folder for the parent.

A ``sitecustomize`` on ``PYTHONPATH`` waits for ``import torch`` and then installs the card (``spawn``, launchers like
``torchrun``, Ray workers). Forked children inherit the running card.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from .locate import Site
from .rules import RULES, Finding, Recorder, suppress_pattern
from .session import Session, active

#: Carries the settings to children; its presence switches the rehearsal on there.
VARIABLE: Final = "AUTO_RESEARCH_REHEARSAL"
_STARTUP: Final = Path(__file__).parent / "startup"


@contextmanager
def followed(options: argparse.Namespace) -> Iterator[Path]:
    """While the body runs, children of this process rehearse too; yields the folder of their findings."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        settings = {
            "card": options.card,
            "memory": options.memory,
            "devices": options.devices,
            "stop": options.stop,
            "ignore": list(options.ignore),
            "folder": folder,
            "parent": os.getpid(),
        }
        with environment(settings):
            yield Path(folder)


@contextmanager
def environment(settings: dict[str, Any]) -> Iterator[None]:
    """Put the settings and the start-up hook into the environment that children inherit."""
    source = str(Path(__file__).resolve().parents[2])
    before = {name: os.environ.get(name) for name in (VARIABLE, "PYTHONPATH")}
    os.environ[VARIABLE] = json.dumps(settings)
    paths = [str(_STARTUP), source, *filter(None, [before["PYTHONPATH"]])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start() -> None:
    """Called in a child right after torch is imported: install the card, and report at exit."""
    raw = os.environ.get(VARIABLE)
    if raw is None or active() is not None:
        return
    settings = json.loads(raw)
    if settings["parent"] == os.getpid():
        return
    from .api import install
    from .memory import card_profile

    recorder = Recorder(stop=settings["stop"], ignore=tuple(suppress_pattern(e) for e in settings["ignore"]))
    session = Session(
        card_profile(settings["card"], settings["memory"]),
        device_count=settings["devices"],
        recorder=recorder,
        check_memory=True,
    )
    install(session)
    report_to_parent(recorder)


def report_to_parent(recorder: Recorder) -> None:
    """In a child (spawned or forked) every new finding goes to the parent's folder at once."""
    raw = os.environ.get(VARIABLE)
    if raw is not None:
        folder = Path(json.loads(raw)["folder"])
        recorder.sink = lambda finding: _append(folder, finding)


def _append(folder: Path, finding: Finding) -> None:
    """Write a finding at once: a worker may be killed without running its exit handlers."""
    line = json.dumps(
        {
            "rule": finding.rule,
            "message": finding.message,
            "site": [finding.site.file, finding.site.line, finding.site.function, finding.site.via],
            "op": finding.op,
            "arguments": list(finding.arguments),
            "fix": finding.fix,
        }
    )
    if folder.is_dir():
        with (folder / f"{os.getpid()}.jsonl").open("a") as stream:
            stream.write(line + "\n")


def merge(folder: Path, session: Session) -> None:
    """Add what the children found to the parent's findings, each place once."""
    recorder = session.recorder
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            site = Site(*entry["site"])
            key = (entry["rule"], site.file, site.line, site.via)
            recorder.counts[key] += 1
            if recorder.counts[key] == 1:
                rule = RULES[entry["rule"]]
                recorder.findings.append(
                    Finding(
                        rule.id,
                        entry["message"],
                        site,
                        entry["op"],
                        tuple(entry["arguments"]),
                        entry["fix"],
                        rule.level,
                    )
                )
