"""torch's own operator test database: nothing unexplained."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("expecttest", reason="torch's operator test database imports it")

from sweep import EXPLAINED, displace, sweep


@pytest.mark.slow
def test_operator_sweep_has_no_unexplained_failure():
    explained = json.loads(EXPLAINED.read_text())["operators"]
    outcome = sweep(limit=2)
    unexplained = {
        key: problem
        for key, problem in outcome.problems.items()
        if key not in explained or not problem.startswith(explained[key]["seen"])
    }
    assert unexplained == {}
    assert outcome.passed > 5000


@pytest.mark.slow
def test_displacement_sweep_flags_every_operand_that_cuda_refuses():
    reasons = json.loads(EXPLAINED.read_text())["displaced"]
    counts, silent = displace(limit=2)
    unexplained = {key: seen for key, seen in silent.items() if not key.startswith(tuple(reasons))}
    assert unexplained == {}
    assert counts["n-dim flagged"] > 750


@pytest.mark.parametrize(
    "names", [["addmm", "cat", "gather", "where", "clamp"], ["index_select", "lerp", "bmm", "take"]]
)
def test_a_sample_of_the_sweeps_runs_with_every_test(names):
    outcome = sweep(limit=2, names=names)
    assert {key.split("/")[0].split(".")[0] for key in outcome.problems} <= {"addmm", "bmm"}
    assert outcome.passed > 20
    counts, silent = displace(limit=2, names=names)
    assert silent == {}
    assert counts["n-dim flagged"] > 10
