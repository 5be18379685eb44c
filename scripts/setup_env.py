"""Sets up `.venv` for this project; run by the Makefile with any Python 3.11 or newer, needs nothing installed.

An existing torch is used as it is and never replaced: one in `.venv`, or else one that the calling Python already
has, also in an active virtual environment (then `.venv` sees that Python's packages). Without any, the version named
below is installed. A second run with unchanged requirements does nothing.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup-stamp"
TORCH = "torch==2.13.0"
OLDEST_TORCH = (2, 9)
EXTRAS = "dev,cluster,postgres"


def fail(sentence: str) -> None:
    """Ends the set-up with one sentence and exit code 2."""
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def fingerprint() -> str:
    """Digest of what decides the environment's content."""
    content = (ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()
    return hashlib.sha256(content + sys.version.encode()).hexdigest()


def create(found: str | None) -> None:
    """Makes `.venv`; over a torch that was `found`, it sees the packages of the calling Python."""
    venv.EnvBuilder(with_pip=True, system_site_packages=found is not None).create(VENV)
    if found is not None and sys.prefix != sys.base_prefix:
        # Called from a virtual environment: "system" means the Python below it, so its own folders are named as well.
        inner = Path(sysconfig.get_path("purelib", "venv", {"base": str(VENV), "platbase": str(VENV)}))
        own = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        (inner / "calling_environment.pth").write_text("\n".join(own) + "\n", encoding="utf-8")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What a program that failed said last."""
    return (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]


def own_torch() -> str | None:
    """Version of torch that the calling Python has, or None."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def venv_torch() -> str | None:
    """Version of torch, with its local part (`+cu128`), that `.venv` sees, or None; it need not work."""
    probe = "from importlib import metadata; print(metadata.version('torch'))"
    done = subprocess.run([PYTHON, "-c", probe], capture_output=True, text=True)
    return done.stdout.strip() or None if done.returncode == 0 else None


def why_torch_fails() -> str | None:
    """Last line of what `.venv` says when it imports torch, or None if that works."""
    done = subprocess.run([PYTHON, "-c", "import torch"], stderr=subprocess.PIPE, text=True)
    return None if done.returncode == 0 else last_line(done)


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pip inside `.venv`, showing what it does."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    return done


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - the caller's Python may be older than the project's
        fail(f"Python 3.11 or newer is needed and this is {sys.version.split()[0]}; set PYTHON=python3.11")
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == fingerprint():
        return
    if not PYTHON.exists():
        found = own_torch()
        print(f"creating .venv{f' over the existing torch {found}' if found else ''}", flush=True)
        create(found)
    version = venv_torch()
    if version is None:
        print(f"installing {TORCH}", flush=True)
        done = pip(TORCH)
        if done.returncode:
            fail(f"pip could not install {TORCH}: {last_line(done)}")
        version = venv_torch()
        if version is None:
            fail(f"{TORCH} was installed and cannot be found; delete .venv and run again")
        if reason := why_torch_fails():
            fail(f"{TORCH} was installed and cannot be imported ({reason}); delete .venv and run again")
    elif reason := why_torch_fails():
        fail(
            f"torch {version} is present and cannot be imported ({reason}); an existing torch is never replaced, "
            "so mend or remove it yourself and run again"
        )
    assert version is not None
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        fail(
            f"torch {version} is present and {oldest} or newer is needed; an existing torch is never replaced, "
            "so upgrade it yourself or set PYTHON to a Python without it"
        )
    print(f"installing the project beside torch {version} (kept as it is)", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraint:
        constraint.write(f"torch=={version}\n")
        constraint.flush()
        done = pip("-c", constraint.name, "-e", f"{ROOT}[{EXTRAS}]")
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        reason = (
            f"the requirements would replace the existing torch {version}, so nothing was installed; "
            "use an environment of its own or relax the package that asks for another torch"
            if "torch" in done.stderr and "conflict" in done.stderr.lower()
            else "pip could not install the project; its messages are above"
        )
        fail(reason)
    if (after := venv_torch()) != version:
        fail(f"torch changed from {version} to {after} during the set-up; delete .venv and report this")
    STAMP.write_text(fingerprint())


if __name__ == "__main__":
    main()
