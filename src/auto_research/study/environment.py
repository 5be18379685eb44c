"""What this environment can and cannot do, found by trying, and what to do about it.

Each probe returns findings; none of them changes anything or uses the network. A probe that fails in an
unforeseen way is itself a finding, so that one broken part never hides the others.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

from auto_research.runtime import versions
from auto_research.runtime.cache import CACHE_VARIABLE, cache_folder
from auto_research.runtime.errors import DeviceAbsent

__all__ = ["Finding", "State", "inspect_environment"]

State = Literal["ok", "limited", "missing", "broken"]

GIB = 2**30
ENOUGH_DISK = 5 * GIB
"""SmolLM2 with its conversion, a CUDA wheel's unpacking and a few runs fit into this."""
ENOUGH_MEMORY = 6 * GIB
"""A full fine-tuning step of SmolLM2-135M peaks at about 4 GiB."""


@dataclass(frozen=True)
class Finding:
    """One fact about this environment.

    Attributes:
        area: ``python``, ``torch``, ``devices``, ``libraries``, ``network``, ``checkpoints``, ``data``,
            ``machine`` or ``threads``.
        subject: what was looked at.
        state: ``ok``; ``limited`` (works, with a restriction); ``missing`` (an optional part is not here);
            ``broken`` (the program cannot do its main job).
        found: what was found.
        advice: what to do, ``""`` where nothing is needed.
    """

    area: str
    subject: str
    state: State
    found: str
    advice: str = ""


def inspect_environment(dataset_dir: Path | None = None) -> list[Finding]:
    """Run every probe. ``dataset_dir`` is the folder of ``--dataset-dir``, looked at first for data."""
    probes: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", _python),
        ("torch", _torch_build),
        ("torch", _lapack),
        ("devices", _cuda),
        ("devices", _mps),
        ("libraries", _libraries),
        ("libraries", _torchvision),
        ("network", _offline),
        ("checkpoints", _checkpoints),
        ("data", partial(_data, dataset_dir)),
        ("machine", _machine),
        ("machine", _disk),
        ("threads", _threads),
    ]
    return [finding for area, probe in probes for finding in _run(area, probe)]


def _run(area: str, probe: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(probe())
    except ModuleNotFoundError as error:
        name = getattr(probe, "__name__", area).strip("_")
        return [Finding(area, name, "broken", f"needs the package {error.name}, which is absent", "run `make setup`")]
    except Exception as error:  # a probe must never end the examination; its failure is a finding
        name = getattr(probe, "__name__", area).strip("_")
        return [Finding(area, name, "broken", f"{type(error).__name__}: {error}", "report this; see the message")]


def _python() -> Iterator[Finding]:
    old = sys.version_info < (3, 11)
    advice = "use Python 3.11 or newer" if old else ""
    yield Finding("python", "version", "broken" if old else "ok", sys.version.split()[0], advice)


def _torch_build() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", "build", "broken", f"cannot be imported ({error})", "run `make setup`")
        return
    gpu = versions.environment().get("gpu", "none")
    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU only"
    )
    idle_gpu = build == "CPU only" and gpu != "none" and not gpu.startswith("unreadable")
    yield Finding(
        "torch",
        "build",
        "limited" if idle_gpu else "ok",
        f"{torch.__version__}, {build}",
        f"this machine has {gpu}, which this build cannot use: install a CUDA build of torch" if idle_gpu else "",
    )


def _lapack() -> Iterator[Finding]:
    """Factorise a small matrix for real: a torch without LAPACK imports well and fails here."""
    import torch

    matrix = torch.tensor([[4.0, 2.0, 0.6], [2.0, 3.0, 0.4], [0.6, 0.4, 2.0]])
    try:
        factor = torch.linalg.cholesky(matrix)
        values, vectors = torch.linalg.eigh(matrix)
        left, singular, right = torch.linalg.svd(matrix)
    except RuntimeError as error:
        if "lapack" not in str(error).lower():
            raise
        yield Finding(
            "torch",
            "CPU LAPACK",
            "limited",
            "absent from this torch build: cholesky, eigh and svd fail on the CPU",
            "adapters fall back where they can; install an official torch wheel, which has LAPACK",
        )
        return
    rebuilt = (factor @ factor.T, vectors @ torch.diag(values) @ vectors.T, left @ torch.diag(singular) @ right)
    right_numbers = all(torch.allclose(matrix, again, atol=1e-4) for again in rebuilt)
    yield Finding(
        "torch",
        "CPU LAPACK",
        "ok" if right_numbers else "broken",
        "cholesky, eigh and svd work" if right_numbers else "cholesky, eigh or svd return wrong numbers",
        "" if right_numbers else "reinstall torch: its linear algebra library is damaged",
    )


def _cuda() -> Iterator[Finding]:
    import torch

    from auto_research.runtime.device import resolve_device

    try:
        device = resolve_device("cuda")
    except DeviceAbsent as error:
        yield Finding(
            "devices",
            "cuda",
            "missing",
            str(error).partition(": ")[2].partition(";")[0] or str(error),
            "use --device cpu here, and `auto-research rehearse` for what only a GPU would show",
        )
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield Finding(
            "devices",
            f"cuda:{index}",
            "ok" if free > ENOUGH_MEMORY else "limited",
            f"{facts.name}, compute {facts.major}.{facts.minor}, {free / GIB:.1f} of {total / GIB:.1f} GiB free",
            "" if free > ENOUGH_MEMORY else "other programs hold its memory: end them or run more --shards",
        )
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    yield Finding(
        "devices",
        "BF16",
        "ok" if bf16 else "limited",
        "native" if bf16 else "emulated or absent on this GPU",
        "" if bf16 else "load checkpoints with dtype float16 or float32",
    )
    if not torch.backends.cudnn.is_available():
        yield Finding("devices", "cuDNN", "limited", "absent", "recurrent and convolution layers run slowly without it")
        return
    # A GRU goes through cuDNN, which is what fails when its libraries do not belong to the driver.
    gru = torch.nn.GRU(8, 8, batch_first=True, device=device)
    finite = bool(gru(torch.ones(2, 3, 8, device=device))[0].isfinite().all())
    yield Finding(
        "devices",
        "cuDNN",
        "ok" if finite else "broken",
        f"version {torch.backends.cudnn.version()}, a GRU {'runs' if finite else 'gives numbers that are not finite'}",
        "" if finite else "reinstall torch with the CUDA libraries of its own wheel",
    )


def _mps() -> Iterator[Finding]:
    import torch

    if torch.backends.mps.is_available():
        yield Finding("devices", "mps", "ok", "a Metal GPU is usable")
    elif sys.platform == "darwin":
        yield Finding("devices", "mps", "missing", "no Metal GPU is usable", "use macOS 14 or newer on Apple silicon")


LIBRARIES: dict[str, tuple[str, bool]] = {
    "numpy": ("everything", True),
    "polars": ("reading data sets", True),
    "pooch": ("fetching data sets", True),
    "transformers": ("language and vision checkpoints", True),
    "tokenizers": ("language and vision checkpoints", True),
    "safetensors": ("checkpoints", True),
    "peft": ("LoRA", True),
    "trl": ("post-training", True),
    "huggingface_hub": ("checkpoints of the hub and its cache", True),
    "accelerate": ("post-training, and converting the SmolLM2 package", True),
    "gguf": ("converting the SmolLM2 package", True),
    "optuna": ("evolve's search and trial storage", True),
    "ray": ("more than one machine (--executor ray)", False),
}
"""Library -> what needs it, and whether the standard set-up installs it."""


def _libraries() -> Iterator[Finding]:
    for name, (purpose, standard) in LIBRARIES.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            state: State = "broken" if standard else "missing"
            yield Finding("libraries", name, state, f"absent; needed for {purpose}", f"pip install {name}")
            continue
        if name == "transformers" and version.partition(".")[0] != "5":
            yield Finding("libraries", name, "limited", version, "written for 5.x: pip install 'transformers>=5.20,<6'")
        else:
            yield Finding("libraries", name, "ok", version)


def _torchvision() -> Iterator[Finding]:
    """Not needed; but one that does not match torch breaks every image processor of Transformers."""
    try:
        version = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        return
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        found = f"{version} does not fit this torch ({error})"
        yield Finding("libraries", "torchvision", "broken", found, "pip uninstall torchvision")
    else:
        yield Finding("libraries", "torchvision", "ok", version)


def _offline() -> Iterator[Finding]:
    from auto_research.checkpoints.resolve import is_offline

    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    flags = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or "no flag set"
    fetched = "nothing is" if is_offline() else "a missing checkpoint may be"
    yield Finding("network", "offline flags", "ok", f"{flags}: {fetched} fetched from the hub")


def _checkpoints() -> Iterator[Finding]:
    from auto_research.checkpoints.resolve import CATALOGUE, available

    for name, entry in CATALOGUE.items():
        if not available(name):
            yield Finding("checkpoints", name, "missing", entry.about, f"auto-research prepare {name}")
        elif entry.repository is None:
            yield Finding("checkpoints", name, "ok", "built here in seconds when first needed")
        else:
            yield Finding("checkpoints", name, "ok", f"on this machine; {entry.about}")


def _data(dataset_dir: Path | None) -> Iterator[Finding]:
    from auto_research.data.catalogue import CATALOGUE, find

    for name, entry in CATALOGUE.items():
        located = find(name, dataset_dir)
        if located is None:
            yield Finding("data", name, "missing", entry.title, f"auto-research prepare {name}")
        else:
            part = f" ({entry.embedded})" if located.origin == "embedded" else ""
            yield Finding("data", name, "ok", f"{located.origin}{part}")


def _machine() -> Iterator[Finding]:
    import psutil

    facts = versions.environment()
    yield Finding("machine", "CPU", "ok", f"{facts['cpu']}, {facts['cores']} cores for this process")
    limit = _memory_limit()
    memory = psutil.virtual_memory()
    total = min(memory.total, limit or memory.total)
    free = min(memory.available, total)
    small = free < ENOUGH_MEMORY
    yield Finding(
        "machine",
        "memory",
        "limited" if small else "ok",
        f"{free / GIB:.1f} of {total / GIB:.1f} GiB free",
        "fine-tuning SmolLM2-135M needs about 4 GiB: use the micro checkpoints or fewer --workers" if small else "",
    )


def _memory_limit() -> int | None:
    """Bytes that the control group (a container) allows, if it limits memory."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text(encoding="ascii").strip()
        except OSError:  # no control groups of this version here
            continue
        return int(text) if text.isdigit() else None
    return None


def _disk() -> Iterator[Finding]:
    folder = cache_folder()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        yield Finding(
            "machine", "cache", "broken", f"{folder} cannot be written ({error.strerror})", f"set {CACHE_VARIABLE}"
        )
        return
    low = free < ENOUGH_DISK
    yield Finding(
        "machine",
        "cache",
        "limited" if low else "ok",
        f"{folder}, {free / GIB:.1f} GiB free",
        f"free some space or set {CACHE_VARIABLE} to another disk" if low else "",
    )


def _threads() -> Iterator[Finding]:
    import torch

    cores, threads = versions.cores(), torch.get_num_threads()
    over = threads > cores
    yield Finding(
        "threads",
        "count",
        "limited" if over else "ok",
        f"{threads} threads a process on {cores} cores",
        f"export OMP_NUM_THREADS={cores}" if over else "",
    )
    policy = os.environ.get("OMP_WAIT_POLICY", "unset")
    passive = policy.upper() == "PASSIVE"
    yield Finding(
        "threads",
        "OMP_WAIT_POLICY",
        "ok" if passive else "limited",
        policy,
        "" if passive else "export OMP_WAIT_POLICY=PASSIVE: waiting threads otherwise spin and slow their neighbours",
    )
