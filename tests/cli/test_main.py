"""The command line as a person meets it: list, show, reproduce, and errors of one sentence with exit code 2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from auto_research.papers._registry import adapters
from auto_research.runtime.records import read_record
from auto_research.study.execute import StudyRecord

PROGRAM = [sys.executable, "-c", "from auto_research.cli.main import main; main()"]


def run(*arguments, cwd=None, **environ):
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env={**os.environ, **environ}
    )


def test_help_names_every_command():
    done = run("--help")
    assert done.returncode == 0
    for command in ("list", "show", "reproduce", "audit", "prepare", "doctor"):
        assert command in done.stdout


def test_list_and_show_import_no_torch():
    program = (
        "import sys\nfrom auto_research.cli.main import main\n"
        "for words in (['list'], ['list', '--json'], ['show', 'rankmixer']):\n"
        "    sys.argv = ['auto-research', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'numpy', 'polars'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_list_filters_and_json():
    rows = json.loads(run("list", "--json").stdout)
    assert [row["key"] for row in rows] == list(adapters())
    for option, value, holds in [
        ("--family", "ranking", lambda r: r["family"] == "ranking"),
        ("--dataset", "ml-100k", lambda r: "ml-100k" in r["datasets"]),
        ("--fidelity", "core_mechanism", lambda r: r["fidelity"] == "core_mechanism"),
        ("--checkpoint", "minilm", lambda r: any("minilm" in names for names in r["checkpoints"].values())),
    ]:
        kept = json.loads(run("list", "--json", option, value).stdout)
        assert kept == [row for row in rows if holds(row)]
        assert kept


@pytest.mark.parametrize(
    "filters",
    [
        ("--fidelity", "concept_demo", "--family", "ranking"),
        ("--dataset", "tiny-shakespeare"),  # of the catalogue, and of no card
        ("--checkpoint", "micro-vlm", "--family", "baselines"),
    ],
)
def test_filters_that_nothing_fits_list_nothing(filters):
    done = run("list", "--json", *filters)
    assert (done.returncode, json.loads(done.stdout)) == (0, [])


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("list", "--family", "rankng"), "Did you mean 'ranking'?"),
        (("list", "--fidelity", "concept-demo"), "Did you mean 'concept_demo'?"),
        (("list", "--dataset", "tiny-shakespear"), "Did you mean 'tiny-shakespeare'?"),
        (("show", "rankmixr"), "Did you mean 'rankmixer'?"),
        (("reproduce", "rankmixr"), "Did you mean 'rankmixer'?"),
        (("reproduce", "rankmixer", "--seeds", "1,x"), "not a list of whole numbers"),
        (("reproduce", "rankmixer", "--seeds", "1,1"), "repeat"),
        (("reproduce", "rankmixer", "--seeds", ""), "not a list of whole numbers"),
        (("reproduce", "rankmixer", "--results-dir", "/dev/null/x"), "cannot create /dev/null/x"),
        (("reproduce", "rankmixer", "--device", "cuda:7"), "cuda:7"),
        (("reproduce", "rankmixer", "--dataset-dir", "nowhere"), "nowhere is not a folder"),
        (("reproduce", "rankmixer", "--workers", "0"), "--workers"),
        (("reproduce", "rankmixer", "--timeout-seconds", "0"), "must be positive"),
    ],
)
def test_wrong_input_gets_one_sentence_and_exit_code_2(tmp_path, arguments, sentence):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "variable, value, sentence",
    [
        ("AUTO_RESEARCH_MOBIUS_ROPE_TRAIN_STEP", "3", "AUTO_RESEARCH_MOBIUS_ROPE_TRAIN_STEPS"),
        ("AUTO_RESEARCH_MOBIUS_ROPE_TRAIN_STEPS", "-3", "not a positive integer"),
    ],
)
def test_undocumented_and_senseless_overrides_list_the_documented_ones(tmp_path, variable, value, sentence):
    done = run("reproduce", "mobius-rope", cwd=tmp_path, **{variable: value})
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "AUTO_RESEARCH_MOBIUS_ROPE_EXAMPLES" in done.stderr


def test_reproduce_writes_record_pages_and_log(tmp_path):
    done = run(
        "reproduce", "mobius-rope", "--seeds", "7", "--device", "cpu", "--results-dir", tmp_path / "results",
        "--output", tmp_path / "runs", cwd=tmp_path,
        AUTO_RESEARCH_MOBIUS_ROPE_TRAIN_STEPS="2", AUTO_RESEARCH_MOBIUS_ROPE_EXAMPLES="60",
        AUTO_RESEARCH_MOBIUS_ROPE_WINDOWS="4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "conclude nothing" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert {p.name for p in folder.iterdir()} == {"log.txt", "report.html", "report.md", "result.json"}
    record = read_record(folder / "result.json", StudyRecord)
    assert record.comparison.verdict == "smoke: no conclusion"
    assert record.overrides == {
        "AUTO_RESEARCH_MOBIUS_ROPE_TRAIN_STEPS": 2,
        "AUTO_RESEARCH_MOBIUS_ROPE_EXAMPLES": 60,
        "AUTO_RESEARCH_MOBIUS_ROPE_WINDOWS": 4,
    }
    assert record.seeds == [7]
    assert record.data.keys() == {"wikitext-2"}
    kept = Path(tmp_path / "results" / "mobius-rope.json")
    assert read_record(kept, StudyRecord) == record
    page = (folder / "report.html").read_text()
    assert not re.search(r"""(src|href)=["']?https?:|url\(https?:|@import""", page), "the page needs a network"


def test_a_failing_paper_is_reported_and_the_others_run(tmp_path):
    done = run(
        "reproduce", "mobius-rope", "--timeout-seconds", "0.5", "--output", tmp_path, cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 1
    assert "timed_out" in done.stdout
    assert "log.txt" in done.stdout
