"""The processes behind :mod:`auto_research.runtime.process`: fork server, guardian and job.

This module runs in a process that its caller starts for it. It must not start threads or touch CUDA before
a fork.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import random
import re
import resource
import selectors
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from auto_research.runtime.errors import EXIT_CODE, UserError
from auto_research.runtime.process import ChildError, Job
from auto_research.runtime.records import write_json_atomic

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_WAIT_S = 5.0
"""How long to insist on the end of processes that were sent SIGKILL."""
MEMORY_CHECK_S = 1.0
"""How often the memory of a job's processes is added up, unless that takes more than a hundredth of the time."""

OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc|ALLOC_FAILED",
    re.IGNORECASE,
)


# -------------------------------------------------------------------------------------------------- server


def serve(descriptor: int, preload: list[str]) -> NoReturn:
    """Import the modules, then fork a guardian for every socket that arrives, until the caller is gone."""
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    problem = _import_all(preload)
    control.sendall(f"{problem}\n".encode() if problem else b"ready\n")
    if problem:
        sys.exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guardians are reaped by the system
    gc.collect()
    gc.freeze()  # what is loaded stays in shared pages
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            sys.exit(0)
        with socket.socket(fileno=descriptors[0]) as caller:
            caller.set_inheritable(False)
            try:
                pid = os.fork()
            except OSError as error:
                _send(caller, {"event": "ended", "start_error": f"cannot start a process ({error.strerror})"})
                continue
            if pid == 0:
                control.close()
                _exit_after(lambda: guard(caller))


def _import_all(modules: list[str]) -> str:
    """Import modules; returns what went wrong, in one line, or an empty string."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            return f"preload {module!r} cannot be imported ({type(error).__name__}: {error})".replace("\n", " ")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"preload {', '.join(modules)} starts CUDA on import, which a forked job could not use"
    return ""


def _exit_after(work: Callable[[], int]) -> NoReturn:
    """Run the life of a forked process; it must never return into the code that forked it."""
    code = 1
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _send(caller: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the caller is gone; the job has been ended for that very reason
        caller.sendall(json.dumps(message).encode() + b"\n")


# ------------------------------------------------------------------------------------------------ guardian


def guard(caller: socket.socket) -> int:
    """Run one job for the caller and report its end. Returns the guardian's exit code."""
    try:
        return _guard(caller)
    except Exception:
        _send(caller, {"event": "ended", "start_error": traceback.format_exc()})
        return 1


def _guard(caller: socket.socket) -> int:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    line = caller.makefile("rb").readline()
    if not line.endswith(b"\n"):  # the caller is gone
        return 0
    request = json.loads(line)
    job = Job.model_validate(request["job"])
    try:
        log = os.open(job.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        problem = f"cannot write the log {job.log_path} ({error.strerror})"
        _send(caller, {"event": "ended", "start_error": problem})
        return 0
    wake_up = _wake_up_on_child()
    report, report_of_child = os.pipe()
    guardian, killed_before = os.getpid(), _oom_kills()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become_job(guardian)
        for end in (caller, *wake_up):
            end.close()
        os.close(report)
        _exit_after(lambda: run_job(job, request, log, report_of_child))
    os.close(log)
    os.close(report_of_child)
    _send(caller, {"event": "started", "pid": pid})
    watch = Watch(job, pid, caller, wake_up[0], report, started)
    ended_by = watch.until_end()
    left_behind = watch.end_tree()
    _send(
        caller,
        {
            "event": "ended",
            "ended_by": ended_by,
            **watch.exit(),
            **watch.report(),
            "seconds": watch.ended - started,
            "peak_rss_bytes": watch.peak_rss,
            "held_bytes": watch.held,
            "oom_kills": _oom_kills() - killed_before,
            "strays": watch.strays,
            "left_behind": left_behind,
        },
    )
    return 0


class Watch:
    """Waits for the end of a job, or brings it about.

    Args:
        job: what runs.
        pid: its process, the leader of its own session.
        caller: becomes readable when the caller is gone.
        wake_up: becomes readable when a child ends.
        report: receives what the job says about its own end.
        started: on the monotonic clock.
    """

    def __init__(
        self, job: Job, pid: int, caller: socket.socket, wake_up: socket.socket, report: int, started: float
    ) -> None:
        self.job = job
        self.pid = pid
        self.peak_rss = 0
        self.held = 0
        self.strays = 0
        self.ended = started
        self._status: int | None = None
        self._deadline = started + job.timeout_s
        self._caller, self._wake_up, self._report = caller, wake_up, report
        self._said = b""
        self._selector = selectors.DefaultSelector()
        os.set_blocking(report, False)
        for source in (caller, wake_up, report):
            self._selector.register(source, selectors.EVENT_READ)

    def until_end(self) -> str | None:
        """Wait for the job's own process; ``deadline``, ``stall``, ``memory`` or ``cancel`` if it had to be ended."""
        sign, seen = self._sign_of_life(), time.monotonic()
        weigh = seen + MEMORY_CHECK_S
        while not self._reap():
            now = time.monotonic()
            if now >= self._deadline:
                return self._stop("deadline")
            if now >= weigh:
                if self._above_limit():
                    return "memory"  # without a grace in which it would grow on
                weigh = (done := time.monotonic()) + max(MEMORY_CHECK_S, 100 * (done - now))
            pause = min(self._deadline, weigh) - now
            if self.job.stall_s is not None:
                if (latest := self._sign_of_life()) != sign:
                    sign, seen = latest, now
                elif now - seen >= self.job.stall_s:
                    return self._stop("stall")
                pause = min(pause, self.job.stall_s / 4)
            self._sleep(pause)
            if self._caller not in self._sources():
                return self._stop("cancel")
        return None

    def _sources(self) -> list[Any]:
        return [key.fileobj for key in self._selector.get_map().values()]

    def _sleep(self, pause: float) -> None:
        """Wait until a child ends, the caller leaves or the job says something, at most ``pause`` seconds."""
        for key, _ in self._selector.select(pause):
            try:
                data = os.read(key.fd, 65536)
            except BlockingIOError:
                continue
            except ConnectionResetError:  # the caller left without reading what was sent
                data = b""
            if not data:
                self._selector.unregister(key.fileobj)
            elif key.fileobj == self._report:
                self._said += data

    def _sign_of_life(self) -> list[tuple[int, int] | None]:
        """Size and time of change of the files that show progress."""
        signs: list[tuple[int, int] | None] = []
        for path in (self.job.log_path, self.job.heartbeat_path):
            try:
                state = os.stat(path) if path is not None else None
            except OSError:
                state = None
            signs.append(state and (state.st_size, state.st_mtime_ns))
        return signs

    def _above_limit(self) -> bool:
        """Whether the job and all it started hold more than the limit together; keeps their peak.

        A limit of the kernel holds for each process alone, and so does its record of a peak: a job with data loaders
        would pass under both.
        """
        limit = self.job.memory_limit_bytes
        pids = _descendants(os.getpid())
        if limit is None and len(pids) < 2:  # the kernel keeps the peak of a single process
            return False
        shares = [_memory(pid) for pid in pids]
        self.peak_rss = max(self.peak_rss, sum(resident for resident, _ in shares))
        self.held = sum(private for _, private in shares)
        return limit is not None and self.held > limit

    def _stop(self, why: str) -> str:
        """SIGTERM to the group and a grace to react; :meth:`end_tree` does the rest."""
        until = time.monotonic() + self.job.grace_s
        try:
            os.killpg(self.pid, signal.SIGTERM)
        except ProcessLookupError:  # so young that it has no group yet; it is not reaped, so the id is its own
            os.kill(self.pid, signal.SIGTERM)
        while not self._reap() and (pause := until - time.monotonic()) > 0:
            self._sleep(pause)
        return why

    def end_tree(self) -> list[int]:
        """SIGKILL to every process below the guardian until there is none; returns those that stay."""
        below = self._below()
        if self._status is not None:
            self.strays = len(below)
        until = time.monotonic() + KILL_WAIT_S
        while True:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            for process in below:
                with suppress(psutil.Error):
                    process.kill()
            self._reap()
            below = [process for process in {*below, *self._below()} if _alive(process)]
            if not below and self._status is not None:
                return []
            if time.monotonic() >= until:
                return sorted(process.pid for process in below)
            self._sleep(0.02)

    def _below(self) -> list[psutil.Process]:
        """Living descendants of the guardian. On Linux orphans are among them: the guardian adopts them."""
        with suppress(psutil.Error):
            return [process for process in psutil.Process().children(recursive=True) if _alive(process)]
        return []

    def _reap(self) -> bool:
        """Collect children that have ended; True once the job's own process has."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self.peak_rss = max(self.peak_rss, usage.ru_maxrss * (1024 if LINUX else 1))
            if pid == self.pid:
                self._status, self.ended = status, time.monotonic()
        return self._status is not None

    def exit(self) -> dict[str, int | None]:
        """Exit code or signal of the job's own process."""
        code = None if self._status is None else os.waitstatus_to_exitcode(self._status)
        if code is None or code >= 0:
            return {"exit_code": code, "signal": None}
        return {"exit_code": None, "signal": -code}

    def report(self) -> dict[str, Any]:
        """What the job said about its own end: ``error`` or ``start_error``; nothing if it could not speak."""
        with suppress(BlockingIOError):  # a process that outlived SIGKILL holds the other end
            while part := os.read(self._report, 65536):
                self._said += part
        try:
            return dict(json.loads(self._said)) if self._said else {}
        except ValueError:  # killed while it wrote
            return {}


def _descendants(pid: int) -> list[int]:
    """Process ids below a process."""
    if not Path(f"/proc/{pid}/task/{pid}/children").exists():
        with suppress(psutil.Error):
            return [process.pid for process in psutil.Process(pid).children(recursive=True)]
        return []
    found: list[int] = []
    waiting = [pid]
    while waiting:
        for path in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):  # a thread that has just ended
                below = [int(number) for number in path.read_text().split()]
                found += below
                waiting += below
    return found


def _memory(pid: int) -> tuple[int, int]:
    """Bytes that a process holds: (resident, of it private or shared memory, without the pages of files).

    A page that n processes share counts 1/n in each, so that sums are right (Linux; elsewhere it counts in full).
    """
    try:
        said = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        with suppress(psutil.Error):
            resident = int(psutil.Process(pid).memory_info().rss)
            return resident, resident
        return 0, 0
    kib = {name: int(number) for name, number in re.findall(r"^(\w+): +(\d+) kB$", said, re.MULTILINE)}
    private = sum(kib.get(name, 0) for name in ("Pss_Anon", "Pss_Shmem", "SwapPss"))
    return kib.get("Pss", 0) * 1024, (private if "Pss_Anon" in kib else kib.get("Pss", 0)) * 1024


def _alive(process: psutil.Process) -> bool:
    """Running, and not a zombie that only waits for its parent."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _wake_up_on_child() -> tuple[socket.socket, socket.socket]:
    """A socket pair whose first end becomes readable when a child ends."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return reader, writer


def _oom_kills() -> int:
    """Processes the kernel has killed for lack of memory so far, as far as this process may know."""
    count = 0
    for path in (Path("/proc/vmstat"), Path("/sys/fs/cgroup") / _cgroup() / "memory.events"):
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            count += int(found[1]) if found else 0
    return count


def _cgroup() -> str:
    with suppress(OSError):
        found = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        return found[1] if found else ""
    return ""


def _prctl(option: int, value: int) -> None:
    if LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# --------------------------------------------------------------------------------------------------- job


def _become_job(guardian: int) -> None:
    """First lines of the job's process: its own session, ended with its guardian, plain signals."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:  # it ended between the fork and the line above
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run_job(job: Job, request: dict[str, Any], log: int, report: int) -> int:
    """Set up the process, call the job's function, write its result. Returns the exit code."""
    fcntl.fcntl(report, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    identity = os.fstat(report)

    def tell(message: dict[str, Any]) -> None:
        with suppress(OSError):  # the job's function may have closed it, or another file may sit there now
            now = os.fstat(report)
            if stat.S_ISFIFO(now.st_mode) and (now.st_dev, now.st_ino) == (identity.st_dev, identity.st_ino):
                os.write(report, json.dumps(message).encode())

    code = 0
    try:
        _redirect(log)
        _enter(job, request)
        function = _find(job.target)
    except _NotStarted as error:
        tell({"start_error": str(error)})
        return 1
    except BaseException as error:
        return _failure(error, tell)
    try:
        result = function(job.payload)
        if not isinstance(result, dict):
            raise TypeError(f"{job.target} returned {type(result).__name__}; a job returns a JSON object")
        write_json_atomic(job.result_path, result)
    except BaseException as error:
        code = _failure(error, tell)
    atexit._run_exitfuncs()
    with suppress(Exception):  # standard output may be closed or its disk full
        sys.stdout.flush()
    return code


class _NotStarted(Exception):
    """The job's function cannot be entered."""


def _redirect(log: int) -> None:
    """Standard input from nowhere, output and errors to the log, line by line so that a kill loses nothing."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nowhere)
    os.close(log)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )


def _enter(job: Job, request: dict[str, Any]) -> None:
    """Environment, folder, modules, threads, limits and randomness of the caller and the job."""
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # a module of the preload may have looked it up in the server's environment
    sys.path[:] = request["path"]
    sys.argv[:] = [job.target]
    importlib.invalidate_caches()
    try:
        os.chdir(request["folder"])
    except OSError as error:
        raise _NotStarted(f"cannot enter the folder {request['folder']} ({error.strerror})") from None
    missing = [module for module in job.preload if module not in sys.modules] if LINUX else []
    if missing:
        raise _NotStarted(f"the fork server has not loaded {', '.join(missing)}")
    faulthandler.enable()  # a crash leaves its traceback in the log ...
    faulthandler.register(signal.SIGTERM, chain=True)  # ... and the deadline leaves where the job was
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(request["threads"])
    if job.memory_limit_bytes is not None:
        _limit_memory(job.memory_limit_bytes)


def _limit_memory(limit: int) -> None:
    """Limit private writable memory. Address space is no measure: CUDA reserves far more than it uses."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def _find(target: str) -> Callable[[dict[str, Any]], Any]:
    """Import the job's function. An exception inside its module is the job's failure and passes through."""
    module_name, _, function_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise _NotStarted(f"there is no module {error.name} (target {target})") from None
        raise
    function: Any = module
    for part in function_name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise _NotStarted(f"module {module_name} has no function {function_name}")
    return function


def _failure(error: BaseException, tell: Callable[[dict[str, Any]], None]) -> int:
    """Report the exception that ended the job; returns the exit code."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # the report itself needs memory
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    text = "".join(traceback.format_exception(error))
    with suppress(Exception):  # standard error may be closed or its disk full
        print(text, file=sys.stderr)
    kind = type(error)
    child_error = ChildError(
        type=f"{kind.__module__}.{kind.__qualname__}",
        kinds=[base.__name__ for base in kind.__mro__[:-1]],
        message=str(error)[:8_000],
        traceback=text[-30_000:],
        out_of_memory=_is_out_of_memory(error),
    )
    tell({"error": child_error.model_dump()})
    return EXIT_CODE if isinstance(error, UserError) else 1


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the exception, or one it was raised from, is a lack of memory of host or device."""
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        if isinstance(error, RuntimeError | OSError) and OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
