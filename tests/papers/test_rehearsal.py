"""The smoke run of every paper, whole, on the virtual card: clean; with BF16 weights where a language model is used."""

import json
import subprocess
import sys

import pytest

from auto_research.papers._registry import adapters

pytestmark = pytest.mark.slow

CPU_ONLY = {"most-popular", "item-knn", "ease", "bm25-title"}
RUNS = [
    (key, dtype)
    for key, found in adapters().items()
    for dtype in (("fp32", "bf16") if "causal_lm" in found.front.get("checkpoints", {}) else ("checkpoint",))
]


@pytest.mark.parametrize("key, dtype", RUNS)
def test_the_smoke_run_on_the_virtual_card_has_no_finding(key, dtype, tmp_path):
    program = [sys.executable, "-c", "from auto_research.cli.main import main; main()", "rehearse"]
    options = ["--dtype", dtype, "--checkpoints", "micro", "--output", str(tmp_path)]
    done = subprocess.run([*program, key, *options], capture_output=True, text=True, check=False)
    log = (tmp_path / f"{key}.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log[-3000:]
    summary = json.loads((tmp_path / f"{key}.json").read_text())
    assert summary["findings"] == []
    if key in CPU_ONLY:
        assert summary["share"]["device_operations"] == 0
    else:
        assert summary["synchronisations"]["steps"] > 0
        assert summary["share"]["flops_on_device"] > 0.9
