"""Preference pairs: the official binarised format in every form it is laid in, the demo pairs, the pairs made here."""

import gzip
import json
import random

import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.data import catalogue
from auto_research.data.preferences import (
    Message,
    Pair,
    by_hash,
    own_pairs,
    read_dpo_demo,
    read_ultrafeedback,
)
from auto_research.data.rows import MalformedRow
from auto_research.runtime.errors import UserError


def said(role: str, content: str) -> dict[str, str]:
    return {"content": content, "role": role}


def row(question: str = "Why?", good: str = "Because.", bad: str = "No.", scores=(8.5, 3.0), **changes) -> dict:
    """As HuggingFaceH4/ultrafeedback_binarized ships it."""
    chosen, rejected = ([said("user", question), said("assistant", answer)] for answer in (good, bad))
    made = {
        "prompt": question,
        "prompt_id": "0f" * 32,
        "chosen": chosen,
        "rejected": rejected,
        "messages": chosen,
        "score_chosen": scores[0],
        "score_rejected": scores[1],
    }
    return made | changes


def pair(question: str = "Why?", good: str = "Because.", bad: str = "No.", scores=(8.5, 3.0)) -> Pair:
    return Pair((Message("user", question),), good, bad, scores)


ROWS = [row(), row("Where?", "Here.", "There.\n", (7.0, 7.0)), row("é \U0001f600", "a", "b", (1, 0))]
PAIRS = [pair(), pair("Where?", "Here.", "There.\n", (7.0, 7.0)), pair("é \U0001f600", "a", "b", (1.0, 0.0))]
ALONE = [said("assistant", "a")]


def lay(folder, split: str, rows: list[dict], form: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(json.dumps(one) for one in rows).encode()
    if form == "parquet":
        polars.DataFrame(rows, strict=False).write_parquet(folder / f"{split}-00000-of-00001.parquet")
    elif form == "shards":
        for i in (0, 1):
            part = rows[:1] if i == 0 else rows[1:]
            polars.DataFrame(part, strict=False).write_parquet(folder / f"{split}-0000{i}-of-00002-1a2b3c.parquet")
    elif form == "jsonl":
        (folder / f"{split}.jsonl").write_bytes(lines)
    elif form == "jsonl.gz":
        (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(lines))
    else:
        (folder / f"{split}.json").write_text(json.dumps(rows))


@pytest.mark.parametrize("form", ["parquet", "shards", "jsonl", "jsonl.gz", "json"])
@pytest.mark.parametrize("place", ["", "data"])
def test_official_rows_in_every_form(form, place, tmp_path):
    lay(tmp_path / place, "train_prefs", ROWS, form)
    lay(tmp_path / place, "test_prefs", ROWS[:1], form if form != "shards" else "json")
    lay(tmp_path / place, "train_sft", [row("not a preference")], "json")
    assert read_ultrafeedback(tmp_path) == {"train": PAIRS, "test": PAIRS[:1]}


def test_the_catalogue_reads_it_from_a_given_folder(tmp_path):
    for split in ("train_prefs", "test_prefs"):
        lay(tmp_path / "ultrafeedback", split, ROWS, "parquet")
    assert catalogue.load("ultrafeedback", tmp_path)["train"] == PAIRS
    assert catalogue.entry("ultrafeedback").differing(tmp_path / "ultrafeedback") == []


def test_prompts_may_be_messages_and_answers_may_stand_alone(tmp_path):
    history = [said("system", "Be kind."), said("user", "Hi"), said("assistant", "Hello"), said("user", "Why?")]
    alone = {"chosen": [said("assistant", "A")], "rejected": [said("assistant", "B")]}
    whole = {name: [*history, *answer] for name, answer in alone.items()}
    rows = [
        alone | {"prompt": history},
        whole | {"prompt": history},
        whole,
        whole | {"prompt": "Why?"},
        alone | {"prompt": "Why?", "score_chosen": None, "score_rejected": None},
    ]
    lay(tmp_path, "train_prefs", rows, "json")
    lay(tmp_path, "test_prefs", ROWS, "json")
    found = read_ultrafeedback(tmp_path)["train"]
    assert found[:4] == [Pair(tuple(Message(m["role"], m["content"]) for m in history), "A", "B")] * 4
    assert found[4] == Pair((Message("user", "Why?"),), "A", "B")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (7, "row 2 is not an object"),
        (row(prompt=None, chosen=ALONE, rejected=ALONE), "no question of the user"),
        (row(prompt=3), "neither text nor a list"),
        (row(prompt=[said("robot", "x")]), "neither text nor a list"),
        (row(prompt="Another question"), "not what its answers answer"),
        (row(chosen="Because."), "no list of messages 'chosen'"),
        (row(rejected=[said("user", "Why?")]), "no list of messages 'rejected'"),
        (row(rejected=[]), "no list of messages 'rejected'"),
        (row(chosen=[said("user", "Why?"), {"role": "assistant"}]), "no list of messages 'chosen'"),
        (row(chosen=[said("user", "Who?"), said("assistant", "a")]), "two different conversations"),
        (row(chosen=[said("system", "x"), *ALONE], rejected=[said("system", "x"), *ALONE]), "no question of the user"),
        (row(score_chosen=None), "not a number"),
        (row(score_rejected=True), "not a number"),
        (row(score_rejected="5"), "not a number"),
    ],
)
def test_a_row_outside_the_format_is_named(bad, why, tmp_path):
    lay(tmp_path, "test_prefs", ROWS, "json")
    for form in ("json", "jsonl"):
        lay(tmp_path, "train_prefs", [ROWS[0], bad], form)
        with pytest.raises(MalformedRow, match=why) as caught:
            read_ultrafeedback(tmp_path)
        assert caught.value.line == 2
        (tmp_path / f"train_prefs.{form}").unlink()


def test_files_that_are_not_what_they_should_be(tmp_path):
    lay(tmp_path, "test_prefs", ROWS, "json")
    with pytest.raises(UserError, match="no train_prefs file"):
        read_ultrafeedback(tmp_path)
    (tmp_path / "train_prefs.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(UserError, match=r"train_prefs\.parquet cannot be read as Parquet"):
        read_ultrafeedback(tmp_path)
    (tmp_path / "train_prefs.parquet").unlink()
    polars.DataFrame([row()]).clear().write_parquet(tmp_path / "train_prefs.parquet")
    with pytest.raises(UserError, match="has no rows"):
        read_ultrafeedback(tmp_path)
    (tmp_path / "train_prefs.parquet").unlink()
    lay(tmp_path, "train_prefs", ROWS, "shards")
    (tmp_path / "train_prefs-00001-of-00002-1a2b3c.parquet").unlink()
    with pytest.raises(UserError, match="not one whole set of shards"):
        read_ultrafeedback(tmp_path)
    (tmp_path / "train_prefs-00000-of-00002-1a2b3c.parquet").unlink()
    (tmp_path / "train_prefs.jsonl").write_text(json.dumps(row()) + "\n{\n")
    with pytest.raises(MalformedRow, match=r"train_prefs\.jsonl, line 2"):
        read_ultrafeedback(tmp_path)


def demo(**changes) -> dict:
    made = {
        "conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Why?"}],
        "chosen": {"from": "gpt", "value": "So."},
        "rejected": {"from": "gpt", "value": "No."},
    }
    return made | changes


def test_demo_pairs(write, tmp_path):
    write("dpo_en_demo.json", json.dumps([demo(), demo(conversations=[{"from": "human", "value": "Hi"}])]))
    assert read_dpo_demo(tmp_path) == [
        Pair((Message("system", "Be brief."), Message("user", "Why?")), "So.", "No."),
        Pair((Message("user", "Hi"),), "So.", "No."),
    ]
    for bad, why in (
        ("[1", "not JSON"),
        ("{}", "not a JSON list"),
        (json.dumps([demo(), 7]), "line 2: row 2 has no list 'conversations'"),
        (json.dumps([demo(conversations=[])]), "row 1 has no list 'conversations'"),
        (json.dumps([demo(conversations=[{"from": "gpt", "value": "x"}])]), "ends with a human's message"),
        (json.dumps([demo(conversations=[{"from": "user", "value": "x"}])]), "ends with a human's message"),
        (json.dumps([demo(chosen=None)]), "lacks a message of gpt"),
        (json.dumps([demo(rejected={"from": "human", "value": "x"})]), "lacks a message of gpt"),
    ):
        write("dpo_en_demo.json", bad)
        with pytest.raises(MalformedRow, match=why):
            read_dpo_demo(tmp_path)


def test_what_says_nothing_about_preference():
    assert pair().fault == Pair((Message("user", "Why?"),), "a", "b").fault == ""
    assert pair(scores=(7.0, 7.0)).fault == "tie"
    assert pair(scores=(3.0, 8.5)).fault == "reversed scores"
    assert pair(good="No. ", bad=" No.").fault == "identical"
    assert pair(good=" \n").fault == pair(bad="").fault == pair("  ").fault == "empty"


@settings(deadline=None, max_examples=30)
@given(st.randoms(use_true_random=False))
def test_the_order_by_hash_is_that_of_the_prompts_alone(shuffler: random.Random):
    pairs = [pair(f"Question {i % 7}", f"good {i}") for i in range(20)]
    wanted = by_hash(pairs)
    shuffled = [*pairs, *pairs[:5]]
    shuffler.shuffle(shuffled)
    assert by_hash(shuffled) == wanted
    keys = [one.key for one in wanted]
    assert keys == sorted(keys)
    assert len({one.id for one in wanted}) == 20


def test_prompts_that_differ_in_case_and_spaces_are_one_prompt():
    assert pair("What  is it?").key == pair("what is\nit?").key != pair("what isit?").key
    assert pair("What  is it?").id != pair("what is\nit?").id


def test_own_pairs_are_right_and_length_decides_nothing():
    pairs = own_pairs()
    assert pairs == own_pairs()
    assert len({one.key for one in pairs}) == len(pairs) == 144
    assert not any(one.fault for one in pairs)
    longer = [len(one.chosen) > len(one.rejected) for one in pairs]
    assert sum(longer) == 72
    for one in pairs:
        words = one.prompt[-1].content.rstrip("?").split()
        if "plus" in words:
            right, wrong = (int(text.split(" is ")[1].split(".")[0]) for text in (one.chosen, one.rejected))
            assert right == int(words[2]) + int(words[4]) != wrong
        elif words[0] == "Count":
            numbers = [int(n) for n in one.chosen.split(".")[0].split(",")]
            assert numbers == list(range(int(words[2]), int(words[4].rstrip(".")) + 1))
        elif "larger," in words:
            large, small = (int(n) for n in (one.chosen.split()[0], one.chosen.split(".")[0].split()[-1]))
            assert large > small
