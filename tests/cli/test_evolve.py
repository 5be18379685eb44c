"""`evolve` as a person meets it, on the toy workflow: every command, every exit code, errors of one sentence."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from auto_research.cli.evolve import choose, configure, evolve_app, find_run, rounds
from auto_research.cli.evolve_view import LiveView
from auto_research.evolve import workflows as registry
from auto_research.evolve.board import command
from auto_research.evolve.records import RunConfig, RunRecord
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import read_jsonl, read_record

TOYS = str(Path(__file__).parent.parent / "evolve")
TOY = ("--workflow", "toy:ToyWorkflow", "--device", "cpu")
PROGRAM = [sys.executable, "-c", "from auto_research.cli.main import main; main()", "evolve"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go to a fresh folder; the toy workflow is importable here and in cells."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(TOYS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TOYS, *filter(None, [os.environ.get("PYTHONPATH")])]))


def call(*words: str) -> Any:
    return CliRunner().invoke(evolve_app, list(words))


def params(*words: str) -> dict[str, Any]:
    """The options of `evolve run` as the command would get them."""
    made = typer.main.get_command(evolve_app).commands["run"].make_context("run", list(words))  # type: ignore[attr-defined]
    given = dict(made.params)
    given.pop("resume")
    return given


# ------------------------------------------------------------------------------------------------- listing, plan


def test_workflows_are_listed_without_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "sys.argv = ['auto-research', 'evolve', 'workflows', '--json']\n"
        "from auto_research.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["key"] for row in json.loads(done.stdout)] == list(registry.WORKFLOWS)


def test_the_list_names_models_data_and_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "WORKFLOWS", {"toy:ToyWorkflow": "toy"})
    monkeypatch.setattr("auto_research.evolve.workflows.workflow", _toy)
    done = call("workflows")
    assert done.exit_code == 0
    for word in ("toy", "line", "points", "closeness ↑", "bias, exchange, decor", "L0 mechanism"):
        assert word in done.stdout


def _toy(key: str) -> Any:
    import toy

    return toy.ToyWorkflow()


def test_plan_shows_every_candidate_with_provenance_and_cost_and_leaves_nothing(tmp_path: Path) -> None:
    done = call("plan", *TOY, "--budget", "standard", "--population", "3")
    assert done.exit_code == 0, done.output
    for words in (
        "baseline", "g1-1", "model.bias: off → on", "0001.00001, core mechanism", "duplicate of baseline",
        "evidence only, never run: Curves instead of lines", "Generations 2 to 2 are planned from the results",
        "10 to confirm", "18 of random search", "times a run of the baseline",
    ):  # fmt: skip
        assert words in done.stdout, words
    assert list(tmp_path.iterdir()) == []


def test_plan_as_json() -> None:
    done = call("plan", *TOY, "--json", "--direction", "an offset", "--set", "train.lr=0.1")
    facts = json.loads(done.stdout)
    assert [p["generation"] for p in facts["plans"]] == [0, 1]
    assert facts["plans"][0]["candidates"][0]["genome"]["train.lr"] == 0.1
    assert facts["plans"][1]["candidates"][0]["operators"] == ["bias"]
    assert facts["cost"]["cells"] > 0


# ------------------------------------------------------------------------------------------ a run from end to end


class Finished(NamedTuple):
    folder: Path
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A finished smoke run that kept its test sealed, and what it printed."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.syspath_prepend(TOYS)
        patch.setenv("PYTHONPATH", os.pathsep.join([TOYS, *filter(None, [os.environ.get("PYTHONPATH")])]))
        done = call("run", *TOY, "--population", "2", "--run", "first", "--keep-test-sealed")
    assert done.exit_code == 0, done.output
    return Finished(root / "runs" / "evolve" / "first", done.stdout, done.stderr)


@pytest.fixture
def finished(made: Finished) -> Path:
    """The folder of that run."""
    return made.folder


def test_a_run_ends_with_the_verdict_a_table_and_the_boards_path(made: Finished) -> None:
    assert made.stdout.startswith("Smoke run, no conclusion")
    assert "g1-1" in made.stdout
    assert "model.bias: off → on" in made.stdout
    assert made.stdout.rstrip().endswith("Board: runs/evolve/first/board.html")
    assert "generation 1: g1-1, g1-2" in made.stderr
    assert "[3/3] g1-" in made.stderr  # two cells at a time end in any order
    assert "g1-2-search-seed42" in made.stderr
    page = (made.folder / "board.html").read_text()
    assert "<h1" in page
    assert "g1-2" in page


def test_status_and_board_read_the_run(finished: Path) -> None:
    record = read_record(finished / "record.json", RunRecord)
    facts = json.loads(call("status", str(finished), "--json").stdout)
    assert facts["status"] == "finished"
    assert {c["id"]: c["mean"] for c in facts["candidates"]} == {t.candidate.id: t.mean for t in record.trials}
    assert facts["test"] is None
    assert call("status", str(finished)).stdout.startswith("Smoke run, no conclusion")
    by_name = call("status", "first", "--output", str(finished.parent), "--json")
    assert json.loads(by_name.stdout) == facts
    (finished / "board.html").unlink()
    assert call("board", str(finished)).stdout.strip() == str(finished / "board.html")
    assert (finished / "board.html").is_file()


def test_resuming_a_finished_run_runs_nothing_again(finished: Path) -> None:
    before = [e for e in read_jsonl(finished / "events.jsonl") if e["event"] == "cell_started"]
    assert call("resume", str(finished), "--workers", "2").exit_code == 0
    after = [e for e in read_jsonl(finished / "events.jsonl") if e["event"] == "cell_started"]
    assert before == after
    assert read_record(finished / "config.json", RunConfig).where["workers"] == 2


def test_the_sealed_test_opens_once(finished: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    opened = call("test", str(folder))
    assert opened.exit_code == 0, opened.output
    assert "sealed test" in opened.stdout
    again = call("test", str(folder))
    assert isinstance(again.exception, UserError)
    assert "opens once a run" in str(again.exception)


def test_fork_shows_its_plan_and_refuses_what_the_space_lacks(finished: Path) -> None:
    done = call("fork", str(finished), "--set", "train.optimiser=momentum", "--plan")
    assert done.exit_code == 0, done.output
    assert "nothing was run" in done.stdout
    assert [p.name for p in finished.parent.iterdir()] == ["first"]
    wrong = call("fork", str(finished), "--set", "train.optimizer=momentum")
    assert "Did you mean 'train.optimiser'?" in str(wrong.exception)


@pytest.mark.slow
def test_a_fork_runs_under_a_name_of_its_own(finished: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "first"
    shutil.copytree(finished, folder)
    done = call("fork", str(folder), "--set", "train.lr=0.1", "--population", "1")
    assert done.exit_code == 0, done.output
    record = read_record(tmp_path / "first-fork1" / "record.json", RunRecord)
    assert record.config.forked_from == "first"
    assert record.trials[0].candidate.genome["train.lr"] == 0.1


def test_nothing_drives_a_finished_run(finished: Path) -> None:
    assert "nothing to stop" in str(call("stop", str(finished)).exception)


# --------------------------------------------------------------------------------------------------- exit codes


def test_a_run_in_which_nothing_completes_exits_with_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_FAULT", "exception")
    done = call("run", *TOY, "--population", "1", "--retries", "0", "--run", "broken")
    assert done.exit_code == 4, done.output
    assert done.stdout.startswith("Nothing completed")
    assert "Nothing completed" in Path("runs/evolve/broken/board.html").read_text()


def test_ctrl_c_exits_with_3_and_resume_goes_on(tmp_path: Path) -> None:
    words = ["run", *TOY, "--population", "1", "--size", "pause_ms=40", "--run", "slow"]
    with subprocess.Popen([*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("[1/"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
        process.wait(120)
    assert process.returncode == 3, rest
    assert "evolve resume runs/evolve/slow` goes on" in rest
    assert "Traceback" not in rest
    assert json.loads(call("status", "slow", "--json").stdout)["status"] == "interrupted"
    refused = call("run", *TOY, "--population", "1", "--size", "pause_ms=41", "--run", "slow", "--resume")
    assert "began with another configuration (sizes)" in str(refused.exception)
    done = call("run", *TOY, "--population", "1", "--size", "pause_ms=40", "--run", "slow", "--resume")
    assert done.exit_code == 0, done.output
    started = [e["cell"] for e in read_jsonl(Path("runs/evolve/slow/events.jsonl")) if e["event"] == "cell_started"]
    assert started.count("baseline-search-seed42") == 1, "what had completed is not run again"


def test_a_full_disk_exits_with_3(monkeypatch: pytest.MonkeyPatch) -> None:
    from auto_research.evolve import controller

    def full(*arguments: Any) -> None:
        raise controller.RunStopped("no space left")

    monkeypatch.setattr(controller, "run", full)
    done = call("run", *TOY)
    assert done.exit_code == 3
    assert "error: no space left" in done.stderr


def test_a_second_interruption_exits_with_3_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    from auto_research.evolve import controller

    def impatient(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(controller, "run", impatient)
    done = call("run", *TOY)
    assert done.exit_code == 3
    assert "evolve resume" in done.stderr


@pytest.mark.parametrize(
    "words, sentence",
    [
        (("plan",), "name a workflow: --workflow rankmixer-movielens"),
        (("plan", "--workflow", "llm-wikitex"), "Did you mean 'llm-wikitext'?"),
        (("plan", *TOY, "--set", "model.bais=on"), "Did you mean 'model.bias'?"),
        (("plan", *TOY, "--set", "model.bias=onn"), "axis model.bias has no value 'onn'"),
        (("plan", *TOY, "--set", "train.lr=7"), "takes numbers from 0.01 to 0.3"),
        (("plan", *TOY, "--set", "model.bias"), "--set takes name=value"),
        (("plan", *TOY, "--size", "stepz=3"), "Did you mean 'steps'?"),
        (("plan", *TOY, "--size", "steps=many"), "takes a whole number"),
        (("plan", *TOY, "--size", "steps=-5"), "size steps is at least 1, not -5"),
        (("plan", *TOY, "--confidence-z", "nan"), "--confidence-z: Input should be a finite number, got nan"),
        (("plan", "--workflow", "os:path"), "'os:path' is no workflow"),
        (("plan", "--workflow", ":"), "workflow ':' cannot be imported"),
        (("plan", *TOY, "--seeds", ""), "not a list of whole numbers"),
        (("plan", *TOY, "--seeds", "1,x"), "not a list of whole numbers"),
        (("plan", *TOY, "--seeds", "1,1"), "repeat a seed"),
        (("plan", *TOY, "--seeds", "5", "--confirm-seeds", "5"), "needs fresh ones"),
        (("plan", *TOY, "--dataset-dir", "nowhere"), "nowhere is not a folder"),
        (("plan", *TOY, "--dataset", "movielens"), "is not that of --workflow toy:ToyWorkflow, which has points"),
        (("plan", "--workflow", "toy:ToyWorkflow", "--device", "cuda:7"), "cuda:7"),
        (("run", *TOY, "--trial-timeout-seconds", "0"), "must be positive"),
        (("run", *TOY, "--run", "../x"), "no name for a folder"),
        (("run", *TOY, "--resume"), "give --run NAME"),
        (("run", *TOY, "--address", "auto"), "add --executor ray"),
        (("status", "frist"), "there is no run 'frist'"),
        (("board", "nowhere"), "there is no run 'nowhere'"),
        (("resume", "nowhere"), "there is no run 'nowhere'"),
    ],
)
def test_wrong_input_gets_one_sentence(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    done = call(*words)
    assert isinstance(done.exception, UserError), done.output
    assert sentence in str(done.exception)
    assert "\n" not in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_word_exits_with_2_from_the_program_itself() -> None:
    done = subprocess.run([*PROGRAM, "plan", "--workflow", "rankmixer"], capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"budget": "standard", "generations": 4, "population": 5, "seeds": [1, 2, 3], "confirm_seeds": [9, 10]},
        {"direction": "längere 'history' $HOME; rm -rf /", "changes": {"train.lr": 0.1, "model.bias": "on"}},
        {"sizes": {"steps": 7, "rows": 50}, "n_min": 4, "z": 1.25, "delta_min": -0.5, "confirm_z": 3.0},
        {"sampler": "tpe", "run_seed": 77, "random_search": True, "retries": 3, "memory_limit_mb": 500},
        {"trial_timeout_s": 12.5, "stall_s": 3.25, "screening": True},
    ],
)
def test_the_boards_command_repeats_the_configuration(changes: dict[str, Any]) -> None:
    config = RunConfig(
        **{"run": "x", "workflow": "toy:ToyWorkflow", "generations": 1, "population": 2, "seeds": [42],
           "random_search": False, **changes}
    )  # fmt: skip
    words = shlex.split(command(config))
    assert words[:3] == ["auto-research", "evolve", "run"]
    again = configure(params(*words[3:]))
    assert again.fingerprint() == config.fingerprint()
    assert again.model_copy(update={"run": "x", "where": {}}) == config, "but for places"


def test_defaults_follow_budget_and_workflow() -> None:
    smoke, standard = (configure(params(*TOY, "--budget", budget)) for budget in ("smoke", "standard"))
    assert (smoke.seeds, smoke.confirm_seeds, smoke.random_search, smoke.generations) == ([42], [], False, 1)
    assert (standard.seeds, len(standard.confirm_seeds), standard.random_search) == ([42, 43, 44], 5, True)
    assert not set(standard.seeds) & set(standard.confirm_seeds)
    assert standard.population == 3, "a place for each operator"
    assert standard.generations == 2
    toy = _toy("")
    toy.smoke_plan = lambda: [{}, {}, {}, {}, {}]
    assert rounds(toy, "smoke") == (1, 5)
    fixed = type("Fixed", (type(toy),), {"select": False, "points": lambda self, budget: [{}] * 4})()
    assert rounds(fixed, "standard") == (1, 3)


def test_places_and_limits_are_outside_the_fingerprint() -> None:
    plain = configure(params(*TOY))
    placed = configure(
        params(*TOY, "--workers", "2", "--cpu-threads", "1", "--gpu-slots", "2", "--gpu-memory-per-trial-mb", "900",
               "--executor", "ray", "--address", "auto", "--storage", "none", "--online", "--retries", "4",
               "--trial-timeout-seconds", "5", "--keep-test-sealed", "--quarantine", "q")
    )  # fmt: skip
    assert placed.fingerprint() == plain.fingerprint()
    assert placed.where == {
        "workers": 2, "cpu_threads": 1, "gpu_slots": 2, "gpu_memory_per_trial_mb": 900, "executor": "ray",
        "address": "auto", "storage": "none", "offline": False, "test": "manual", "quarantine": "q",
    }  # fmt: skip
    assert (placed.retries, placed.trial_timeout_s) == (4, 5.0)


def test_data_are_found_again_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert configure(params(*TOY) | {"dataset_dir": Path("data")}).dataset_dir == str(tmp_path / "data")


def test_a_budget_brings_its_own_limit_of_a_cell() -> None:
    toy = _toy("")
    assert configure(params(*TOY)).trial_timeout_s == toy.cell_seconds["smoke"]
    assert configure(params(*TOY, "--budget", "standard")).trial_timeout_s == toy.cell_seconds["standard"]


def test_cells_share_the_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auto_research.runtime.versions.cores", lambda: 4)
    assert configure(params(*TOY, "--device", "cpu")).where == {"workers": 4}
    assert configure(params(*TOY, "--device", "cpu", "--cpu-threads", "3")).where == {"workers": 1, "cpu_threads": 3}
    assert configure(params(*TOY, "--device", "cpu", "--workers", "2")).where == {"workers": 2}
    large = ("--workflow", "ultrafeedback", "--device", "cpu")
    assert configure(params(*large)).where == {}, "a real checkpoint has all cores to itself"
    assert configure(params(*large, "--workers", "2")).where == {"workers": 2}
    assert configure(params(*large)).stall_s > configure(params(*TOY)).stall_s == 120
    assert configure(params(*large, "--stall-seconds", "7")).stall_s == 7
    assert configure(params(*TOY, "--device", "cpu", "--executor", "ray")).where == {"executor": "ray"}


def test_model_and_dataset_select_a_workflow(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = type(_toy(""))
    made = {
        key: type(key, (toy,), {"key": key, "model": model, "dataset": data, "title": key})()
        for key, model, data in [("a-x", "RankMixer", "movielens"), ("b-y", "micro-llm", "wikitext-2-devsplit"),
                                 ("c-z", "micro-llm", "grid")]
    }  # fmt: skip
    monkeypatch.setattr(registry, "WORKFLOWS", made)
    monkeypatch.setattr(registry, "workflow", made.__getitem__)
    assert choose(None, "rankmixer", None).key == "a-x"
    assert choose(None, "micro_llm", "wikitext-2").key == "b-y"
    assert choose("c-z", "micro-llm", None).key == "c-z"
    with pytest.raises(UserError, match="several workflows fit: b-y, c-z"):
        choose(None, "micro-llm", None)
    with pytest.raises(UserError, match="Did you mean 'RankMixer'"):
        choose(None, "rankmixr", None)
    with pytest.raises(UserError, match="no workflow has --dataset movielens"):
        choose(None, "micro-llm", "movielens")


def test_a_run_is_found_by_path_or_name_and_the_nearest_is_named(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    (root / "first").mkdir(parents=True)
    (root / "first" / "config.json").write_text("{}")
    assert find_run("first", root) == root / "first"
    assert find_run(str(root / "first"), Path("elsewhere")) == root / "first"
    with pytest.raises(UserError, match="Did you mean 'first'"):
        find_run("frist", root)


def test_the_live_view_shows_what_runs_and_what_ended(tmp_path: Path) -> None:
    console = Console(force_terminal=True, width=100, height=20, file=(tmp_path / "out").open("w"))
    view = LiveView(tmp_path, "closeness", console)
    view._drawn = float("inf")
    with view:
        view.watch({"event": "planned", "plan": "g1", "candidates": ["g1-1"]})
        view.watch({"event": "queued", "cells": [{"cell": "g1-1-s1"}, {"cell": "g1-1-s2"}]})
        view.watch({"event": "cell_started", "cell": "g1-1-s1", "attempt": 1})
        view.watch({"event": "cell_ended", "cell": "g1-1-s1", "state": "timed_out", "reason": "no\nprogress"})
        view.watch({"event": "cell_started", "cell": "g1-1-s2", "attempt": 1})
        folder = tmp_path / "cells" / "g1-1-s2" / "attempt-1"
        folder.mkdir(parents=True)
        from auto_research.evolve.cells import HEARTBEAT

        (folder / HEARTBEAT).write_text('{"step": 7, "loss": 2.5}')
        shown = Console(width=100, record=True, file=(tmp_path / "shown").open("w"))
        shown.print(view._table())
    text = shown.export_text()
    for words in ("timed out", "no progress", "running", "step 7, loss 2.5", "generation 1: 1 of 2 cells"):
        assert words in text, words
