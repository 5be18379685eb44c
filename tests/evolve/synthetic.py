"""Run records made up for tests: every verdict, every state, many candidates, hostile texts. Nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from auto_research.evolve.records import (
    Attempt,
    Candidate,
    CellResult,
    CellState,
    Decision,
    Paired,
    Prepared,
    Role,
    RunConfig,
    RunRecord,
    TestResult,
    Trial,
    TrialState,
)

EVIL = "</details><script>alert(1)</script><img src=x onerror=alert(2)>&\"'`{{7*7}}{%raw%}\x00\x1b[31m\u202e ]]>"
FAILED_STATES = [s for s in get_args(CellState) if s not in ("planned", "queued", "running", "completed")]
AXES = {
    "seq.encoder": ["recent-mean", "longer", "target-attention"],
    "mix.block": ["dense", "shared-ffn", "sparse-moe"],
    "mix.width": [32, 64, 128],
    "train.lr": [0.003, 0.001, 0.0003],
}
BASELINE: dict[str, Any] = {axis: values[0] for axis, values in AXES.items()}


def config(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "run": "20260214-101500-rankmixer-movielens",
        "workflow": "rankmixer-movielens",
        "direction": "long histories at a low serving cost",
        "budget": "standard",
        "generations": 2,
        "population": 3,
        "seeds": [42, 43, 44],
        "confirm_seeds": [1001, 1002, 1003, 1004, 1005],
    }
    return RunConfig(**{**values, **changes})


def prepared(**changes: Any) -> Prepared:
    values: dict[str, Any] = {
        "digests": {"ml-latest-small": "9f2c1ab04d77e6e1", "item vocabulary": "0a1b2c3d4e5f6071"},
        "hygiene": {
            "distinct train": 39_975, "distinct validation": 586, "distinct test": 586,
            "train and validation share": 0, "train and test share": 0, "validation and test share": 0,
        },
        "examples": 586,
        "stand_in": "",
        "floors": {"popularity": 0.0210, "random": 0.0023},
        "anchors": {"co-occurrence": 0.0660},
        "sizes": {"steps": 4000, "batch": 64, "users": 586},
    }  # fmt: skip
    return Prepared(**{**values, **changes})


def candidate(id: str, generation: int, changes: Mapping[str, Any] | None = None, **fields: Any) -> Candidate:
    """A candidate that differs from the baseline's genome by `changes`."""
    changes = dict(changes or {})
    parent = fields.pop("parent_genome", BASELINE)
    genome = {**parent, **changes}
    width = float(genome.get("mix.width", 32)) if isinstance(genome.get("mix.width", 32), int) else 32.0
    values: dict[str, Any] = {
        "id": id,
        "generation": generation,
        "origin": "hyperparameter-mutation" if id != "baseline" else "baseline",
        "genome": genome,
        "parents": [] if id == "baseline" else ["baseline"],
        "difference": {axis: [parent.get(axis), value] for axis, value in changes.items() if parent.get(axis) != value},
        "fingerprint": f"{abs(hash_text(id)):016x}"[:16],
        "parameters": int(2700 * width + (74_000 if genome.get("seq.encoder") == "longer" else 0)),
        "flops": 1.1e6 * width * (2.1 if genome.get("seq.encoder") == "longer" else 1.0),
        "memory_bytes": 180_000_000,
        "cost": {"candidate_flops": 9e4 * width},
    }
    return Candidate(**{**values, **fields})


def hash_text(text: str) -> int:
    """A hash that is the same in every process."""
    import hashlib

    return int(hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:15], 16)


def cell(id: str, seed: int, value: float | CellState, role: Role = "search", metric: str = "NDCG@10") -> CellResult:
    """A completed cell of that value, or a cell in that state."""
    values: dict[str, Any] = {
        "cell": f"{id}-s{seed}-{role}", "candidate": id, "seed": seed, "role": role, "seconds": 40.0 + seed % 7,
        "cpu_seconds": 38.5, "peak_rss_bytes": 512_000_000,
    }  # fmt: skip
    if isinstance(value, str):
        attempts = [] if value in ("planned", "queued", "running") else [failed_attempt(value)]
        return CellResult(**values, state=value, attempts=attempts)
    return CellResult(
        **values,
        state="completed",
        metrics={metric: value, "Hit@10": value * 1.9, "scoring_latency_ms": 2.0 + (hash_text(id) % 100) / 40},
        artefact="5e" * 8,
        attempts=[Attempt(state="completed", seconds=40.0)],
    )


def failed_attempt(state: CellState) -> Attempt:
    details: dict[str, Any] = {
        "failed": {"error": "ValueError", "exit_code": 1, "reason": "ValueError: 33 heads do not divide width 64",
                   "traceback": "Traceback (most recent call last):\n  File \"train.py\", line 8, in step\nValueError"},
        "timed_out": {"signal": 15, "reason": "no progress for 120 s; the process group was ended"},
        "out_of_memory": {"error": "OutOfMemoryError", "reason": "CUDA out of memory: tried to allocate 2.00 GiB"},
        "non_finite": {"error": "NonFinite", "reason": "loss is NaN at step 37"},
        "killed": {"signal": 9, "reason": "ended by signal 9"},
        "interrupted": {"reason": "the controller was interrupted"},
    }  # fmt: skip
    return Attempt(
        state=state, seconds=12.5, last_step=37, last_loss=2.25, log_tail="step 36 loss 2.31\nstep 37 loss 2.25",
        **details[state],
    )  # fmt: skip


def trial(
    made: Candidate,
    values: Sequence[float | CellState] = (),
    parent: Trial | None = None,
    *,
    seeds: Sequence[int] = (42, 43, 44),
    role: Role = "search",
    direction: str = "max",
    metric: str = "NDCG@10",
    z: float = 1.0,
    noise: float = 0.002,
    state: TrialState | None = None,
) -> Trial:
    cells = [cell(made.id, seed, value, role, metric) for seed, value in zip(seeds, values)]
    found = [c.metrics[metric] for c in cells if c.metrics]
    n = len(found)
    mean = sum(found) / n if n else None
    deviation = float(np.std(found, ddof=1)) if n > 1 else None
    if state is None:
        running = any(c.state in ("running", "queued", "planned") for c in cells)
        state = "running" if running else "completed" if n == len(cells) else "partial" if n else "failed"
    sign = 1 if direction == "max" else -1
    score = None if mean is None or deviation is None else mean - sign * z * deviation / math.sqrt(n)
    gain = None if parent is None or not n else paired(made.id, parent, cells, sign, metric, z, noise)
    return Trial(candidate=made, state=state, mean=mean, deviation=deviation, score=score, gain=gain, cells=cells)


def paired(
    id: str, parent: Trial, cells: Sequence[CellResult], sign: int, metric: str, z: float, noise: float
) -> Paired | None:
    of_parent = {c.seed: c.metrics[metric] for c in parent.cells if c.metrics}
    gains = [sign * (c.metrics[metric] - of_parent[c.seed]) for c in cells if c.metrics and c.seed in of_parent]
    if not gains:
        return None
    n, gain = len(gains), sum(gains) / len(gains)
    se = float(np.std(gains, ddof=1)) / math.sqrt(n) if n > 1 else noise
    return Paired(
        child=id, parent=parent.candidate.id, n=n, gain=gain, se=se, z=z, lower=gain - z * se, upper=gain + z * se,
        provisional=n == 1,
    )  # fmt: skip


LONGER = {
    "origin": "paper-operator", "operators": ["longer"], "papers": ["2505.04421"], "fidelity": "core_mechanism",
    "omitted": ["serving-side user cache across requests"], "match": "+85.1% parameters",
}  # fmt: skip
EVIDENCE = [
    {
        "title": "UniMixer", "citation": "arXiv 2604.00590", "why_not": "its router is described without equations",
        "what_would": "a definition of the router, or its code",
    },
    {
        "title": "HSTU", "citation": "arXiv 2402.17152", "why_not": "no operator is installed for this task",
        "what_would": "an operator of layers/ with tests",
    },
]  # fmt: skip
USED = {
    "cells": 49.0, "cell_seconds": 1980.5, "processor_seconds": 1886.5, "peak_memory_bytes": 5.12e8,
    "peak_device_bytes": 0.0,
}  # fmt: skip
ENVIRONMENT = {
    "auto_research": "0.4.0", "python": "3.11.9", "torch": "2.13.0", "numpy": "2.4.1", "optuna": "5.0.0",
    "platform": "Linux-6.8-x86_64", "cpu": "AMD EPYC 9654", "cores": "2", "commit": "4f" * 20,
}  # fmt: skip


def record(**changes: Any) -> RunRecord:
    values: dict[str, Any] = {
        "config": config(),
        "title": "RankMixer on MovieLens, LONGER among the candidates",
        "metric": "NDCG@10",
        "direction": "max",
        "prepared": prepared(),
        "trials": [],
        "decisions": [],
        "noise": 0.0016,
        "status": "finished",
        "verdict": "not improved",
        "level": "L1 small public",
        "sentence": "",
        "evidence": EVIDENCE,
        "used": USED,
        "environment": ENVIRONMENT,
        "started": "2026-02-14T10:15:00Z",
        "ended": "2026-02-14T10:39:20Z",
    }
    return RunRecord(**{**values, **changes})


def _search(lift: float) -> tuple[list[Trial], list[Decision], list[Trial]]:
    """Two generations of three and six random candidates; the best child gains about `lift`."""
    base = trial(candidate("baseline", 0), [0.0641, 0.0622, 0.0653])
    target = candidate(
        "g1-2", 1, {"seq.encoder": "target-attention"}, origin="paper-operator", operators=["target-attention"],
        papers=["1706.06978"], fidelity="simplified", omitted=["Dice activation", "mini-batch aware regularisation"],
    )  # fmt: skip
    first = [
        trial(candidate("g1-1", 1, {"seq.encoder": "longer"}, **LONGER), [0.0521, 0.0498, 0.0533], base),
        trial(target, [0.0641 + lift, 0.0619 + lift, 0.0655 + 0.8 * lift], base),
        trial(
            candidate("g1-3", 1, {"mix.block": "shared-ffn"}, origin="paper-operator", operators=["shared-ffn"],
                      papers=["2507.15551"], fidelity="core_mechanism", match="-31.0% parameters"),
            [0.0602, 0.0589, 0.0618], base,
        ),
    ]  # fmt: skip
    parent = first[1] if lift > 0.003 else base
    genome = parent.candidate.genome
    where = {"parents": [parent.candidate.id], "parent_genome": genome}
    second = [
        trial(candidate("g2-1", 2, {"train.lr": 0.001}, **where), [0.0651 + lift, 0.0628 + lift, 0.066 + lift], parent),
        trial(candidate("g2-2", 2, {"mix.width": 64}, **where), [0.0645 + lift, 0.0612 + lift, 0.0665 + lift], parent),
        trial(
            candidate("g2-3", 2, {"seq.encoder": "target-attention", "mix.block": "shared-ffn"}, origin="combination",
                      parents=[parent.candidate.id, "g1-3"], parent_genome=genome,
                      operators=["target-attention", "shared-ffn"], papers=["1706.06978", "2507.15551"],
                      axis_from={"seq.encoder": "g1-2", "mix.block": "g1-3"}),
            [0.0611, 0.0602, 0.0628], parent,
        ),
    ]  # fmt: skip
    champion = second[0].candidate.id if lift > 0.003 else "baseline"

    def comparisons(trials: list[Trial]) -> list[Paired]:
        return [t.gain for t in trials if t.gain]

    why = "gain {} over {}: the lower bound lies above 0" if lift > 0.003 else "no child's lower bound lies above 0"
    decisions = [
        Decision(generation=1, parent="baseline", champion=parent.candidate.id, comparisons=comparisons(first),
                 reason=why.format(f"{lift:.4f}", "baseline")),
        Decision(generation=2, parent=parent.candidate.id, champion=champion, comparisons=comparisons(second),
                 reason=why.format("0.0009", "g1-2")),
    ]  # fmt: skip
    draws = np.random.default_rng(7).normal(0.0, 0.004, size=(6, 1)) + np.random.default_rng(8).normal(
        0.0, 0.0012, size=(6, 3)
    )
    random = [
        trial(
            candidate(f"random-{i + 1}", 0, {"mix.width": [64, 128][i % 2], "train.lr": [0.001, 0.0003][i // 3]},
                      origin="random-search", sampler="random"),
            [float(0.061 + d) for d in draws[i]], base, role="random",
        )
        for i in range(6)
    ]  # fmt: skip
    return [base, *first, *second], decisions, random


def improved() -> RunRecord:
    trials, decisions, random = _search(0.0088)
    seeds = [1001, 1002, 1003, 1004, 1005]
    base = trial(trials[0].candidate, [0.0634, 0.0629, 0.0650, 0.0641, 0.0618], seeds=seeds, role="confirm")
    best = trial(
        trials[4].candidate, [0.0722, 0.0704, 0.0735, 0.0728, 0.0701], base, seeds=seeds, role="confirm", z=2.0
    )
    gain = Paired(
        child="g2-1", parent="baseline", n=586, by="examples", gain=0.0071, se=0.0018, z=2.0, lower=0.0035, upper=0.0107
    )
    return record(
        trials=trials, decisions=decisions, random_search=random, confirmation=[base, best], confirmed=best.gain,
        champion="g2-1", verdict="improved",
        test=TestResult(
            opened="2026-02-14T10:38:55Z", openings=1, gain=gain,
            metrics={"baseline": {"NDCG@10": 0.0588, "Hit@10": 0.1126}, "g2-1": {"NDCG@10": 0.0659, "Hit@10": 0.1263}},
        ),
        sentence="Improved: g2-1 gains 0.0084 NDCG@10 over the baseline on 5 fresh seeds "
        "(0.0075 to 0.0093 at two standard errors).",
    )  # fmt: skip


def not_improved() -> RunRecord:
    trials, decisions, random = _search(0.0004)
    return record(
        trials=trials, decisions=decisions, random_search=random, verdict="not improved",
        test=TestResult(
            opened="2026-02-14T10:38:55Z", openings=1, metrics={"baseline": {"NDCG@10": 0.0588, "Hit@10": 0.1126}}
        ),
        sentence="No improvement found: none of 6 candidates beats the baseline beyond noise on NDCG@10.",
    )  # fmt: skip


def no_signal() -> RunRecord:
    base = trial(candidate("baseline", 0), [0.0114, 0.0121, 0.0109])
    children = [
        trial(candidate("g1-1", 1, {"seq.encoder": "longer"}, **LONGER), [0.0131, 0.0127, 0.0125], base),
        trial(candidate("g1-2", 1, {"train.lr": 0.0003}), [0.0098, 0.0102, 0.0111], base),
    ]
    return record(
        config=config(generations=1, population=2, random_search=False), trials=[base, *children],
        decisions=[Decision(generation=1, parent="baseline", champion="g1-1",
                            comparisons=[t.gain for t in children if t.gain], reason="g1-1 gains 0.0013")],
        champion="g1-1", verdict="no signal",
        sentence="No signal: the best candidate, g1-1, stays at 0.0128, below the popularity floor of 0.0210.",
    )  # fmt: skip


def smoke() -> RunRecord:
    metric, seeds = "validation loss", (42,)
    genome = {"model.attention": "mha", "model.ffn": "swiglu", "post.method": "none"}

    def made(id: str, changes: dict[str, Any], **fields: Any) -> Candidate:
        return candidate(
            id, 0 if id == "baseline" else 1, changes, parent_genome=genome,
            **{"parameters": 651_904, "flops": 3.9e9, "cost": {"kv_bytes_per_token": 2048.0}, **fields},
        )  # fmt: skip

    def run(c: Candidate, value: float, parent: Trial | None = None) -> Trial:
        return trial(c, [value], parent, seeds=seeds, direction="min", metric=metric, noise=0.012)

    base = run(made("baseline", {}), 5.234)
    children = [
        run(made("g1-1", {"model.attention": "gqa"}, origin="paper-operator", operators=["gqa"], papers=["2305.13245"],
                 fidelity="core_mechanism", omitted=["uptraining from an MHA checkpoint"], parameters=619_136,
                 flops=3.7e9, cost={"kv_bytes_per_token": 1024.0}, match="-5.0% parameters"), 5.199, base),
        run(made("g1-2", {"model.attention": "mqa"}, origin="paper-operator", operators=["mqa"], papers=["1911.02150"],
                 fidelity="core_mechanism", parameters=602_752, flops=3.6e9, cost={"kv_bytes_per_token": 512.0}),
            5.214, base),
        run(made("g1-3", {"model.ffn": "gelu"}), 5.251, base),
        run(made("g1-4", {"post.method": "sft"}), 5.228, base),
    ]  # fmt: skip
    return record(
        config=config(run="first", workflow="llm-wikitext", direction="", budget="smoke", generations=1, population=4,
                      seeds=[42], confirm_seeds=[], random_search=False),
        title="Micro language model on WikiText-2", metric=metric, direction="min",
        prepared=prepared(
            stand_in="wikitext-2-devsplit: 90 % of the official validation text stands in for the training text",
            floors={"unigram": 6.14}, anchors={}, examples=31_500, sizes={"steps": 150, "batch": 8},
            digests={"wikitext-2-devsplit": "77aa0c1d2e3f4051", "tokenizer": "b0b1b2b3b4b5b6b7"},
        ),
        trials=[base, *children],
        decisions=[Decision(generation=1, parent="baseline", champion="baseline",
                            comparisons=[t.gain for t in children if t.gain], reason="one seed: provisional only")],
        verdict="smoke: no conclusion", level="smoke", noise=0.012, evidence=[],
        sentence="Smoke run, no conclusion (smoke budget, stand-in data, 1 seed). No improvement found: none of 4 "
        "candidates beats the baseline on validation loss.",
    )  # fmt: skip


def measured() -> RunRecord:
    metric, genome = "validation loss", {"width": 64, "layers": 2, "steps": 100}
    points = [(64, 2, 100, 5.871), (64, 2, 300, 5.036), (96, 2, 300, 4.895), (128, 3, 400, 4.690)]
    trials = [
        trial(
            candidate("baseline" if i == 0 else f"g1-{i}", min(i, 1),
                      {"width": width, "layers": layers, "steps": steps} if i else {}, parent_genome=genome,
                      origin="fixed" if i else "baseline", parameters=231_744 * (i + 1), flops=1.4e9 * width / 64,
                      cost={"training_flops": 1.4e11 * steps * width}),
            [loss, loss + 0.012, loss - 0.008], direction="min", metric=metric,
        )
        for i, (width, layers, steps, loss) in enumerate(points)
    ]  # fmt: skip
    return record(
        config=config(workflow="scaling-law", generations=1, population=3, confirm_seeds=[], random_search=False),
        title="Scaling law of a micro language model", metric=metric, direction="min", trials=trials,
        prepared=prepared(floors={"unigram": 6.14}, anchors={}), verdict="measured", evidence=[], decisions=[],
        sentence="Measured: four fixed points, slope -0.083 (log-RMSE 0.0265 against 0.0847 for a constant).",
    )  # fmt: skip


def failures() -> RunRecord:
    """A trial for each state that a cell can end in, a duplicate, an infeasible one, one that recovered."""
    base = trial(candidate("baseline", 0), [0.0641, 0.0622, 0.0653])
    children = [
        trial(candidate(f"g1-{i + 1}", 1, {"mix.width": 64}), [0.0629, state, state], base)
        for i, state in enumerate(FAILED_STATES)
    ]
    children.append(trial(candidate("g1-7", 1, {"mix.block": "sparse-moe"}), ["failed"] * 3, base))
    noop = candidate("g1-8", 1, {"mix.block": "shared-ffn"}, duplicate_of="baseline", operators=["no-op"])
    children.append(trial(noop, state="duplicate"))
    odd = candidate("g1-9", 1, {"mix.width": 128}, reason="heads: width 128 is not divisible by 3 heads")
    children.append(trial(odd, state="infeasible"))
    again = trial(candidate("g1-10", 1, {"train.lr": 0.001}), [0.0650, 0.0633, 0.0660], base)
    first = failed_attempt("out_of_memory").model_copy(update={"changed": {"micro_batch": 32, "accumulate": 2}})
    again.cells[1].attempts.insert(0, first)
    children.append(again)
    return record(
        config=config(generations=1, population=10, random_search=False), trials=[base, *children],
        decisions=[Decision(generation=1, parent="baseline", champion="baseline",
                            comparisons=[t.gain for t in children if t.gain], reason="no candidate has three seeds")],
        sentence="No improvement found: 7 of 10 candidates did not complete.",
    )  # fmt: skip


def running() -> RunRecord:
    base = trial(candidate("baseline", 0), [0.0641, 0.0622, 0.0653])
    children = [
        trial(candidate("g1-1", 1, {"seq.encoder": "longer"}, **LONGER), [0.0521, "running", "queued"], base),
        trial(candidate("g1-2", 1, {"mix.width": 64}), state="planned"),
    ]
    return record(
        config=config(generations=1, population=2), trials=[base, *children], status="running", ended="",
        sentence="No signal: nothing can be compared (g1-1 running).",
    )  # fmt: skip


def nothing_completed() -> RunRecord:
    base = trial(candidate("baseline", 0), ["failed", "failed", "failed"])
    return record(
        trials=[base], status="nothing completed", verdict="no signal", prepared=None, noise=None, environment={},
        used={}, evidence=[], sentence="No signal: nothing can be compared (baseline failed).",
    )  # fmt: skip


def planned() -> RunRecord:
    sentence = "No signal: nothing can be compared (nothing ran)."
    return record(status="planned", trials=[], prepared=None, noise=None, sentence=sentence)


def sixty() -> RunRecord:
    """Sixty candidates in three generations, the second and third from the champion of the one before."""
    rng = np.random.default_rng(3)
    trials = [trial(candidate("baseline", 0), [0.0641, 0.0622, 0.0653])]
    parent, decisions = trials[0], []
    for generation in (1, 2, 3):
        children = []
        for i in range(20):
            axis = list(AXES)[i % 4]
            value = AXES[axis][1 + i % 2]
            made = candidate(f"g{generation}-{i + 1}", generation, {axis: value}, parents=[parent.candidate.id])
            base = (parent.mean or 0) + rng.normal(0, 0.002)
            children.append(trial(made, [float(base + e) for e in rng.normal(0, 0.001, size=3)], parent))
        best = max(children, key=lambda t: t.mean or 0)
        decisions.append(
            Decision(generation=generation, parent=parent.candidate.id, champion=best.candidate.id,
                     comparisons=[c.gain for c in children if c.gain], reason=f"{best.candidate.id} gains most")
        )  # fmt: skip
        trials += children
        parent = best
    return record(
        config=config(generations=3, population=20), trials=trials, decisions=decisions,
        champion=parent.candidate.id, sentence="No improvement found on fresh seeds.",
    )  # fmt: skip


def hostile() -> RunRecord:
    """Every text a run can bring in holds markup, control characters or 400 letters without a break."""
    long = "x" * 400
    base = trial(candidate("baseline", 0), [0.0641, 0.0622, 0.0653])
    evil = candidate(
        EVIL, 1, {EVIL: EVIL, long: long}, origin="paper-operator", operators=[EVIL, long], papers=[EVIL], match=EVIL,
        omitted=[EVIL], fidelity=EVIL, sampler=EVIL, cost={EVIL: 3.0, long: 4.0}, parents=["baseline", EVIL, "nowhere"],
    )  # fmt: skip
    tall = candidate(long, 1, {"mix.width": 64}, parents=[long, EVIL])
    children = [trial(evil, [0.07, 0.071, "failed"], base), trial(tall, [0.05, 0.051, 0.052], base)]
    cell = children[0].cells[2]
    cell.attempts[0] = cell.attempts[0].model_copy(
        update={"reason": EVIL + long, "log_tail": EVIL * 50, "traceback": EVIL, "error": EVIL}
    )
    return record(
        config=config(run=EVIL, direction=EVIL + long, changes={"mix.block": EVIL}, dataset_dir="/data/" + long,
                      where={"note": EVIL}),
        title=EVIL + long, metric="NDCG" + long[:90], sentence=EVIL + long, level=EVIL, trials=[base, *children],
        prepared=prepared(digests={EVIL: long}, hygiene={EVIL: 1, "train and test share": 3}, stand_in=EVIL + long,
                          floors={EVIL: 0.02, long: 0.03}, anchors={EVIL: 0.066}),
        decisions=[Decision(generation=1, parent="baseline", champion=EVIL, comparisons=[], reason=EVIL + long)],
        champion=EVIL, notes={"g1": [EVIL]}, quarantined=[candidate(EVIL, 0, origin="quarantined", reason=EVIL)],
        evidence=[{"title": EVIL, "citation": long, "why_not": EVIL, "what_would": long, EVIL: EVIL}],
        used={EVIL: 1.0}, environment={EVIL: long}, started=EVIL, ended=EVIL,
        test=TestResult(opened=EVIL, openings=2, metrics={"baseline": {EVIL: 0.1}, EVIL: {EVIL: 0.2, long: 0.3}}),
    )  # fmt: skip


RECORDS = {
    made.__name__: made
    for made in (
        improved, not_improved, no_signal, smoke, measured, failures, running, nothing_completed, planned, sixty,
        hostile,
    )
}  # fmt: skip
