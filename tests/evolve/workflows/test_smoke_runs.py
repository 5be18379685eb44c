"""The smoke run of every workflow as a user starts it, from the command line to the board, without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from auto_research.evolve import promotion
from auto_research.evolve.board import headline
from auto_research.evolve.reading import read_run
from auto_research.evolve.records import RunRecord, Trial
from auto_research.evolve.workflows import WORKFLOWS

CALL = "from auto_research.cli.main import main; main()"


def no_network() -> list[str]:
    """What puts a command into a network of its own, without any other machine; nothing where that is not allowed."""
    isolated = ["unshare", "--map-root-user", "--net"]
    allowed = shutil.which("unshare") and not subprocess.run([*isolated, "true"], capture_output=True).returncode
    return isolated if allowed else []


@pytest.fixture(scope="module", params=list(WORKFLOWS))
def smoke(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, Path]:
    root = tmp_path_factory.mktemp("runs")
    call = [sys.executable, "-c", CALL, "evolve", "run", "--workflow", request.param, "--run", "smoke"]
    command = [*no_network(), *call, "--output", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_run(root / "smoke")
    assert done.stdout.splitlines()[-1] == f"Board: {root / 'smoke' / 'board.html'}"
    assert headline(record)[0] in done.stdout, "the verdict is printed"
    return record, root / "smoke"


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_smoke_run_ends_with_a_board_and_meets_its_row(smoke: tuple[RunRecord, Path]) -> None:
    record, folder = smoke
    assert record.status == "finished"
    assert record.verdict == expected_verdict(record)
    assert record.level == "smoke"
    assert "Improved" not in record.sentence
    assert all(trial.state == "completed" for trial in record.trials), [t.state for t in record.trials]
    assert record.test is not None
    assert record.test.openings == 1
    assert record.prepared is not None
    assert all(n == 0 for name, n in record.prepared.hygiene.items() if "share" in name)
    page = (folder / "board.html").read_text(encoding="utf-8")
    assert 'href="http' not in page
    assert "src=" not in page
    CHECKS[record.config.workflow](record)


def expected_verdict(record: RunRecord) -> str:
    if record.config.workflow == "reasoning-budget" and record.prepared and record.prepared.stand_in:
        return "no signal"  # the micro model answers no sum
    if record.config.workflow == "gsm8k-sft" and record.prepared and "micro-lm" in record.prepared.stand_in:
        return "no signal"  # what it has read of Shakespeare makes it worse than chance at sums
    if record.config.workflow == "ultrafeedback":
        means = [t.mean or 0.0 for t in record.trials if t.candidate.id in ("baseline", record.champion)]
        if min(means) <= best_floor(record):
            return "no signal"  # 16 pairs leave that to chance
    return "measured" if record.config.workflow == "scaling-law" else "smoke: no conclusion"


def metrics(trial: Trial) -> dict[str, float]:
    return promotion.mean_metrics(trial)


def best_floor(record: RunRecord) -> float:
    assert record.prepared is not None
    return (max if record.direction == "max" else min)(record.prepared.floors.values())


def ranking(record: RunRecord) -> None:
    assert [t.candidate.operators for t in record.trials] == [[], ["longer"], ["shared-ffn"]]
    for trial in record.trials:
        assert trial.mean is not None
        assert trial.mean > best_floor(record), f"{trial.candidate.id} is not above popularity"


def language(record: RunRecord) -> None:
    found = [metrics(trial) for trial in record.trials]
    assert all(m["perplexity"] < 300 and m["fitness"] > best_floor(record) for m in found)
    assert [m["kv_bytes_per_token"] for m in found] == [2048, 1024, 512, 2048, 2048]
    assert record.summary["sentence"].startswith("No difference beyond noise can be shown")


def vision(record: RunRecord) -> None:
    for trial in record.trials:
        accuracy = metrics(trial)["accuracy"]
        assert accuracy > best_floor(record)
        assert accuracy >= 0.95 if trial.candidate.genome["model.positions"] == "on" else accuracy <= 0.80


def post_training(record: RunRecord) -> None:
    assert record.trials[0].candidate.genome["post.loss"] == "sft", "the control"
    for trial in record.trials:
        found = metrics(trial)
        assert found["accuracy"] > max(0.15, best_floor(record))
        assert trial.candidate.genome["post.loss"] == "sft" or found["pair_yield"] > 0
    assert "The control" in record.summary["sentence"]


def scaling(record: RunRecord) -> None:
    points = sorted((metrics(t)["compute"], metrics(t)["loss"]) for t in record.trials)
    losses = [loss for _, loss in points]
    assert losses == sorted(losses, reverse=True), "loss falls with compute"
    assert max(losses) < best_floor(record)
    assert record.summary["target"]["holds"]


def reasoning(record: RunRecord) -> None:
    assert record.prepared is not None
    read, made = (record.prepared.sizes[f"{which}_price_cents"] for which in ("input", "output"))
    base, two, four, stopping = found = [metrics(trial) for trial in record.trials]
    for m in found:
        assert m["cost_microdollars"] == pytest.approx((m["prompt_tokens"] * read + m["generated_tokens"] * made) / 100)
    assert [m["samples_used"] for m in (base, two, four)] == [1, 2, 4]
    assert not [trial.violations for trial in record.trials if trial.violations]
    if record.prepared.stand_in:  # it knows no sums: without an answer no vote is ever settled
        return
    assert base["accuracy"] > best_floor(record)
    assert stopping["samples_used"] < 4
    assert stopping["generated_tokens"] < four["generated_tokens"], "stopping early really stops"
    assert "Stopping early" in record.summary["sentence"]


def tuning(record: RunRecord) -> None:
    assert record.prepared is not None
    for trial in record.trials:
        found = metrics(trial)
        assert found["response_nll"] < record.prepared.floors["untrained checkpoint"], "the likelihood improves"
        assert found["changed_share"] > 0.5
        assert (found["weight_bits"], found["compute_bits"]) == (32, 16)
        assert (found["resumed_from_step"], found["steps_after_resume"]) == (1, 1)
        assert found["tensors_bit_equal"] == found["tensors"]
    if "micro-lm" not in record.prepared.stand_in:
        assert metrics(record.trials[0])["tensors"] == 272
    assert "resumed from step 1" in record.summary["sentence"]


def preferring(record: RunRecord) -> None:
    assert record.prepared is not None
    assert [len(ids) for ids in record.prepared.subset.values()] == [16, 16, 8]
    dpo, orpo = (metrics(trial) for trial in record.trials)
    assert dpo["first_loss"] == pytest.approx(0.6931, abs=2e-3), "ln 2 before any step"
    assert dpo["loss_after_a_step"] != dpo["first_loss"]
    assert (dpo["accuracy_untrained"], record.prepared.floors) == (0.5, {"untrained policy (ties) or chance": 0.5})
    for found in (dpo, orpo):
        assert found["changed_share"] > 0.5
        assert (found["weight_bits"], found["compute_bits"]) == (32, 16)
        assert found["margin"] != 0
        assert found["accuracy_lower"] < found["accuracy"] < found["accuracy_upper"]
    assert "this is no comparison" in record.summary["sentence"]


def asking(record: RunRecord) -> None:
    assert len(record.trials) == 5, "1 + 2 x 2"
    found = [metrics(trial) for trial in record.trials]
    assert all(m["parse_rate"] == 1 for m in found)
    assert found[0]["accuracy"] > best_floor(record)
    crops = {trial.candidate.genome.get("image.longest_edge", 512) for trial in record.trials}
    assert len({m["visual_tokens"] for m in found}) == len(crops) > 1, "visual tokens follow the image axes"
    assert record.summary["sentence"].startswith("Of baseline's answers 100% name a choice")


CHECKS = {
    "rankmixer-movielens": ranking,
    "llm-wikitext": language,
    "vlm-shapes": vision,
    "arithmetic": post_training,
    "scaling-law": scaling,
    "reasoning-budget": reasoning,
    "gsm8k-sft": tuning,
    "ultrafeedback": preferring,
    "vlm-scienceqa": asking,
}
