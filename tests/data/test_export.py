"""Data sets as messages: the rows that trainers of language models read, and what is left out."""

from __future__ import annotations

import json

import pytest

from auto_research.data import catalogue
from auto_research.data.export import export, row_of
from auto_research.data.preferences import Message, Pair
from auto_research.runtime.errors import UserError


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_problems_become_prompts_and_completions(tmp_path):
    assert export("gsm8k", tmp_path / "new" / "gsm8k") == {
        "train": (300, 0),
        "validation": (500, 0),
        "test": (200, 0),
    }
    made, published = rows(tmp_path / "new" / "gsm8k" / "train.jsonl"), catalogue.load("gsm8k")["train"][:300]
    assert [row["prompt"] for row in made] == [[{"role": "user", "content": one.question}] for one in published]
    for row, one in zip(made, published):
        (answer,) = row["completion"]
        assert answer["role"] == "assistant"
        assert answer["content"].endswith(f"\nAnswer: {one.answer}")
        assert "<<" not in answer["content"]
        assert "####" not in answer["content"]


def test_pairs_become_messages_and_those_without_a_preference_are_left_out(tmp_path, monkeypatch):
    asked = (Message("system", "Be brief."), Message("user", "2 + 2?"))
    good, tie = Pair(asked, "4", "5", (8.0, 1.0)), Pair(asked, "four", "4", (5.0, 5.0))
    assert row_of(good) == {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
        "chosen": [{"role": "assistant", "content": "4"}],
        "rejected": [{"role": "assistant", "content": "5"}],
    }
    monkeypatch.setattr(catalogue, "load", lambda name, folder: [good, tie, good])
    assert export("dpo-en-demo", tmp_path) == {"train": (2, 1)}
    assert rows(tmp_path / "train.jsonl") == [row_of(good)] * 2
    assert not (tmp_path / "test.jsonl").exists()


def test_what_has_no_such_form_is_refused(tmp_path):
    with pytest.raises(UserError, match="ml-latest-small has no form as messages; these have: gsm8k"):
        export("ml-latest-small", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot create"):
        export("gsm8k", tmp_path / "file" / "below")
