"""Texts and word problems."""

import json

import pytest

from auto_research.data.reasoning import Problem, read_gsm8k, with_validation
from auto_research.data.rows import MalformedRow
from auto_research.data.text import Instruction, read_alpaca, read_tiny_shakespeare, read_wikitext2
from auto_research.runtime.errors import UserError


def test_wikitext2(write, tmp_path):
    write("valid.txt", " \n = Title = \n \n a <unk> é \n")
    write("test.txt", "b\n")
    assert read_wikitext2(tmp_path) == {"valid": " \n = Title = \n \n a <unk> é \n", "test": "b\n"}
    write("train.txt", "c")
    assert list(read_wikitext2(tmp_path)) == ["train", "valid", "test"]
    write("test.txt", b"one\ntwo\nthree \xe9\n")
    with pytest.raises(MalformedRow, match=r"test\.txt, line 3: byte 0xe9 is not UTF-8"):
        read_wikitext2(tmp_path)
    write("test.txt", " \n")
    with pytest.raises(UserError, match=r"test\.txt is empty"):
        read_wikitext2(tmp_path)
    (tmp_path / "test.txt").unlink()
    with pytest.raises(UserError, match=r"has no file test\.txt"):
        read_wikitext2(tmp_path)


def test_tiny_shakespeare(write, tmp_path):
    write("input.txt", "First Citizen:\nBefore we proceed")
    assert read_tiny_shakespeare(tmp_path) == "First Citizen:\nBefore we proceed"


def test_alpaca(write, tmp_path):
    rows = [{"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Hi", "input": "", "output": "é"}]
    write("alpaca_en_demo.json", json.dumps(rows))
    assert read_alpaca(tmp_path) == [Instruction("Add.", "1 2", "3"), Instruction("Hi", "", "é")]
    for bad, why in (
        ("[1", "not JSON"),
        ("{}", "not a JSON list"),
        ("[]", "not a JSON list"),
        (json.dumps([*rows, {"instruction": "x", "output": "y"}]), "line 3: row 3 lacks a text"),
        (json.dumps([rows[0], 7]), "row 2 lacks"),
        (json.dumps([rows[0] | {"output": " "}]), "row 1 has an empty"),
    ):
        write("alpaca_en_demo.json", bad)
        with pytest.raises(MalformedRow, match=why):
            read_alpaca(tmp_path)


def problem(answer: str = "2*3 = <<2*3=6>>6 eggs.\n#### 6", question: str = "How many?") -> str:
    return json.dumps({"question": question, "answer": answer})


def test_gsm8k(write, tmp_path):
    write("train.jsonl", problem() + "\n" + problem("It sinks.\n#### -1,250.50") + "\n")
    write("test.jsonl", problem("#### 7"))
    problems = read_gsm8k(tmp_path)
    assert problems["train"] == [
        Problem("How many?", "2*3 = <<2*3=6>>6 eggs.", "6"),
        Problem("How many?", "It sinks.", "-1250.50"),
    ]
    assert problems["train"][0].steps == "2*3 = 6 eggs."
    assert problems["test"] == [Problem("How many?", "", "7")]
    assert [one.response for one in problems["train"]] == ["2*3 = 6 eggs.\nAnswer: 6", "It sinks.\nAnswer: -1250.50"]
    assert problems["test"][0].response == "Answer: 7"
    assert [one.calculations for one in problems["train"]] == [1, 0]
    assert problems["test"][0].messages == {
        "prompt": [{"role": "user", "content": "How many?"}],
        "completion": [{"role": "assistant", "content": "Answer: 7"}],
    }


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ('{"question": "x"', "is not a JSON object"),
        (json.dumps({"answer": "#### 1"}), "no text 'question'"),
        (problem(question=" "), "no text 'question'"),
        (json.dumps({"question": "x", "answer": 3}), "no text 'answer'"),
        (problem("about six"), "does not end in '#### number'"),
        (problem("#### six"), "does not end in '#### number'"),
        (problem("#### 6 eggs"), "does not end in '#### number'"),
    ],
)
def test_gsm8k_refuses_a_malformed_row(write, tmp_path, row, why):
    path = write("train.jsonl", problem() + "\n" + row + "\n" + problem())
    write("test.jsonl", problem())
    with pytest.raises(MalformedRow) as caught:
        read_gsm8k(tmp_path)
    assert f"{path}, line 2: " in str(caught.value)
    assert why in str(caught.value)


def test_validation_is_the_end_of_the_training_file():
    train = [Problem(f"q{i}", "", str(i)) for i in range(7)]
    parts = with_validation({"train": train, "test": []}, rows=3)
    assert [p.question for p in parts["train"]] == ["q0", "q1", "q2", "q3"]
    assert [p.question for p in parts["validation"]] == ["q4", "q5", "q6"]
    with pytest.raises(UserError, match="none is left to train on"):
        with_validation({"train": train, "test": []}, rows=7)
