"""Code that an external generator wrote, kept apart until a person approves it.

A candidate lies in `<quarantine>/<name>`: `files/` as they came and `record.json`. Three steps, each a command::

    auto-research evolve quarantine stage   NAME SOURCE --generator WHO
    auto-research evolve quarantine check   NAME
    auto-research evolve quarantine approve NAME --digest D --by WHO --into NEW_FOLDER   (or: refuse)

What is checked, and by which command, is fixed here: nothing in the files chooses it. Checks run in an isolated process
with a deadline, a memory limit, a bare environment and no network. They find mistakes; malice is found by reading the
files, which is why approval names the digest of exactly what was read. Nothing staged is ever part of a run, and
approved code becomes an operator only when somebody registers it.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import importlib.util
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from auto_research.evolve.records import Candidate, Part
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import OutputLock, Record, read_record, utc_now, write_json_atomic

FOLDER = Path("quarantine")
"""Where external candidates lie unless told otherwise."""
SUFFIXES = (".py", ".json", ".md")
MAX_BYTES = 1_000_000
"""Largest file."""
MAX_FILES = 200
TIMEOUT_S = 120.0
MEMORY_BYTES = 2 * 2**30

NETWORK_NAMESPACE = "network namespace: the process had no interface but a dead loopback"
SOCKET_GUARD = "socket guard: Python refused sockets and new processes; this system permits no network namespace"

_MODULE = "auto_research.evolve.quarantine"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_STEERING = ("conftest.py", "sitecustomize.py", "usercustomize.py")
"""Files that Python or pytest would obey on their own."""


class StagedFile(Part):
    """A file of a candidate, by its path below `files/`."""

    path: str
    sha256: str
    bytes: int


class Check(Part):
    """One check and its finding, in words."""

    name: str
    passed: bool
    detail: str


class Quarantined(Record):
    """What is known of an external candidate.

    Attributes:
        generator: who or what wrote it, as told when it was staged.
        digest: SHA-256 of all paths and contents; approval names it.
        network: how the checks were kept from the network.
        decided_by, decided_at, reason, installed_at: of the approval or the refusal.
    """

    schema_version: int = 1
    name: str
    generator: str
    staged_at: str
    state: Literal["staged", "checked", "approved", "refused"] = "staged"
    files: list[StagedFile]
    digest: str
    checks: list[Check] = Field(default_factory=list)
    checked_at: str = ""
    network: str = ""
    decided_by: str = ""
    decided_at: str = ""
    reason: str = ""
    installed_at: str = ""

    @property
    def passed(self) -> bool:
        """Whether it was checked and every check passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def candidate(self) -> Candidate:
        """How a run shows it: a candidate of origin `quarantined`, which never runs."""
        found = "; ".join(f"{check.name} {'passed' if check.passed else 'failed'}" for check in self.checks)
        decision = f", {self.state} by {self.decided_by}" if self.decided_by else ", waits for a person's approval"
        return Candidate(
            id=f"quarantined-{self.name}",
            generation=0,
            origin="quarantined",
            genome={},
            code={file.path: file.sha256 for file in self.files},
            reason=f"code from {self.generator} ({found or 'not checked yet'}){decision}",
        )


# ----------------------------------------------------------------------------------------------------- staging


def stage(source: Path | Mapping[str, bytes | str], quarantine: Path, name: str, generator: str) -> Quarantined:
    """Copy a candidate's files into the quarantine without executing, importing or following any.

    Args:
        source: a folder, or path -> content.
        quarantine: folder of all external candidates.
        name: letters, digits, `_`, `-`, `.`; must be new.

    Raises `UserError`, and leaves nothing behind, for a suffix that is not allowed, a file above 1 MB, an absolute or a
    parent path, a link, or a file that would steer the tests.
    """
    if not _PART.fullmatch(name):
        raise UserError(f"'{name}' cannot name a candidate: use letters, digits, '_', '-' and '.'")
    if isinstance(source, Path):
        files = _read_folder(source)
    else:
        files = {path: text.encode() if isinstance(text, str) else text for path, text in source.items()}
    _refuse_paths(list(files))
    for path, content in files.items():
        if len(content) > MAX_BYTES:
            raise UserError(f"{path} is larger than {MAX_BYTES:,} bytes, the most that a quarantined file may have")
    folder = quarantine / name
    record = Quarantined(
        name=name,
        generator=generator,
        staged_at=utc_now(),
        files=[_staged(path, files[path]) for path in sorted(files)],
        digest=_digest(files),
    )
    _make_new(folder)
    try:
        for path, content in files.items():
            _write_new(folder / "files" / path, content)
        write_json_atomic(folder / "record.json", record)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot stage {name} ({error}): correct its paths or free some space") from error
        raise
    return record


def _read_folder(folder: Path) -> dict[str, bytes]:
    """Path -> content of all regular files; links and special files are refused, never followed."""
    if folder.is_symlink() or not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the folder that holds the candidate's files")
    found: dict[str, bytes] = {}
    for where, folders, names in os.walk(folder, followlinks=False):
        for entry in (*folders, *names):
            path = Path(where, entry)
            relative, kind = path.relative_to(folder).as_posix(), path.lstat()
            if stat.S_ISLNK(kind.st_mode):
                raise UserError(f"{relative} is a link; a quarantined candidate holds plain files")
            if stat.S_ISDIR(kind.st_mode):
                continue
            if not stat.S_ISREG(kind.st_mode):
                raise UserError(f"{relative} is no plain file; a quarantined candidate holds plain files")
            _refuse_paths([relative])
            if len(found) == MAX_FILES:
                raise UserError(f"{folder} holds more than {MAX_FILES} files")
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                found[relative] = file.read(MAX_BYTES + 1)
    return found


def _refuse_paths(paths: Sequence[str]) -> None:
    if not paths or len(paths) > MAX_FILES:
        raise UserError(f"a candidate has 1 to {MAX_FILES} files, not {len(paths)}")
    for path in paths:
        parts = path.split("/")
        if len(path) > 200 or not all(_PART.fullmatch(part) for part in parts):
            raise UserError(
                f"the path '{path}' is refused: paths are relative, without '..', of letters, digits, '_', '-' and '.'"
            )
        if not path.endswith(SUFFIXES):
            raise UserError(f"{path} is refused: only {', '.join(SUFFIXES)} files are staged")
        if parts[-1].casefold() in _STEERING:
            raise UserError(f"{path} is refused: Python or pytest would obey it, and no candidate chooses its test")
    if len({path.casefold() for path in paths}) < len(paths):
        raise UserError("two paths differ in case only, which some disks cannot hold")


def _staged(path: str, content: bytes) -> StagedFile:
    return StagedFile(path=path, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


def _digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 over the sorted paths and the hashes of their contents."""
    hashes = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _make_new(folder: Path) -> None:
    """Make a folder that must not exist: not as a folder, a file or a link that leads nowhere."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        raise UserError(f"{folder} exists: give a folder that does not exist yet") from None
    except OSError as error:
        raise UserError(f"cannot make {folder} ({error.strerror}): give another folder") from error


def _write_new(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        file.write(content)


# ---------------------------------------------------------------------------------------------------- checking


def read(quarantine: Path, name: str) -> Quarantined:
    """The record of a candidate. Raises `UserError` when there is none."""
    if not _PART.fullmatch(name):
        raise UserError(f"'{name}' cannot name a candidate: use letters, digits, '_', '-' and '.'")
    return read_record(quarantine / name / "record.json", Quarantined)


def list_all(quarantine: Path) -> list[Quarantined]:
    """All external candidates, by name."""
    names = sorted(path.parent.name for path in quarantine.glob("*/record.json"))
    return [read(quarantine, name) for name in names]


def check(quarantine: Path, name: str, *, timeout_s: float = TIMEOUT_S, namespace: bool = True) -> Quarantined:
    """Check paths, syntax and unit tests; the findings go into the record.

    Syntax and tests run in their own process group without a network: in an empty network namespace where the system
    permits one, else behind a socket guard. The command is `pytest` over `test_*.py`, whatever the files say. A
    candidate without a test that passes does not pass.

    Args:
        timeout_s: after this the whole process tree is ended.
        namespace: False uses the socket guard at once.
    """
    from auto_research.runtime.process import Job, run_isolated

    folder = quarantine / name
    with _undecided(quarantine, name) as record:
        _same_files(folder, record)
        checks = [Check(name="paths", passed=True, detail=f"{len(record.files)} files, contents as staged")]
        with tempfile.TemporaryDirectory(prefix="quarantine-") as scratch:
            shutil.copytree(folder / "files", Path(scratch, "files"))
            outcome = run_isolated(
                Job(
                    target=f"{_MODULE}:check_isolated",
                    payload={"scratch": scratch, "namespace": namespace, "paths": [file.path for file in record.files]},
                    timeout_s=timeout_s,
                    log_path=folder / "check.log",
                    result_path=folder / "check.json",
                    memory_limit_bytes=MEMORY_BYTES,
                    threads=1,
                    preload=("pytest",) if importlib.util.find_spec("pytest") else (),
                    name=f"check of {name}",
                )
            )
            early = _said(Path(scratch, "early.json"))
        said: dict[str, Any] = dict(outcome.result or {}) if outcome.state == "finished" else early
        network = str(said.get("network", ""))
        for kind in ("syntax", "tests"):
            passed, detail = said.get(kind, (False, f"the checks ended early: {outcome.reason or outcome.state}"))
            checks.append(Check(name=kind, passed=bool(passed), detail=str(detail)))
        _same_files(folder, record)
        checked = record.model_copy(
            update={"state": "checked", "checks": checks, "checked_at": utc_now(), "network": network}
        )
        write_json_atomic(folder / "record.json", checked)
    return checked


def _said(path: Path) -> dict[str, Any]:
    """What was found before any test ran, of a process that ended early; the file may hold nothing else."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return {kind: found[kind] for kind in ("network", "syntax")}
    return {}


@contextmanager
def _undecided(quarantine: Path, name: str) -> Iterator[Quarantined]:
    """The record of a candidate that nobody has decided on, with the right to change it."""
    read(quarantine, name)  # a lock would make the folder
    with OutputLock(quarantine / name / "record.json"):
        record = read(quarantine, name)
        if record.state in ("approved", "refused"):
            raise UserError(f"{name} was {record.state} by {record.decided_by}: stage a change under a new name")
        yield record


def _same_files(folder: Path, record: Quarantined) -> dict[str, bytes]:
    """The staged files, read anew. Raises `UserError` when they are not what was staged."""
    files = _read_folder(folder / "files")
    if _digest(files) != record.digest:
        raise UserError(f"the files of {record.name} are not those that were staged: stage them under a new name")
    return files


def check_isolated(payload: dict[str, Any]) -> dict[str, Any]:
    """What the isolated process does: cut the network off, parse every file, run the tests of a scratch copy."""
    scratch = Path(payload["scratch"])
    network = _cut_off_network(payload["namespace"])
    _bare_environment(scratch)
    os.chdir(scratch / "files")
    found: dict[str, Any] = {"network": network, "syntax": _check_syntax(payload["paths"])}
    write_json_atomic(scratch / "early.json", found)
    found["tests"] = _run_tests(scratch) if found["syntax"][0] else (False, "not run: the syntax check failed")
    return found


def _cut_off_network(namespace: bool) -> str:
    """Leave the network for good; returns how."""
    if namespace and sys.platform == "linux":
        new_network, new_user = 0x40000000, 0x10000000
        before = os.readlink("/proc/self/ns/net")
        unshare = ctypes.CDLL(None, use_errno=True).unshare
        user = os.geteuid()
        for flags in (new_network, new_network | new_user):  # as root, or with a user namespace of its own
            if unshare(flags) == 0 and os.readlink("/proc/self/ns/net") != before:
                if flags & new_user:
                    with suppress(OSError):  # the user keeps its number; without it nothing else would change
                        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
                return NETWORK_NAMESPACE
    sys.addaudithook(_refuse_network)
    return SOCKET_GUARD


_REFUSED_EVENTS = (
    "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname",
    "socket.gethostbyaddr", "socket.getnameinfo", "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty",
    "os.posix_spawn", "os.spawn",
)  # fmt: skip


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook, which cannot be removed: no address is reached, and no process starts that could."""
    if event in _REFUSED_EVENTS:
        raise PermissionError(f"quarantined code may not use {event}")


def _bare_environment(scratch: Path) -> None:
    """Keep secrets and settings of the caller from the code: a few variables stay, home is the scratch folder."""
    kept = {key: os.environ[key] for key in ("PATH", "LANG", "LC_ALL", "OMP_NUM_THREADS") if key in os.environ}
    os.environ.clear()
    os.environ.update(kept)
    os.environ.update(HOME=str(scratch), TMPDIR=str(scratch), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    tempfile.tempdir = str(scratch)


def _check_syntax(paths: Sequence[str]) -> tuple[bool, str]:
    """Whether every file parses, and none tells pytest which plugins to load."""
    problems = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
            if path.endswith(".json"):
                json.loads(text)
            elif path.endswith(".py"):
                tree = ast.parse(text, path)
                compile(tree, path, "exec", dont_inherit=True)
                if any(isinstance(node, ast.Name) and node.id == "pytest_plugins" for node in ast.walk(tree)):
                    problems.append(f"{path}: 'pytest_plugins' would choose how it is tested")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            problems.append(f"{path}: {type(error).__name__}: {error}")
    return not problems, "; ".join(problems) or f"{len(paths)} files parse"


def _run_tests(scratch: Path) -> tuple[bool, str]:
    """Run pytest with a fixed command line, settings of nobody and no plugin but our count."""
    try:
        import pytest
    except ImportError:
        return False, "not run: pytest is not installed (pip install pytest)"

    class Count:
        passed = failed = skipped = 0

        def pytest_runtest_logreport(self, report: Any) -> None:
            self.passed += report.when == "call" and report.passed
            self.failed += report.failed
            self.skipped += report.skipped

        def pytest_collectreport(self, report: Any) -> None:
            self.failed += report.failed

    count = Count()
    settings = scratch / "pytest.ini"
    settings.write_text("[pytest]\npython_files = test_*.py\n", encoding="utf-8")
    sys.path.insert(0, os.getcwd())
    sys.dont_write_bytecode = True
    command = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", str(settings), "--rootdir", os.getcwd(), "."]
    code = int(pytest.main(command, plugins=[count]))
    found = f"{count.passed} passed, {count.failed} failed, {count.skipped} skipped"
    if code == 0 and count.passed and not count.failed:
        return True, found
    return False, found if count.failed or count.skipped else f"{found}: a candidate brings tests in files test_*.py"


# ---------------------------------------------------------------------------------------------------- decision


def approve(quarantine: Path, name: str, *, digest: str, by: str, into: Path) -> Quarantined:
    """Copy a checked candidate into a new folder, on a person's word. Nothing calls this but that command.

    Args:
        digest: at least the first 12 hex digits of the record's digest: the person approves exactly what was read.
        by: who approves.
        into: a folder that does not exist.

    Raises `UserError` when a check is missing or failed, the files changed since, the digest is another's, or `into`
    exists.
    """
    if not by.strip():
        raise UserError("an approval names the person who gives it: --by NAME")
    folder = quarantine / name
    with _undecided(quarantine, name) as record:
        if not record.passed:
            failed = ", ".join(check.name for check in record.checks if not check.passed) or "it was not checked"
            raise UserError(f"{name} cannot be approved: {failed}")
        if len(digest) < 12 or not record.digest.startswith(digest):
            raise UserError(f"{name} has the digest {record.digest[:12]}, not '{digest}': read its files, then name it")
        files = _same_files(folder, record)
        _make_new(into)
        try:
            for path, content in files.items():
                _write_new(into / path, content)
            approved = record.model_copy(
                update={
                    "state": "approved",
                    "decided_by": by.strip(),
                    "decided_at": utc_now(),
                    "installed_at": os.path.abspath(into),
                }
            )
            write_json_atomic(folder / "record.json", approved)
        except BaseException:
            shutil.rmtree(into, ignore_errors=True)
            raise
    return approved


def refuse(quarantine: Path, name: str, *, by: str, reason: str) -> Quarantined:
    """Refuse a candidate for good; its files stay for the record."""
    if not by.strip() or not reason.strip():
        raise UserError("a refusal names the person and the reason: --by NAME --reason TEXT")
    with _undecided(quarantine, name) as record:
        refused = record.model_copy(
            update={"state": "refused", "decided_by": by.strip(), "decided_at": utc_now(), "reason": reason.strip()}
        )
        write_json_atomic(quarantine / name / "record.json", refused)
    return refused


def text(record: Quarantined) -> str:
    """The record for a terminal."""
    lines = [f"{record.name}: {record.state}, from {record.generator}, digest {record.digest[:12]}"]
    lines += [f"  {file.path}  {file.bytes:,} bytes  {file.sha256[:12]}" for file in record.files]
    lines += [f"  {check.name}: {'passed' if check.passed else 'FAILED'}: {check.detail}" for check in record.checks]
    if record.network:
        lines.append(f"  {record.network}")
    if record.decided_by:
        where = f" into {record.installed_at}" if record.installed_at else ""
        lines.append(f"  {record.state} by {record.decided_by}{where} {record.reason}".rstrip())
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The commands of the module's description. Returns the exit code: 0, 1 when a check failed, 2 for bad input."""
    import argparse

    parser = argparse.ArgumentParser(prog="auto-research evolve quarantine", description="External candidates.")
    parser.add_argument("--quarantine", type=Path, default=FOLDER, help="folder of all of them")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="show all")
    named = {name: commands.add_parser(name) for name in ("stage", "check", "approve", "refuse")}
    for command in named.values():
        command.add_argument("name")
    named["stage"].add_argument("source", type=Path)
    named["stage"].add_argument("--generator", required=True, help="who or what wrote the files")
    named["approve"].add_argument("--digest", required=True, help="of the record, at least 12 digits")
    named["approve"].add_argument("--into", type=Path, required=True, help="a folder that does not exist")
    named["refuse"].add_argument("--reason", required=True)
    for name in ("approve", "refuse"):
        named[name].add_argument("--by", required=True, help="your name")
    given = parser.parse_args(arguments)
    try:
        if given.command == "list":
            print("\n".join(map(text, list_all(given.quarantine))) or f"{given.quarantine} holds no candidate")
            return 0
        if given.command == "stage":
            record = stage(given.source, given.quarantine, given.name, given.generator)
        elif given.command == "check":
            record = check(given.quarantine, given.name)
        elif given.command == "approve":
            record = approve(given.quarantine, given.name, digest=given.digest, by=given.by, into=given.into)
        else:
            record = refuse(given.quarantine, given.name, by=given.by, reason=given.reason)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text(record))
    return 1 if given.command == "check" and not record.passed else 0
