"""Isolated processes: what starts, what is reported, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from auto_research.runtime.process import LOG_TAIL_BYTES, Job, _classify, _server_for, run_isolated, start
from auto_research.runtime.records import Record, read_record

MakeJob = Callable[..., Job]
Alive = Callable[[int], bool]
Until = Callable[[Callable[[], bool]], None]
SOURCE = Path(__file__).parents[2] / "src"


def lines_of(path: Path) -> list[str]:
    """The complete lines of a file that another process is writing."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


# ---------------------------------------------------------------------------------------------- the start


def test_a_result_comes_back(make_job: MakeJob) -> None:
    payload = {"text": "ü € \x00", "number": 1.5, "nothing": None, "list": [1, [2]]}
    outcome = run_isolated(make_job("echo", payload))
    assert (outcome.state, outcome.exit_code, outcome.signal) == ("finished", 0, None)
    assert outcome.result == {"payload": payload}
    assert outcome.reason == ""
    assert outcome.peak_rss_bytes is not None
    assert outcome.peak_rss_bytes > 2**20
    assert json.loads(outcome.model_dump_json())["state"] == "finished"


def test_the_process_is_what_was_asked_for(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    run_isolated(make_job("echo"))  # the server runs; what follows was not known when it started
    monkeypatch.setenv("AUTO_RESEARCH_LATER", "set after the server started")
    monkeypatch.setenv("AUTO_RESEARCH_BOTH", "caller")
    names = ["AUTO_RESEARCH_LATER", "AUTO_RESEARCH_BOTH", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"]
    environment = {"AUTO_RESEARCH_BOTH": "job"}
    outcome = run_isolated(
        make_job(
            "surroundings",
            {"variables": names, "modules": ["torch", "auto_research.runtime.process"]},
            environment=environment,
            threads=2,
        )
    )
    found = outcome.result
    assert found is not None, outcome.log_tail
    assert found["loaded"] == ["torch", "auto_research.runtime.process"]
    assert found["cuda_initialized"] is False
    assert found["leads_session"] is True
    assert found["environment"] == {
        "AUTO_RESEARCH_LATER": "set after the server started",
        "AUTO_RESEARCH_BOTH": "job",
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "OMP_NUM_THREADS": "2",
    }
    assert found["folder"] == os.getcwd()
    assert found["threads"] == 2


def test_modules_are_loaded_before_the_job_starts(make_job: MakeJob) -> None:
    """The server itself has the preload: its memory map holds torch, and it has one thread."""
    job = make_job("echo")
    run_isolated(job)
    server = psutil.Process(_server_for(job.preload, os.environ, gone=None).pid)
    assert any("libtorch_cpu" in mapping.path for mapping in server.memory_maps())
    assert server.num_threads() == 1


def test_temporary_files_go_where_each_job_says(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the server, which began with the first job's environment, has looked that place up."""
    (tmp_path / "looks_up_where_to_write.py").write_text("import tempfile; tempfile.gettempdir()")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("first", "second"):
        (folder := tmp_path / name).mkdir()
        job = make_job("temporary", preload=("looks_up_where_to_write",), environment={"TMPDIR": str(folder)})
        outcome = run_isolated(job)
        assert outcome.result == {"folder": str(folder)}, outcome.log_tail


def test_a_misspelt_preload_is_an_error(make_job: MakeJob) -> None:
    outcome = run_isolated(make_job("echo", preload=("json", "torhc")))
    assert outcome.state == "start_failed"
    assert "torhc" in outcome.reason


def test_without_preload_modules_are_imported_by_the_job(make_job: MakeJob) -> None:
    outcome = run_isolated(make_job("echo", preload=()))
    assert outcome.state == "finished"


def test_variables_that_libraries_read_at_import_choose_another_server(make_job: MakeJob) -> None:
    ordinary = run_isolated(make_job("surroundings", preload=()))
    offline = run_isolated(
        make_job(
            "surroundings",
            {"variables": ["HF_HUB_OFFLINE"]},
            preload=(),
            environment={"HF_HUB_OFFLINE": "yes"},
        )
    )
    assert ordinary.state == offline.state == "finished"
    assert offline.result is not None
    assert offline.result["environment"] == {"HF_HUB_OFFLINE": "yes"}
    with_flag = {**os.environ, "HF_HUB_OFFLINE": "yes"}
    assert _server_for((), os.environ, gone=None) is not _server_for((), with_flag, gone=None)


def test_equal_seeds_give_equal_numbers_and_set_orders(make_job: MakeJob) -> None:
    first, second, other, unseeded, unseeded_too = (
        run_isolated(make_job("draws", {"seed": seed})).result for seed in (7, 7, 8, None, None)
    )
    assert first == second
    assert first is not None
    assert other is not None
    assert all(first[name] != other[name] for name in ("python", "numpy", "torch"))
    assert first["set"] == other["set"]
    assert unseeded is not None
    assert unseeded_too is not None
    assert unseeded["python"] != unseeded_too["python"]
    assert unseeded["numpy"] != unseeded_too["numpy"]


@pytest.mark.parametrize(
    "target, said",
    [("no_such_package.module:run", "no_such_package"), ("process_targets:absent", "absent")],
)
def test_a_target_that_does_not_exist_is_not_started(make_job: MakeJob, target: str, said: str) -> None:
    outcome = run_isolated(make_job("echo", target=target))
    assert outcome.state == "start_failed"
    assert said in outcome.reason


def test_a_module_that_cannot_be_imported_is_the_jobs_failure(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "broken_adapter.py").write_text("from transformers_of_the_past import gone\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    sys.path.insert(0, str(tmp_path))
    try:
        outcome = run_isolated(make_job("echo", target="broken_adapter:run", environment=environment))
    finally:
        sys.path.remove(str(tmp_path))
    assert outcome.state == "failed"
    assert outcome.error is not None
    assert outcome.error.type == "builtins.ModuleNotFoundError"
    assert "transformers_of_the_past" in outcome.error.message


def test_an_unwritable_output_folder_is_not_started(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = run_isolated(make_job("echo", log_path=tmp_path / "file" / "log"))
    assert outcome.state == "start_failed"
    assert "choose another output folder" in outcome.reason


def test_a_killed_server_is_replaced(make_job: MakeJob) -> None:
    job = make_job("echo", preload=())
    assert run_isolated(job).state == "finished"
    server = _server_for((), os.environ, gone=None)
    os.kill(server.pid, signal.SIGKILL)
    psutil.Process(server.pid).wait(timeout=60)
    assert run_isolated(job).state == "finished"
    assert _server_for((), os.environ, gone=None) is not server


@pytest.mark.parametrize(
    "fields",
    [
        {"timeout_s": 0},
        {"timeout_s": float("inf")},
        {"payload": {"auc": float("nan")}},
        {"target": "os.system"},
        {"threads": 0},
        {"unknown": 1},
    ],
)
def test_a_malformed_job_is_refused(make_job: MakeJob, fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        make_job("echo", **fields)


# ------------------------------------------------------------------------------------------------ the end


def test_the_whole_tree_ends(make_job: MakeJob, tmp_path: Path, alive: Alive, until: Until) -> None:
    """Child, grandchild and a daemon in its own session, all deaf to SIGTERM as the job itself is."""
    pids = tmp_path / "pids"
    running = start(make_job("stubborn_tree", {"pids": str(pids)}, grace_s=0.1))
    until(lambda: len(lines_of(pids)) == 3)
    assert running.pid is not None
    tree = [running.pid, *map(int, lines_of(pids))]
    assert all(alive(pid) for pid in tree)
    running.cancel()
    outcome = running.wait()
    assert (outcome.state, outcome.signal) == ("killed", signal.SIGKILL)
    assert outcome.reason == "cancelled by the caller"
    assert outcome.left_behind == []
    assert not any(alive(pid) for pid in tree)


def test_a_deadline_ends_the_whole_tree(make_job: MakeJob, tmp_path: Path, alive: Alive) -> None:
    pids = tmp_path / "pids"
    outcome = run_isolated(make_job("stubborn_tree", {"pids": str(pids)}, timeout_s=4, grace_s=0.1))
    assert outcome.state == "timed_out"
    assert outcome.reason == "not finished after 4 s"
    assert outcome.seconds >= 4
    assert outcome.left_behind == []
    assert not any(alive(int(pid)) for pid in lines_of(pids))
    if pids.exists():  # by then it ignored SIGTERM
        assert outcome.signal == signal.SIGKILL


def test_sigterm_leaves_where_the_job_was(make_job: MakeJob, until: Until) -> None:
    job = make_job("wait_for_ever")
    running = start(job)
    until(lambda: "waiting" in job.log_path.read_text())
    assert running.pid is not None
    os.kill(running.pid, signal.SIGTERM)
    outcome = running.wait()
    assert (outcome.state, outcome.signal) == ("killed", signal.SIGTERM)
    assert "in wait_for_ever" in outcome.log_tail


def test_what_a_finished_job_leaves_running_is_ended(make_job: MakeJob, tmp_path: Path, alive: Alive) -> None:
    pids = tmp_path / "pids"
    outcome = run_isolated(make_job("start_stray", {"pids": str(pids)}))
    assert outcome.state == "finished"
    assert outcome.strays == 3
    assert outcome.left_behind == []
    assert not any(alive(int(pid)) for pid in pids.read_text().split())


def test_a_stall_ends_a_job_and_a_heartbeat_keeps_it(make_job: MakeJob, tmp_path: Path, until: Until) -> None:
    stalled = run_isolated(make_job("wait_for_ever", stall_s=0.5, grace_s=60))
    assert stalled.state == "timed_out"
    assert stalled.reason == "no output for 0.5 s"

    heart, stop = tmp_path / "heartbeat", tmp_path / "stop"
    payload = {"heartbeat": str(heart), "stop": str(stop)}
    running = start(make_job("beat", payload, stall_s=20, heartbeat_path=heart))
    until(lambda: int((lines_of(heart) or ["0"])[0]) >= 5)
    stop.write_text("")
    assert running.wait().state == "finished"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGFPE])
def test_a_signal_is_reported_as_that_signal(make_job: MakeJob, number: signal.Signals) -> None:
    outcome = run_isolated(make_job("die", {"signal": int(number)}))
    assert (outcome.state, outcome.signal, outcome.exit_code) == ("killed", number, None)
    assert number.name in outcome.reason
    assert "about to die" in outcome.log_tail


def test_a_crash_leaves_its_traceback(make_job: MakeJob) -> None:
    outcome = run_isolated(make_job("crash"))
    assert (outcome.state, outcome.signal) == ("killed", signal.SIGSEGV)
    assert "Segmentation fault" in outcome.log_tail
    assert "in crash" in outcome.log_tail


def test_megabytes_of_output_stay_in_the_log(make_job: MakeJob) -> None:
    outcome = run_isolated(make_job("shout", {"megabytes": 4}))
    assert outcome.state == "finished"
    assert len(outcome.log_tail.encode()) <= LOG_TAIL_BYTES
    assert outcome.log_tail.endswith("last line\n")
    log = Path(outcome.log_path).read_bytes()
    assert len(log) == 4 * 2**20 + len("first line\nlast line\n")
    assert b"first line\n" in log


def test_lines_are_handed_on_once_and_in_order(make_job: MakeJob) -> None:
    lines: list[str] = []
    outcome = run_isolated(make_job("shout", {"megabytes": 1}), on_line=lines.append)
    assert outcome.state == "finished"
    assert lines == Path(outcome.log_path).read_text().splitlines()


def test_an_error_while_listening_ends_the_job(make_job: MakeJob, alive: Alive) -> None:
    def listen(line: str) -> None:
        raise RuntimeError(line)

    running = start(make_job("wait_for_ever", grace_s=0.1))
    with pytest.raises(RuntimeError, match="waiting"):
        running.wait(on_line=listen)
    assert running.pid is not None
    assert not alive(running.pid)


@pytest.mark.parametrize("function", ["leave", "leave_politely"])
@pytest.mark.parametrize("code, reason", [(0, "without a result"), (7, "exit code 7")])
def test_leaving_without_a_result_is_a_failure(make_job: MakeJob, function: str, code: int, reason: str) -> None:
    job = make_job(function, {"code": code})
    job.result_path.write_text('{"an": "older result"}')
    outcome = run_isolated(job)
    assert (outcome.state, outcome.exit_code, outcome.result) == ("failed", code, None)
    assert reason in outcome.reason


def test_a_kill_while_the_result_is_written_leaves_no_result(make_job: MakeJob) -> None:
    job = make_job("torn_result")
    outcome = run_isolated(job)
    assert (outcome.state, outcome.signal) == ("killed", signal.SIGXFSZ)
    assert not job.result_path.exists()
    assert not list(job.result_path.parent.glob(".*.tmp"))


@pytest.mark.parametrize("text, reason", [("{", "not valid JSON"), ("[1]", "not a JSON object"), ('{"a": NaN}', "NaN")])
def test_a_forged_result_is_a_failure(make_job: MakeJob, tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "result.json"
    outcome = run_isolated(make_job("forge_result", {"path": str(path), "text": text}, result_path=path))
    assert (outcome.state, outcome.exit_code) == ("failed", 0)
    assert reason in outcome.reason


def test_closing_every_descriptor_changes_nothing_but_the_words(make_job: MakeJob, tmp_path: Path) -> None:
    outcome = run_isolated(make_job("close_everything"))
    assert (outcome.state, outcome.result) == ("finished", {"closed": True})
    failed = run_isolated(make_job("close_everything", {"fail": True}))
    assert (failed.state, failed.exit_code) == ("failed", 1)
    # A report must not end up in a file that took the place of the closed pipe.
    other = tmp_path / "other"
    assert run_isolated(make_job("reuse_descriptors", {"path": str(other)})).state == "failed"
    assert other.read_text() == ""


def test_an_exception_is_reported_with_its_kinds(make_job: MakeJob) -> None:
    ordinary = run_isolated(make_job("raise_error", {"kind": "ordinary"}))
    assert (ordinary.state, ordinary.exit_code) == ("failed", 1)
    assert ordinary.error is not None
    assert ordinary.error.message == "an ordinary fault"
    assert "raise_error" in ordinary.error.traceback
    assert "an ordinary fault" in ordinary.log_tail

    missing = run_isolated(make_job("raise_error", {"kind": "MissingData"}))
    assert (missing.state, missing.exit_code) == ("failed", 2)
    assert missing.error is not None
    assert {"MissingData", "UserError"} <= set(missing.error.kinds)
    assert missing.reason == "MissingData: ml-1m is not here: run auto-research prepare ml-1m."

    long = run_isolated(make_job("raise_error", {"kind": "long"}))
    assert long.error is not None
    assert long.error.message.startswith("\x00é")


@pytest.mark.parametrize("function, said", [("not_an_object", "list"), ("not_a_number", "metrics.auc")])
def test_a_result_that_is_no_json_object_is_a_failure(make_job: MakeJob, function: str, said: str) -> None:
    outcome = run_isolated(make_job(function))
    assert outcome.state == "failed"
    assert said in outcome.reason


def test_exit_handlers_run(make_job: MakeJob, tmp_path: Path) -> None:
    path = tmp_path / "note"
    assert run_isolated(make_job("at_exit", {"path": str(path)})).state == "finished"
    assert path.read_text() == "written at exit"


def test_a_log_that_cannot_grow_is_the_jobs_failure(make_job: MakeJob) -> None:
    outcome = run_isolated(make_job("file_limit"))
    assert outcome.state == "failed"
    assert "File too large" in outcome.reason
    assert outcome.log_tail.startswith("yyyy")


# ------------------------------------------------------------------------------------------- out of memory


@pytest.mark.parametrize("kind", ["chained memory", "torch memory"])
def test_memory_errors_are_out_of_memory(make_job: MakeJob, kind: str) -> None:
    assert run_isolated(make_job("raise_error", {"kind": kind})).state == "out_of_memory"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the limit on private memory")
def test_a_memory_limit_holds(make_job: MakeJob) -> None:
    payload = {"steps": 64, "bytes": 64 * 2**20}
    limited = run_isolated(make_job("allocate", payload, memory_limit_bytes=2**30))
    assert limited.state == "out_of_memory"
    assert limited.peak_rss_bytes is not None
    assert limited.peak_rss_bytes < 1.5 * 2**30
    small = {"steps": 2, "bytes": 64 * 2**20}
    assert run_isolated(make_job("allocate", small, memory_limit_bytes=2**30)).state == "finished"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere shared pages count in every process")
def test_the_memory_limit_holds_for_all_processes_of_a_job_together(make_job: MakeJob) -> None:
    """Three children, each far below the limit; pages that they share with their parent count once."""
    mib = 2**20
    each = {"children": 3, "bytes": 200 * mib, "shared": 0, "seconds": 600}
    over = run_isolated(make_job("hold_in_children", each, memory_limit_bytes=500 * mib, preload=()))
    assert over.state == "out_of_memory"
    assert re.fullmatch(r"its processes together held [56]\d\d MB, and the limit is 500 MB", over.reason)
    assert over.peak_rss_bytes is not None
    assert over.peak_rss_bytes > 500 * mib
    assert over.left_behind == []
    shared = {"children": 3, "bytes": 0, "shared": 200 * mib, "seconds": 2.5}
    for limit in (500 * mib, None):
        under = run_isolated(make_job("hold_in_children", shared, memory_limit_bytes=limit, preload=()))
        assert under.state == "finished"
        assert under.peak_rss_bytes is not None
        assert 200 * mib <= under.peak_rss_bytes < 300 * mib


def test_a_kill_near_the_limit_is_out_of_memory(make_job: MakeJob) -> None:
    filled = make_job("hog_and_die", {"bytes": 200 * 2**20}, memory_limit_bytes=2**32, preload=())
    outcome = run_isolated(filled)
    assert (outcome.state, outcome.signal) == ("killed", signal.SIGKILL)  # far from the limit
    peak = outcome.peak_rss_bytes
    assert peak is not None
    assert 200 * 2**20 <= peak < 400 * 2**20
    ended = {"signal": int(signal.SIGKILL), "peak_rss_bytes": peak, "oom_kills": 0}
    for share, state in ((0.95, "out_of_memory"), (0.85, "killed")):
        job = make_job("hog_and_die", memory_limit_bytes=int(peak / share))
        assert _classify(job, ended, None, "")[0] == state


def test_an_abort_for_lack_of_memory_is_out_of_memory(make_job: MakeJob) -> None:
    outcome = run_isolated(make_job("abort_for_memory"))
    assert (outcome.state, outcome.signal) == ("out_of_memory", signal.SIGABRT)


def test_the_kernels_own_count_decides_about_a_sigkill(make_job: MakeJob) -> None:
    job = make_job("echo")
    killed = {"signal": int(signal.SIGKILL), "peak_rss_bytes": 10}
    assert _classify(job, {**killed, "oom_kills": 0}, None, "")[0] == "killed"
    assert _classify(job, {**killed, "oom_kills": 1}, None, "")[0] == "out_of_memory"
    assert _classify(job, {**killed, "oom_kills": 1, "ended_by": "deadline"}, None, "")[0] == "timed_out"


# ---------------------------------------------------------------------------------------------- the caller

CALLER = """
import sys
from auto_research.runtime.process import Job, run_isolated
print("main runs", flush=True)
outcome = run_isolated(
    Job(
        target="process_targets:" + sys.argv[1],
        payload={{"pids": {pids!r}, "modules": []}},
        timeout_s=300,
        grace_s=0.1,
        log_path={log!r},
        result_path={result!r},
        preload=(),
    )
)
print(outcome.state, outcome.reason, flush=True)
"""


def caller_script(tmp_path: Path) -> Path:
    """A script with no ``if __name__`` guard that runs one job."""
    script = tmp_path / "caller.py"
    paths = {name: str(tmp_path / name) for name in ("pids", "log", "result")}
    script.write_text(CALLER.format(**paths))
    return script


def caller_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(Path(__file__).parent)])}


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(caller_script(tmp_path)), "surroundings"],
        env=caller_environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.stdout.split("\n") == ["main runs", "finished ", ""], done.stderr
    assert json.loads((tmp_path / "result").read_text())["main_file"] != str(tmp_path / "caller.py")


def test_a_console_entry_point_and_a_string_command_can_call(tmp_path: Path) -> None:
    script = caller_script(tmp_path).read_text()
    done = subprocess.run(
        [sys.executable, "-c", script, "echo"],
        env=caller_environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.stdout.split("\n") == ["main runs", "finished ", ""], done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_caller_is_the_end_of_its_jobs(
    tmp_path: Path, alive: Alive, until: Until, number: signal.Signals
) -> None:
    """Ctrl-C, SIGTERM, and even SIGKILL of the caller end the job, its tree and the fork server."""
    caller = subprocess.Popen(
        [sys.executable, str(caller_script(tmp_path)), "stubborn_tree"],
        env=caller_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    pids = tmp_path / "pids"
    until(lambda: len(lines_of(pids)) == 3 or caller.poll() is not None)
    family = psutil.Process(caller.pid).children(recursive=True)
    assert len(family) >= 5  # server, guardian, job, child, grandchild; the daemon was adopted
    caller.send_signal(number)
    output, errors = caller.communicate(timeout=240)
    assert caller.returncode != 0
    assert "finished" not in output
    assert number != signal.SIGINT or "KeyboardInterrupt" in errors
    tree = [*(process.pid for process in family), *map(int, lines_of(pids))]
    until(lambda: not any(alive(pid) for pid in tree))


def test_a_killed_guardian_takes_the_job_along(make_job: MakeJob, alive: Alive, until: Until) -> None:
    running = start(make_job("wait_for_ever"))
    assert running.pid is not None
    job = psutil.Process(running.pid)
    os.kill(job.ppid(), signal.SIGKILL)
    outcome = running.wait()
    assert outcome.state == "killed"
    assert "watched the job" in outcome.reason
    until(lambda: not alive(job.pid))


def test_a_job_can_run_a_job(make_job: MakeJob) -> None:
    inner = make_job("echo", preload=())
    outcome = run_isolated(make_job("nested", {"job": inner.model_dump(mode="json")}, preload=()))
    assert outcome.result == {"inner": "finished"}, outcome.log_tail


def test_an_outcome_is_a_record(make_job: MakeJob, tmp_path: Path) -> None:
    outcome = run_isolated(make_job("raise_error", {"kind": "ordinary"}))
    assert isinstance(outcome, Record)
    path = tmp_path / "outcome.json"
    path.write_text(outcome.model_dump_json())
    assert read_record(path, type(outcome)) == outcome
