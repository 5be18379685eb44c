"""What a result was obtained with: program, libraries, machine."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import auto_research

__all__ = ["environment"]

LIBRARIES = ("torch", "transformers", "tokenizers", "peft", "trl", "numpy", "scipy", "optuna", "ray")
SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def environment() -> dict[str, str]:
    """Versions and facts needed to repeat a run, without importing torch or touching a GPU.

    Always present: ``auto_research``, ``python``, ``platform``, ``cpu``, ``cores`` (that this process may
    use), ``torch``. Where they apply: other libraries, ``gpu`` and ``gpu_driver``, ``commit`` (with
    ``-modified`` when tracked files differ from it), and the thread and offline settings that are set.
    """
    facts = {
        "auto_research": auto_research.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": str(cores()),
        "torch": "absent",
    }
    for library in LIBRARIES:
        try:
            facts[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    facts.update(_gpu())
    if commit := _commit():
        facts["commit"] = commit
    facts.update({name: os.environ[name] for name in SETTINGS if name in os.environ})
    return facts


def cores() -> int:
    """CPU cores that this process may use; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return platform.machine()


@functools.cache
def _gpu() -> dict[str, str]:
    """Names of the GPUs and their driver, asked from the driver's own library, which starts no context."""
    try:
        import pynvml  # type: ignore[import-untyped,import-not-found]
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver on this machine
        return {}
    try:
        names = [
            str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index)))
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return {"gpu": ", ".join(names) or "none", "gpu_driver": str(pynvml.nvmlSystemGetDriverVersion())}
    except pynvml.NVMLError as error:
        return {"gpu": f"unreadable ({error})"}
    finally:
        pynvml.nvmlShutdown()


@functools.cache
def _commit() -> str | None:
    """Commit of the checkout this file is tracked in, if it is."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here.parent), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        commit = git("rev-parse", "HEAD")
        modified = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):  # no git, not a checkout, or an installed copy
        return None
    return f"{commit}-modified" if modified else commit
