"""The catalogue, where data sets are looked for, and what the package holds."""

import gzip
import json
from pathlib import Path

import pytest

from auto_research.data import catalogue
from auto_research.data.catalogue import CATALOGUE, EMBEDDED, DataFile, DatasetEntry
from auto_research.data.sequences import Interactions
from auto_research.runtime.errors import MissingData, UserError


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("AUTO_RESEARCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def hundred(folder: Path, rating: int = 3) -> Path:
    folder.mkdir(parents=True)
    (folder / "u.genre").write_text("unknown|0\n")
    (folder / "u.item").write_text("1|Film (1990)|01-Jan-1990||u|0\n")
    (folder / "u.user").write_text("1|24|M|artist|85711\n")
    (folder / "u.data").write_text(f"1\t1\t{rating}\t881250949\n")
    return folder


def test_dataset_dir_wins_over_cache_over_package(cache, tmp_path):
    with pytest.raises(MissingData, match="run `auto-research prepare ml-100k`") as caught:
        catalogue.locate("ml-100k")
    assert caught.value.dataset == "ml-100k"
    with pytest.raises(MissingData, match=str(tmp_path / "mine" / "ml-100k")):
        catalogue.locate("ml-100k", tmp_path / "mine")  # a folder that does not exist holds nothing
    hundred(cache / "ml-100k", rating=1)
    assert catalogue.load("ml-100k", tmp_path / "mine").rating.tolist() == [1]
    hundred(tmp_path / "mine" / "ml-100k", rating=2)
    assert catalogue.load("ml-100k", tmp_path / "mine").rating.tolist() == [2]
    assert catalogue.load("ml-100k", str(tmp_path / "mine")).rating.tolist() == [2]
    assert catalogue.locate("ml-latest-small", tmp_path / "mine") == EMBEDDED / "ml-latest-small"
    (cache / "ml-latest-small").mkdir(parents=True)
    assert catalogue.find("ml-latest-small") == catalogue.Located(cache / "ml-latest-small", "cache")


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(UserError, match=r"unknown data set 'ml-100'\. Did you mean 'ml-100k'\?"):
        catalogue.load("ml-100")


def test_a_truncated_file_is_one_error_that_speaks_of_its_checksum(tmp_path):
    folder = hundred(tmp_path / "ml-100k")
    (folder / "u.data").write_text("1\t1\t3\t881250949\n1\t1\t3")
    with pytest.raises(UserError) as caught:
        catalogue.load("ml-100k", tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'u.data'}, line 2: expected 4 columns")
    assert "not the published u.data" in message
    (folder / "u.data").unlink()
    with pytest.raises(UserError, match=r"has no file u\.data"):
        catalogue.load("ml-100k", tmp_path)


def test_every_entry_is_complete():
    assert set(CATALOGUE) == {
        "ml-latest-small",
        "ml-100k",
        "ml-1m",
        "amazon-beauty",
        "amazon-beauty-5core",
        "office-products",
        "industrial-scientific",
        "wikitext-2",
        "gsm8k",
        "tiny-shakespeare",
        "alpaca-en-demo",
        "dpo-en-demo",
        "ultrafeedback",
    }
    assert len({entry.folder for entry in CATALOGUE.values()}) == len(CATALOGUE)
    for entry in CATALOGUE.values():
        addresses = [url for file in entry.files for url in file.urls]
        addresses += [entry.source] + ([entry.archive.url] if entry.archive else [])
        assert all(url.startswith("https://") for url in addresses)
        for file in entry.files:
            assert all(len(digest) == 64 and int(digest, 16) >= 0 for digest in file.sha256)
    assert CATALOGUE["ml-100k"].size == 4_924_029
    assert CATALOGUE["gsm8k"].size == 4_166_206 + 749_738
    assert CATALOGUE["ml-1m"].archive is not None
    with pytest.raises(ValueError, match="needs an archive"):
        DatasetEntry(**{**CATALOGUE["gsm8k"].model_dump(), "files": (DataFile(name="x"),)})


def test_what_may_not_be_redistributed_is_not_in_the_package():
    embedded = {name for name, entry in CATALOGUE.items() if entry.embedded}
    assert embedded == {"ml-latest-small", "wikitext-2", "gsm8k", "tiny-shakespeare"}
    assert {path.name for path in EMBEDDED.iterdir()} == embedded
    files = [path for path in EMBEDDED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_500_000
    for name in embedded:
        assert [p for p in files if p.parent.name == name and p.suffix == ".txt"], "the licence travels with the data"
    assert "redistribute" in (EMBEDDED / "ml-latest-small" / "README.txt").read_text(encoding="utf-8")


def test_embedded_files_are_the_published_ones():
    for name in ("ml-latest-small", "wikitext-2", "tiny-shakespeare"):
        assert CATALOGUE[name].differing(EMBEDDED / name) == []
    assert CATALOGUE["gsm8k"].differing(EMBEDDED / "gsm8k") == ["train.jsonl", "test.jsonl"]  # a part of them


def test_embedded_data_loads():
    movies = catalogue.load("ml-latest-small")
    assert isinstance(movies, Interactions)
    text = catalogue.load("wikitext-2")
    assert {split: len(content) for split, content in text.items()} == {"valid": 1_120_192, "test": 1_255_018}
    assert len(catalogue.load("tiny-shakespeare")) == 1_115_394
    problems = catalogue.load("gsm8k")
    assert {split: len(rows) for split, rows in problems.items()} == {"train": 800, "test": 200}
    assert (problems["train"][0].answer, problems["test"][0].answer) == ("72", "18")
    prints = {catalogue.fingerprint(data) for data in (movies, text, problems)}
    assert movies.fingerprint in prints
    assert len(prints) == 3


def test_differing_compares_contents(tmp_path):
    content = b"To be, or not"
    entry = CATALOGUE["tiny-shakespeare"]
    (tmp_path / "input.txt").write_bytes(content)
    assert entry.differing(tmp_path) == ["input.txt"]
    digest = catalogue.sha256(tmp_path / "input.txt")
    known = entry.model_copy(update={"files": (DataFile(name="input.txt", sha256=("0" * 64, digest)),)})
    assert known.differing(tmp_path) == []
    (tmp_path / "input.txt").unlink()
    assert known.differing(tmp_path) == ["input.txt"]
    (tmp_path / "input.txt.gz").write_bytes(gzip.compress(content))
    assert known.differing(tmp_path) == []
    (tmp_path / "input.txt.gz").write_bytes(gzip.compress(content)[:-4])
    assert known.differing(tmp_path) == ["input.txt"]


def test_entries_are_plain_records():
    for entry in CATALOGUE.values():
        assert DatasetEntry.model_validate(json.loads(entry.model_dump_json())) == entry
