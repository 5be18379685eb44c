"""The scaling-law workflow: fits on planted laws, what they refuse, and (slow) the measured points."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import markov
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auto_research.evolve import genome as genomes
from auto_research.evolve.records import Candidate, CellResult, Trial
from auto_research.evolve.workflow import Sizes
from auto_research.evolve.workflows import workflow
from auto_research.evolve.workflows.scaling_law import FORMS, Observed, fit, rank, report

WORKFLOW = workflow("scaling-law")
COMPUTE, TWO, CHINCHILLA = FORMS
TINY = Sizes("smoke", {"vocabulary": 256, "batch": 4, "context": 32, "percent": 10})
MEASURED = [
    Observed("64x2, 100", 231_744, 100_672, 102_400, 315_486, (5.871,), 6.14, math.log(2048)),
    Observed("64x2, 300", 231_744, 100_672, 307_200, 315_486, (5.036,), 6.14, math.log(2048)),
    Observed("96x2, 300", 418_272, 221_664, 307_200, 315_486, (4.895,), 6.14, math.log(2048)),
    Observed("128x3, 400", 846_720, 584_576, 409_600, 315_486, (4.690,), 6.14, math.log(2048)),
]


def points(law, sizes=(1e5, 3e5, 1e6), lengths=(1e5, 5e5, 2e6), noise=0.0, seeds=1) -> list[Observed]:
    rng = np.random.default_rng(0)
    return [
        Observed(f"{n:.0e} {d:.0e}", n, n / 2, d, 1e9, tuple(law(n, d) * np.exp(noise * rng.standard_normal(seeds))))
        for n, d in itertools.product(sizes, lengths)
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTO_RESEARCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield WORKFLOW.load(TINY, markov.lay(tmp_path_factory.mktemp("data"), 20_000))


# ---------------------------------------------------------------------------------------------------- fits


def test_the_measured_table_gives_the_measured_fit():
    found = report(MEASURED)
    main = found["fits"]["compute"]
    assert main["coefficients"]["s"] == pytest.approx(-0.083, abs=5e-4)
    assert main["log_rmse"] == pytest.approx(0.0265, abs=5e-5)
    assert main["constant_log_rmse"] == pytest.approx(0.0847, abs=5e-5)
    assert found["target"]["holds"]
    assert found["fits"]["size and data"]["status"] == "fitted"
    assert found["fits"]["size and data"]["degrees_of_freedom"] == 1
    assert found["fits"]["chinchilla"] == {
        "form": CHINCHILLA.text, "points": 4, "status": "not identifiable",
        "reason": "4 different points; 9 on a crossed grid are needed",
    }  # fmt: skip
    assert main["bootstrap"]["resamples"] == 0
    assert any("1.3 passes over 315,486 unique tokens" in text for text in found["warnings"])
    assert any("real curvature" in text for text in found["warnings"])
    assert [row["repetitions"] for row in found["points"]] == pytest.approx([0.325, 0.974, 0.974, 1.298], abs=1e-3)
    json.dumps(found, allow_nan=False)


def test_the_old_run_is_called_what_it_was():
    """Losses near ln V, tokens seen as they were: the target may hold, and still nothing was learned."""
    table = ((169_728, 768, 6.8678), (169_728, 1536, 6.7986), (328_320, 1536, 6.7440), (734_336, 2304, 6.5692))
    old = [Observed(str(i), n, n / 3, d, 1e5, (loss,), 6.0, math.log(1024)) for i, (n, d, loss) in enumerate(table)]
    found = report(old)
    assert found["fits"]["compute"]["constant_log_rmse"] == pytest.approx(0.0165, abs=5e-5)
    assert found["fits"]["compute"]["leave_one_out"]["slopes"]["s"] == pytest.approx([-0.0188, -0.0135], abs=5e-5)
    assert sum("nothing was learned yet" in text for text in found["warnings"]) == 3
    assert sum("not below the unigram" in text for text in found["warnings"]) == 4


@given(st.floats(0.5, 3), st.floats(-0.3, 0.3))
def test_a_planted_power_law_is_found(a, s):
    found = fit(COMPUTE, points(lambda n, d: math.exp(a) * (6 * n * d) ** s))
    assert found["coefficients"] == pytest.approx({"a": a, "s": s}, abs=1e-6)
    assert found["log_rmse"] < 1e-9
    assert found["leave_one_out"]["log_rmse"] < 1e-8


@given(st.floats(-0.3, 0.3), st.floats(-0.3, 0.3), st.floats(0.1, 10))
def test_size_and_data_are_told_apart_whatever_their_units(s_n, s_d, unit):
    found = fit(
        TWO, points(lambda n, d: 5 * (n / 1e5) ** s_n * (d / 1e5) ** s_d, sizes=(1e5 * unit, 3e5 * unit, 1e6 * unit))
    )
    assert found["coefficients"]["s_N"] == pytest.approx(s_n, abs=1e-6)
    assert found["coefficients"]["s_D"] == pytest.approx(s_d, abs=1e-6)


def test_what_does_not_identify_a_law_is_refused():
    law = points(lambda n, d: n**-0.1)
    assert fit(COMPUTE, law[:2])["reason"] == "2 different C; 3 are needed"
    same = [replace(p, parameters=1e5 * 2**i, tokens=1e5 / 2**i) for i, p in enumerate(law[:4])]
    assert fit(COMPUTE, same)["status"] == "not identifiable"  # one C in four disguises
    assert fit(TWO, law[:3])["reason"] == "3 points; 4 are needed"
    diagonal = [replace(p, parameters=10.0**i, tokens=100.0**i) for i, p in enumerate(law[:5], start=4)]
    assert fit(TWO, diagonal)["reason"] == "the points have rank 2 in (1, ln N, ln D); 3 is needed"
    one_length = [replace(p, tokens=1e5) for p in law]
    assert "rank 2" in fit(TWO, one_length)["reason"]
    assert "no crossed grid" in fit(CHINCHILLA, [*law[:8], replace(law[8], tokens=7e7)])["reason"]
    assert (
        "no crossed grid" in fit(CHINCHILLA, points(lambda n, d: 1.0, (1e5, 2e5), (1e5, 2e5, 3e5, 4e5, 5e5)))["reason"]
    )
    assert "not identifiable" in report(law[:2])["sentence"]
    assert rank(np.ones((3, 1))) == 1


def test_leave_one_out_says_which_points_a_law_hangs_on():
    law = [
        *points(lambda n, d: n**-0.1 * d**-0.1, (1e5,), (1e5, 2e5, 3e5)),
        *points(lambda n, d: n**-0.1 * d**-0.1, (2e5,), (1e5,)),
    ]
    found = fit(TWO, law)
    assert found["leave_one_out"]["errors"] == {}
    assert found["leave_one_out"]["not identifiable without"] == [p.name for p in law]
    grid = points(lambda n, d: 3 * n**-0.05 * d**-0.1, noise=0.01)
    shown = fit(TWO, grid)["leave_one_out"]
    design = np.array([[1, math.log(p.parameters), math.log(p.tokens)] for p in grid])
    y = np.log([p.loss for p in grid])
    hat = design @ np.linalg.pinv(design)
    residual = (y - hat @ y) / (1 - np.diag(hat))  # the closed form
    assert list(shown["errors"].values()) == pytest.approx(list(residual), abs=1e-9)


def test_the_chinchilla_law_is_found_on_a_grid():
    e, a, b, alpha, beta = 1.69, 406.4, 410.7, 0.34, 0.28
    law = points(lambda n, d: e + a * n**-alpha + b * d**-beta, (1e5, 1e6, 1e7, 1e8), (1e6, 1e7, 1e8, 1e9))
    found = fit(CHINCHILLA, law)
    assert found["log_rmse"] < 1e-5
    assert found["coefficients"]["alpha"] == pytest.approx(alpha, abs=5e-3)
    assert found["coefficients"]["beta"] == pytest.approx(beta, abs=5e-3)
    assert found["coefficients"]["E"] == pytest.approx(e, abs=0.02)
    assert found["log_rmse"] < fit(COMPUTE, law)["log_rmse"]


def test_the_bootstrap_covers_the_planted_slope_and_widens_with_noise():
    widths = []
    for noise in (0.002, 0.02):
        found = fit(COMPUTE, points(lambda n, d: 9 * (6 * n * d) ** -0.08, noise=noise, seeds=5))["bootstrap"]
        low, high = found["slopes"]["s"]
        assert found["resamples"] == 2000
        assert low - noise / 10 < -0.08 < high + noise / 10
        widths.append(high - low)
    assert widths[0] * 5 < widths[1]
    again = fit(COMPUTE, points(lambda n, d: 9 * (6 * n * d) ** -0.08, noise=0.02, seeds=5))["bootstrap"]
    assert again["slopes"]["s"] == [low, high]


def test_a_flat_law_misses_the_target():
    found = report(points(lambda n, d: 5.0, noise=0.01, seeds=3))
    assert not found["target"]["holds"]
    assert "not below half" in found["sentence"]
    assert "no compute-optimal advice" in found["sentence"]


# ------------------------------------------------------------------------------------------------ the workflow


def test_points_are_the_measured_ones_and_a_crossed_grid(data):
    assert not WORKFLOW.select
    assert [tuple(p.values()) for p in WORKFLOW.points("smoke")] == [
        (64, 2, 100),
        (64, 2, 300),
        (96, 2, 300),
        (128, 3, 400),
    ]
    assert WORKFLOW.points("smoke")[0] == WORKFLOW.space.baseline()
    assert WORKFLOW.smoke_plan() == WORKFLOW.points("smoke")[1:]
    sizes = WORKFLOW.sizes("smoke")
    wide = replace(data, parts=replace(data.parts, vocabulary=2048))
    costs = [WORKFLOW.cost(point, sizes, wide) for point in WORKFLOW.points("smoke")]
    assert [c.parameters for c in costs] == [231_744, 231_744, 418_272, 846_720]
    assert [c.extra["tokens_seen"] for c in costs] == [102_400, 307_200, 307_200, 409_600]
    assert costs[3].extra["compute"] == 6 * 846_720 * 409_600
    assert WORKFLOW.match(WORKFLOW.points("smoke")[1], costs[0], sizes, wide) == "3.0 times the compute"
    grid = WORKFLOW.points("standard")
    seen = [
        Observed(str(i), WORKFLOW.cost(p, sizes, wide).parameters, 1, p["point.steps"], 1, (2.0,))
        for i, p in enumerate(grid)
    ]
    assert CHINCHILLA.fails(seen) == TWO.fails(seen) == ""
    assert WORKFLOW.rate({"point.width": 64}) == WORKFLOW.rate({"point.width": 128}) == 2e-3
    assert WORKFLOW.rate({"point.width": 256}) == 1e-3


def test_every_axis_value_has_an_effect(data):
    found = genomes.effects(WORKFLOW, TINY, data)
    assert [effect.text for effect in found if not effect.holds] == []
    assert {effect.axis for effect in found} == {"point.width", "point.layers", "point.steps"}


def test_a_point_consumes_its_tokens_and_scores_the_whole_text(tmp_path: Path, data):
    point = {"point.width": 64, "point.layers": 2, "point.steps": 300}
    steps = []
    made = WORKFLOW.train(point, data, 0, TINY, "cpu", lambda step, loss: steps.append(step))
    assert (len(made.losses), steps[-1], made.tokens) == (30, 30, 30 * 4 * 32)
    shorter = WORKFLOW.train({**point, "point.steps": 100}, data, 0, TINY, "cpu", lambda step, loss: None)
    assert shorter.losses[0] == made.losses[0]  # the same windows first
    scores = WORKFLOW.validate(made, data, TINY, "cpu")
    metrics = scores.metrics
    assert metrics["compute"] == 6 * metrics["parameters"] * metrics["tokens_seen"]
    assert metrics["repetitions"] == pytest.approx(3840 / len(data.parts.train))
    assert len(scores.units) == math.ceil(len(data.parts.validation) / 32)
    assert np.mean(scores.units) == pytest.approx(metrics["loss"])
    assert metrics["loss"] / math.log(2) == pytest.approx(metrics["bits_per_byte"])  # one byte a token here
    assert WORKFLOW.floors(data, TINY)["unigram"] == metrics["unigram_loss"]
    WORKFLOW.save(made, tmp_path)
    back = WORKFLOW.restore(point, data, tmp_path, TINY, "cpu")
    assert WORKFLOW.validate(back, data, TINY, "cpu").units == scores.units


def trial(point: Observed) -> Trial:
    cells = [
        CellResult(
            cell=f"{point.name}-{seed}", candidate=point.name, seed=seed, role="search", state="completed",
            metrics={
                "loss": loss, "parameters": point.parameters, "non_embedding_parameters": point.non_embedding,
                "tokens_seen": point.tokens, "unique_tokens": point.unique, "unigram_loss": 6.14, "uniform_loss": 7.62,
            },
        )
        for seed, loss in enumerate(point.losses)
    ]  # fmt: skip
    return Trial(
        candidate=Candidate(id=point.name, generation=0, origin="fixed", genome={}), state="completed", cells=cells
    )


def test_the_summary_is_the_report_of_what_finished():
    failed = Trial(
        candidate=Candidate(id="broken", generation=0, origin="fixed", genome={}),
        state="failed",
        cells=[CellResult(cell="b", candidate="broken", seed=0, role="search", state="failed")],
    )
    found = WORKFLOW.summarise([*map(trial, MEASURED), failed])
    assert found["missing"] == ["broken"]
    assert found["fits"]["compute"]["log_rmse"] == pytest.approx(0.0265, abs=5e-5)
    assert WORKFLOW.summarise([failed])["target"]["holds"] is False
    two = WORKFLOW.summarise([trial(replace(p, losses=(p.loss, p.loss + 0.01))) for p in MEASURED])
    assert two["points"][0]["deviation"] == pytest.approx(0.01 / math.sqrt(2))
    assert two["fits"]["compute"]["bootstrap"]["resamples"] == 2000
    json.dumps(two, allow_nan=False)


@pytest.mark.slow
def test_the_smoke_run_falls_with_compute_and_meets_the_target():
    sizes = WORKFLOW.sizes("smoke")
    data = WORKFLOW.load(sizes, None)
    trials, losses = [], []
    for i, point in enumerate(WORKFLOW.points("smoke")):
        made = WORKFLOW.train(point, data, 0, sizes, "cpu", lambda step, loss: None)
        metrics = WORKFLOW.validate(made, data, sizes, "cpu").metrics
        losses.append(metrics["loss"])
        cell = CellResult(cell=str(i), candidate=str(i), seed=0, role="search", state="completed", metrics=metrics)
        trials.append(
            Trial(
                candidate=Candidate(id=str(i), generation=0, origin="fixed", genome=point),
                state="completed",
                cells=[cell],
            )
        )
    assert losses == sorted(losses, reverse=True)
    assert losses == pytest.approx([5.871, 5.036, 4.895, 4.690], abs=0.15)
    assert max(losses) < WORKFLOW.floors(data, sizes)["unigram"]
    found = WORKFLOW.summarise(trials)
    assert found["target"]["holds"]
    assert found["fits"]["compute"]["coefficients"]["s"] == pytest.approx(-0.083, abs=0.02)
