"""External candidates: what is refused, what the checks find, and that nothing is installed without a person."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auto_research.evolve.cells import Cell
from auto_research.evolve.quarantine import (
    MAX_BYTES,
    MAX_FILES,
    NETWORK_NAMESPACE,
    SOCKET_GUARD,
    Quarantined,
    approve,
    check,
    list_all,
    main,
    read,
    refuse,
    stage,
)
from auto_research.runtime.errors import UserError

GOOD: dict[str, bytes | str] = {
    "operator_one.py": "def double(x):\n    return 2 * x\n",
    "test_operator_one.py": "from operator_one import double\n\ndef test_double():\n    assert double(2) == 4\n",
    "notes/card.json": '{"paper": "0001.00001", "test_command": "true"}',
    "README.md": "An operator.",
}


def staged(folder: Path, **files: bytes | str) -> Quarantined:
    """GOOD with further files; `_` in a keyword stands for the dot of `.py`."""
    return stage({**GOOD, **{name.replace("_py", ".py"): text for name, text in files.items()}}, folder, "one", "model")


def checks(record: Quarantined) -> dict[str, tuple[bool, str]]:
    return {found.name: (found.passed, found.detail) for found in record.checks}


# ----------------------------------------------------------------------------------------------------- staging


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd.py", "../up.py", "a/../../up.py", "a/./b.py", "", "a//b.py", "~/x.py", "C:\\x.py", "..\\x.py",
        "x.py\n", ".hidden.py", "a/.git/x.py", "x y.py", "x\0.py", "run.sh", "x.pyc", "x.PY", "x", "x.so", "pytest.ini",
        "x.toml", "conftest.py", "deep/conftest.py", "sitecustomize.py", "d" * 101 + ".py", "d/" * 120 + "x.py",
    ],
)  # fmt: skip
def test_refused_paths(path: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        stage({**GOOD, path: "x = 1\n"}, tmp_path / "q", "one", "model")
    assert not list(tmp_path.rglob("*.py")), "nothing is left behind"
    assert not (tmp_path / "q" / "one").exists()


@given(st.text(st.sampled_from("ab./\\:~ _-\0\n"), max_size=12))
def test_no_path_leaves_the_quarantine(path: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "deep", "q")
        try:
            stage({path + ".py": "x = 1"}, root, "one", "model")
        except UserError:
            assert not root.exists() or not list(root.iterdir())
        else:
            kept = root / "one" / "files"
            written = [p for p in Path(folder).rglob("*") if p.is_file() and p.name != "record.json"]
            assert [p.resolve().is_relative_to(kept.resolve()) for p in written] == [True]


def test_size_number_and_clashes(tmp_path: Path) -> None:
    stage({"largest.md": b"x" * MAX_BYTES}, tmp_path, "largest", "model")
    with pytest.raises(UserError, match="larger than 1,000,000 bytes"):
        stage({"larger.md": b"x" * (MAX_BYTES + 1)}, tmp_path, "larger", "model")
    with pytest.raises(UserError, match="1 to 200 files, not 201"):
        stage({f"f{i}.md": "" for i in range(MAX_FILES + 1)}, tmp_path, "many", "model")
    with pytest.raises(UserError, match="1 to 200 files, not 0"):
        stage({}, tmp_path, "none", "model")
    with pytest.raises(UserError, match="case only"):
        stage({"a.py": "", "A.py": ""}, tmp_path, "case", "model")
    with pytest.raises(UserError, match="cannot stage clash"):
        stage({"a.py": "", "a.py/b.py": ""}, tmp_path, "clash", "model")
    assert [record.name for record in list_all(tmp_path)] == ["largest"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["largest"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp/x", ".hidden", "a b"])
def test_refused_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot name a candidate"):
        stage(GOOD, tmp_path, name, "model")
    with pytest.raises(UserError, match="cannot name a candidate"):
        read(tmp_path, name)


def test_a_name_is_used_once(tmp_path: Path) -> None:
    staged(tmp_path)
    with pytest.raises(UserError, match="exists: give a folder that does not exist yet"):
        staged(tmp_path, extra_py="x = 1")
    assert not (tmp_path / "one" / "files" / "extra.py").exists()


def test_a_folder_is_staged_as_it_is(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for path, text in GOOD.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(str(text))
    record = stage(source, tmp_path / "q", "one", "model 3")
    assert record == read(tmp_path / "q", "one")
    assert record.digest == staged(tmp_path / "other").digest
    assert {file.path: file.bytes for file in record.files} == {path: len(text) for path, text in GOOD.items()}
    assert (record.state, record.generator, record.passed) == ("staged", "model 3", False)
    with pytest.raises(UserError, match="is not a folder"):
        stage(source / "README.md", tmp_path / "q", "two", "model")


@pytest.mark.parametrize("kind", ["file", "folder", "dangling", "root", "pipe"])
def test_links_and_special_files_are_refused(kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.py").write_text("KEY = 1")
    source = tmp_path / "source"
    if kind == "root":
        source.symlink_to(secret)
    else:
        source.mkdir()
        (source / "ok.py").write_text("x = 1")
        if kind == "pipe":
            os.mkfifo(source / "pipe.py")
        else:
            target = {"file": secret / "key.py", "folder": secret, "dangling": tmp_path / "nowhere.py"}[kind]
            (source / "link.py").symlink_to(target)
    with pytest.raises(UserError, match=r"is a link|is no plain file|is not a folder"):
        stage(source, tmp_path / "q", "one", "model")
    assert not (tmp_path / "q").exists()


# ---------------------------------------------------------------------------------------------------- checking


def test_a_good_candidate_passes_and_is_not_installed_by_it(tmp_path: Path) -> None:
    staged(tmp_path)
    before = {p for p in tmp_path.rglob("*") if "files" in p.parts}
    record = check(tmp_path, "one")
    assert checks(record) == {
        "paths": (True, "4 files, contents as staged"),
        "syntax": (True, "4 files parse"),
        "tests": (True, "1 passed, 0 failed, 0 skipped"),
    }
    assert (record.state, record.passed, record.installed_at, record.decided_by) == ("checked", True, "", "")
    assert record.network in (NETWORK_NAMESPACE, SOCKET_GUARD)
    assert {p for p in tmp_path.rglob("*") if "files" in p.parts} == before, "tests run on a copy"
    assert record == read(tmp_path, "one")


@pytest.mark.parametrize(
    ("files", "failed", "detail"),
    [
        ({"broken_py": "def f(:\n"}, "syntax", "broken.py: SyntaxError"),
        ({"deep_py": "x = " + "(" * 5000 + ")" * 5000}, "syntax", "deep.py: "),
        ({"latin_py": b"x = '\xe4'\n"}, "syntax", "latin.py: UnicodeDecodeError"),
        ({"zero_py": "x = 1\0\n"}, "syntax", "zero.py: "),
        ({"notes/card.json": "{"}, "syntax", "notes/card.json: JSONDecodeError"),
        (
            {"steer_py": "pytest_plugins = ['operator_one']\n"},
            "syntax",
            "'pytest_plugins' would choose how it is tested",
        ),
        ({"test_bad_py": "def test_bad():\n    assert 1 == 2\n"}, "tests", "1 passed, 1 failed"),
        ({"test_import_py": "import no_such_module\n"}, "tests", "1 failed"),
        ({"test_setup_py": "import pytest\n@pytest.fixture\ndef f(): 1/0\ndef test(f): 0\n"}, "tests", "1 failed"),
        ({"test_operator_one_py": "x = 1\n"}, "tests", "a candidate brings tests"),
        (
            {"test_operator_one_py": "import pytest\n@pytest.mark.skip\ndef test(): 0\n"},
            "tests",
            "0 passed, 0 failed, 1 skipped",
        ),
        ({"test_quits_py": "import os\nos._exit(0)\n"}, "tests", "ended early: ended with exit code 0 and without"),
        ({"test_dies_py": "import os\nos.kill(os.getpid(), 9)\n"}, "tests", "ended early: ended by signal 9"),
        ({"test_memory_py": "def test(): bytearray(8 * 2**30)\n"}, "tests", "1 failed"),
    ],
)
def test_what_the_checks_find(files: dict[str, Any], failed: str, detail: str, tmp_path: Path) -> None:
    staged(tmp_path, **files)
    record = check(tmp_path, "one")
    found = checks(record)
    assert not record.passed
    assert not found[failed][0]
    assert detail in found[failed][1]
    assert found["syntax"][0] == (failed != "syntax")
    if failed == "syntax":
        assert found["tests"] == (False, "not run: the syntax check failed")
    with pytest.raises(UserError, match=f"cannot be approved: {failed}"):
        approve(tmp_path, "one", digest=record.digest, by="A. Person", into=tmp_path / "new")
    assert not (tmp_path / "new").exists()


CALLS = """
import socket, urllib.request
import pytest

def test_no_network():
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", {port}), timeout=5)
    with pytest.raises(OSError):
        urllib.request.urlopen("http://127.0.0.1:{port}", timeout=5)
    with pytest.raises(OSError):
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {port}))
"""


@pytest.mark.parametrize("namespace", [True, False])
def test_the_checks_have_no_network_and_say_how(namespace: bool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):  # the server answers here ...
            server.accept()[0].close()
        staged(tmp_path, test_call_py=CALLS.format(port=port))
        record = check(tmp_path, "one", namespace=namespace)
        server.settimeout(0.0)
        with pytest.raises(BlockingIOError):  # ... and nothing of the candidate reached it
            server.accept()
    assert checks(record)["tests"] == (True, "2 passed, 0 failed, 0 skipped")
    assert record.network == SOCKET_GUARD if not namespace else record.network in (NETWORK_NAMESPACE, SOCKET_GUARD)


def test_behind_the_socket_guard_no_process_starts_that_could_call(tmp_path: Path) -> None:
    text = "import os, subprocess, pytest\n"
    for name, call in (("run", "subprocess.run(['true'])"), ("system", "os.system('true')"), ("fork", "os.fork()")):
        text += f"def test_{name}():\n    with pytest.raises(PermissionError, match='quarantined'):\n        {call}\n"
    staged(tmp_path, test_processes_py=text)
    assert checks(check(tmp_path, "one", namespace=False))["tests"] == (True, "4 passed, 0 failed, 0 skipped")


def test_a_hanging_test_and_its_grandchild_are_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    staged(
        tmp_path,
        test_hang_py=(
            "import os, subprocess, time\ndef test_hang():\n"
            "    child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
            f"    open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n    time.sleep(600)\n"
        ),
    )
    record = check(tmp_path, "one", timeout_s=3)
    assert checks(record)["syntax"][0]
    assert checks(record)["tests"] == (False, "the checks ended early: not finished after 3 s")
    assert record.network, "what was found before the tests is kept"
    for pid in map(int, pids.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_candidate_cannot_choose_how_it_is_tested_or_see_the_caller_s_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")  # beside the scratch folder
    (tmp_path / "conftest.py").write_text("raise RuntimeError('obeyed')\n")
    staged(
        tmp_path / "q",
        test_environment_py=(
            "import os, pathlib\ndef test_environment():\n    assert 'SECRET_TOKEN' not in os.environ\n"
            "    assert pathlib.Path.home() in pathlib.Path.cwd().parents\n"
        ),
    )
    assert checks(check(tmp_path / "q", "one"))["tests"] == (True, "2 passed, 0 failed, 0 skipped")


def test_a_claim_that_tests_passed_is_not_taken_from_the_candidate(tmp_path: Path) -> None:
    claim = json.dumps({"network": "none", "syntax": [True, ""], "tests": [True, "9 passed"]})
    staged(
        tmp_path,
        test_claim_py=f"import os\nopen(os.path.join('..', 'early.json'), 'w').write({claim!r})\nos._exit(0)\n",
    )
    assert not checks(check(tmp_path, "one"))["tests"][0]


def test_changed_files_are_not_checked_and_not_approved(tmp_path: Path) -> None:
    record = staged(tmp_path)
    check(tmp_path, "one")
    (tmp_path / "one" / "files" / "operator_one.py").write_text("def double(x):\n    return x + x\n")
    for act in (
        lambda: check(tmp_path, "one"),
        lambda: approve(tmp_path, "one", digest=record.digest, by="A. Person", into=tmp_path / "new"),
    ):
        with pytest.raises(UserError, match="not those that were staged"):
            act()
    assert not (tmp_path / "new").exists()


def test_an_added_link_is_found(tmp_path: Path) -> None:
    staged(tmp_path)
    (tmp_path / "one" / "files" / "more.py").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match="is a link"):
        check(tmp_path, "one")


# ---------------------------------------------------------------------------------------------------- decision


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quarantine")
    staged(folder)
    check(folder, "one")
    return folder


def copy_of(checked: Path, tmp_path: Path) -> tuple[Path, Quarantined]:
    shutil.copytree(checked, tmp_path / "q")
    return tmp_path / "q", read(tmp_path / "q", "one")


def test_an_approval_installs_exactly_what_was_checked(checked: Path, tmp_path: Path) -> None:
    quarantine, record = copy_of(checked, tmp_path)
    into = tmp_path / "operators" / "one"
    approved = approve(quarantine, "one", digest=record.digest[:12], by=" A. Person ", into=into)
    assert {p.relative_to(into).as_posix(): p.read_text() for p in into.rglob("*") if p.is_file()} == GOOD
    assert (approved.state, approved.decided_by, approved.installed_at) == ("approved", "A. Person", str(into))
    assert approved.decided_at
    assert approved == read(quarantine, "one")
    assert approved.checks == record.checks
    for act in (
        lambda: check(quarantine, "one"),
        lambda: approve(quarantine, "one", digest=record.digest, by="B", into=tmp_path / "again"),
        lambda: refuse(quarantine, "one", by="B", reason="late"),
    ):
        with pytest.raises(UserError, match=r"was approved by A. Person"):
            act()


@pytest.mark.parametrize("kind", ["folder", "file", "dangling"])
def test_an_approval_needs_a_folder_that_does_not_exist(kind: str, checked: Path, tmp_path: Path) -> None:
    quarantine, record = copy_of(checked, tmp_path)
    into = tmp_path / "into"
    if kind == "folder":
        into.mkdir()
    elif kind == "file":
        into.write_text("mine")
    else:
        into.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="does not exist yet"):
        approve(quarantine, "one", digest=record.digest, by="A. Person", into=into)
    assert read(quarantine, "one") == record
    assert not (tmp_path / "elsewhere").exists()
    assert kind != "folder" or not list(into.iterdir())


@pytest.mark.parametrize(
    ("digest", "by", "message"),
    [
        (slice(0, 11), "A", "has the digest"),
        (slice(0, 0), "A", "has the digest"),
        (slice(1, 20), "A", "has the digest"),
        (slice(0, 12), " ", "names the person"),
    ],
)
def test_an_approval_names_the_person_and_what_was_read(
    digest: slice, by: str, message: str, checked: Path, tmp_path: Path
) -> None:
    quarantine, record = copy_of(checked, tmp_path)
    with pytest.raises(UserError, match=message):
        approve(quarantine, "one", digest=record.digest[digest], by=by, into=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_unchecked_candidates_are_not_approved(tmp_path: Path) -> None:
    record = staged(tmp_path)
    with pytest.raises(UserError, match="it was not checked"):
        approve(tmp_path, "one", digest=record.digest, by="A. Person", into=tmp_path / "new")


def test_a_refusal_is_recorded_and_final(checked: Path, tmp_path: Path) -> None:
    quarantine, record = copy_of(checked, tmp_path)
    with pytest.raises(UserError, match="the person and the reason"):
        refuse(quarantine, "one", by="A. Person", reason=" ")
    refused = refuse(quarantine, "one", by="A. Person", reason="copies another operator")
    assert (refused.state, refused.decided_by, refused.reason) == ("refused", "A. Person", "copies another operator")
    with pytest.raises(UserError, match=r"was refused by A. Person"):
        approve(quarantine, "one", digest=record.digest, by="B", into=tmp_path / "new")


def test_a_quarantined_candidate_is_shown_and_never_runs(checked: Path, tmp_path: Path) -> None:
    quarantine, record = copy_of(checked, tmp_path)
    for shown in (record.candidate(), refuse(quarantine, "one", by="A", reason="no").candidate()):
        assert (shown.origin, shown.genome) == ("quarantined", {})
        assert shown.code == {file.path: file.sha256 for file in record.files}
        with pytest.raises(UserError, match="is quarantined and never runs: code from model"):
            Cell(shown, 0, "search")
    approved = approve(checked, "one", digest=record.digest, by="A. Person", into=tmp_path / "new").candidate()
    assert "tests passed), approved by A. Person" in approved.reason
    with pytest.raises(UserError, match="never runs"):
        Cell(approved, 0, "search")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "test_one.py").write_text("def test(): assert True\n")
    start = ["--quarantine", str(tmp_path / "q")]
    assert main([*start, "list"]) == 0
    assert "holds no candidate" in capsys.readouterr().out
    assert main([*start, "check", "one"]) == 2
    assert "There is no file" in capsys.readouterr().err
    assert not (tmp_path / "q" / "one").exists()
    assert main([*start, "stage", "one", str(source), "--generator", "model"]) == 0
    assert main([*start, "check", "one"]) == 0
    assert "tests: passed: 1 passed" in capsys.readouterr().out
    digest = read(tmp_path / "q", "one").digest
    words = ["approve", "one", "--by", "A. Person", "--into", str(tmp_path / "new"), "--digest"]
    assert main([*start, *words, "0" * 12]) == 2
    assert main([*start, *words, digest]) == 0
    assert (tmp_path / "new" / "test_one.py").exists()
    assert main([*start, "list"]) == 0
    assert "approved by A. Person into" in capsys.readouterr().out
    (source / "test_one.py").write_text("def test(): assert False\n")
    assert main([*start, "stage", "two", str(source), "--generator", "model"]) == 0
    assert main([*start, "check", "two"]) == 1
    assert main([*start, "refuse", "two", "--by", "A. Person", "--reason", "it fails"]) == 0
