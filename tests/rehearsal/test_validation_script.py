"""The script for a real card: an exhibit that ends its process, or hangs, does not take the others with it."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "validate_on_gpu.py"
#: Stands for the worker: prints one line an exhibit, dies at one and falls silent at another.
WORKER = """
import json, os, sys, time
for name in sys.argv[2].split(","):
    if name == "dies":
        os._exit(9)
    if name == "hangs":
        time.sleep(60)
    print(json.dumps({"exhibit": name, "agrees": True}), flush=True)
"""


@pytest.fixture
def script(tmp_path):
    spec = importlib.util.spec_from_file_location("validate_on_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    module.__file__ = str(worker)
    return module


def test_the_rest_goes_on_without_the_exhibit_that_ended_or_hung(script):
    records = script.in_worker(["a", "dies", "b", "hangs", "c"], time.monotonic() + 60, 3.0)
    assert [record["exhibit"] for record in records] == ["a", "dies", "b", "hangs", "c"]
    assert [record["agrees"] for record in records] == [True, False, True, False, True]
    assert "ended with 9" in records[1]["problem"]
    assert "no answer" in records[3]["problem"]


def test_nothing_starts_after_the_deadline(script):
    records = script.in_worker(["a", "b"], time.monotonic(), 3.0)
    assert [record["problem"] for record in records] == ["no time left", "no time left"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here")
def test_an_exhibit_is_judged_by_what_it_raised(script):
    record = script.run_exhibit("HostInputToLinear")
    assert (record["rule"], record["expected"]) == ("DEV-1", "RuntimeError")
    assert record["mended"] is not None  # no card here: the twin fails, which is a disagreement
    assert not record["agrees"]
