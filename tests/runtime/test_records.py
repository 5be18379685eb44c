"""Records: strict JSON, atomic replacement, whole lines, one writer, and a full disk loses nothing."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from auto_research.runtime.errors import UserError
from auto_research.runtime.records import (
    OutputLock,
    Record,
    append_jsonl,
    read_jsonl,
    read_record,
    to_json,
    write_json_atomic,
    write_text_atomic,
)

SOURCE = Path(__file__).parents[2] / "src"


class Inner(BaseModel):
    auc: float | None


class Example(Record):
    schema_version: int = 2
    name: str
    inner: list[Inner] = Field(default_factory=list)


# ------------------------------------------------------------------------------------------------ atomic


def test_a_record_survives_the_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "result.json"
    example = Example(name="ü €", inner=[Inner(auc=0.5), Inner(auc=None)])
    write_json_atomic(path, example)
    assert read_record(path, Example) == example
    assert path.read_text(encoding="utf-8").endswith("}\n")
    assert os.listdir(path.parent) == ["result.json"]


def test_new_files_have_ordinary_permissions_and_old_ones_keep_theirs(tmp_path: Path) -> None:
    path, plain = tmp_path / "a", tmp_path / "b"
    write_text_atomic(path, "1")
    plain.write_text("1")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    path.chmod(0o640)
    write_text_atomic(path, "2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_is_written_through(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text_atomic(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_at_any_step_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "result.json"
    write_json_atomic(path, {"old": 1})

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(UserError, match=r"No space left to write .*result\.json.*free some space"):
        write_json_atomic(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1}
    assert os.listdir(tmp_path) == ["result.json"]


def test_paths_that_cannot_be_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a regular file"):
        write_text_atomic(tmp_path, "text")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another path"):
        write_text_atomic(tmp_path / "file" / "below", "text")
    with pytest.raises(UserError, match="choose another path"):
        append_jsonl(tmp_path, {})


KILLED_WRITER = """
import os, sys
from auto_research.runtime.records import write_json_atomic
number = 0
while True:
    write_json_atomic(sys.argv[1], {"number": number, "filling": "x" * 200_000})
    number += 1
"""


def test_a_kill_at_any_moment_leaves_a_readable_file(tmp_path: Path, until: Callable[..., None]) -> None:
    """Killed as soon as its file has changed again, so at another moment of the write each time."""
    path = tmp_path / "result.json"
    write_json_atomic(path, {"number": -1})
    for round_number in range(4):
        before = path.stat().st_ino
        writer = subprocess.Popen(
            [sys.executable, "-c", KILLED_WRITER, str(path)],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )
        until(lambda before=before: path.stat().st_ino != before)
        for _ in range(round_number * 1000):  # a little longer each time
            path.stat()
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert json.loads(path.read_text())["number"] >= 0
    with OutputLock(path):  # whoever writes next clears what the killed left
        assert not list(tmp_path.glob(".result.json.*"))


# --------------------------------------------------------------------------------------------- full disks


@contextmanager
def small_disk(folder: Path, size: str = "256k") -> Iterator[Path]:
    """A tmpfs of a given size, where this process may mount one."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs needs more rights: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        result, log = disk / "result.json", disk / "log.jsonl"
        write_json_atomic(result, {"old": "x" * 1000})
        appended = 0
        refused = ""
        while not refused:
            try:
                append_jsonl(log, {"number": appended, "filling": "y" * 3000})
                appended += 1
            except UserError as error:
                refused = str(error)
        assert refused.startswith("No space left to append to")
        assert appended > 10
        assert [line["number"] for line in read_jsonl(log)] == list(range(appended))
        assert log.read_bytes().endswith(b"}\n")
        with pytest.raises(UserError, match="No space left to write"):
            write_json_atomic(result, {"new": "z" * 300_000})
        assert json.loads(result.read_text()) == {"old": "x" * 1000}
        assert sorted(os.listdir(disk)) == ["log.jsonl", "result.json"]
        log.unlink()  # room again: the same calls work
        write_json_atomic(result, {"new": 1})
        assert json.loads(result.read_text()) == {"new": 1}


FULL_BY_LIMIT = """
import resource, sys
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import append_jsonl, write_json_atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for action in (
    lambda: write_json_atomic(sys.argv[1], {"new": "z" * 30_000}),
    lambda: [append_jsonl(sys.argv[2], {"number": n, "filling": "y" * 3000}) for n in range(100)],
):
    try:
        action()
    except UserError as error:
        print(error)
"""


def test_a_file_that_may_not_grow_loses_nothing(tmp_path: Path) -> None:
    """The same without a mount: a limit on file size cuts a write in two, as a filling disk does."""
    result, log = tmp_path / "result.json", tmp_path / "log.jsonl"
    write_json_atomic(result, {"old": 1})
    done = subprocess.run(
        [sys.executable, "-c", FULL_BY_LIMIT, str(result), str(log)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.count("No space left to") == 2, done.stdout + done.stderr
    assert json.loads(result.read_text()) == {"old": 1}
    assert [line["number"] for line in read_jsonl(log)] == list(range(6))
    assert log.read_bytes().endswith(b"}\n")
    assert sorted(os.listdir(tmp_path)) == ["log.jsonl", "result.json"]


# -------------------------------------------------------------------------------------------- strict JSON


@pytest.mark.parametrize(
    "value, where",
    [
        ({"metrics": {"auc": math.nan}}, r"metrics\.auc"),
        ({"a": [1.0, -math.inf]}, r"a\[1\]"),
        (math.inf, "the value itself"),
        (Inner.model_construct(auc=math.nan), "auc"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, value: Any, where: str) -> None:
    for write in (write_json_atomic, append_jsonl):
        with pytest.raises(ValueError, match=where):
            write(tmp_path / "file", value)
    assert os.listdir(tmp_path) == []


def test_a_record_refuses_nan_and_unknown_fields() -> None:
    class Metrics(Record):
        auc: float

    for fields in ({"auc": math.nan}, {"auc": 0.5, "ndcg": 1.0}):
        with pytest.raises(ValueError):
            Metrics.model_validate(fields)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(json_values)
def test_strict_json_round_trip(value: Any) -> None:
    text = to_json(value)
    assert json.loads(text) == value
    assert "\n" not in text  # one value, one line


# ------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "not valid JSON"),
        ("[]", "holds no record"),
        ('{"schema_version": 3, "name": "n"}', "schema version 3 and this program knows up to 2"),
        ('{"schema_version": 3, "name": "n", "unknown": 1}', "schema version 3"),
        ('{"schema_version": 2}', "field name: Field required"),
        ('{"name": "n", "extra": 1}', "field extra"),
        ('{"name": 1, "inner": []}', "field name"),
        ('{"name": "n", "inner": [{"auc": 1}, {"auc": "high"}]}', r"field inner\.1\.auc"),
        ('{"schema_version": "two", "name": "n"}', "field schema_version"),
    ],
)
def test_a_bad_record_is_named_by_file_and_field(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as error:
        read_record(path, Example)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no file"):
        read_record(tmp_path / "absent.json", Example)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not valid JSON"):
        read_record(tmp_path / "binary", Example)
    with pytest.raises(UserError, match="Cannot read"):
        read_record(tmp_path, Example)


def test_an_older_schema_is_read(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"schema_version": 1, "name": "n"}')
    assert read_record(tmp_path / "old.json", Example).schema_version == 1


# --------------------------------------------------------------------------------------------- JSON lines


def test_a_torn_line_is_ignored_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_jsonl(path, {"number": 1})
    with open(path, "ab") as file:
        file.write(b'{"number": 2, "torn')
    assert read_jsonl(path) == [{"number": 1}]
    append_jsonl(path, {"number": 3, "text": "two\nlines"})
    assert read_jsonl(path) == [{"number": 1}, {"number": 3, "text": "two\nlines"}]


def test_a_long_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"number": 1}\n' + b"x" * 300_000)
    append_jsonl(path, {"number": 2})
    assert read_jsonl(path) == [{"number": 1}, {"number": 2}]
    path.write_bytes(b"x" * 300_000)  # nothing but a torn line
    append_jsonl(path, {"number": 3})
    assert read_jsonl(path) == [{"number": 3}]


def test_no_file_has_no_lines_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "absent") == []
    path = tmp_path / "log.jsonl"
    for wrong in ("[1]", "not json"):
        path.write_text(f'{{"a": 1}}\n{wrong}\n')
        with pytest.raises(UserError, match=r"log\.jsonl, line 2,"):
            read_jsonl(path)


def _append_many(path: str, writer: int) -> None:
    for number in range(50):
        append_jsonl(path, {"writer": writer, "number": number, "filling": "z" * (writer * 500)})


def test_appenders_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(str(path), writer)) for writer in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
        assert process.exitcode == 0
    lines = read_jsonl(path)
    for writer in range(4):
        assert [line["number"] for line in lines if line["writer"] == writer] == list(range(50))


# ------------------------------------------------------------------------------------------------- locking

HOLDER = """
import sys
from auto_research.runtime.records import OutputLock
with OutputLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_elsewhere(path: Path) -> Iterator[subprocess.Popen[str]]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    try:
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def test_the_second_writer_is_told_who_holds_the_output(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    with held_elsewhere(path) as holder:
        with pytest.raises(UserError) as error, OutputLock(path):
            pass
        text = str(error.value)
        assert f"process {holder.pid}" in text
        assert "since 20" in text
        assert "give another output" in text
        with OutputLock(tmp_path / "other.json"):  # another output is free
            pass
        holder.kill()
        holder.wait()
        with OutputLock(path):  # freed by the death of its holder
            write_json_atomic(path, {})


def test_a_released_lock_is_free_and_leaves_no_holder(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    for _ in range(2):
        with OutputLock(path):
            with pytest.raises(UserError, match=f"process {os.getpid()}"), OutputLock(path):
                pass
            with pytest.raises(UserError), OutputLock(path):  # the failed attempt freed nothing
                pass
    assert not path.with_name("audit.json.lock.holder").exists()


def test_a_lock_in_an_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write"), OutputLock(tmp_path / "file" / "audit.json"):
        pass


def test_importing_records_does_not_import_torch() -> None:
    code = (
        "import sys; from auto_research.runtime import budget, errors, records, versions, evidence, device, process; "
        "versions.environment(); sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
