"""What the jobs of the executor tests run."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any


def echo(payload: dict[str, Any]) -> dict[str, Any]:
    import torch

    print(f"job {payload.get('number')}")
    return {"number": payload.get("number"), "threads": torch.get_num_threads(), "pid": os.getpid()}


def meet(payload: dict[str, Any]) -> dict[str, Any]:
    """Ends once as many jobs as given have arrived in the folder: they must run at the same time."""
    folder = Path(payload["folder"])
    (folder / str(payload["number"])).touch()
    while len(list(folder.iterdir())) < payload["together"]:
        time.sleep(0.01)
    return {}


def after(payload: dict[str, Any]) -> dict[str, Any]:
    """Ends once a file exists."""
    while not Path(payload["file"]).exists():
        time.sleep(0.01)
    return {}


def wait_for_ever(payload: dict[str, Any]) -> dict[str, Any]:
    Path(payload["note"]).write_text(f"{os.getpid()}\n")
    threading.Event().wait()
    return {}


def fail(payload: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("on purpose")


def die(payload: dict[str, Any]) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}
