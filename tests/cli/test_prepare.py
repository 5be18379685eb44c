"""`auto-research prepare` over a catalogue without a network."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from auto_research.cli.prepare import prepare
from auto_research.data.fetch import OFFLINE_VARIABLES
from auto_research.runtime.errors import UserError

app = typer.Typer()
app.command()(prepare)


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTO_RESEARCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv(OFFLINE_VARIABLES[0], "1")

    def runner(*arguments: str | Path):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return runner


def line(output: str, name: str) -> str:
    (found,) = [line for line in output.splitlines() if line.split()[:1] == [name]]
    return found


def test_list_says_what_is_here(run, tmp_path):
    (tmp_path / "mine" / "tiny-shakespeare").mkdir(parents=True)
    (tmp_path / "mine" / "tiny-shakespeare" / "input.txt").write_text("To be")
    result = run("--list", "--dataset-dir", tmp_path / "mine")
    assert result.exit_code == 0
    assert "not here" in line(result.output, "ml-1m")
    assert "5.9 MB" in line(result.output, "ml-1m")
    assert "the package" in line(result.output, "ml-latest-small")
    assert "ready: ratings, movies" in line(result.output, "ml-latest-small")
    assert "not as published: input.txt" in line(result.output, "tiny-shakespeare")
    assert "built here" in line(result.output, "micro-lm")
    assert run().output.startswith(run("--list").output[:100])  # without names: the list


def test_what_the_package_holds_needs_no_network(run):
    result = run("ml-latest-small", "tiny-shakespeare")
    assert result.exit_code == 0
    assert "not here" not in result.output


def test_what_cannot_be_fetched_fails_in_words(run):
    result = run("ml-100k", "ml-latest-small")
    assert result.exit_code == 2
    assert "says offline" in result.output
    assert "not ready: ml-100k" in result.output
    assert "ready: ratings" in line(result.output, "ml-latest-small")


def test_an_unknown_name_is_refused_before_anything_is_done(run):
    result = run("ml-latest-small", "ml-latest-smal")
    assert isinstance(result.exception, UserError)
    assert "Did you mean 'ml-latest-small'?" in str(result.exception)
    assert result.output == ""
