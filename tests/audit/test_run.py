"""What an audit says about adapters that behave in every way there is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from auto_research.audit import run as running
from auto_research.audit.plan import Selection
from auto_research.audit.record import AdapterResult, AuditRecord, AuditSettings
from auto_research.audit.report import write_reports
from auto_research.audit.run import clean_tail, run_audit, run_folder
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import OutputLock, read_record

from .conftest import PASSING, Package

SETTINGS = AuditSettings(
    device="cpu", resolved_device="cpu", budget="smoke", seeds=[42], timeout_seconds=60, checkpoints="micro"
)


def audited(package: Package, **changes: Any) -> dict[str, AdapterResult]:
    settings = SETTINGS.model_copy(update=changes)
    record = run_audit(settings, Path("runs/audit.json"), package.adapters())
    assert read_record("runs/audit.json", AuditRecord) == record
    assert record.finished
    return {result.key: result for result in record.results}


def test_a_pass_carries_its_evidence(package: Package) -> None:
    package.add("good", PASSING)
    result = audited(package)["good"]
    assert result.status == "cpu_pass"
    (call,) = result.calls
    source = (package.folder / "good.py").read_text().splitlines()
    assert call.file == f"{package.name}/good.py"
    assert "device_for(study.device)" in source[call.line - 1]
    assert (call.function, call.requested, call.resolved) == ("run", "cpu", "cpu")
    assert result.sites[0].line == call.line  # what the scanner foresaw is what ran
    assert result.work["cpu"].operations > 0
    assert result.work["cpu"].bytes > 0
    assert result.work["cpu"].flops > 0
    assert result.share == 1.0
    assert [(s.name, s.optimiser_steps) for s in result.stages] == [("train", 2)]
    assert result.fidelity == "core_mechanism"
    assert result.settings == {"train steps": 2}
    assert Path(result.log).is_file()
    assert Path(result.evidence).is_file()


def test_without_a_device_call(package: Package) -> None:
    package.add("plain", "def run(study):\n    work('cpu')\n    return Done()\n")
    package.add("claims", "def run(study):\n    if study.budget == 'full': device_for('cpu')\n    return Done()\n")
    results = audited(package)
    assert {r.status for r in results.values()} == {"completed_without_device_call"}
    assert results["plain"].acceptable
    assert not results["claims"].acceptable  # it has an accelerator path and did not take it


def test_resolved_and_then_computed_in_numpy(package: Package) -> None:
    package.add(
        "numpy-only",
        """
        def run(study):
            import numpy
            device_for(study.device)
            numpy.ones((300, 300)) @ numpy.ones((300, 300))
            return Done()
        """,
    )
    result = audited(package)["numpy-only"]
    assert result.status == "resolved_without_device_work"
    assert not result.passed


@pytest.mark.parametrize("line", ['{"event": "device_for"}', '{"event": "device_work", "devices": 3}', "no JSON"])
def test_evidence_of_another_form_proves_nothing_and_stops_nothing(package: Package, tmp_path: Path, line: str) -> None:
    from auto_research.audit.scan import scan

    package.add("good", PASSING)
    adapter = package.adapters()["good"]
    (evidence := tmp_path / "evidence.jsonl").write_text(line + "\n")
    outcome = running.Outcome(state="finished", started_at="", log_path="x", result={})
    judged = running.judge(adapter, scan(adapter), SETTINGS, outcome, evidence)
    assert judged.status == "completed_without_device_call"
    assert "evidence" in judged.notes[0]


def test_a_call_that_resolves_elsewhere_is_no_pass(package: Package) -> None:
    # Judged as a machine with a GPU would: everything ran on the CPU.
    package.add("good", PASSING)
    record = run_audit(SETTINGS, Path("runs/a.json"), package.adapters())
    evidence = Path(record.results[0].evidence)
    outcome = running.Outcome(state="finished", started_at="", log_path="x", result={})
    from auto_research.audit.scan import scan

    adapter = package.adapters()["good"]
    cuda = SETTINGS.model_copy(update={"resolved_device": "cuda:0"})
    judged = running.judge(adapter, scan(adapter), cuda, outcome, evidence)
    assert judged.status == "completed_without_device_call"
    lines = [json.loads(line) for line in evidence.read_text().splitlines()]
    for line in lines:
        if line["event"] == "device_for":
            line["resolved"] = "cuda:0"
    evidence.write_text("".join(json.dumps(line) + "\n" for line in lines))
    judged = running.judge(adapter, scan(adapter), cuda, outcome, evidence)
    assert judged.status == "resolved_without_device_work"
    for line in lines:
        if line["event"] == "device_work":
            line["devices"] = {"cuda": line["devices"]["cpu"]}
            line["peak_bytes"] = {"cuda:0": 4096}
    evidence.write_text("".join(json.dumps(line) + "\n" for line in lines))
    judged = running.judge(adapter, scan(adapter), cuda, outcome, evidence)
    assert judged.status == "gpu_pass"
    assert judged.peak_bytes == {"cuda:0": 4096}


def test_mps_has_its_own_pass() -> None:
    assert running.PASS_ON == {"cuda": "gpu_pass", "mps": "mps_pass", "cpu": "cpu_pass"}


FAILING = {
    "raises": ("raise ValueError('planted fault')", "unknown"),
    "out-of-memory": (
        "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB.')",
        "out_of_memory",
    ),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed_by_signal"),
    "exits": ("import os; os._exit(7)", "unknown"),
    "mixes": ("torch.ones(2, 2) + torch.ones(2, 2, device='meta')", "device_mix"),
}


def test_failures_are_told_apart_and_the_audit_goes_on(package: Package) -> None:
    for key, (line, _) in FAILING.items():
        package.add(key, f"def run(study):\n    device_for(study.device)\n    {line}\n")
    package.add("zzz-last", PASSING)
    results = audited(package)
    assert {key: results[key].status for key in FAILING} == dict.fromkeys(FAILING, "failed")
    found = {key: results[key].diagnosis.kind for key in FAILING}  # type: ignore[union-attr]
    assert found == {key: kind for key, (_, kind) in FAILING.items()}
    assert results["killed"].signal == 11
    assert results["exits"].exit_code == 7
    assert "planted fault" in results["raises"].log_tail
    assert results["raises"].fidelity is None
    assert results["zzz-last"].status == "cpu_pass"


def test_missing_data_and_checkpoints_block(package: Package) -> None:
    package.add(
        "no-data",
        """
        from auto_research.runtime.errors import MissingData
        def run(study):
            raise MissingData("ml-1m", "Data set ml-1m is not here; fetch it with `auto-research prepare ml-1m`.")
        """,
    )
    package.add(
        "no-checkpoint",
        """
        from auto_research.runtime.errors import MissingCheckpoint
        def run(study):
            raise MissingCheckpoint("smollm2-135m", "It is not here; run `auto-research prepare smollm2-135m`.")
        """,
    )
    results = audited(package)
    assert {r.status for r in results.values()} == {"blocked"}
    assert "prepare ml-1m" in results["no-data"].diagnosis.next_step  # type: ignore[union-attr]
    assert "prepare smollm2-135m" in results["no-checkpoint"].diagnosis.next_step  # type: ignore[union-attr]


def test_a_hanging_adapter_ends_with_all_it_started(package: Package) -> None:
    package.add(
        "hangs",
        f"""
        def run(study):
            import pathlib, subprocess, sys, time
            device_for(study.device)
            code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
            child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
            pathlib.Path({str(package.root)!r}, "pid").write_text(str(child.pid))
            with study.stage("wait for ever"):
                time.sleep(600)
        """,
    )
    result = audited(package, timeout_seconds=3)["hangs"]
    assert result.status == "timeout"
    assert result.diagnosis is not None
    assert "wait for ever" in result.diagnosis.summary
    assert [(s.name, s.seconds) for s in result.stages] == [("wait for ever", None)]
    pid = int((package.root / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_megabytes_of_output_are_kept_on_disk_only(package: Package) -> None:
    package.add(
        "prints",
        """
        def run(study):
            for i in range(40000):
                print("x" * 90, i)
            raise RuntimeError("after much")
        """,
    )
    result = audited(package)["prints"]
    assert result.status == "failed"
    assert "after much" in result.log_tail
    assert len(result.log_tail) <= running.TAIL_CHARACTERS
    assert Path(result.log).stat().st_size > 3_000_000


def test_a_stage_without_a_step_lowers_the_fidelity(package: Package) -> None:
    package.add(
        "idle",
        """
        def run(study):
            device = device_for(study.device)
            with study.stage("encode", trains=False):
                work(device)
            with study.stage("train"):
                torch.ones(3, device=device) + 1
            return Done()
        """,
        fidelity="full_pipeline",
    )
    result = audited(package)["idle"]
    assert (result.declared_fidelity, result.fidelity) == ("full_pipeline", "concept_demo")


def test_overrides_are_documented_recorded_and_positive(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    package.add("short", PASSING, overrides="TRAIN_STEPS: steps of the training stage")
    monkeypatch.setenv("AUTO_RESEARCH_SHORT_TRAIN_STEPS", "1")
    result = audited(package)["short"]
    assert result.overrides == {"AUTO_RESEARCH_SHORT_TRAIN_STEPS": 1}
    assert result.stages[0].optimiser_steps == 1
    monkeypatch.setenv("AUTO_RESEARCH_SHORT_TRAIN_STEP", "1")
    with pytest.raises(UserError, match="AUTO_RESEARCH_SHORT_TRAIN_STEPS"):
        audited(package)


def test_only_passed_runs_enter_the_total(package: Package) -> None:
    package.add("good", PASSING)
    package.add("bad", "def run(study):\n    time.sleep(0.2)\n    raise ValueError('no')\n")
    record = run_audit(SETTINGS, Path("runs/a.json"), package.adapters())
    by_key = {r.key: r for r in record.results}
    assert record.passed_seconds == by_key["good"].seconds
    assert "not a throughput benchmark" in record.passed_seconds_label
    assert record.status_counts == {"cpu_pass": 1, "failed": 1}


def test_workers_give_the_same_statuses(package: Package) -> None:
    for i in range(4):
        package.add(f"good-{i}", PASSING)
    package.add("bad", "def run(study):\n    raise ValueError('no')\n")
    results = audited(package, workers=2)
    assert [r.status for r in results.values()] == ["failed"] + ["cpu_pass"] * 4


def counting(package: Package, key: str, rest: str) -> None:
    """An adapter that leaves a line in a file each time it runs."""
    package.add(
        key,
        f"""
        def run(study):
            with open({str(package.root / "count")!r}, "a") as file:
                file.write("{key}\\n")
            device = device_for(study.device)
            {rest}
            work(device)
            return Done()
        """,
    )


def test_resume_reruns_nothing_that_passed(package: Package) -> None:
    counting(package, "good", "pass")
    counting(package, "mended", "raise ValueError('not yet')")
    output = Path("runs/audit.json")
    first = run_audit(SETTINGS, output, package.adapters())
    assert first.status_counts == {"cpu_pass": 1, "failed": 1}
    counting(package, "mended", "pass")
    second = run_audit(SETTINGS, output, package.adapters(), resume=True)
    assert second.status_counts == {"cpu_pass": 2}
    assert (package.root / "count").read_text().split() == ["good", "mended", "mended"]
    attempts = {r.key: r.attempt for r in second.results}
    assert attempts == {"good": 1, "mended": 2}
    assert (run_folder(output) / "mended.log").is_file()  # the log of the first attempt is kept


def test_resume_refuses_other_settings(package: Package) -> None:
    package.add("one", PASSING)
    package.add("two", PASSING)
    output = Path("runs/audit.json")
    run_audit(SETTINGS, output, package.adapters())
    before = output.read_text()
    for change in (
        {"seeds": [1]},
        {"budget": "standard"},
        {"timeout_seconds": 5.0},
        {"selection": Selection(keys=["one"])},
        {"shards": 2},
    ):
        with pytest.raises(UserError, match="other settings") as error:
            run_audit(SETTINGS.model_copy(update=change), output, package.adapters(), resume=True)
        assert next(iter(change)).split("_")[0] in str(error.value)
    assert output.read_text() == before


def test_without_resume_the_earlier_record_is_moved_aside(package: Package) -> None:
    package.add("one", PASSING)
    output = Path("runs/audit.json")
    run_audit(SETTINGS, output, package.adapters())
    before = output.read_text()
    run_audit(SETTINGS, output, package.adapters())
    assert Path("runs/audit.previous.json").read_text() == before


def test_a_second_writer_is_refused(package: Package) -> None:
    package.add("one", PASSING)
    with OutputLock("runs/audit.json"), pytest.raises(UserError, match="is being written by"):
        run_audit(SETTINGS, Path("runs/audit.json"), package.adapters())
    assert not Path("runs/audit.json").exists()


def test_an_output_that_cannot_be_written_says_so(package: Package) -> None:
    package.add("one", PASSING)
    Path("runs").write_text("a file")
    with pytest.raises(UserError, match="Cannot write"):
        run_audit(SETTINGS, Path("runs/audit.json"), package.adapters())


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Any:
    """A disk of 192 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs privileges")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_loses_nothing(package: Package, tiny_disk: Path) -> None:
    for key in ("aaa", "bbb"):
        counting(package, key, "pass")
    filler = tiny_disk / "runs" / "filler"
    package.add(
        "fills",
        f"""
        def run(study):
            with open({str(filler)!r}, "wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 512)
        """,
    )
    output = tiny_disk / "runs" / "audit.json"
    with pytest.raises(UserError, match="No space left"):
        run_audit(SETTINGS, output, package.adapters())
    record = read_record(output, AuditRecord)
    assert [r.key for r in record.results] == ["aaa", "bbb"]
    assert all(r.passed for r in record.results)
    filler.unlink()
    counting(package, "fills", "pass")
    record = run_audit(SETTINGS, output, package.adapters(), resume=True)
    assert record.status_counts == {"cpu_pass": 3}
    assert (package.root / "count").read_text().split() == ["aaa", "bbb", "fills"]


def test_an_interrupt_keeps_what_had_ended(package: Package) -> None:
    package.add("aaa", PASSING)
    package.add("bbb", "def run(study):\n    import time\n    time.sleep(600)\n")

    def interrupt(progress: running.Progress, result: AdapterResult | None) -> None:
        if result is None and "bbb" in progress.running:
            raise KeyboardInterrupt

    # The interrupt arrives in the thread that waits for bbb's start, as any fault there would.
    with pytest.raises(KeyboardInterrupt):
        run_audit(SETTINGS, Path("runs/audit.json"), package.adapters(), watch=interrupt)
    record = read_record("runs/audit.json", AuditRecord)
    assert [r.key for r in record.results] == ["aaa"]
    assert record.missing == ["bbb"]
    assert not record.finished


def command(package: Package, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "auto_research.cli.main", "audit", "--device", "cpu", *arguments]


def environ(package: Package) -> dict[str, str]:
    source = str(Path(running.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, str(package.root)]), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_kill_at_any_moment_then_resume(package: Package, kills: int) -> None:
    import random

    script = (
        "import sys; from auto_research.cli.audit import audit_app; audit_app(args=sys.argv[1:], prog_name='audit')"
    )
    keys = [f"p{i}" for i in range(5)]
    for key in keys:
        counting(package, key, "time.sleep(0.15)")
    counts = package.root / "count"
    output = package.root / "runs" / "audit.json"
    arguments = [*keys, "--device", "cpu", "--output", str(output), "--resume", "--checkpoints", "micro"]
    line = [sys.executable, "-c", script, *arguments]
    chance = random.Random(kills)
    passed_before: set[str] = set()
    for _ in range(kills):
        process = subprocess.Popen(
            line, cwd=package.root, env=environ(package), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        started = len(counts.read_text().split()) if counts.exists() else 0
        # Wait for a random number of further starts, then for a random while, then pull the plug.
        wanted, delay = started + chance.randint(1, 2), chance.random() * 0.4
        watcher = psutil.Process(process.pid)
        while watcher.is_running() and watcher.status() != psutil.STATUS_ZOMBIE:
            if counts.exists() and len(counts.read_text().split()) >= wanted:
                break
            try:
                process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        record = read_record(output, AuditRecord)  # readable whenever the plug was pulled
        passed = {r.key for r in record.results if r.passed}
        assert passed_before <= passed
        passed_before = passed
    ran_before = counts.read_text().split()
    subprocess.run(line, cwd=package.root, env=environ(package), check=True, capture_output=True)
    record = read_record(output, AuditRecord)
    assert record.finished
    assert record.status_counts == {"cpu_pass": 5}
    rerun = counts.read_text().split()[len(ran_before) :]
    assert set(rerun) == set(keys) - passed_before
    assert len(rerun) == len(set(rerun))
    assert output.with_suffix(".html").is_file()


def test_logs_go_below_runs_wherever_the_output_is(package: Package) -> None:
    assert run_folder(Path("runs/gpu/a30.json")) == Path.cwd() / "runs/gpu/a30"
    assert run_folder(Path("docs/a30.json")) == Path.cwd() / "runs/audit/a30"


def test_a_log_tail_is_plain_text() -> None:
    assert clean_tail("a\x1b[31mred\x1b[0m\x00\r\n10%\r50%\r100%\nend\n") == "ared\n100%\nend"


def test_untrusted_text_reaches_no_page_unescaped(package: Package) -> None:
    evil = "<script>alert(1)</script>"
    package.add("evil", f"def run(study):\n    print({evil!r})\n    raise ValueError({evil!r})\n", title=evil)
    record = run_audit(SETTINGS, Path("runs/a.json"), package.adapters())
    html, markdown, junit = write_reports(record, Path("runs/a.json"))
    assert "<script" not in html.read_text()
    assert "&lt;script&gt;" in html.read_text()
    assert "<script" not in junit.read_text()
    shutil.rmtree(package.root / "runs")
    assert markdown.suffix == ".md"
