"""Records that survive: versioned schemas, atomic writes, append-only lines, one writer at a time.

* A file is replaced, never edited: temporary file in the same folder, flush, fsync, rename, fsync of the
  folder. A kill or a full disk at any moment leaves the old content or the new content, complete.
* A JSON-lines file is only appended to, one write a line, under a lock. A line torn by a kill or by a full
  disk is cut off by the next writer and ignored by readers.
* JSON here is strict: a missing number is ``None``; NaN and infinity are refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import filelock
from pydantic import BaseModel, ConfigDict, ValidationError

from auto_research.runtime.errors import UserError

__all__ = [
    "OutputLock",
    "Record",
    "append_jsonl",
    "read_jsonl",
    "read_record",
    "to_json",
    "utc_now",
    "write_json_atomic",
    "write_text_atomic",
]


class Record(BaseModel):
    """A file format: unknown fields, NaN and infinity are errors.

    A subclass raises its default of ``schema_version`` when its fields change meaning; older programs then
    refuse newer files in one sentence instead of misreading them.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    schema_version: int = 1


RecordT = TypeVar("RecordT", bound=Record)


# ------------------------------------------------------------------------------------------------ writing


def _where_not_finite(value: Any, at: str = "") -> str | None:
    """Path of the first NaN or infinity inside a JSON-like value, such as ``metrics.auc[2]``."""
    if isinstance(value, float):
        return None if math.isfinite(value) else at or "the value itself"
    if isinstance(value, dict):
        inner = ((f"{at}.{key}" if at else str(key), child) for key, child in value.items())
    elif isinstance(value, list | tuple):
        inner = ((f"{at}[{index}]", child) for index, child in enumerate(value))
    else:
        return None
    return next((found for where, child in inner if (found := _where_not_finite(child, where))), None)


def to_json(obj: Any, *, indent: int | None = None) -> str:
    """Serialise a pydantic model or a plain JSON value, strictly.

    Raises:
        ValueError: the value holds NaN or infinity; the message says where.
        TypeError: the value holds something JSON has no form for.
    """
    plain = obj.model_dump(mode="python") if isinstance(obj, BaseModel) else obj
    if where := _where_not_finite(plain):
        raise ValueError(f"{where} is not a finite number; records hold None where a number is missing")
    if isinstance(obj, BaseModel):
        plain = obj.model_dump(mode="json")
    return json.dumps(plain, allow_nan=False, ensure_ascii=False, indent=indent)


def _user_error(error: OSError, path: Path, doing: str) -> UserError:
    """One sentence for what a user can cause: no room, no permission, a path that cannot be a file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(
            f"No space left to {doing} {path}: what was written before is intact; "
            "free some space on that disk and run the command again."
        )
    reason = os.strerror(error.errno) if error.errno else str(error)
    return UserError(f"Cannot {doing} {path} ({reason}): choose another path or correct its permissions.")


@contextmanager
def _clear_errors(path: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _user_error(error, path, doing) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network folders refuse it; the rename itself has happened
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary_pattern(path: Path) -> tuple[str, str]:
    return f".{path.name}.", ".tmp"


def remove_torn_writes(path: Path) -> None:
    """Remove the temporary files that killed writers of ``path`` left; only while no writer is alive."""
    prefix, suffix = _temporary_pattern(path)
    with suppress(OSError):  # a folder that cannot be listed has nothing to clean
        for name in os.listdir(path.parent):
            if name.startswith(prefix) and name.endswith(suffix):
                with suppress(FileNotFoundError):
                    (path.parent / name).unlink()


def _write_atomic(path: Path, data: bytes) -> None:
    path = Path(os.path.realpath(path))  # write through a link, as open() would
    with _clear_errors(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise UserError(f"Cannot write {path}: it exists and is not a regular file; choose another path.")
        prefix, suffix = _temporary_pattern(path)
        temporary = path.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(4)}{suffix}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                if path.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8) so that a reader sees the old or the new content, never a part.

    Parent folders are made. A full disk leaves the old file as it was.

    Raises:
        UserError: no space, no permission, or a path that cannot be a file.
    """
    _write_atomic(Path(path), text.encode("utf-8"))


def write_json_atomic(path: str | os.PathLike[str], obj: Any) -> None:
    """Replace ``path`` by a pydantic model or a plain JSON value, indented; see :func:`write_text_atomic`.

    Raises:
        UserError: as :func:`write_text_atomic`.
        ValueError: the value holds NaN or infinity.
    """
    write_text_atomic(path, to_json(obj, indent=2) + "\n")


def append_jsonl(path: str | os.PathLike[str], obj: Any, *, sync: bool = False) -> None:
    """Append one JSON line: ``O_APPEND``, one write, under a lock that other appenders honour.

    A line that does not fit on the disk is taken back, and a torn last line that a killed writer left is
    cut off first, so the file holds whole lines only.

    Args:
        sync: return only once the line is on the disk (fsync of the file, and of the folder of a new file).

    Raises:
        UserError: no space, no permission, or a path that cannot be a file.
        ValueError: the value holds NaN or infinity.
    """
    path = Path(path)
    line = to_json(obj).encode("utf-8") + b"\n"
    with _clear_errors(path, "append to"):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            end = _end_of_whole_lines(descriptor)
            try:
                written = os.write(descriptor, line)
            except OSError:
                os.ftruncate(descriptor, end)
                raise
            if written < len(line):
                os.ftruncate(descriptor, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(descriptor)
                if end == 0:
                    _sync_folder(path.parent)
        finally:
            os.close(descriptor)


def _end_of_whole_lines(descriptor: int, block: int = 65536) -> int:
    """Cut a torn last line off an open JSON-lines file; return the length that remains, in bytes."""
    size = os.fstat(descriptor).st_size
    start = size
    while start > 0:
        start = max(0, start - block)
        newline = os.pread(descriptor, block, start).rfind(b"\n")
        if newline >= 0:
            start += newline + 1
            break
    if start < size:
        os.ftruncate(descriptor, start)
    return start


# ------------------------------------------------------------------------------------------------ reading


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file as dictionaries; an unfinished last line is ignored.

    A missing file has no lines.

    Raises:
        UserError: a line is not a JSON object; the message names file and line.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _user_error(error, path, "read") from error
    records: list[dict[str, Any]] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number}, is not a JSON object: remove the line or the file.")
        records.append(record)
    return records


def read_record(path: str | os.PathLike[str], model: type[RecordT]) -> RecordT:
    """Read and validate a record.

    Raises:
        UserError: the file is missing or unreadable, is not JSON, was written by a newer version of this
            program, or a field is missing, unknown or of the wrong kind (the message names file and field).
    """
    path = Path(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no file {path}: check the path or run the command that writes it.") from None
    except OSError as error:
        raise _user_error(error, path, "read") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): restore it or run the command again.") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds no record (its top level is not an object): restore it or write it anew.")
    known = model.model_fields["schema_version"].default
    found = raw.get("schema_version", 1)
    if isinstance(known, int) and isinstance(found, int) and found > known:
        raise UserError(
            f"{path} has schema version {found} and this program knows up to {known}: "
            "use the newer version of the program that wrote it."
        )
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{path}: {_first_problem(error)}; correct it or write the file anew.") from error


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "(the whole record)"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"field {field}: {first['msg']}{more}"


# ------------------------------------------------------------------------------------------------- locking


class OutputLock:
    """The right to write one output, for one process at a time; freed by the system if the holder dies.

    ::

        with OutputLock("runs/audit.json"):
            ...

    The lock is the file ``<path>.lock``; ``<path>.lock.holder`` says who holds it and since when.

    Raises (on entering):
        UserError: another process, or this one, already writes that output.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock_path = self.path.with_name(self.path.name + ".lock")
        self._holder_path = self.path.with_name(self.path.name + ".lock.holder")
        self._lock = filelock.FileLock(self._lock_path, thread_local=False)

    def __enter__(self) -> OutputLock:
        with _clear_errors(self.path, "write"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(blocking=False)
            except filelock.Timeout:
                raise UserError(
                    f"{self.path} is being written by {self._holder()}: wait until that run ends, "
                    "or give another output."
                ) from None
        try:
            remove_torn_writes(self.path)
            write_json_atomic(self._holder_path, {"pid": os.getpid(), "since": utc_now()})
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(FileNotFoundError):
            self._holder_path.unlink()
        self._lock.release()

    def _holder(self) -> str:
        try:
            holder = json.loads(self._holder_path.read_text(encoding="utf-8"))
            return f"process {holder['pid']} (since {holder['since']})"
        except (OSError, ValueError, KeyError, TypeError):  # the holder has not written its name yet
            return "another process"


def utc_now() -> str:
    """The time as records hold it: UTC, ISO 8601, seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
