"""A controller in a process of its own, for tests that kill it: `python drive.py run|resume FOLDER [MOMENT [NUMBER]]`.

FOLDER holds `wanted.json`, the configuration. With MOMENT the process sends itself SIGKILL at the NUMBER-th (1) event
of that name; `write` is the moment between a cell's result and its event.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from auto_research.evolve import events
from auto_research.evolve.controller import resume, run
from auto_research.evolve.records import RunConfig
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import read_record


def main(how: str, folder: Path, moment: str = "", number: str = "1") -> int:
    left = int(number)

    def at(name: str) -> None:
        nonlocal left
        left -= name == moment
        if name == moment and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    plain = events.EventLog.vouch

    def vouch(log: events.EventLog, event: str, file: str, **facts: Any) -> None:
        at("write" if event == "cell_ended" else "file")
        plain(log, event, file, **facts)

    events.EventLog.vouch = vouch  # type: ignore[assignment,method-assign]
    config = read_record(folder / "wanted.json", RunConfig)
    try:
        if how == "run":
            run(config, folder, lambda event: at(event["event"]))
        else:
            resume(folder / config.run, config, lambda event: at(event["event"]))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
