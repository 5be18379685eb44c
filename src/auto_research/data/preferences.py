"""Preference pairs: one question, a chosen and a rejected answer.

Two published forms are read, UltraFeedback as Hugging Face H4 binarised it and LLaMA-Factory's demo pairs. A small set
of pairs made here by rule lets everything run where neither is.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from auto_research.data.rows import MalformedRow, read_json_list, read_lines, require
from auto_research.runtime.errors import UserError

OFFICIAL_SPLITS = {"train": "train_prefs", "test": "test_prefs"}
"""Our name of a split -> the name that its files begin with."""
FORMATS = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz")
"""Of the official rows, in order of preference; a split is read in the first one that it is there in."""
DEMO_FILE = "dpo_en_demo.json"
DEMO_ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
SAME_ROLES = {role: role for role in DEMO_ROLES.values()}
SCORES = ("score_chosen", "score_rejected")
COLUMNS = ("prompt", "chosen", "rejected", *SCORES)
_SHARD = re.compile(r"-(\d+)-of-(\d+)(?:-\w+)?\.")


class Message(NamedTuple):
    """What one side of a conversation says; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Pair:
    """A conversation that ends where the assistant is to answer, and two answers to it.

    `scores` are those of the chosen and the rejected answer, where the data set has them.
    """

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    scores: tuple[float, float] | None = None

    @property
    def key(self) -> str:
        """SHA-256 (hex) of the prompt, alike for prompts that differ in case and white space only."""
        words = [(message.role, " ".join(message.content.lower().split())) for message in self.prompt]
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()

    @property
    def id(self) -> str:
        """SHA-256 (16 hex digits) of prompt and both answers: the same for the same pair whatever file it came from."""
        return hashlib.sha256(json.dumps([self.prompt, self.chosen, self.rejected]).encode()).hexdigest()[:16]

    @property
    def fault(self) -> str:
        """Why the pair says nothing about preference: `tie`, `reversed scores`, `identical`, `empty`; "" for none."""
        if not (self.chosen.strip() and self.rejected.strip() and any(m.content.strip() for m in self.prompt)):
            return "empty"
        if self.chosen.split() == self.rejected.split():
            return "identical"
        if self.scores is not None and not self.scores[0] > self.scores[1]:
            return "tie" if self.scores[0] == self.scores[1] else "reversed scores"
        return ""


def by_hash(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs in the order of their prompts' SHA-256, each pair once: a fixed order that no file's order decides."""
    kept = {pair.id: pair for pair in pairs}
    return sorted(kept.values(), key=lambda pair: (pair.key, pair.id))


# ------------------------------------------------------------------------------------------------- official format


def read_ultrafeedback(folder: Path | str) -> dict[str, list[Pair]]:
    """UltraFeedback binarised (HuggingFaceH4/ultrafeedback_binarized): its preference pairs, `train` and `test`.

    Reads `train_prefs*` and `test_prefs*` in `folder` or its subfolder `data`, as Parquet, JSON lines or one JSON list,
    the JSON ones gzipped or not, in one file or in shards `-00000-of-00002`. A row has `prompt` (text, or a list of
    messages), `chosen` and `rejected` (lists of messages `role`, `content`: the conversation with its answer, or the
    answer alone), and `score_chosen` and `score_rejected`; other columns are left alone.

    Raises UserError for a missing split or shard or an unreadable file, MalformedRow (file, row) for a row outside the
    format.
    """
    folder = Path(folder)
    return {split: [pair for file in _files(folder, name) for pair in _official(file)]
            for split, name in OFFICIAL_SPLITS.items()}  # fmt: skip


def _files(folder: Path, split: str) -> list[Path]:
    """All files of a split, in the order of their shards."""
    for place in (folder, folder / "data"):
        for suffix in FORMATS:
            found = sorted(path for path in place.glob(f"{split}*{suffix}") if path.is_file())
            if not found:
                continue
            shards = [_SHARD.search(path.name) for path in found]
            if len(found) == 1 and shards[0] is None:
                return found
            numbers = [(int(shard[1]), int(shard[2])) if shard else (-1, -1) for shard in shards]
            if numbers != [(i, len(found)) for i in range(len(found))]:
                names = ", ".join(path.name for path in found)
                raise UserError(f"{place} has {names} of {split}: not one whole set of shards; fetch them again.")
            return found
    raise UserError(
        f"{folder} has no {split} file ({split}-00000-of-00001.parquet, or .jsonl or .json): fetch the data set again "
        "with `auto-research prepare`."
    )


def _official(path: Path) -> Iterator[Pair]:
    for number, row in enumerate(_rows(path), start=1):
        yield _official_pair(path, number, row)


def _rows(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if ".jsonl" in path.suffixes:
        rows = []
        for line, text in enumerate(read_lines(path), start=1):
            try:
                rows.append(json.loads(text))
            except (ValueError, RecursionError) as error:
                raise MalformedRow(path, line, f"{text[:60]!r} is not a JSON object") from error
        return rows
    return read_json_list(path)


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    import polars

    try:
        schema = polars.read_parquet_schema(path)
        rows: list[dict[str, Any]] = polars.read_parquet(path, columns=[c for c in COLUMNS if c in schema]).to_dicts()
    except (polars.exceptions.PolarsError, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet ({str(error).splitlines()[0]}): fetch it again.") from error
    if not rows:
        raise UserError(f"{path} has no rows: fetch it again.")
    return rows


def _official_pair(path: Path, number: int, row: Any) -> Pair:
    def wrong(reason: str) -> MalformedRow:
        return MalformedRow(path, number, f"row {number} {reason}")

    def answered(name: str) -> tuple[list[Message], str]:
        """The conversation before an answer, empty where the row gives the answer alone, and the answer."""
        messages = _messages(row.get(name), SAME_ROLES, "role", "content")
        if not messages or messages[-1].role != "assistant":
            raise wrong(f"has no list of messages '{name}' that ends with the assistant's answer")
        return messages[:-1], messages[-1].content

    if not isinstance(row, dict):
        raise wrong("is not an object")
    given = row.get("prompt")
    prompt = [Message("user", given)] if isinstance(given, str) else _messages(given, SAME_ROLES, "role", "content")
    if prompt is None and given is not None:
        raise wrong("has a 'prompt' that is neither text nor a list of messages")
    (before, chosen), (other, rejected) = answered("chosen"), answered("rejected")
    if before != other:
        raise wrong("has answers to two different conversations")
    conversation = before or prompt or []
    if not conversation or conversation[-1].role != "user":
        raise wrong("has no question of the user, neither as 'prompt' nor before its answers")
    if prompt and prompt[-1].content != conversation[-1].content:
        raise wrong("has a 'prompt' that is not what its answers answer")
    scores = [row.get(name) for name in SCORES]
    if scores == [None, None]:
        return Pair(tuple(conversation), chosen, rejected)
    known = [float(s) for s in scores if isinstance(s, int | float) and not isinstance(s, bool) and math.isfinite(s)]
    if len(known) < len(scores):
        raise wrong("has a 'score_chosen' or 'score_rejected' that is not a number")
    return Pair(tuple(conversation), chosen, rejected, (known[0], known[1]))


def _messages(given: Any, roles: dict[str, str], role: str, content: str) -> list[Message] | None:
    """Messages of a list of objects; None when it is none. `roles` maps the file's names of roles to ours."""
    if not isinstance(given, list):
        return None
    found = []
    for one in given:
        if not isinstance(one, dict) or one.get(role) not in roles or not isinstance(one.get(content), str):
            return None
        found.append(Message(roles[one[role]], one[content]))
    return found


# ------------------------------------------------------------------------------------------------------ demo pairs


def read_dpo_demo(folder: Path | str) -> list[Pair]:
    """LLaMA-Factory's English demo pairs: `dpo_en_demo.json`, a JSON list of `conversations`, `chosen`, `rejected`.

    Messages are objects `from` (system, human or gpt) and `value`; there are no scores.
    Raises UserError for a missing or empty file, MalformedRow (file, row) for a row outside the format.
    """
    path = require(Path(folder), DEMO_FILE)
    return [_demo_pair(path, number, row) for number, row in enumerate(read_json_list(path), start=1)]


def _demo_pair(path: Path, number: int, row: Any) -> Pair:
    parts = row if isinstance(row, dict) else {}
    conversation, *answers = (
        _messages(given, DEMO_ROLES, "from", "value")
        for given in (parts.get("conversations"), [parts.get("chosen")], [parts.get("rejected")])
    )
    if not conversation or conversation[-1].role != "user":
        raise MalformedRow(path, number, f"row {number} has no list 'conversations' that ends with a human's message")
    said = [answer[0].content for answer in answers if answer and answer[0].role == "assistant"]
    if len(said) < 2:
        raise MalformedRow(path, number, f"row {number} lacks a message of gpt 'chosen' or 'rejected'")
    return Pair(tuple(conversation), said[0], said[1])


# ------------------------------------------------------------------------------------------------------- own pairs

_OPPOSITES = (
    "hot cold, big small, fast slow, early late, light dark, full empty, hard soft, high low, young old, wet dry, "
    "open closed, near far, rich poor, loud quiet, long short, strong weak, happy sad, thick thin, clean dirty, "
    "first last, deep shallow, sweet sour, wide narrow, cheap expensive"
)
_CAPITALS = (
    "France Paris, Italy Rome, Spain Madrid, Portugal Lisbon, Austria Vienna, Greece Athens, Norway Oslo, "
    "Finland Helsinki, Poland Warsaw, Hungary Budapest, Ireland Dublin, Japan Tokyo, Egypt Cairo, Kenya Nairobi, "
    "Peru Lima, Cuba Havana, Chile Santiago, Canada Ottawa, Thailand Bangkok, Iceland Reykjavik, Denmark Copenhagen, "
    "Sweden Stockholm, Belgium Brussels, Turkey Ankara"
)
_COLOURS = (
    "grass green, snow white, coal black, a ripe lemon yellow, a clear sky blue, blood red, a carrot orange, "
    "chocolate brown, a lime green, milk white, a raven black, a sunflower yellow, the deep sea blue, a brick red, "
    "a pumpkin orange, a walnut brown, an emerald green, salt white, tar black, a canary yellow, a sapphire blue, "
    "a strawberry red, an apricot orange, a chestnut brown"
)
SYSTEM = Message("system", "You are helpful.")
"""Of our own pairs: shorter than what chat templates put in the place of none."""


def own_pairs() -> list[Pair]:
    """144 pairs made by rule, with short answers: the right one is chosen, a wrong one rejected.

    In half of them the rejected answer is the longer one, so that length alone decides nothing.
    """
    made: list[Pair] = []

    def add(question: str, right: str, wrong: str) -> None:
        """Of every two pairs, one pads the right answer and one the wrong answer with the same idle sentence."""
        padding = " I hope that this is what you wanted to know."
        longer = len(made) % 2
        made.append(Pair((SYSTEM, Message("user", question)), right + padding * (1 - longer), wrong + padding * longer))

    for (word, opposite), (_, other) in _turned(_OPPOSITES):
        add(f"What is the opposite of '{word}'?", f"The opposite is {opposite}.", f"The opposite is {other}.")
    for (country, capital), (_, other) in _turned(_CAPITALS):
        add(f"Which city is the capital of {country}?", f"It is {capital}.", f"It is {other}.")
    for (thing, colour), (_, other) in _turned(_COLOURS):
        add(f"What colour is {thing}?", f"Usually {colour}.", f"Usually {other}.")
    for i in range(24):
        a, b = 3 + i, 2 + 7 * i % 11
        add(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.", f"{a} plus {b} is {a + b + 1 + i % 3}.")
        add(f"Count from {a} to {a + 3}.", f"{a}, {a + 1}, {a + 2}, {a + 3}.", f"{a}, {a + 2}, {a + 1}, {a + 4}.")
        add(
            f"Which number is larger, {a} or {a + b}?",
            f"{a + b} is larger than {a}.",
            f"{a} is larger than {a + b}.",
        )
    return made


def _turned(listed: str) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Each entry `some words value` with the next one whose value differs, which gives the wrong answer."""
    entries: Sequence[tuple[str, str]] = [tuple(one.rsplit(" ", 1)) for one in listed.split(", ")]  # type: ignore[misc]
    for i, entry in enumerate(entries):
        yield entry, next(other for other in [*entries[i + 1 :], *entries[:i]] if other[1] != entry[1])
