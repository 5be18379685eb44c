"""Which device a run uses, and the evidence of who asked for it.

``auto`` tries CUDA, MPS and the CPU, in that order. A device named explicitly is used or is an error; there
is no silent fall-back.
"""

from __future__ import annotations

import random
import re
import sys
from typing import TYPE_CHECKING

from auto_research.runtime.errors import DeviceAbsent, UserError, nearest

if TYPE_CHECKING:
    import torch

__all__ = ["device_for", "resolve_device", "seed_everything"]


def resolve_device(requested: str = "auto") -> torch.device:
    """Turn ``auto``, ``cpu``, ``mps``, ``cuda`` or ``cuda:<i>`` into a device of this machine.

    A CUDA device always carries its index. Nothing is allocated and no CUDA context is made.

    Raises:
        DeviceAbsent: the device was named and is not here; the message says why.
        UserError: the name is not a device name.
    """
    import torch

    name = requested.strip().lower()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name == "mps":
        if not torch.backends.mps.is_available():
            reason = (
                "this machine has no Metal GPU that torch can use"
                if torch.backends.mps.is_built()
                else f"this torch build ({torch.__version__}) has no MPS support"
            )
            raise DeviceAbsent(f"Device mps is absent: {reason}; choose another --device or auto.")
        return torch.device("mps")
    match = re.fullmatch(r"cuda(?::([0-9]+))?", name)
    if not match:
        hint = " Did you mean 'cuda'?" if name.startswith("gpu") else nearest(name, ("auto", "cpu", "mps", "cuda"))
        raise UserError(f"{requested!r} is not a device.{hint} Use auto, cpu, mps, cuda or cuda:<index>.")
    if not torch.cuda.is_available():
        raise DeviceAbsent(f"Device {name} is absent: {_why_no_cuda()}; choose another --device or auto.")
    index = int(match[1]) if match[1] else _current_cuda_index()
    count = torch.cuda.device_count()
    if index >= count:
        visible = ", ".join(f"cuda:{i}" for i in range(count))
        raise DeviceAbsent(f"Device cuda:{index} is absent: this process sees {visible}; choose one of them.")
    return torch.device("cuda", index)


def _current_cuda_index() -> int:
    import torch

    return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0


def _why_no_cuda() -> str:
    import torch

    if not torch.backends.cuda.is_built():
        return f"this torch build ({torch.__version__}) has no CUDA support"
    return "torch has CUDA support but this process sees no usable GPU or driver"


def device_for(requested: str = "auto") -> torch.device:
    """:func:`resolve_device`, recording who asked.

    The current evidence log (:func:`auto_research.runtime.evidence.current_log`) receives time, process,
    the requested and the resolved device, and the caller's file, line and function. Call it in the file
    whose run it is to prove: the caller is the frame that calls this function.
    """
    from auto_research.runtime.evidence import current_log

    device = resolve_device(requested)
    log = current_log()
    if log is not None:
        caller = sys._getframe(1)
        log.append(
            "device_for",
            requested=requested,
            resolved=str(device),
            file=caller.f_code.co_filename,
            line=caller.f_lineno,
            function=caller.f_code.co_qualname,
        )
    return device


def seed_everything(seed: int, *, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch (every device).

    Args:
        seed: 0 to 2**32 - 1, the range numpy accepts.
        deterministic: also refuse torch operations that have no repeatable implementation. On CUDA set
            ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` before the process starts, or matrix products raise.

    String hashes, and with them the order of sets, are fixed when Python starts: isolated processes start
    with ``PYTHONHASHSEED=0``.

    Raises:
        UserError: the seed is outside the range.
    """
    import numpy as np
    import torch

    if not 0 <= seed < 2**32:
        raise UserError(f"Seed {seed} is out of range: choose one from 0 to {2**32 - 1}.")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - libraries below us draw from the global state
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
