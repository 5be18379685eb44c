"""The guide's commands: SFT, DPO and ORPO by TRL under `accelerate launch`, on two processes of this machine's CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from auto_research.checkpoints.resolve import resolve
from auto_research.data.export import row_of
from auto_research.data.preferences import own_pairs
from auto_research.data.reasoning import Problem

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "larger-checkpoints.md"
SCRIPTS = {"sft": ["-m", "trl.scripts.sft"], "dpo": ["-m", "trl.scripts.dpo"], "orpo": [str(ROOT / "scripts/orpo.py")]}
ROWS = 8


def data(method: str, folder: Path) -> Path:
    if method == "sft":
        examples = [Problem(f"What is {n} + {n}?", f"{n} + {n} = {2 * n}.", str(2 * n)) for n in range(ROWS)]
        rows = [row_of(one) for one in examples]
    else:
        rows = [row_of(one) for one in own_pairs()[:ROWS]]
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run_until_saved(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """Runs a launcher to its end, which must be a good one; returns what it said.

    The last line of TRL's own scripts destroys the process group, and that was seen to hang with gloo after the model
    had been saved. Then, half a minute after the last file, the processes are ended here.
    """
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
        )
        last = folder / "out" / "training_args.bin"
        try:
            while process.poll() is None:
                if last.is_file() and time.time() - last.stat().st_mtime > 30:
                    break
                time.sleep(0.5)
            log.seek(0)
            said = log.read()
            assert process.returncode in (None, 0), said[-4000:]
            return said
        finally:
            if process.poll() is None:
                workers = psutil.Process(process.pid).children(recursive=True)  # each leads a session of its own
                for worker in workers:
                    worker.kill()
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", list(SCRIPTS))
def test_two_processes_train_together(method: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    base = resolve("micro-lm").path
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    options = {
        "model_name_or_path": base,
        "dataset_name": data(method, tmp_path / "rows"),
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-3,
        "max_length": 512,
        "dtype": "float32",
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "c")}
    said = run_until_saved([*launch, *SCRIPTS[method], *words], environment, tmp_path)
    assert (tmp_path / "out" / "training_args.bin").is_file(), said[-4000:]
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    # Two processes with a row each use half of eight rows in two steps; one alone would use a quarter.
    assert state["epoch"] == pytest.approx(0.5)
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    moved = sum(int((before[name] != after[name]).sum()) for name in before)
    assert moved > 0.5 * sum(tensor.numel() for tensor in before.values())


def test_the_guide_shows_these_commands() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for words in ("-m trl.scripts.sft", "-m trl.scripts.dpo", "scripts/orpo.py", "accelerate launch"):
        assert words in text
    assert "auto_research" not in (ROOT / "scripts/orpo.py").read_text().replace("this project", "")


def test_the_fsdp_configuration_of_the_guide_is_one_that_accelerate_takes(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    (block,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    path = tmp_path / "fsdp.yaml"
    path.write_text(block)
    config = load_config_from_file(str(path))
    assert config.distributed_type == "FSDP"
    assert config.fsdp_config["fsdp_version"] == 2
