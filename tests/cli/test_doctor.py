"""`auto-research doctor` prints the findings and fails only where something is broken."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from auto_research.cli.doctor import doctor
from auto_research.study import environment
from auto_research.study.environment import Finding

app = typer.Typer()
app.command()(doctor)

FOUND = [
    Finding("torch", "build", "ok", "2.13.0"),
    Finding("data", "ml-1m", "missing", "MovieLens [1M]", "auto-research prepare ml-1m"),
]


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    found = list(FOUND)
    monkeypatch.setattr(environment, "inspect_environment", lambda dataset_dir: found)
    return found


def test_table_shows_every_finding_and_its_advice(findings: list[Finding]) -> None:
    result = CliRunner().invoke(app, [], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    for finding in findings:
        assert finding.subject in result.stdout
        assert finding.found in result.stdout  # square brackets are text, not markup
        assert finding.advice in result.stdout


def test_json_is_complete(findings: list[Finding]) -> None:
    result = CliRunner().invoke(app, ["--json"])
    report = json.loads(result.stdout)
    assert report["findings"][1]["advice"] == "auto-research prepare ml-1m"
    assert report["environment"]["python"]


def test_something_broken_is_exit_code_1(findings: list[Finding]) -> None:
    findings.append(Finding("machine", "cache", "broken", "cannot be written", "set it"))
    for arguments in ([], ["--json"]):
        assert CliRunner().invoke(app, arguments).exit_code == 1
