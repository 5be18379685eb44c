"""The probes of this environment, on this machine and on machines made to look worse."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from auto_research.runtime.cache import CACHE_VARIABLE
from auto_research.study import environment
from auto_research.study.environment import Finding, inspect_environment


def _find(findings: list[Finding], subject: str) -> Finding:
    (found,) = [finding for finding in findings if finding.subject == subject]
    return found


def test_every_finding_that_is_not_fine_says_what_to_do() -> None:
    findings = inspect_environment()
    assert {"python", "torch", "devices", "libraries", "network", "checkpoints", "data", "machine", "threads"} == {
        finding.area for finding in findings
    }
    for finding in findings:
        assert finding.found
        assert (finding.state == "ok") == (finding.advice == ""), finding
    assert [finding for finding in findings if finding.state == "broken"] == []


def test_lapack_is_tried_and_its_absence_is_a_restriction(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lapack(matrix: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Calling torch.linalg.cholesky on a CPU tensor requires compiling PyTorch with LAPACK.")

    assert _find(list(environment._lapack()), "CPU LAPACK").state == "ok"
    monkeypatch.setattr(torch.linalg, "cholesky", no_lapack)
    finding = _find(list(environment._lapack()), "CPU LAPACK")
    assert finding.state == "limited"
    assert "official torch wheel" in finding.advice


def test_wrong_numbers_from_lapack_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "cholesky", lambda matrix: matrix)
    assert _find(list(environment._lapack()), "CPU LAPACK").state == "broken"


def test_a_probe_that_fails_is_a_finding_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_failure(matrix: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("something else")

    monkeypatch.setattr(torch.linalg, "cholesky", other_failure)
    findings = inspect_environment()
    broken = _find(findings, "lapack")
    assert (broken.state, broken.found) == ("broken", "RuntimeError: something else")
    assert _find(findings, "OMP_WAIT_POLICY")


def test_no_cuda_points_to_what_works_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (finding,) = environment._cuda()
    assert finding.state == "missing"
    assert "CUDA" in finding.found
    assert "--device cpu" in finding.advice


def test_a_gpu_under_a_cpu_build_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(environment.versions, "environment", lambda: {"gpu": "NVIDIA A30"})
    (finding,) = environment._torch_build()
    assert finding.state == "limited"
    assert "NVIDIA A30" in finding.advice
    assert "CUDA build" in finding.advice


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("HF_HUB_OFFLINE", "1", "HF_HUB_OFFLINE=1: nothing is fetched"),
        ("TRANSFORMERS_OFFLINE", "1", "TRANSFORMERS_OFFLINE=1: nothing is fetched"),
        ("HF_HUB_OFFLINE", "0", "HF_HUB_OFFLINE=0: a missing checkpoint may be fetched"),
    ],
)
def test_offline_flags(variable: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    (finding,) = environment._offline()
    assert words in finding.found


def test_a_missing_or_old_library_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("peft", "ray"):
            raise environment.metadata.PackageNotFoundError(name)
        return "4.57.1"

    monkeypatch.setattr(environment.metadata, "version", version)
    found = list(environment._libraries())
    assert (_find(found, "peft").state, _find(found, "peft").advice) == ("broken", "pip install peft")
    assert _find(found, "ray").state == "missing"
    assert _find(found, "transformers").state == "limited"


def test_a_torchvision_that_does_not_fit_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.metadata, "version", lambda name: "0.28.0")
    real = importlib.import_module

    def refuse(name: str) -> object:
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist")
        return real(name)

    monkeypatch.setattr(environment.importlib, "import_module", refuse)
    (finding,) = environment._torchvision()
    assert (finding.state, finding.advice) == ("broken", "pip uninstall torchvision")


def test_missing_checkpoints_and_data_name_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from auto_research.checkpoints import resolve

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(resolve, "available", lambda name: name.startswith("micro"))
    assert _find(list(environment._checkpoints()), "minilm").advice == "auto-research prepare minilm"
    data = list(environment._data(None))
    assert _find(data, "ml-100k").advice == "auto-research prepare ml-100k"
    assert _find(data, "ml-latest-small").found.startswith("embedded")
    (tmp_path / "given" / "ml-100k").mkdir(parents=True)
    assert _find(list(environment._data(tmp_path / "given")), "ml-100k").found == "dataset-dir"


def test_a_cache_that_cannot_be_written_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    (finding,) = environment._disk()
    assert finding.state in ("ok", "limited")
    assert not (tmp_path / "cache").exists()  # looking changes nothing
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    (finding,) = environment._disk()
    assert finding.state == "broken"
    assert CACHE_VARIABLE in finding.advice


def test_little_disk_and_memory_are_restrictions(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**8))
    assert _find(list(environment._disk()), "cache").state == "limited"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * 2**30, available=60 * 2**30))
    monkeypatch.setattr(environment, "_memory_limit", lambda: 2 * 2**30)
    finding = _find(list(environment._machine()), "memory")
    assert finding.state == "limited"
    assert finding.found == "2.0 of 2.0 GiB free"


def test_thread_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setattr(environment.versions, "cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    found = list(environment._threads())
    assert _find(found, "OMP_WAIT_POLICY").state == "ok"
    assert _find(found, "count").advice == "export OMP_NUM_THREADS=2"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert "OMP_WAIT_POLICY=PASSIVE" in _find(list(environment._threads()), "OMP_WAIT_POLICY").advice


def test_torch_that_cannot_be_imported_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (finding,) = environment._torch_build()
    assert finding.state == "broken"


@pytest.mark.parametrize(("package", "area"), [("psutil", "machine"), ("huggingface_hub", "checkpoints")])
def test_an_environment_without_a_package_is_told_to_set_up(
    monkeypatch: pytest.MonkeyPatch, package: str, area: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    found = [finding for finding in inspect_environment() if finding.area == area and finding.state == "broken"]
    assert [(package in finding.found, finding.advice) for finding in found] == [(True, "run `make setup`")]
