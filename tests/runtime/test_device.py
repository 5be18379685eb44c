"""Devices: the order of auto, no silent fall-back, and the record of who asked."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from auto_research.runtime.device import device_for, resolve_device, seed_everything
from auto_research.runtime.errors import DeviceAbsent, UserError
from auto_research.runtime.evidence import LOG_VARIABLE, EvidenceLog, current_log, use_log


def machine(monkeypatch: pytest.MonkeyPatch, *, cuda: int = 0, mps: bool = False) -> None:
    """Pretend that this machine has so many CUDA devices, and MPS or not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    "cuda, mps, device", [(2, True, "cuda:0"), (1, False, "cuda:0"), (0, True, "mps"), (0, False, "cpu")]
)
def test_auto_tries_cuda_then_mps_then_cpu(monkeypatch: pytest.MonkeyPatch, cuda: int, mps: bool, device: str) -> None:
    machine(monkeypatch, cuda=cuda, mps=mps)
    assert str(resolve_device("auto")) == str(resolve_device()) == device
    assert str(resolve_device("cpu")) == "cpu"


@pytest.mark.parametrize("requested, device", [("cuda", "cuda:0"), ("cuda:1", "cuda:1"), (" CUDA:0 ", "cuda:0")])
def test_explicit_cuda(monkeypatch: pytest.MonkeyPatch, requested: str, device: str) -> None:
    machine(monkeypatch, cuda=2)
    assert str(resolve_device(requested)) == device


@pytest.mark.parametrize(
    "requested, cuda, said",
    [
        ("cuda", 0, "Device cuda is absent"),
        ("cuda:0", 0, "Device cuda:0 is absent"),
        ("cuda:2", 2, "this process sees cuda:0, cuda:1"),
        ("mps", 2, "Device mps is absent"),
    ],
)
def test_an_absent_device_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, requested: str, cuda: int, said: str
) -> None:
    machine(monkeypatch, cuda=cuda)
    with use_log(tmp_path / "evidence.jsonl") as log, pytest.raises(DeviceAbsent, match=said):
        device_for(requested)
    assert log is not None
    assert log.records() == []


@pytest.mark.parametrize("built, said", [(False, "has no CUDA support"), (True, "sees no usable GPU")])
def test_the_reason_for_absence(monkeypatch: pytest.MonkeyPatch, built: bool, said: str) -> None:
    machine(monkeypatch)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    with pytest.raises(DeviceAbsent, match=said):
        resolve_device("cuda")


@pytest.mark.parametrize("requested", ["gpu", "cdua", "cuda:", "cuda:-1", "cuda:x", "", "cpu:0", "cuda:0:1"])
def test_a_word_that_is_no_device(requested: str) -> None:
    with pytest.raises(UserError, match="is not a device") as error:
        resolve_device(requested)
    assert not isinstance(error.value, DeviceAbsent)


def test_somebody_who_asks_for_a_gpu_is_not_sent_to_the_cpu() -> None:
    with pytest.raises(UserError, match="Did you mean 'cuda'"):
        resolve_device("gpu")


def test_who_asked_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    before = time.time()
    with use_log(path):
        device = device_for("cpu")
        line = sys._getframe().f_lineno - 1
    assert device == torch.device("cpu")
    (record,) = EvidenceLog(path).records()
    assert before <= record.pop("time") <= time.time()
    assert record == {
        "event": "device_for",
        "pid": os.getpid(),
        "requested": "cpu",
        "resolved": "cpu",
        "file": __file__,
        "line": line,
        "function": "test_who_asked_is_recorded",
    }


def test_the_function_is_named_in_full(tmp_path: Path) -> None:
    class Adapter:
        def run(self) -> None:
            device_for("cpu")

    with use_log(tmp_path / "evidence.jsonl") as log:
        Adapter().run()
    assert log is not None
    assert log.records()[0]["function"].endswith("Adapter.run")


def test_which_log_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOG_VARIABLE, raising=False)
    assert current_log() is None
    assert device_for("cpu").type == "cpu"  # without a log there is nothing to record
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "inherited"))
    device_for("cpu")
    with use_log(tmp_path / "outer"):
        with use_log(tmp_path / "inner"):
            device_for("cpu")
        device_for("cpu")
        device_for("cpu")
    device_for("cpu")
    counts = {name: len(EvidenceLog(tmp_path / name).records()) for name in ("inherited", "outer", "inner")}
    assert counts == {"inherited": 2, "outer": 2, "inner": 1}


def test_equal_seeds_give_equal_numbers() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    draws = []
    for seed in (3, 3, 4):
        seed_everything(seed)
        draws.append(draw())
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[0], draws[2]))


def test_the_range_of_seeds() -> None:
    for seed in (0, 2**32 - 1):
        seed_everything(seed)
    for seed in (-1, 2**32):
        with pytest.raises(UserError, match="out of range"):
            seed_everything(seed)


def test_deterministic_algorithms_are_an_option() -> None:
    before = torch.backends.cudnn.benchmark
    try:
        seed_everything(0)
        assert not torch.are_deterministic_algorithms_enabled()
        seed_everything(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = before
