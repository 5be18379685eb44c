"""The board: complete, self-contained, the same bytes for the same record, safe whatever the texts hold."""

from __future__ import annotations

import html
import html.parser
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import FAILED_STATES, RECORDS, candidate, config, failed_attempt, improved, record, trial

from auto_research.evolve import board_plots as plots
from auto_research.evolve.board import (
    board_html,
    budget,
    compared,
    effects,
    failures,
    headline,
    hygiene,
    moved,
    outcome,
    pareto,
    race,
    status_facts,
    status_table,
    status_text,
    without_times,
    write_board,
)
from auto_research.evolve.records import Candidate, Paired, RunRecord
from auto_research.evolve.records import TestResult as SealedResult

SECTIONS = [
    "outcome", "used", "lineage", "candidates", "random", "pareto", "effects", "failures", "evidence", "hygiene",
    "repeat",
]  # fmt: skip
TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "h4", "p", "div", "span", "nav", "a",
    "section", "table", "tr", "th", "td", "b", "i", "small", "details", "summary", "dl", "dt", "dd", "pre", "footer",
    "svg", "g", "line", "circle", "text", "tspan", "path", "br",
}  # fmt: skip


class Page(html.parser.HTMLParser):
    """Elements with attributes, the text of the body in order; checks that elements nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and "body" in self.open:
            self.words.append(data.strip())

    def all(self, tag: str, kind: str = "") -> list[dict[str, str | None]]:
        return [a for t, a in self.tags if t == tag and kind in (a.get("class") or "").split() + [""]]


@pytest.fixture(scope="module", params=sorted(RECORDS))
def made(request: pytest.FixtureRequest) -> tuple[RunRecord, str]:
    found = RECORDS[request.param]()
    return found, board_html(found)


def test_the_page_is_well_formed_complete_and_begins_with_the_verdict(made: tuple[RunRecord, str]) -> None:
    run, page = made
    parsed = Page(page)
    assert parsed.words[0] == headline(run)[0]
    assert {tag for tag, _ in parsed.tags} <= TAGS
    ids = [a["id"] for _, a in parsed.tags if "id" in a]
    assert [id for id in ids if id in SECTIONS] == SECTIONS
    assert len(ids) == len(set(ids))
    assert {a["href"] for a in parsed.all("a")} == {f"#{id}" for id in SECTIONS}


def test_the_page_asks_for_nothing(made: tuple[RunRecord, str]) -> None:
    page = Page(made[1])
    assert not [a for _, a in page.tags if {"src", "srcset", "onload", "onerror", "xlink:href"} & set(a)]
    style = re.search(r"<style>.*?</style>", made[1], re.S)
    assert style
    assert not re.search(r"url\(|@import|https?:", style[0])
    policy = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_the_same_record_gives_the_same_bytes(made: tuple[RunRecord, str]) -> None:
    run, page = made
    again = RunRecord.model_validate_json(run.model_dump_json())
    assert board_html(again) == page
    assert status_text(again) == status_text(run)


def test_another_process_with_another_hash_seed_draws_the_same_bytes() -> None:
    program = (
        "import sys; from synthetic import RECORDS; from auto_research.evolve.board import board_html\n"
        "for name in ('improved', 'failures', 'hostile'): sys.stdout.write(board_html(RECORDS[name]()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": "4711"}
    )
    assert done.stdout.decode() == "".join(board_html(RECORDS[name]()) for name in ("improved", "failures", "hostile"))


def test_times_and_memory_can_be_taken_out() -> None:
    one, other = improved(), improved()
    other.started, other.ended, other.used = "2027-01-01T00:00:00Z", "", {**other.used, "cell_seconds": 7.0}
    other.used["peak_memory_bytes"] = 1.0
    assert other.test is not None
    other.test.opened = "2027-01-01T00:00:01Z"
    for t in (*other.trials, *other.random_search, *other.confirmation):
        for cell in t.cells:
            cell.seconds, cell.cpu_seconds, cell.peak_rss_bytes = 1.25, 1.0, 7
    other.ended = "2027-01-01T01:00:00Z"
    assert board_html(one) != board_html(other)
    assert without_times(board_html(one)) == without_times(board_html(other))


def test_a_difference_in_results_stays_when_times_are_taken_out() -> None:
    one, other = improved(), improved()
    other.trials[1].cells[0].metrics = {"NDCG@10": 0.0522}
    assert without_times(board_html(one)) != without_times(board_html(other))


# --------------------------------------------------------------------------------------------------- first line


@pytest.mark.parametrize(
    "name, words",
    [
        ("improved", "Improved"),
        ("not_improved", "No improvement found"),
        ("no_signal", "No signal"),
        ("smoke", "Smoke run, no conclusion; no improvement found"),
        ("measured", "Measured"),
        ("running", "Running"),
        ("nothing_completed", "Nothing completed"),
        ("planned", "Planned, nothing has run yet"),
    ],
)
def test_the_first_line_is_the_verdict_in_words(name: str, words: str) -> None:
    run = RECORDS[name]()
    page = Page(board_html(run))
    assert page.words[0] == words
    assert page.words[1] == headline(run)[1]
    assert status_text(run).startswith(words + ". ")


def test_the_sentence_neither_repeats_the_verdict_nor_changes_names() -> None:
    assert headline(improved())[1].startswith("g2-1 gains 0.0084")
    smoke = headline(RECORDS["smoke"]())[1]
    assert smoke == ("Smoke budget, stand-in data, 1 seed. None of 4 candidates beats the baseline on validation loss.")


def test_only_a_running_board_reloads_itself() -> None:
    for name, made in RECORDS.items():
        assert ('http-equiv="refresh"' in board_html(made())) == (name == "running")


def test_an_interrupted_run_says_so_and_how_far_it_came() -> None:
    words, sentence = headline(RECORDS["running"]().model_copy(update={"status": "interrupted"}))
    assert words == "Interrupted, can be resumed"
    assert sentence == "Generation 1 of 1: 4 of 6 cells have ended."


# --------------------------------------------------------------------------------------------------- candidates


def test_every_candidate_and_every_seed_is_drawn(made: tuple[RunRecord, str]) -> None:
    run, page = made
    titles = re.findall(r'<circle class="dot"[^>]*><title>(seed [^<]*)</title>', page)
    for t in (*run.trials, *run.random_search):
        assert html.escape(plots.clip(t.candidate.id.replace("\x00", ""), 40)[:12], quote=False)[:8] in page
        for cell in t.cells:
            if cell.metrics and run.metric in cell.metrics:
                assert f"seed {cell.seed}: {plots.number(cell.metrics[run.metric])}" in titles


def test_floor_anchor_and_parent_lines() -> None:
    page = board_html(improved())
    assert re.search(r"popularity 0.0210<title>floor popularity", page)
    assert re.search(r"← random 0.0023<title>floor random", page), "a floor off the scale is named at the edge"
    assert re.search(r"co-occurrence 0.0660<title>anchor", page)
    assert re.search(r"g1-2 0.0720<title>parent g1-2", page)


def test_mean_and_interval_are_where_they_belong() -> None:
    axis = plots.Scale(0.0, 1.0)
    t = trial(candidate("baseline", 0), [0.2, 0.4, 0.6])
    strip = plots.strip(t, axis, "NDCG@10", 2.0, None)
    half = 2.0 * 0.2 / 3**0.5
    assert strip.mean == pytest.approx(2 + 96 * 0.4, abs=0.01)
    assert strip.low == pytest.approx(2 + 96 * (0.4 - half), abs=0.01)
    assert strip.high == pytest.approx(2 + 96 * (0.4 + half), abs=0.01)
    assert [x for x, _ in strip.dots] == pytest.approx([2 + 96 * v for v in (0.2, 0.4, 0.6)], abs=0.01)
    assert not strip.assumed


def test_one_seed_takes_its_interval_from_the_noise_floor_and_is_marked() -> None:
    t = trial(candidate("baseline", 0), [0.5])
    assert plots.strip(t, plots.Scale(0, 1), "NDCG@10", 1.0, 0.1).assumed
    assert plots.strip(t, plots.Scale(0, 1), "NDCG@10", 1.0, 0.1).low == pytest.approx(2 + 96 * 0.4)
    assert plots.strip(t, plots.Scale(0, 1), "NDCG@10", 1.0, None).low is None


@given(
    st.lists(st.floats(-1e6, 1e6).filter(lambda v: v == 0 or abs(v) > 1e-6), min_size=1, max_size=20),
    st.booleans(),
)
def test_a_scale_keeps_order_and_holds_its_values_and_ticks(values: list[float], log: bool) -> None:
    values = [abs(v) + 1e-3 for v in values] if log else values
    axis = plots.scale(values, log=log)
    places = [axis(v) for v in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= p <= 100 for p in places)
    assert all(-0.01 <= x <= 100.01 for x, _ in axis.ticks)
    assert len(axis.ticks) <= 12


@given(st.lists(st.tuples(st.text(max_size=30), st.floats(-5, 5)), max_size=8))
def test_labels_of_lines_in_one_lane_do_not_cover_one_another(named: list[tuple[str, float]]) -> None:
    found = plots.lines([("floor", name, value) for name, value in named], plots.Scale(-2.0, 2.0))
    spans: dict[int, list[tuple[float, float]]] = {}
    for line in found:
        width = 2.0 * min(len(line.name) + 12, 46)
        span = (line.x - width, line.x) if line.end else (line.x, line.x + width)
        assert all(span[0] > b or span[1] < a for a, b in spans.get(line.lane, []))
        spans.setdefault(line.lane, []).append(span)


@pytest.mark.parametrize(
    "gain, lower, upper, provisional, words",
    [
        (0.2, 0.1, 0.3, False, "ahead"),
        (-0.2, -0.3, -0.1, False, "behind"),
        (0.2, -0.1, 0.5, False, "within noise"),
        (0.2, 0.1, 0.3, True, "ahead, provisional"),
        (0.2, None, None, True, "no deviation"),
    ],
)
def test_a_gain_in_words(gain: float, lower: float | None, upper: float | None, provisional: bool, words: str) -> None:
    paired = Paired(
        child="a", parent="b", n=3, gain=gain, se=0.1, z=1, lower=lower, upper=upper, provisional=provisional
    )
    assert outcome(paired) == words
    assert outcome(None) == ""
    assert lower is None or outcome(paired, least=5.0) != "ahead"


# ------------------------------------------------------------------------------------------------------ lineage


@pytest.mark.parametrize("name", ["improved", "sixty", "failures"])
def test_the_lineage_graph_joins_parents_and_children(name: str) -> None:
    run = RECORDS[name]()
    graph = plots.lineage(run.trials, run.champion)
    at = {n.trial.candidate.id: (n.x, n.y) for n in graph.nodes}
    assert len(set(at.values())) == len(run.trials)
    assert all(0 <= x <= 100 and 0 <= y <= graph.height for x, y in at.values())
    drawn = {}
    for edge in graph.edges:
        parent, _, child = edge.title.partition(" → ")
        numbers = [float(n) for n in re.findall(r"[-\d.]+", edge.d)]
        assert numbers[:2] == pytest.approx([10 * at[parent][0], at[parent][1]])
        assert numbers[-2:] == pytest.approx([10 * at[child][0], at[child][1]])
        drawn[parent, child] = edge.kind
    assert set(drawn) == {(p, t.candidate.id) for t in run.trials for p in t.candidate.parents}
    line = plots.ancestors({t.candidate.id: t for t in run.trials}, run.champion)
    assert {pair for pair, kind in drawn.items() if kind == "path"} == set(itertools.pairwise(line))


def test_a_combination_shows_its_second_parent() -> None:
    graph = plots.lineage(improved().trials, "g2-1")
    assert [e.title for e in graph.edges if e.kind == "second"] == ["g1-3 → g2-3"]


def test_a_lineage_that_goes_round_in_circles_ends() -> None:
    one = trial(candidate("a", 1, parents=["b"]), [0.1])
    two = trial(candidate("b", 1, parents=["a"]), [0.1])
    assert plots.ancestors({"a": one, "b": two}, "a") == ["b", "a"]
    assert "b → a" in board_html(record(trials=[one, two], champion="a"))


def test_what_an_operator_brought_is_shown_even_where_the_axis_began_to_count() -> None:
    made = candidate(
        "g1-3", 1, {"samples": 4}, origin="combination", parents=["baseline"],
        axis_from={"samples": "operator:vote", "stop": "operator:early", "verifier": "sampler:planned"},
    )  # fmt: skip
    made.difference = {"samples": [1, 4], "stop": [None, 0.67], "verifier": [None, "vote"]}
    assert moved(made) == {"samples": [1, 4], "stop": [None, 0.67]}
    page = board_html(record(trials=[*improved().trials, trial(made, [0.1])]))
    assert "and 1 setting that goes with it" in page


# ------------------------------------------------------------------------------------------------------- Pareto


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=2, max_size=12), st.booleans())
def test_the_front_is_what_no_other_candidate_beats(pairs: list[tuple[int, int]], larger: bool) -> None:
    items = [(f"c{i}", float(cost), float(fitness), "") for i, (cost, fitness) in enumerate(pairs)]
    made = plots.scatter("cost", items, plots.scale([f for _, _, f, _ in items]), larger=larger)
    sign = 1 if larger else -1
    for point in made.points:
        cost, fitness = pairs[int(point.id[1:])]
        beaten = any(c <= cost and sign * f >= sign * fitness and (c, f) != (cost, fitness) for c, f in pairs)
        assert point.front == (not beaten)


def test_costs_that_exist_and_differ_are_drawn() -> None:
    found = pareto(improved())
    assert [s.name for s in found.plots] == ["parameters", "FLOPs", "candidate flops", "scoring latency ms"]
    assert found.equal == ["expected memory (bytes)"]
    assert found.front
    assert all(found.ranks[id] == 0 for id in found.front)
    assert [s.name for s in pareto(RECORDS["smoke"]()).plots][2] == "kv bytes per token"
    assert pareto(RECORDS["nothing_completed"]()).plots == []


def limited() -> RunRecord:
    """The improved run with a limit on the latency that its best candidate breaks."""
    run = improved()
    name = "scoring_latency_ms"
    trials = [t.model_copy(deep=True) for t in run.trials]
    slow = next(t for t in trials if t.candidate.id == run.champion)
    slow.violations = [f"{name} 9 above its limit 5"]
    assert run.prepared is not None
    return run.model_copy(
        update={"trials": trials, "prepared": run.prepared.model_copy(update={"limits": {name: 5.0}})}
    )


def test_what_breaks_a_hard_limit_is_drawn_and_on_no_front() -> None:
    run, plain = limited(), pareto(improved())
    found = pareto(run)
    assert run.champion in plain.front
    assert run.champion not in found.front
    assert run.champion not in found.ranks
    for drawn in found.plots:
        point = next(p for p in drawn.points if p.id == run.champion)
        assert (point.front, point.kind) == (False, "champion barred")
        assert point.title.endswith("beyond a hard limit")
        assert any(p.front for p in drawn.points)
        assert (drawn.limit is not None) == (drawn.name == "scoring latency ms")


def test_the_page_says_what_breaks_a_hard_limit() -> None:
    page, plain = board_html(limited()), board_html(improved())
    for said in ("beyond a limit", "scoring_latency_ms 9 above its limit 5", "Hard limits: scoring latency ms 5;"):
        assert said in page
        assert said not in plain


# ------------------------------------------------------------------------------------------- outcome and effects


def test_search_confirmation_and_test_stand_side_by_side() -> None:
    run = improved()
    found = compared(run)
    assert found is not None
    assert [s.name for s in found.steps] == ["Search", "Confirmation", "Sealed test"]
    search, confirmation, test = found.steps
    base, best = run.trials[0], run.trials[4]
    gains = [b - a for a, b in zip(*([c.metrics["NDCG@10"] for c in t.cells if c.metrics] for t in (base, best)))]
    assert search.gain is not None
    assert search.gain.gain == pytest.approx(np.mean(gains)), "g2-1 against the baseline, not against its parent g1-2"
    assert search.gain.se == pytest.approx(np.std(gains, ddof=1) / 3**0.5)
    assert confirmation.gain == run.confirmed
    assert test.gain == (run.test.gain if run.test else None)
    page = board_html(run)
    assert "z = 2, 5 seeds" in page
    assert "z = 2, 586 examples" in page


def test_the_sealed_test_box() -> None:
    page = board_html(improved())
    box = page[page.index("<h3>Sealed test") : page.index('<section id="used">')]
    for text in ("Opened once", "baseline and g2-1", "0.0588", "0.0659", "+0.0071", "+0.0035 to +0.0107"):
        assert text in box
    assert "Not opened" in board_html(RECORDS["no_signal"]())
    again = improved()
    again.test = SealedResult(opened="x", openings=2, metrics={"baseline": {"NDCG@10": 0.1}})
    assert "was opened 2 times" in board_html(again)


def test_without_a_confirmation_the_board_claims_nothing() -> None:
    run = improved().model_copy(update={"confirmation": [], "confirmed": None})
    assert "nothing can be claimed" in board_html(run)


def test_axis_effects_average_the_candidates_that_changed_one_axis_alone() -> None:
    rows = {(e.axis, e.new): (e, word) for e, _, _, word in effects(improved()).rows}
    block, _ = rows["mix.block", "shared-ffn"]
    assert (len(block.alone), len(block.joint)) == (2, 0)
    by_hand = [t.gain for t in improved().trials if list(t.candidate.difference) == ["mix.block"] and t.gain]
    assert block.mean == pytest.approx(sum(g.gain for g in by_hand) / 2)
    assert block.se == pytest.approx(sum((g.se or 0) ** 2 for g in by_hand) ** 0.5 / 2)
    assert rows["seq.encoder", "longer"][1] == "behind"
    assert rows["mix.width", "64"][1] == "within noise"


def test_axes_that_only_begin_to_count_are_no_changes_of_their_own() -> None:
    run = improved()
    run.trials[1].candidate.difference = {
        "seq.encoder": ["recent-mean", "longer"], "longer.merge": [None, 4], "mix.match": ["none", None],
    }  # fmt: skip
    rows = {(e.axis, e.new): e for e, *_ in effects(run).rows}
    assert len(rows["seq.encoder", "longer"].alone) == 1
    assert not [axis for axis, _ in rows if axis in ("longer.merge", "mix.match")]
    assert status_table(run)[2][2] == "seq.encoder: recent-mean → longer and 2 that go with it"
    assert "and 2 settings that go with it" in board_html(run)


def test_a_dead_axis_is_told_in_the_effects() -> None:
    notes = {(e.axis, e.new): e.notes for e, *_ in effects(RECORDS["failures"]()).rows}
    assert notes["mix.block", "shared-ffn"] == ["g1-8 is the same as baseline: no effect"]
    assert notes["mix.width", "128"] == ["g1-9 infeasible"]


def test_operators_of_papers_are_listed_with_their_gain() -> None:
    page = board_html(improved())
    table = page[page.index("Operators of papers") : page.index('<section id="failures">')]
    assert re.search(r"longer<br><span class=\"soft\">2505.04421</span></td><td class=\"n\">−0.0121</td>", table)


# ---------------------------------------------------------------------------------------------- random search


def test_search_against_random_search_at_equal_budget() -> None:
    run = improved()
    found = race(run, plots.Scale(0, 1))
    assert found is not None
    assert "Best of 6 searched candidates: g2-1 at 0.0734; best of 6 random ones: random-2" in found.sentence
    assert "the search was worth it" in found.sentence
    search, random = found.curves.curves
    assert len(search.dots) == len(random.dots) == 6
    assert search.best == run.trials[4].mean
    assert random.best == run.trials[0].mean, "both begin at the baseline, which no random candidate beats"


def test_random_search_that_does_as_well_is_said_so() -> None:
    run = improved()
    lucky = candidate("random-7", 0, {"mix.width": 64}, origin="random-search")
    run.random_search.append(trial(lucky, [0.0751, 0.0722, 0.0731], run.trials[0], role="random"))
    found = race(run, plots.Scale(0, 1))
    assert found is not None
    assert found.sentence.endswith("random search would have done as well.")


def test_without_random_search_the_board_admits_it() -> None:
    assert "cannot say whether a search was needed" in board_html(RECORDS["smoke"]())
    assert "Random search runs after the generations" in board_html(RECORDS["running"]())


# ----------------------------------------------------------------------------------------------------- failures


def test_every_failure_is_listed_with_its_reason_and_log() -> None:
    run = RECORDS["failures"]()
    found = failures(run)
    assert {f.state for f in found} == {*FAILED_STATES, "duplicate", "infeasible", "recovered"}
    page = board_html(run)
    for attempt in map(failed_attempt, FAILED_STATES):
        assert attempt.reason in page
    assert "step 37 loss 2.25" in page
    assert "Last heartbeat: step 37, loss 2.25." in page
    assert "Signal 9." in page
    assert "same effective fingerprint as baseline" in page
    assert "ran again with micro_batch 32, accumulate 2" in page
    assert "heads: width 128 is not divisible by 3 heads" in page


def test_an_interruption_that_was_run_again_is_no_failure() -> None:
    run = improved()
    plain = board_html(run)
    run.trials[2].cells[1].attempts.insert(0, failed_attempt("interrupted"))
    assert failures(run) == []
    assert board_html(run) == plain


def test_a_failed_finaliser_is_a_failure() -> None:
    run = RECORDS["not_improved"]()
    run.test, run.test_cell = None, RECORDS["failures"]().trials[2].cells[1].model_copy(update={"role": "test"})
    assert [f.where for f in failures(run)] == ["sealed test"]


# ------------------------------------------------------------------------------------------------- the rest


def test_hygiene_shows_overlaps_as_alarms() -> None:
    assert {state for *_, state in hygiene(improved())} == {"plain", "good"}
    run = improved()
    assert run.prepared is not None
    run.prepared.hygiene["train and test share"] = 3
    assert ("train and test share", 3, "bad") in hygiene(run)
    page = board_html(run)
    assert "no number below can be trusted" in page
    assert "train and test share 3; it must be 0" in status_text(run)


def test_budget_tiles_count_what_ran() -> None:
    tiles = {name: figure for name, figure, _, _ in budget(improved())}
    assert tiles["trials of the search"] == "6"
    assert tiles["cells completed"] == "49"
    assert tiles["random trials"] == "6"
    assert tiles["all cells time"] == "33.0 min"
    assert tiles["peak memory"] == "512MB"
    assert "peak device" not in tiles, "nothing was used there"


def test_how_to_repeat_and_evidence() -> None:
    page = board_html(improved())
    for text in (
        "auto-research evolve run --workflow rankmixer-movielens", config().fingerprint(), "9f2c1ab04d77e6e1",
        "2.13.0", "UniMixer", "arXiv 2604.00590", "what would make it run",
    ):  # fmt: skip
        assert text in page


def test_notes_of_the_plans_and_quarantined_code_are_shown() -> None:
    run = improved()
    note = "longer by 'history'; left out: shared-ffn"
    run.notes = {"g0": [note], "g1": [note, "1 of 4 places stay empty"]}
    code = Candidate(id="quarantined-x", generation=0, origin="quarantined", genome={}, reason="code from a generator")
    run.quarantined = [code]
    words = " ".join(Page(board_html(run)).words)
    assert words.count(note) == 1, "a note that says the same again is not repeated"
    assert "1 of 4 places stay empty" in words
    assert "code from a generator" in words
    assert "quarantined, never run: quarantined-x: code from a generator" in status_text(run)
    facts = status_facts(run)
    assert (facts["notes"], facts["quarantined"][0]["id"]) == (run.notes, "quarantined-x")


def test_without_random_search_the_board_says_so_in_words() -> None:
    run = improved()
    run.random_search = []
    assert "The search ran no candidate" in board_html(run)
    run.config = run.config.model_copy(update={"random_search": False})
    for text in (board_html(run), status_text(run), str(status_facts(run)["random_search"])):
        assert "Random search was not part of this run" in text
    measured = RECORDS["measured"]()
    assert "there was no search to compare with" in board_html(measured)


def test_a_summary_of_the_workflow_is_shown() -> None:
    run = RECORDS["measured"]()
    run.summary = {
        "sentence": "loss falls as C^-0.083",
        "fit": {"slope": -0.0831, "points": [1, 2.5], "inner": {"range": {"s": [-0.1, -0.05]}}},
        "points": [{"candidate": "baseline", "loss": 5.25}, {"candidate": "g1-1", "loss": 4.75, "seeds": 3}],
        "laws": {"compute": {"holds": True}, "size": {"holds": False}},
        "log_rmse": 0.0265,
    }
    page = board_html(run)
    assert page.index("loss falls as C^-0.083") < page.index("<nav")
    assert "loss falls as C^-0.083" in status_text(run).splitlines()[1]
    assert "<dt>slope</dt><dd>−0.0831</dd>" in page
    assert "<dt>inner · range · s</dt>" in page
    for name in ("candidate", "loss", "seeds"):
        assert f">{name}</th>" in page
    assert re.search(r"<td>baseline</td><td class=\"n\">5.25\d*</td><td class=\"n\">–</td>", page)
    assert "laws: size" in page
    assert "<dt>holds</dt><dd>no</dd>" in page
    assert "<dt>log rmse</dt><dd>0.0265</dd>" in page


def test_hostile_texts_stay_texts() -> None:
    page = board_html(RECORDS["hostile"]())
    parsed = Page(page)
    assert not [t for t, _ in parsed.tags if t in ("script", "img")]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", page)
    visible = " ".join(parsed.words)
    assert "<script>alert(1)</script>" in visible
    assert "{{7*7}}" in visible
    assert "\x1b" not in status_text(RECORDS["hostile"]())
    assert len(status_table(RECORDS["hostile"]())) == 4


def test_sixty_candidates_make_a_page_of_moderate_size() -> None:
    assert len(board_html(RECORDS["sixty"]())) < 400_000


def test_status_as_json_and_text_says_what_the_board_says(made: tuple[RunRecord, str]) -> None:
    run, page = made
    facts = json.loads(json.dumps(status_facts(run), allow_nan=False))
    assert facts["headline"].startswith(headline(run)[0])
    assert [c["id"] for c in facts["candidates"]] == [t.candidate.id for t in (*run.trials, *run.random_search)]
    assert len(facts["failures"]) == page.count('<details class="fail">')
    text = status_text(run)
    assert ("sealed test: not opened" in text) == (run.test is None)


def test_write_board_writes_one_file(tmp_path: Path) -> None:
    path = write_board(tmp_path, improved())
    assert path == tmp_path / "board.html"
    assert path.read_text(encoding="utf-8") == board_html(improved())
    assert [p.name for p in tmp_path.iterdir()] == ["board.html"]


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="a real layout needs a browser")
@pytest.mark.parametrize("name", ["improved", "failures", "hostile", "sixty"])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_its_window(tmp_path: Path, name: str, width: int) -> None:
    """The page in a frame of that width, all of it opened; a script outside the frame measures."""
    frame = html.escape(board_html(RECORDS[name]()))
    (tmp_path / "frame.html").write_text(
        f'<iframe width={width} height=900 srcdoc="{frame}"></iframe><script>onload = () => {{'
        "const page = document.querySelector('iframe').contentDocument;"
        "page.querySelectorAll('details').forEach(d => d.open = true);"
        "document.title = 'width ' + page.documentElement.scrollWidth + ' of ' + page.documentElement.clientWidth}"
        "</script>"
    )
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--dump-dom", f"file://{tmp_path / 'frame.html'}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search(r"width (\d+) of (\d+)", done.stdout)
    assert found, done.stderr
    assert int(found[1]) <= int(found[2])
