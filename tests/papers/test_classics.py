"""The four classics as adapters: each ends, each clears its floor on the embedded data, none touches a device."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from auto_research.papers._registry import adapter
from auto_research.papers.baselines import classics
from auto_research.runtime.evidence import EvidenceLog, use_log
from auto_research.study.context import Study
from auto_research.tasks.base import Evaluation
from auto_research.tasks.baselines import MostPopular, Random


def run_smoke(key: str) -> tuple[Study, dict[str, Evaluation]]:
    found = adapter(key)
    study = Study(card=found.card, device="cpu", quiet=True)
    comparison = found.load()(study)
    assert comparison.record().verdict == "smoke: no conclusion"
    return study, {name: trials[0].test for name, trials in comparison.trials.items()}


@pytest.mark.parametrize(
    ("key", "better", "worse", "metric"),
    [
        ("most-popular", "most popular", "random", "ndcg@10"),
        ("item-knn", "item kNN", "most popular", "hr@50"),
        ("ease", "EASE", "most popular", "ndcg@10"),
        ("bm25-title", "BM25", "random", "ndcg@10"),
    ],
)
def test_smoke_run_clears_its_floor_without_a_device(
    tmp_path: Path, key: str, better: str, worse: str, metric: str
) -> None:
    with use_log(tmp_path / "evidence.jsonl"):
        _, tests = run_smoke(key)
    log = EvidenceLog(tmp_path / "evidence.jsonl")
    assert tests[better][metric] > tests[worse][metric]
    events = {record["event"] for record in log.records()}
    assert "stage" in str(events)
    assert "device_for" not in events


def test_popularity_recommends_the_head_and_never_a_cold_item() -> None:
    _, tests = run_smoke("most-popular")
    assert tests["most popular"].diagnostics["head share@10"] == 1.0
    assert tests["most popular"]["hr@10/cold"] == 0.0


def test_bm25_finds_cold_items_that_popularity_cannot() -> None:
    _, tests = run_smoke("bm25-title")
    assert tests["BM25"]["ndcg@10/cold"] > tests["most popular"]["ndcg@10/cold"] == 0.0


def test_tuning_takes_the_best_on_validation_and_says_so() -> None:
    study = Study(card=adapter("ease").card, device="cpu", quiet=True)
    split, task = classics.prepare(study)
    builds: dict[str, Callable[[], nn.Module]] = {
        "popular": lambda: MostPopular(split),
        "random": lambda: Random(split.num_items),
    }
    values = {name: task.evaluate(build(), "validation", classics.CPU)[task.primary] for name, build in builds.items()}
    model = classics.tuned(study, task, "a list", builds.items())
    assert isinstance(model, MostPopular) == (values["popular"] > values["random"])
    assert any("a list, chosen on validation: popular" in note for note in study.notes)


def test_ease_and_the_neighbours_that_it_is_held_against_are_both_tuned() -> None:
    study, _ = run_smoke("ease")
    assert [note.split(",")[0] for note in study.notes] == ["item kNN", "EASE"]


def test_all_four_share_one_file() -> None:
    found = {adapter(key).source for key in ("most-popular", "item-knn", "ease", "bm25-title")}
    assert len(found) == 1
    assert "device_for" not in found.pop().read_text()
