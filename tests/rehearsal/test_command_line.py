"""``python -m auto_research.rehearsal``: exit codes, reports, options, child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from auto_research.rehearsal.__main__ import main

SOURCE = Path(__file__).resolve().parents[2] / "src"

CLEAN = """
import sys, torch
model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(3, 4, device="cuda")).sum().backward()
optimizer.step()
print("arguments", sys.argv[1:], __name__)
"""
FAULTY = """
import torch
x = torch.ones(3, device="cuda")
x + torch.zeros(3)
x.numpy()
print("went on")
"""


@dataclass
class Done:
    """A finished rehearsal: exit code and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def rehearse(tmp_path, capfd, monkeypatch):
    """Run a program under the command in this process; gives the outcome and its JSON report (if any)."""
    monkeypatch.chdir(tmp_path)

    def run(program: str, *options: str, arguments: tuple[str, ...] = ()):
        script, report = tmp_path / "train.py", tmp_path / "report.json"
        script.write_text(program)
        code = main(["--json", str(report), *options, str(script), *arguments])
        printed = capfd.readouterr()
        return Done(code, printed.out, printed.err), json.loads(report.read_text()) if report.exists() else None

    return run


def test_the_module_runs_as_a_command(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(FAULTY)
    command = [sys.executable, "-m", "auto_research.rehearsal", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "train.py:4" in done.stderr
    assert "went on" in done.stdout


def test_a_location_is_printed_on_one_line_however_long_its_path(tmp_path, capfd):
    script = tmp_path / ("a_folder_with_a_long_name_" * 5) / "train.py"
    script.parent.mkdir()
    script.write_text(FAULTY)
    assert main([str(script)]) == 1
    assert f"at {script}:4 (<module>)" in capfd.readouterr().err


def test_a_clean_script_with_its_own_arguments(rehearse, tmp_path):
    page = tmp_path / "report.html"
    done, report = rehearse(CLEAN, "--html", str(page), arguments=("--json", "mine", "-v"))
    assert done.returncode == 0, done.stderr
    assert "arguments ['--json', 'mine', '-v'] __main__" in done.stdout
    assert report["findings"] == []
    assert report["synchronisations"]["steps"] == 1
    assert report["share"]["flops_on_device"] == 1.0
    text = page.read_text()
    assert "No findings." in text
    assert "http" not in text  # self-contained
    assert "No findings." in done.stderr


def test_all_faults_are_listed_and_escaped(rehearse, tmp_path):
    page = tmp_path / "report.html"
    program = FAULTY + "\ndef _(x=torch.ones(1, device='cuda')):\n    '<script>'\n"
    done, report = rehearse(program, "--html", str(page))
    assert done.returncode == 1
    assert "went on" in done.stdout
    assert [(f["rule"], f["line"]) for f in report["findings"]] == [("DEV-1", 4), ("DEV-3", 5)]
    assert report["by_rule"] == {"DEV-1": 1, "DEV-3": 1}
    assert "&lt;module&gt;" in page.read_text()


def test_stop_raises_what_cuda_raises(rehearse):
    done, report = rehearse(FAULTY, "--stop")
    assert done.returncode == 1
    assert "went on" not in done.stdout
    assert "RuntimeError: Expected all tensors to be on the same device" in done.stderr
    assert len(report["findings"]) == 1


@pytest.mark.parametrize(
    "options, code",
    [
        (("--ignore", "DEV-1", "--ignore", "DEV-3:train.py"), 0),
        (("--ignore", "DEV-1:other.py"), 1),
        (("--fail-on", "OOB-1,MEM-1"), 0),
        (("--fail-on", "DEV-3"), 1),
        (("--fail-on", "never"), 0),
    ],
)
def test_what_fails_a_run(rehearse, options, code):
    assert rehearse(FAULTY, *options)[0].returncode == code


def test_a_script_that_ends_early_is_not_rehearsable(rehearse):
    done, report = rehearse("import torch\nraise ValueError('no data')\n")
    assert done.returncode == 2
    assert any("no data" in note for note in report["not_rehearsed"])
    assert rehearse("import sys; sys.exit(3)")[0].returncode == 2
    assert rehearse("import sys; sys.exit(0)")[0].returncode == 0


@pytest.mark.parametrize(
    "options, sentence",
    [
        (("--card", "a31"), "Unknown card 'a31'"),
        (("--memory", "lots"), "not a memory size"),
        (("--fail-on", "DEV-99"), "DEV-99"),
    ],
)
def test_bad_options_get_one_sentence(rehearse, options, sentence):
    done, _ = rehearse(CLEAN, *options)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_memory_option_makes_a_small_card(rehearse):
    program = "import torch\nx = torch.zeros(2**20, device='cuda')\n"
    assert rehearse(program, "--memory", "616MiB")[0].returncode == 0
    done, report = rehearse(program, "--memory", "602MiB")
    assert done.returncode == 1
    assert report["by_rule"] == {"MEM-1": 1}
    assert not report["memory"]["fits"]


def test_a_native_error_becomes_a_finding(rehearse):
    program = "import torch\ntorch.nn.Embedding(3, 2).cuda()(torch.tensor([7], device='cuda'))\n"
    done, report = rehearse(program)
    assert done.returncode == 1
    assert [(f["rule"], f["line"]) for f in report["findings"]] == [("OOB-1", 2)]


CHILDREN = """
import sys
import torch
import torch.multiprocessing as mp

def work(rank=0):
    x = torch.ones(2, device="cuda")
    x * torch.ones(2)

if __name__ == "__main__":
    context = mp.get_context(sys.argv[1])
    child = context.Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0
"""


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.slow)],
)
def test_child_processes_report_to_the_parent(rehearse, method):
    done, report = rehearse(CHILDREN, arguments=(method,))
    assert done.returncode == 1, done.stderr
    assert [(f["rule"], f["line"]) for f in report["findings"]] == [("DEV-1", 8)]


@pytest.mark.slow
def test_launcher_processes_train_over_gloo(rehearse, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "dist.init_process_group('nccl')\n"
        "rank = dist.get_rank()\n"
        "model = DDP(torch.nn.Linear(2, 1, bias=False).cuda(), device_ids=[0])\n"
        "x = torch.full((1, 2), float(rank + 1), device='cuda')\n"
        "model(x).sum().backward()\n"
        "assert model.module.weight.grad.tolist() == [[1.5, 1.5]]\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dist.destroy_process_group()\n"
    )
    program = (
        "import subprocess, sys\n"
        "run = ['torch.distributed.run', '--standalone', '--nproc-per-node', '2']\n"
        "command = [sys.executable, '-m', *run, sys.argv[1]]\n"
        "sys.exit(subprocess.run(command).returncode)\n"
    )
    done, report = rehearse(program, "--devices", "2", arguments=(str(worker),))
    assert done.returncode == 1, done.stderr
    assert [(f["rule"], f["line"]) for f in report["findings"]] == [("DST-1", 9)]


@pytest.mark.slow
def test_ray_workers_are_rehearsed(rehearse):
    pytest.importorskip("ray")
    program = (
        "import ray, torch\n"
        "ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)\n"
        "@ray.remote\n"
        "def work():\n"
        "    import torch\n"
        "    x = torch.ones(2, device='cuda')\n"
        "    return (x + torch.zeros(2)).sum().item()\n"
        "assert ray.get(work.remote()) == 2.0\n"
        "ray.shutdown()\n"
    )
    done, report = rehearse(program)
    assert done.returncode == 1, done.stderr
    assert [(f["rule"], f["line"]) for f in report["findings"]] == [("DEV-1", 7)]
