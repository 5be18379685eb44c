"""`auto-research audit` and `scripts/audit_gpu_paths.py` are one program."""

from __future__ import annotations

import io
import runpy
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from auto_research.audit.record import STATUSES, AuditRecord
from auto_research.audit.run import Progress
from auto_research.cli import audit as cli
from auto_research.cli.audit_view import LiveView, print_summary
from auto_research.papers import _registry
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import read_record

from .conftest import EVIL, PASSING, Package, record_of, result

SCRIPT = Path(__file__).parents[2] / "scripts" / "audit_gpu_paths.py"
MISSION = """--dataset-dir data --output runs/gpu-audit/a30-shard-{shard}.json --timeout-seconds 600
    --only-explicit-device-packages --include-concept-demos --shards 3 --shard-index {shard}"""


@pytest.fixture
def planted(package: Package, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Four adapters with an accelerator path, one of them a demo, and one without; no CUDA."""
    for i in range(3):
        package.add(f"neural-{i}", PASSING)
    package.add("neural-demo", PASSING, fidelity="concept_demo")
    package.add("popular", "def run(study):\n    return Done()\n", family="baselines")
    monkeypatch.setattr(_registry, "adapters", package.adapters)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return package


def script(monkeypatch: pytest.MonkeyPatch, arguments: str) -> int:
    """Exit code of `scripts/audit_gpu_paths.py`."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments.split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return int(end.value.code or 0)


def test_the_documented_command_says_that_cuda_is_absent(
    planted: Package, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script(monkeypatch, MISSION.format(shard=0)) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0
    assert said.startswith("error: CUDA is absent")
    assert "`--device cpu` audits the CPU path" in said
    assert not Path("runs").exists()


def test_shards_then_merge(
    planted: Package, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for shard in range(3):
        assert script(monkeypatch, MISSION.format(shard=shard) + " --device cpu") == 0
    said = capsys.readouterr().out
    assert "engineering check" in said
    assert "not a throughput benchmark" in said
    assert "data does not exist" in said
    files = [f"runs/gpu-audit/a30-shard-{shard}.json" for shard in range(3)]
    ran = [[r.key for r in read_record(file, AuditRecord).results] for file in files]
    assert ran == [["neural-0", "neural-demo"], ["neural-1"], ["neural-2"]]  # `popular` has no path of its own
    assert script(monkeypatch, f"merge {' '.join(files)} --output runs/all.json") == 0
    merged = read_record("runs/all.json", AuditRecord)
    assert merged.status_counts == {"cpu_pass": 4}
    assert Path("runs/all.html").is_file()
    assert script(monkeypatch, f"merge {' '.join(files[:2])} --output runs/some.json") == 1
    assert "shard 2 of 3 is missing: neural-2" in capsys.readouterr().out
    assert script(monkeypatch, f"merge {files[0]} {files[0]} --output runs/double.json") == 2
    assert "occur twice" in capsys.readouterr().err


def run(*arguments: str) -> int:
    """Exit code of `auto-research audit`."""
    with pytest.raises(SystemExit) as end:
        cli.audit_app(args=list(arguments))
    return int(end.value.code or 0)


def test_the_exit_code_tells_failures(planted: Package, capsys: pytest.CaptureFixture[str]) -> None:
    planted.add("broken", "def run(study):\n    device_for(study.device)\n    raise ValueError('[bold]no[/]')\n")
    assert run("broken", "popular", "--device", "cpu", "--output", "runs/x.json") == 1
    captured = capsys.readouterr()
    assert "[1/2] broken" in captured.err
    assert "[bold]no[/]" in captured.out
    assert "runs/x.html" in captured.out
    assert run("popular", "--device", "cpu", "--output", "runs/y.json", "--workers", "2") == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nueral-1"], "Did you mean 'neural-1'"),
        (["--shards", "2", "--shard-index", "2"], "--shard-index must lie in 0..1"),
        (["--timeout-seconds", "0"], "must be positive"),
        (["--timeout-seconds", "nan"], "must be positive"),
        (["--timeout-seconds", "inf"], "must be positive"),
        (["--seeds", ""], "--seeds"),
        (["--seeds", "4294967296"], "out of range"),
        (["--output", "runs/x.txt"], "must end in .json"),
        (["--seeds", "4,x"], "--seeds"),
        (["--seeds", "4,4"], "repeat"),
        (["--device", "tpu"], "is not a device"),
        (["--dataset-dir", "file"], "not a folder"),
        (["--family", "rerank"], "no family is called"),
        (["--device", "cuda:1"], "CUDA is absent"),
    ],
)
def test_bad_options_are_one_sentence(planted: Package, arguments: list[str], said: str) -> None:
    Path("file").write_text("")
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        cli.audit_app(args=arguments if "--device" in arguments else [*arguments, "--device", "cpu"])
    assert not Path("runs").exists()


def test_merge_does_not_overwrite_what_it_reads(planted: Package) -> None:
    with pytest.raises(UserError, match="one of the files to merge"):
        cli.audit_app(args=["merge", "a.json", "--output", "./a.json"])


def test_the_live_table_shows_everything_and_interprets_nothing() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=30, color_system=None)
    record = record_of([result("good", "cpu_pass", reason="[red]not markup[/red]")])
    progress = Progress(
        planned=["good", "next", "kept"],
        running={"next": time.monotonic()},
        said={"next": "[next] [/b] stage 2"},
        results={"good": record.results[0], "kept": result("kept", "cpu_pass")},
        kept=frozenset(("kept",)),
    )
    with LiveView(record.settings, console) as view:
        view.watch(progress, None)
        console.print(view._table())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[red]not markup[/red]" in shown
    assert "[next] [/b] stage 2" in shown
    assert "running" in shown
    assert "cpu_pass (kept)" in shown
    assert "2 of 3 adapters on cpu" in shown


def test_the_summary_shows_every_status_and_hostile_text() -> None:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    record = record_of([result(f"p-{s}", s, reason="[/x] " + EVIL) for s in STATUSES])
    print_summary(record, Path("runs/a.json"), [Path("runs/a.html")], console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for status in STATUSES:
        assert status in shown
    assert "[/x]" in shown
