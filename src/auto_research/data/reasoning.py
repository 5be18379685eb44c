"""Word problems with one number as their answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from auto_research.data.rows import MalformedRow, read_lines, require
from auto_research.runtime.errors import UserError

GSM8K_SPLITS = ("train", "test")
HELD_OUT = 500
"""Last training problems that are the validation part."""
_FINAL = re.compile(r"\n?#### ?(-?\$?[0-9][0-9,]*(?:\.[0-9]+)?)\s*$")
_CALCULATION = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class Problem:
    """A question, its worked solution, and the final number, without thousands separators ("1250", "-3", "2.5").

    `solution` is the published text before `#### `, with its calculator annotations such as `<<48/2=24>>`.
    """

    question: str
    solution: str
    answer: str

    @property
    def steps(self) -> str:
        """The solution without the calculator annotations."""
        return _CALCULATION.sub("", self.solution)

    @property
    def calculations(self) -> int:
        """How many calculator annotations the solution has: a measure of how hard the problem is."""
        return len(_CALCULATION.findall(self.solution))

    @property
    def response(self) -> str:
        """What a model is to say: the steps, then "Answer: 1250" on a line of its own."""
        return f"{self.steps}\nAnswer: {self.answer}".lstrip()

    @property
    def messages(self) -> dict[str, list[dict[str, str]]]:
        """`prompt` and `completion` as chat messages, the row that trainers of language models read."""
        return {
            "prompt": [{"role": "user", "content": self.question}],
            "completion": [{"role": "assistant", "content": self.response}],
        }


def read_gsm8k(folder: Path | str) -> dict[str, list[Problem]]:
    """GSM8K: the problems of `train.jsonl` and `test.jsonl`, by split (Cobbe et al., 2021).

    A line is an object with `question` and `answer`, which ends in `#### number`.
    Raises UserError for a missing or empty file, MalformedRow (file, line) for a row outside the format.
    """
    return {split: _problems(require(Path(folder), f"{split}.jsonl")) for split in GSM8K_SPLITS}


def with_validation(published: Mapping[str, list[Problem]], rows: int = HELD_OUT) -> dict[str, list[Problem]]:
    """Training, validation and test problems: the last `rows` of the training file are validation, which has no file.

    Raises UserError when that leaves nothing to train on.
    """
    train = published["train"]
    if len(train) <= rows:
        raise UserError(
            f"there are {len(train)} training problems, of which the last {rows} are for validation, so none is left "
            "to train on: use the published files"
        )
    return {"train": train[:-rows], "validation": train[-rows:], "test": published["test"]}


def _problems(path: Path) -> list[Problem]:
    problems = []
    for line, text in enumerate(read_lines(path), start=1):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MalformedRow(path, line, f"{text[:60]!r} is not a JSON object") from error
        if not isinstance(row, dict):
            raise MalformedRow(path, line, f"{text[:60]!r} is not a JSON object")
        question, answer = row.get("question"), row.get("answer")
        if not (isinstance(question, str) and question.strip()):
            raise MalformedRow(path, line, "the row has no text 'question'")
        if not isinstance(answer, str):
            raise MalformedRow(path, line, "the row has no text 'answer'")
        final = _FINAL.search(answer)
        if final is None:
            raise MalformedRow(path, line, f"the answer does not end in '#### number' but in {answer[-30:]!r}")
        problems.append(Problem(question, answer[: final.start()], re.sub("[,$]", "", final[1])))
    return problems
