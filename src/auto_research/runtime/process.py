"""Run a function in an isolated process, with a hard deadline, and say truthfully how it ended.

Four processes take part::

    caller ── fork server ── guardian ── job (own session) ── whatever the job starts
      └────────── socket ───────┘

* The *fork server* has imported torch and nothing else has happened in it: no thread, no CUDA. A job that
  starts from it reaches its first line in milliseconds instead of seconds.
* A *guardian* watches one job. On Linux it adopts every orphan below it, so the end of the job is the end of
  everything the job ever started, daemons with their own session included.
* The guardian holds one end of a socket whose other end only the caller holds: when the caller cancels, is
  interrupted or is killed, the socket closes and the guardian ends the job.

A job is a function of this installation by name and a JSON payload; its result is a JSON object in a file,
written atomically. Nothing is pickled and the caller's main script is not imported again. Output goes to a
log file; the report holds its tail.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal as signals
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from auto_research.runtime.errors import UserError
from auto_research.runtime.records import Record, remove_torn_writes, utc_now
from auto_research.runtime.versions import cores

__all__ = [
    "LANGUAGE_PRELOAD",
    "TORCH_PRELOAD",
    "ChildError",
    "Job",
    "Outcome",
    "Running",
    "default_threads",
    "run_isolated",
    "start",
]

TORCH_PRELOAD = ("torch", "torch._dynamo")
"""Default preload. The first step of any torch optimiser imports the compiler: two seconds, once instead of
in every job."""

LANGUAGE_PRELOAD = (
    *TORCH_PRELOAD,
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "peft",
)
"""Preload for jobs that use language models: transformers imports lazily, so the exact modules are named."""

LOG_TAIL_BYTES = 20_480
"""How much of the end of the log an :class:`Outcome` carries."""

READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "TORCH_", "PYTORCH_", "TOKENIZERS_", "MKL_", "KMP_", "PYTHONHASHSEED")
"""Environment variables that libraries read once, when imported. A fork server cannot change them for a
job, so jobs that differ in them come from different servers."""

AbsolutePath = Annotated[Path, AfterValidator(lambda path: Path(os.path.abspath(path)))]

State = Literal["finished", "failed", "timed_out", "killed", "out_of_memory", "start_failed"]


class Job(BaseModel):
    """A function call to run in its own process.

    Attributes:
        target: ``package.module:function``; called with the payload as its only argument, it returns the
            result, a JSON object.
        payload: a JSON object.
        timeout_s: seconds from the start until the whole process tree is ended.
        log_path: file that receives standard output and standard error; replaced.
        result_path: file that receives the result; an older one is removed first.
        environment: variables to set on top of the caller's environment.
        stall_s: also end the job after this many seconds (up to a quarter more) in which neither its log
            nor its heartbeat file changed.
        heartbeat_path: a file whose changes count as a sign of life beside the log.
        memory_limit_bytes: most memory that the job's processes may hold together, about 0.3 GB of
            imported libraries included and the pages of files not; a job above it is ended. An allocation
            with which one process would exceed it alone fails inside the job (Linux).
        threads: threads for torch; by default ``OMP_NUM_THREADS`` or all cores.
        grace_s: seconds between SIGTERM and SIGKILL.
        preload: modules the fork server imports beforehand.
        name: for the caller's use.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    target: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    payload: dict[str, JsonValue] = {}
    timeout_s: float = Field(gt=0)
    log_path: AbsolutePath
    result_path: AbsolutePath
    environment: dict[str, str] = {}
    stall_s: float | None = Field(default=None, gt=0)
    heartbeat_path: AbsolutePath | None = None
    memory_limit_bytes: int | None = Field(default=None, gt=0)
    threads: int | None = Field(default=None, gt=0)
    grace_s: float = Field(default=2.0, ge=0)
    preload: tuple[str, ...] = TORCH_PRELOAD
    name: str = ""


class ChildError(BaseModel):
    """The exception that ended a job: its class, the classes it derives from, message and traceback."""

    model_config = ConfigDict(extra="forbid")

    type: str
    kinds: list[str]
    message: str
    traceback: str
    out_of_memory: bool = False


class Outcome(Record):
    """How a job ended.

    Attributes:
        state: ``finished`` (with a result), ``failed`` (an exception, an exit code, or no valid result),
            ``timed_out`` (deadline or stall), ``killed`` (a signal, or cancelled), ``out_of_memory``, or
            ``start_failed`` (the job's function was never entered).
        reason: one sentence; empty when finished.
        exit_code: of the job's process, when it exited.
        signal: number of the signal that ended it, when one did.
        seconds: from start to end.
        started_at: UTC, ISO 8601.
        log_tail: the end of the log, at most :data:`LOG_TAIL_BYTES`.
        result: what the function returned, when finished.
        error: the exception, when one ended the job.
        peak_rss_bytes: largest resident memory of the job: of any one process, or of all together as far as
            a look each second saw it.
        strays: processes that were still running when the job's own process had ended; they were ended.
        left_behind: processes that could not be ended (stuck in the kernel); normally empty.
    """

    state: State
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    seconds: float = 0.0
    started_at: str
    log_path: str
    log_tail: str = ""
    result: dict[str, JsonValue] | None = None
    error: ChildError | None = None
    peak_rss_bytes: int | None = None
    strays: int = 0
    left_behind: list[int] = Field(default_factory=list)


# ---------------------------------------------------------------------------------------------- fork servers


class StartError(Exception):
    """A fork server or a guardian could not be started."""


class ForkServer:
    """The caller's handle on a fork server; safe to use from several threads."""

    _BOOT = (
        "import json, sys; boot = json.loads(sys.argv[1]); sys.path[:] = boot['path']; sys.argv[1:] = []; "
        "from auto_research.runtime._fork_server import serve; serve(boot['socket'], boot['preload'])"
    )

    def __init__(self, preload: tuple[str, ...], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        boot = {"path": sys.path, "socket": theirs.fileno(), "preload": preload}
        settings = {
            "OMP_NUM_THREADS": "1",  # no thread pool may exist when the server forks; jobs set their own
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONHASHSEED": environment.get("PYTHONHASHSEED", "0"),  # same seed, same order of sets
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for a GPU must not start CUDA before the fork
        }
        with tempfile.TemporaryFile() as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", self._BOOT, json.dumps(boot)],  # type: ignore[attr-defined]
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={**environment, **settings},
                start_new_session=True,  # Ctrl-C reaches the caller only, which then ends its jobs
            )
            theirs.close()
            answer = ours.makefile("rb").readline()
            if answer != b"ready\n":
                ours.close()
                self._process.wait()
                output.seek(0)
                said = answer.decode() or output.read().decode(errors="replace").strip()[-2000:]
                raise StartError(f"the fork server did not start: {said.strip()}")
        self._socket = ours
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def connect(self) -> socket.socket:
        """A socket to a fresh guardian.

        Raises:
            OSError: the server is gone.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                socket.send_fds(self._socket, [b"+"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ours

    def close(self) -> None:
        """End the server; jobs that run go on."""
        self._socket.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # another process holds our end of its socket
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Drop the handle in a forked copy of the caller, which the server does not belong to."""
        self._socket.close()
        self._process.returncode = 0  # not our child: nothing to wait for


_servers: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], ForkServer] = {}
_servers_lock = threading.Lock()


def _server_for(preload: tuple[str, ...], environment: Mapping[str, str], *, gone: ForkServer | None) -> ForkServer:
    """The running server for these modules and import-time settings; a new one if there is none, or if the
    one there is turned out to be gone."""
    if sys.platform != "linux":
        preload = ()  # elsewhere system libraries do not survive a fork once they are loaded
    frozen = tuple(sorted((k, v) for k, v in environment.items() if k.startswith(READ_AT_IMPORT)))
    with _servers_lock:
        server = _servers.get((preload, frozen))
        if server is None or server is gone:
            if server is not None:
                server.close()
            server = _servers[preload, frozen] = ForkServer(preload, environment)
        return server


def close_servers() -> None:
    """End the fork servers of this process. Done at exit; the next job starts a new one."""
    with _servers_lock:
        while _servers:
            _servers.popitem()[1].close()


def _forget_servers() -> None:
    global _servers_lock
    _servers_lock = threading.Lock()
    while _servers:
        _servers.popitem()[1].forget()


atexit.register(close_servers)
os.register_at_fork(after_in_child=_forget_servers)


# ----------------------------------------------------------------------------------------------------- jobs


class Running:
    """A job that was started: :meth:`wait` for it or :meth:`cancel` it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._started_at = utc_now()
        self._received = b""
        self._outcome: Outcome | None = None
        self._socket: socket.socket | None = None
        self.pid: int | None = None
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **job.environment}
        threads = job.threads or default_threads(environment)
        environment["OMP_NUM_THREADS"] = str(threads)
        request = {
            "job": job.model_dump(mode="json"),
            "environment": environment,
            "path": sys.path,
            "folder": os.getcwd(),
            "threads": threads,
        }
        try:
            _prepare_files(job)
            self._start(environment, json.dumps(request).encode() + b"\n")
        except (OSError, StartError, UserError) as error:
            self._end({"event": "ended", "start_error": str(error)})

    def _start(self, environment: Mapping[str, str], request: bytes) -> None:
        gone: ForkServer | None = None
        for _ in range(2):  # the server may have been killed since the last job: then once more with a new one
            server = _server_for(self.job.preload, environment, gone=gone)
            try:
                self._socket = server.connect()
                self._socket.sendall(request)
                message = self._receive()
            except (BrokenPipeError, ConnectionResetError):
                message = None
            except BaseException:
                self._cancel_and_drain()
                raise
            if message is not None and message["event"] == "started":
                self.pid = message["pid"]
                return
            if message is not None:
                self._end(message)
                return
            gone = server
            if self._socket is not None:
                self._socket.close()
        raise StartError("the fork server ended twice before it could start the job")

    def wait(self, on_line: Callable[[str], None] | None = None) -> Outcome:
        """Wait for the end.

        Args:
            on_line: receives each line the job writes, without its newline, within about 0.1 s.

        An exception here, Ctrl-C among them, ends the job's whole process tree before it goes on.
        """
        lines = _Lines(self.job.log_path, on_line) if on_line else None
        try:
            while self._outcome is None:
                try:
                    message = self._receive(0.1 if lines else None)
                except TimeoutError:
                    message = {"event": "nothing"}
                except ConnectionResetError:
                    message = None
                if lines:
                    lines.read(last=message is None or message["event"] == "ended")
                if message is None:
                    self._end({"event": "ended", "lost": True})
                elif message["event"] == "ended":
                    self._end(message)
        except BaseException:
            self._cancel_and_drain()
            raise
        return self._outcome

    def cancel(self) -> None:
        """Ask for the end of the job's process tree; :meth:`wait` returns once it has ended."""
        if self._socket is not None:
            with suppress(OSError):  # it has ended already
                self._socket.shutdown(socket.SHUT_WR)

    def _cancel_and_drain(self) -> None:
        """End the process tree and wait until it has ended."""
        self.cancel()
        with suppress(OSError):
            while self._socket is not None and self._receive(self.job.grace_s + 10) is not None:
                pass

    def _receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The guardian's next message; None when it is gone."""
        assert self._socket is not None
        self._socket.settimeout(timeout)
        while b"\n" not in self._received:
            data = self._socket.recv(65536)
            if not data:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _end(self, message: dict[str, Any]) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._outcome = _outcome(self.job, self._started_at, message)


def start(job: Job) -> Running:
    """Start a job; returns when its process exists (or could not be made: see the outcome)."""
    return Running(job)


def run_isolated(job: Job, on_line: Callable[[str], None] | None = None) -> Outcome:
    """Run a job and wait for its end; see :class:`Job`, :class:`Outcome` and :meth:`Running.wait`.

    Nothing the job does raises here, and no process of it is left when this returns or raises.
    """
    return start(job).wait(on_line)


def default_threads(environment: Mapping[str, str]) -> int:
    """Threads of a job that does not say how many: ``OMP_NUM_THREADS``, else every core it may use."""
    text = environment.get("OMP_NUM_THREADS", "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else cores()


def _prepare_files(job: Job) -> None:
    """Make the folders, remove an older result so that it cannot pass for a new one, empty the log."""
    try:
        for path in (job.log_path, job.result_path):
            path.parent.mkdir(parents=True, exist_ok=True)
        job.result_path.unlink(missing_ok=True)
        job.log_path.write_bytes(b"")
    except OSError as error:
        raise UserError(f"cannot write {error.filename} ({error.strerror}): choose another output folder") from None


class _Lines:
    """Hands on the complete lines a growing file gains."""

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self._path = path
        self._on_line = on_line
        self._offset = 0
        self._partial = b""

    def read(self, *, last: bool) -> None:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:  # the job removed its own log
            data = b""
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        if last and self._partial:
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            self._on_line(line.decode(errors="replace").rstrip("\r"))


# -------------------------------------------------------------------------------------------------- outcomes


def _outcome(job: Job, started_at: str, message: Mapping[str, Any]) -> Outcome:
    """Turn the guardian's last message and the files into a report."""
    tail = _tail(job.log_path)
    error = ChildError.model_validate(message["error"]) if message.get("error") else None
    result: dict[str, JsonValue] | None = None
    state, reason = _classify(job, message, error, tail)
    if state == "finished":
        result, reason = _read_result(job.result_path)
        if result is None:
            state = "failed"
    remove_torn_writes(job.result_path)
    return Outcome(
        state=state,
        reason=reason,
        exit_code=message.get("exit_code"),
        signal=message.get("signal"),
        seconds=message.get("seconds", 0.0),
        started_at=started_at,
        log_path=str(job.log_path),
        log_tail=tail,
        result=result,
        error=error,
        peak_rss_bytes=message.get("peak_rss_bytes"),
        strays=message.get("strays", 0),
        left_behind=message.get("left_behind", []),
    )


def _classify(job: Job, message: Mapping[str, Any], error: ChildError | None, tail: str) -> tuple[State, str]:
    """State and reason from facts alone; the order of the cases is the order of certainty."""
    if message.get("start_error"):
        return "start_failed", message["start_error"]
    if message.get("lost"):
        return "killed", "the process that watched the job was killed, and the job with it"
    ended_by = message.get("ended_by")
    if ended_by == "deadline":
        return "timed_out", f"not finished after {job.timeout_s:g} s"
    if ended_by == "stall":
        return "timed_out", f"no output for {job.stall_s:g} s"
    if ended_by == "memory":
        held, limit = message["held_bytes"] / 2**20, (job.memory_limit_bytes or 0) / 2**20
        return "out_of_memory", f"its processes together held {held:,.0f} MB, and the limit is {limit:,.0f} MB"
    if ended_by == "cancel":
        return "killed", "cancelled by the caller"
    if error is not None:
        said = f"{error.type.rpartition('.')[2]}: {error.message}"
        return ("out_of_memory" if error.out_of_memory else "failed"), said.splitlines()[0]
    number = message.get("signal")
    if number is not None:
        if number == signals.SIGKILL and _ran_out_of_memory(job, message):
            return "out_of_memory", "ended by the system for lack of memory"
        if number == signals.SIGABRT and re.search(r"bad_alloc|out of memory", tail, re.IGNORECASE):
            return "out_of_memory", "a library aborted for lack of memory"
        return "killed", f"ended by signal {_signal_name(number)}"
    if message.get("exit_code") != 0:
        return "failed", f"ended with exit code {message.get('exit_code')}"
    return "finished", ""


def _ran_out_of_memory(job: Job, message: Mapping[str, Any]) -> bool:
    peak, limit = message.get("peak_rss_bytes") or 0, job.memory_limit_bytes
    return bool(message.get("oom_kills")) or (limit is not None and peak >= 0.9 * limit)


def _signal_name(number: int) -> str:
    try:
        return f"{number} ({signals.Signals(number).name})"
    except ValueError:  # a real-time signal
        return str(number)


def _read_result(path: Path) -> tuple[dict[str, JsonValue] | None, str]:
    """The result, or None and the reason why there is no valid one."""
    try:
        result = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except FileNotFoundError:
        return None, "ended with exit code 0 and without a result"
    except (OSError, ValueError) as error:
        return None, f"its result is not valid JSON ({error})"
    if not isinstance(result, dict):
        return None, "its result is not a JSON object"
    return result, ""


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _tail(path: Path) -> str:
    """The end of the log from a whole line on."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            data = file.read(LOG_TAIL_BYTES)
    except OSError:  # never opened, or removed by the job
        return ""
    if size > LOG_TAIL_BYTES and 0 <= (newline := data.find(b"\n")) < len(data) - 1:
        data = data[newline + 1 :]
    return data.decode(errors="replace")
