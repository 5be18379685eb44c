"""The set-up of `.venv`: an existing torch is seen, and never replaced."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "setup_env.py"


def fake_torch(folder: Path, version: str) -> None:
    """An installed torch of this version, as far as metadata and an import can tell."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (folder / f"torch-{version}.dist-info").mkdir()
    (folder / f"torch-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    )


@pytest.fixture
def setup_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, for a project in a folder of its own, with a pip that installs nothing."""
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "setup-stamp")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "pyproject.toml").write_text("")
    return module


def test_the_torch_of_an_active_virtual_environment_is_seen_and_kept(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    active = tmp_path / "active"
    fake_torch(active, "2.13.0+cu128")
    monkeypatch.setattr(setup_env, "own_torch", lambda: "2.13.0+cu128")
    monkeypatch.setattr(setup_env.sys, "prefix", str(tmp_path / "elsewhere"))
    ways = setup_env.sysconfig.get_path

    def get_path(name: str, *rest: Any, **more: Any) -> str:
        return ways(name, *rest, **more) if rest or more else str(active)

    monkeypatch.setattr(setup_env.sysconfig, "get_path", get_path)
    builder = setup_env.venv.EnvBuilder
    monkeypatch.setattr(
        setup_env.venv, "EnvBuilder", lambda with_pip, **options: builder(with_pip=False, **options)
    )  # pip would take ten seconds
    asked: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        asked.append(arguments)
        assert Path(arguments[1]).read_text() == "torch==2.13.0+cu128\n"
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(setup_env, "pip", pip)
    for _ in range(2):  # the second run does nothing
        setup_env.main()
    ((option, _, editable, project),) = asked
    assert (option, editable) == ("-c", "-e")
    assert project.startswith(str(tmp_path))
    assert setup_env.venv_torch() == "2.13.0+cu128"
    assert (active / "torch" / "__init__.py").read_text() == "__version__ = '2.13.0+cu128'\n"


@pytest.mark.parametrize(
    ("version", "stderr", "sentence"),
    [
        (
            "2.9.1+cu126",
            "ERROR: Cannot install torch==2.13: conflicting dependencies",
            "would replace the existing torch",
        ),
        ("2.9.1+cu126", "ERROR: no network", "pip could not install the project"),
        ("2.8.0+cu126", "", "2.9 or newer is needed; an existing torch is never replaced"),
    ],
)
def test_a_set_up_that_would_replace_torch_stops_and_says_so(
    setup_env: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str,
    stderr: str,
    sentence: str,
) -> None:
    (setup_env.VENV / "bin").mkdir(parents=True)
    setup_env.PYTHON.symlink_to(sys.executable)
    monkeypatch.setattr(setup_env, "venv_torch", lambda: version)
    monkeypatch.setattr(setup_env, "why_torch_fails", lambda: None)
    monkeypatch.setattr(setup_env, "pip", lambda *a: subprocess.CompletedProcess(a, 1, "", stderr))
    with pytest.raises(SystemExit) as stopped:
        setup_env.main()
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not setup_env.STAMP.exists()
