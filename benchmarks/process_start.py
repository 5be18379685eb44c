"""How long until an adapter's first line runs: a warm fork server against a fresh interpreter.

Usage::

    python benchmarks/process_start.py [--repeats 15]

Both sides start a process that has torch loaded and enters the same function, whose first line reads the
monotonic clock that all processes of a machine share. They alternate, so that other work on the machine
meets both alike. ``fork server, first`` includes starting the server, once per run of a program; the server
also loads what torch imports at the first optimiser step, which the fresh interpreter has still to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from auto_research.runtime.process import Job, close_servers, run_isolated

AIM_S = 0.3
HERE = Path(__file__).resolve().parent


def first_line(payload: dict[str, Any]) -> dict[str, Any]:
    """The adapter: its first line."""
    return {"entered": time.monotonic()}


def forked(folder: Path) -> float:
    """Seconds from the call to the first line, from the fork server."""
    job = Job(
        target="process_start:first_line",
        timeout_s=600,
        log_path=folder / "log",
        result_path=folder / "result.json",
        threads=1,
    )
    before = time.monotonic()
    outcome = run_isolated(job)
    if outcome.result is None:
        sys.exit(f"{outcome.state}: {outcome.reason}\n{outcome.log_tail}")
    return float(str(outcome.result["entered"])) - before


def fresh(folder: Path) -> float:
    """Seconds from the call to the first line, in a new interpreter that imports torch."""
    code = "import json, torch, process_start; print(json.dumps(process_start.first_line({})))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["entered"]) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="starts of each kind, at least 10")
    repeats = max(10, parser.parse_args().repeats)
    sys.path.insert(0, str(HERE))  # jobs import their function from the caller's path
    starts: dict[str, Callable[[Path], float]] = {"fork server, warm": forked, "fresh interpreter": fresh}
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        first = forked(folder)
        for _ in range(repeats):
            for name, begin in starts.items():
                seconds[name].append(begin(folder))
    close_servers()
    print(f"start to first adapter line, seconds, {repeats} starts of each, load {os.getloadavg()[0]:.1f}\n")
    print(f"{'':22}{'median':>9}{'best':>9}{'worst':>9}")
    print(f"{'fork server, first':22}{first:9.3f}")
    for name, values in seconds.items():
        print(f"{name:22}{statistics.median(values):9.3f}{min(values):9.3f}{max(values):9.3f}")
    warm, cold = (statistics.median(values) for values in seconds.values())
    print(f"\n{cold / warm:.0f} times faster; the aim of {AIM_S} s is {'met' if warm <= AIM_S else 'MISSED'}")


if __name__ == "__main__":
    main()
