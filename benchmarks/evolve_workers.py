"""Trials per minute of an experiment with one worker and with two, and what the controller itself costs.

Usage::

    python benchmarks/evolve_workers.py [--workflow rankmixer-movielens] [--trials 4] [--size steps=200]

The same baseline cells (one seed each, one thread each) run once with one slot and once with two, in processes of
their own as in every run; the clock runs from the first cell's start to the last one's end. The controller's cost is
the processor time of its own process in that span (events, files, scheduling), for each trial and as a share of the
processor time of a trial. What a generation costs beside its cells is shown too: the processes that load data and
propose. The machine should be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from auto_research.evolve.controller import run
from auto_research.evolve.records import RunConfig
from auto_research.runtime.versions import cores, environment

AIM_SPEED_UP, AIM_SHARE = 1.7, 0.01


def measure(workflow: str, trials: int, sizes: dict[str, int], workers: int) -> dict[str, float]:
    """Trials per minute, and the controller's processor seconds a trial."""
    at: dict[str, tuple[float, float]] = {}

    def watch(event: dict[str, Any]) -> None:
        now = time.monotonic(), time.process_time()
        if event["event"] == "cell_started":
            at.setdefault("start", now)
        if event["event"] == "cell_ended":
            at["end"] = now

    config = RunConfig(
        run=f"workers-{workers}",
        workflow=workflow,
        generations=0,
        population=1,
        seeds=list(range(trials)),
        random_search=False,
        sizes=sizes,
        where={"workers": workers, "cpu_threads": 1, "storage": "none", "test": "manual"},
    )
    with tempfile.TemporaryDirectory() as folder:
        before = time.monotonic()
        record = run(config, Path(folder), watch)
    cells = record.trials[0].cells
    if any(cell.state != "completed" for cell in cells):
        sys.exit(f"not every trial completed: {[cell.state for cell in cells]}")
    seconds, processor = (at["end"][i] - at["start"][i] for i in (0, 1))
    used = sum(cell.cpu_seconds for cell in cells) / trials
    return {
        "trials_per_minute": 60 * trials / seconds,
        "trial_processor_s": used,
        "controller_s_per_trial": processor / trials,
        "controller_share": processor / trials / used,
        "before_the_first_trial_s": at["start"][0] - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflow", default="rankmixer-movielens")
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--size", action="append", default=[], help="name=number; may be repeated")
    options = parser.parse_args()
    sizes = {name: int(value) for name, value in (text.split("=") for text in options.size)}
    measure(options.workflow, 1, sizes, 1)  # fork server started, data read once
    found = {workers: measure(options.workflow, options.trials, sizes, workers) for workers in (1, 2)}
    speed_up = found[2]["trials_per_minute"] / found[1]["trials_per_minute"]
    share = max(values["controller_share"] for values in found.values())
    print(json.dumps({"workflow": options.workflow, "workers": found, "speed_up": speed_up}, indent=2))
    print(f"cores {cores()}, {environment()['cpu']}, torch {environment()['torch']}")
    for name, value, aim, holds in (
        ("speed-up of two workers", f"{speed_up:.2f}", f"at least {AIM_SPEED_UP}", speed_up >= AIM_SPEED_UP),
        ("controller's share of a trial", f"{share:.2%}", f"under {AIM_SHARE:.0%}", share < AIM_SHARE),
    ):
        print(f"{name}: {value} (aim: {aim}) {'holds' if holds else 'DOES NOT HOLD'}")


if __name__ == "__main__":
    main()
