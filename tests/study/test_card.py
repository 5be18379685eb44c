"""Cards and discovery: what is refused, and how an outside package is found."""

import sys
import textwrap
from pathlib import Path

import pytest

from auto_research.papers import _registry
from auto_research.runtime.errors import UserError
from auto_research.study.card import BrokenCard, read_card

FRONT = """\
---
key: toy-paper
title: A toy
organisation: Nobody
published: 2026-01-02
family: toys
fidelity: concept_demo
datasets: [ml-latest-small]
claim: it works
---
The page.
"""


def write(folder, text, name="toy.md"):
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_a_card_and_its_page(tmp_path):
    card, page = read_card(write(tmp_path, FRONT))
    assert (card.key, card.published.year, page) == ("toy-paper", 2026, "The page.")
    assert card.variable("RQVAE_STEPS") == "AUTO_RESEARCH_TOY_PAPER_RQVAE_STEPS"


@pytest.mark.parametrize(
    "change, message",
    [
        (("---\nkey", "key"), "must begin with YAML"),
        (("claim: it works\n---", "claim: it works"), "no closing"),
        (("key: toy-paper", "key: Toy_Paper"), "field 'key'"),
        (("claim: it works", "claim: it works\nclaims: two"), "field 'claims'"),
        (("fidelity: concept_demo", "fidelity: perfect"), "field 'fidelity'"),
        (("datasets: [ml-latest-small]", "datasets: []"), "field 'datasets'"),
        (("title: A toy", "title: [A toy"), "not valid YAML"),
        (("claim: it works", "claim: it works\noverrides: {steps: few}"), "upper case"),
    ],
)
def test_broken_cards_are_refused_in_one_sentence(tmp_path, change, message):
    path = write(tmp_path, FRONT.replace(*change))
    with pytest.raises(BrokenCard, match=message) as caught:
        read_card(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused_and_a_byte_order_mark_is_not(tmp_path):
    (tmp_path / "folder.md").mkdir()
    with pytest.raises(BrokenCard, match=r"folder\.md cannot be read"):
        read_card(tmp_path / "folder.md")
    assert read_card(write(tmp_path, "\ufeff" + FRONT))[0].key == "toy-paper"


def test_yaml_cannot_build_objects(tmp_path):
    path = write(tmp_path, FRONT.replace("it works", "!!python/object/apply:os.getcwd []"))
    with pytest.raises(BrokenCard):
        read_card(path)


def test_discovery_by_folder_and_flat_file(tmp_path):
    (tmp_path / "family").mkdir()
    write(tmp_path / "family", FRONT)
    (tmp_path / "family" / "toy.py").write_text("def run(study): ...\n")
    flat = FRONT.replace("toy-paper", "flat-one").replace("claim:", "entry: outside.family.flat:run_one\nclaim:")
    write(tmp_path / "family", flat, "flat_one.md")
    (tmp_path / "family" / "flat.py").write_text("def run_one(study): ...\ndef run_two(study): ...\n")
    found = {a.key: a for a in _registry.discover(tmp_path, "outside")}
    assert found["toy-paper"].entry == "outside.family.toy:run"
    assert found["flat-one"].entry == "outside.family.flat:run_one"
    assert found["flat-one"].source == tmp_path / "family" / "flat.py"


def test_a_card_without_its_module_is_refused(tmp_path):
    write(tmp_path, FRONT)
    with pytest.raises(BrokenCard, match="one module and one card"):
        _registry.discover(tmp_path, "outside")


def name_in_metadata(root: Path, package: str) -> None:
    """Metadata in `root` as an installed package has them, which name `package`."""
    info = root / "more-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[auto_research.papers]\nmore = {package}\n")


@pytest.fixture
def outside(tmp_path, monkeypatch):
    root = tmp_path / "outside_papers"
    root.mkdir()
    (root / "__init__.py").touch()
    name_in_metadata(tmp_path, "outside_papers")
    monkeypatch.syspath_prepend(str(tmp_path))
    _registry.adapters.cache_clear()
    yield root
    _registry.adapters.cache_clear()
    sys.modules.pop("outside_papers", None)


def test_entry_points_bring_papers(outside):
    write(outside, FRONT)
    (outside / "toy.py").write_text("def run(study):\n    return 'ran'\n")
    assert _registry.adapter("toy-paper").load()(None) == "ran"


def test_one_key_twice_is_refused(outside):
    for name in ("toy", "again"):
        write(outside, FRONT, f"{name}.md")
        (outside / f"{name}.py").write_text("def run(study): ...\n")
    with pytest.raises(BrokenCard, match="share key 'toy-paper'"):
        _registry.adapters()


@pytest.mark.parametrize(
    "value, message",
    [("no_such_package", "not an installed package"), ("no_such.package", "which fails: No module named 'no_such'")],
)
def test_an_entry_point_to_nowhere_is_refused(outside, value, message):
    name_in_metadata(outside.parent, value)
    with pytest.raises(UserError, match=message):
        _registry.adapters()


def test_an_unknown_key_names_the_nearest(outside):
    write(outside, FRONT)
    (outside / "toy.py").write_text("def run(study): ...\n")
    with pytest.raises(UserError, match="Did you mean 'toy-paper'"):
        _registry.adapter("toy-papr")
