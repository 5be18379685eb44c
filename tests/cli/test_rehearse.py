"""`auto-research rehearse`: scripts pass through, papers run in processes of their own."""

import json

import pytest
from typer.testing import CliRunner

from auto_research.cli import rehearse as command
from auto_research.cli.main import build
from auto_research.runtime.errors import UserError

FAULTY = 'import sys, torch\nprint("arguments", sys.argv[1:])\ntorch.ones(2, device="cuda") + torch.ones(2)\n'


def run(*words):
    return CliRunner().invoke(build(["rehearse"]), ["rehearse", *map(str, words)])


def test_a_script_keeps_its_own_options_and_gets_a_report(tmp_path, capfd):
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(FAULTY)
    done = run("--card", "t4", "--json", report, "--", script, "--card", "mine", "-v")
    assert done.exit_code == 1
    found = json.loads(report.read_text())
    assert [(entry["rule"], entry["line"]) for entry in found["findings"]] == [("DEV-1", 3)]
    assert found["card"]["title"] == "Tesla T4"
    assert "arguments ['--card', 'mine', '-v']" in done.output + capfd.readouterr().out


@pytest.mark.parametrize(
    "words, sentence",
    [
        ((), "name papers to rehearse, or a script"),
        (("no-such-paper",), "there is no paper 'no-such-paper'"),
        (("ease", "--json", "x.json"), "--json and --html are for a script"),
    ],
)
def test_what_cannot_be_rehearsed_is_one_sentence(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert isinstance(done.exception, UserError)
    assert sentence in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_one_paper_that_fails_does_not_stop_the_others_and_decides_the_exit_code(tmp_path, monkeypatch):
    summary = {
        "findings": [{"rule": "DEV-1", "file": "a.py", "line": 3, "message": "two devices"}],
        "by_rule": {"DEV-1": 1},
        "synchronisations": {"mean_per_step": 2.0},
        "share": {"flops_on_device": 0.5},
        "memory": {"peak": 2**21, "fits": True},
        "nondeterministic": [],
    }

    def one(key, options, chosen, output):
        (output / f"{key}.log").write_text("Traceback\nerror: the data set is missing\n")
        return {"ease": (0, {**summary, "findings": []}), "item-knn": (1, summary), "din": (2, None)}[key]

    monkeypatch.setattr(command, "_one", one)
    found = run("ease", "item-knn", "--output", tmp_path / "out")
    assert found.exit_code == 1
    assert "DEV-1 a.py:3" in found.output
    worst = run("din", "ease", "item-knn", "--output", tmp_path / "out")
    assert worst.exit_code == 2
    assert "din  not rehearsable: error: the data set is missing" in worst.output
    assert "clean" in worst.output


@pytest.mark.slow
def test_a_paper_writes_its_reports(tmp_path):
    done = run("item-knn", "--output", tmp_path)
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {"item-knn.json", "item-knn.html", "item-knn.log"}


def test_an_override_that_is_not_documented_is_not_rehearsable(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTO_RESEARCH_EASE_NONSENSE", "3")
    done = run("ease", "--output", tmp_path)
    assert done.exit_code == 2
    assert "NONSENSE" in done.output
