"""What isolated processes run in the tests. Everything here is called by name in a process of its own."""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

Payload = dict[str, Any]


def echo(payload: Payload) -> Payload:
    return {"payload": payload}


def temporary(payload: Payload) -> Payload:
    """Where temporary files go."""
    import tempfile

    return {"folder": tempfile.gettempdir()}


def surroundings(payload: Payload) -> Payload:
    """What the process finds: modules, CUDA, session, environment, folder, threads."""
    import torch

    return {
        "loaded": [name for name in payload.get("modules", []) if name in sys.modules],
        "cuda_initialized": torch.cuda.is_initialized(),
        "leads_session": os.getsid(0) == os.getpid() == os.getpgrp(),
        "environment": {name: os.environ.get(name) for name in payload.get("variables", [])},
        "folder": os.getcwd(),
        "threads": torch.get_num_threads(),
        "main_file": getattr(sys.modules["__main__"], "__file__", None),
        "set_order": list({"a", "b", "c", "d", "e", "f"}),
        "pid": os.getpid(),
        "parent": os.getppid(),
    }


def draws(payload: Payload) -> Payload:
    """Numbers drawn after seeding, and the order of a set of strings."""
    import numpy as np
    import torch

    from auto_research.runtime.device import seed_everything

    if payload.get("seed") is not None:
        seed_everything(payload["seed"])
    return {
        "python": random.random(),
        "numpy": float(np.random.rand()),  # noqa: NPY002 - what seed_everything promises
        "torch": float(torch.rand(())),
        "set": list({f"user {i}" for i in range(20)}),
    }


def wait_for_ever(payload: Payload) -> Payload:
    print("waiting", flush=True)
    threading.Event().wait()
    return {}


def stubborn_tree(payload: Payload) -> Payload:
    """Ignore SIGTERM with a child, a grandchild and a daemon that left the session; all wait for ever."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start_stray(payload)
    print("waiting", flush=True)
    while True:
        signal.pause()


def start_stray(payload: Payload) -> Payload:
    """Leave behind a child, a grandchild and a daemon (double fork, own session), all deaf to SIGTERM."""
    pids = Path(payload["pids"])
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    wait = "signal.pause()"
    note = f"import os; open({str(pids)!r}, 'a').write(str(os.getpid()) + chr(10))"
    leaf = f"{deaf}; {note}; {wait}"
    daemon = f"import os; os.fork() and os._exit(0); os.setsid(); {leaf}"
    nested = (
        f"import subprocess, sys; {deaf}; {note}; subprocess.Popen([sys.executable, '-c', {leaf!r}]); "
        f"subprocess.Popen([sys.executable, '-c', {daemon!r}]); {wait}"
    )
    subprocess.Popen([sys.executable, "-c", nested])
    while not pids.exists() or pids.read_text().count("\n") < 3:
        time.sleep(0.01)
    return {"left": 3}


def die(payload: Payload) -> Payload:
    print("about to die", flush=True)
    os.kill(os.getpid(), payload["signal"])
    threading.Event().wait()
    return {}


def crash(payload: Payload) -> Payload:
    """A real segmentation fault."""
    ctypes.string_at(0)
    return {}


def shout(payload: Payload) -> Payload:
    """Print megabytes, from Python and past Python's buffers, to both streams."""
    line = "x" * 1023
    for number in range(payload["megabytes"] * 512):
        print(line)
        os.write(2, f"{line}\n".encode())
        if number == 0:
            print("first line")
    print("last line")
    return {"printed": True}


def leave(payload: Payload) -> Payload:
    """End at once, past every handler, without a result."""
    os._exit(payload["code"])


def leave_politely(payload: Payload) -> Payload:
    sys.exit(payload["code"])


def torn_result(payload: Payload) -> Payload:
    """Killed between the start of writing the result and its end: the write itself exceeds what may be
    written, and the signal that announces this is deadly again."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    return {"never": "seen" * 100_000}


def forge_result(payload: Payload) -> Payload:
    """Write something that is no result where the result belongs, and leave."""
    Path(payload["path"]).write_text(payload["text"])
    os._exit(0)


def close_everything(payload: Payload) -> Payload:
    os.closerange(0, 1024)
    if payload.get("fail"):
        raise ValueError("after closing everything")
    return {"closed": True}


def reuse_descriptors(payload: Payload) -> Payload:
    """Close everything and open files where the descriptors were; then fail."""
    os.closerange(3, 64)
    kept = [open(payload["path"], "w") for _ in range(20)]  # noqa: SIM115
    raise ValueError(f"{len(kept)} files open")


def raise_error(payload: Payload) -> Payload:
    from auto_research.runtime import errors

    kind = payload["kind"]
    if kind == "MissingData":
        raise errors.MissingData("ml-1m", "ml-1m is not here: run auto-research prepare ml-1m.")
    if kind == "chained memory":
        try:
            raise MemoryError
        except MemoryError as error:
            raise RuntimeError("training failed") from error
    if kind == "torch memory":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if kind == "long":
        raise ValueError("\x00é" * 100_000)
    raise ValueError("an ordinary fault")


def not_an_object(payload: Payload) -> Any:
    return [1, 2]


def not_a_number(payload: Payload) -> Payload:
    return {"metrics": {"auc": float("nan")}}


def allocate(payload: Payload) -> Payload:
    """Allocate and touch memory until it is refused."""
    import torch

    kept = [torch.ones(payload["bytes"], dtype=torch.uint8) for _ in range(payload["steps"])]
    return {"allocated": len(kept)}


def hog_and_die(payload: Payload) -> Payload:
    """Fill memory up to a given resident size, then be killed as the kernel would."""
    kept = bytearray(payload["bytes"])
    kept[::4096] = b"x" * len(kept[::4096])
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hold_in_children(payload: Payload) -> Payload:
    """Processes below this one that hold memory: each its own, or all that of this one; for so many seconds."""
    shared = bytearray(b"x") * payload["shared"]
    children = []
    for _ in range(payload["children"]):
        if (pid := os.fork()) == 0:
            kept = bytearray(b"x") * payload["bytes"]
            time.sleep(payload["seconds"])
            os._exit(len(kept) == len(shared))
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    return {}


def abort_for_memory(payload: Payload) -> Payload:
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


def beat(payload: Payload) -> Payload:
    """Stay silent but touch the heartbeat until told to stop."""
    heart, stop = Path(payload["heartbeat"]), Path(payload["stop"])
    count = 0
    while not stop.exists():
        count += 1
        heart.write_text(f"{count}\n")
        time.sleep(0.02)
    return {"beats": count}


def at_exit(payload: Payload) -> Payload:
    atexit.register(Path(payload["path"]).write_text, "written at exit")
    return {}


def file_limit(payload: Payload) -> Payload:
    """Print beyond the largest file this process may write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    for _ in range(1000):
        print("y" * 100)
    return {}


def nested(payload: Payload) -> Payload:
    """Run a job from inside a job."""
    from auto_research.runtime.process import Job, run_isolated

    job = Job.model_validate(payload["job"])
    return {"inner": run_isolated(job).state}


def first_line(payload: Payload) -> Payload:
    return {"entered": time.monotonic()}
