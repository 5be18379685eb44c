"""What a micro language model reads: WikiText-2, a narrative text and instructions, as token ids of one tokenizer.

Only the validation and test parts of WikiText-2 travel with the package. Where the official training part is not used,
the first nine tenths of the validation text train and its last tenth validates; that split is called
`wikitext-2-devsplit` and never WikiText-2. The test text is the official one either way, and only `read_test` reads
it into tokens.

The tokenizer is a byte-level BPE learned from the training text alone. The byte 0, which no text holds, stands before
the first token of a text and after the last of a response, so no special token takes an id from the BPE.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from auto_research.data import catalogue
from auto_research.data.text import Instruction
from auto_research.evolve.workflow import disjoint
from auto_research.runtime.errors import UserError
from auto_research.tasks.language_model import devsplit, encode, train_tokenizer

DEVSPLIT, OFFICIAL = "wikitext-2-devsplit", "wikitext-2"
END = "\0"
BEFORE, AFTER = "### Instruction:\n", "\n### Response:\n"
"""Around an instruction. The end is a line end: byte-level BPE would join a space to the response."""
HELD_OUT = {"validation": 100, "test": 99}
"""Instructions held out, from the end of the rows; the rest (800 of 999) trains."""
PARAGRAPH = 8
"""Words from which on a line counts as a paragraph: shorter lines and headings recur in every part."""
SMOKE_LINES = 0.1
"""Share of the test text that a smoke run reads, about as much as it validates on."""


@dataclass(frozen=True)
class Row:
    """An instruction as token ids: `prompt`, and `response` with the end token unless it was cut."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


@dataclass(frozen=True)
class Corpus:
    """Training and validation data, without any test part.

    Attributes:
        name: `wikitext-2-devsplit` or `wikitext-2`.
        train, validation, narrative: token ids (T,) int64, on the CPU.
        validation_bytes: UTF-8 bytes of the whole validation text.
        instructions: rows of `train` and `validation`.
        end: id of the byte 0.
        digests, hygiene, stand_in: as `Data` wants them.
    """

    name: str
    train: Tensor
    validation: Tensor
    narrative: Tensor
    validation_bytes: int
    instructions: dict[str, list[Row]]
    tokenizer: Any
    vocabulary: int
    end: int
    digests: dict[str, str]
    hygiene: dict[str, int]
    stand_in: str


@dataclass(frozen=True)
class TestPart:
    """The official test text (T,) int64, or its beginning, with its bytes, and the instructions held out for it."""

    tokens: Tensor
    bytes: int
    instructions: list[Row]


def read_corpus(vocabulary: int, context: int, dataset_dir: Path | None = None, *, official: bool = False) -> Corpus:
    """Training and validation data.

    Args:
        vocabulary: ids of the BPE at most.
        context: tokens of an instruction with its response at most.
        official: use WikiText-2's own training part where it is on this machine.

    Training paragraphs that recur in validation or test are left out, and validation paragraphs that recur in test.
    What was encoded is kept in the cache, under the digest of the texts.
    """
    texts, name = _texts(dataset_dir, official)
    test = _paragraphs(texts["test"])
    validation, from_validation = _without(texts["validation"], test)
    train, from_train = _without(texts["train"], test | _paragraphs(validation))
    narrative = catalogue.load("tiny-shakespeare", dataset_dir)
    tokenizer, ids, mark = _encoded({"train": train, "validation": validation, "narrative": narrative}, vocabulary)

    split, stand_in = _instructions(dataset_dir)
    rows = {part: _rows(tokenizer, split[part], context) for part in ("train", "validation")}
    end = tokenizer.encode(END).ids[0]
    hygiene = disjoint(
        {
            "text train": sorted(_paragraphs(train)),
            "text validation": sorted(_paragraphs(validation)),
            "text test": sorted(test),
        }
    )
    hygiene |= disjoint({f"instructions {part}": [_plain(row) for row in found] for part, found in split.items()})
    hygiene |= {
        "paragraphs left out of training": from_train,
        "paragraphs left out of validation": from_validation,
        "instruction responses cut to the context": sum(r.response[-1] != end for part in rows.values() for r in part),
    }
    return Corpus(
        name=name,
        **ids,
        validation_bytes=len(validation.encode()),
        instructions=rows,
        tokenizer=tokenizer,
        vocabulary=tokenizer.get_vocab_size(),
        end=end,
        digests={
            name: _digest(train, validation, texts["test"]),
            "tiny-shakespeare": _digest(narrative),
            "instructions": _digest(*(_plain(row) + row.output for part in split.values() for row in part)),
            "tokenizer": mark,
        },
        hygiene=hygiene,
        stand_in=stand_in,
    )


def read_test(
    vocabulary: int, context: int, dataset_dir: Path | None = None, *, official: bool = False, lines: float = 1.0
) -> TestPart:
    """The test part under the tokenizer of `read_corpus` with the same arguments; of its text the first `lines`."""
    corpus = read_corpus(vocabulary, context, dataset_dir, official=official)
    whole = _texts(dataset_dir, official)[0]["test"].splitlines(keepends=True)
    text = "".join(whole[: math.ceil(lines * len(whole))])
    split, _ = _instructions(dataset_dir)
    return TestPart(encode(corpus.tokenizer, text), len(text.encode()), _rows(corpus.tokenizer, split["test"], context))


def _texts(dataset_dir: Path | None, official: bool) -> tuple[dict[str, str], str]:
    parts = catalogue.load("wikitext-2", dataset_dir)
    train, validation, name = parts.get("train"), parts["valid"], OFFICIAL
    if not official or train is None:
        (train, validation), name = devsplit(validation), DEVSPLIT
    if not (train.strip() and validation.strip()):
        raise UserError("WikiText-2's valid.txt has too few lines to be split; prepare the data set again")
    return {"train": train, "validation": validation, "test": parts["test"]}, name


def _encoded(texts: Mapping[str, str], vocabulary: int) -> tuple[Any, dict[str, Tensor], str]:
    """(tokenizer learned from `train`, ids of each text, digest), from the cache or made there."""
    import numpy as np
    import tokenizers

    from auto_research.checkpoints.store import build_once
    from auto_research.runtime.cache import cache_folder

    mark = _digest(str(vocabulary), tokenizers.__version__, *(part for pair in texts.items() for part in pair))

    def build(folder: Path) -> None:
        tokenizer = train_tokenizer(texts["train"], vocabulary)
        tokenizer.save(str(folder / "tokenizer.json"))
        for part, text in texts.items():
            np.save(folder / f"{part}.npy", encode(tokenizer, text).to(torch.int32).numpy())

    folder = build_once(cache_folder("text", mark[:24]), build)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {part: torch.from_numpy(np.load(folder / f"{part}.npy", allow_pickle=False)).long() for part in texts}
    return tokenizer, ids, _digest((folder / "tokenizer.json").read_text(encoding="utf-8"))


def _digest(*texts: str) -> str:
    sha = hashlib.sha256()
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        sha.update(len(encoded).to_bytes(8, "little") + encoded)
    return sha.hexdigest()


# ----------------------------------------------------------------------------------------------------- hygiene


def _key(line: str) -> str | None:
    """A paragraph without case and spacing; None for headings, blank and short lines."""
    words = line.lower().split()
    return " ".join(words) if len(words) >= PARAGRAPH and words[0] != "=" else None


def _paragraphs(text: str) -> set[str]:
    return {key for line in text.splitlines() if (key := _key(line)) is not None}


def _without(text: str, banned: Collection[str]) -> tuple[str, int]:
    """The text without the lines that are a banned paragraph, and how many those were."""
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if _key(line) not in banned]
    return "".join(kept), len(lines) - len(kept)


# ------------------------------------------------------------------------------------------------ instructions


def _instructions(dataset_dir: Path | None) -> tuple[dict[str, list[Instruction]], str]:
    """(rows of train, validation and test, why they are no public rows or "").

    No prompt is in two parts: a later part keeps it.
    """
    if catalogue.find("alpaca-en-demo", dataset_dir) is not None:
        rows, stand_in = list(catalogue.load("alpaca-en-demo", dataset_dir)), ""
    else:
        rows = generated_instructions()
        stand_in = (
            "the instructions are generated: alpaca-en-demo is not on this machine "
            "(`auto-research prepare alpaca-en-demo`, or --dataset-dir)"
        )
    cut = {"validation": -sum(HELD_OUT.values()), "test": -HELD_OUT["test"]}
    if len(rows) <= -cut["validation"]:
        raise UserError(
            f"alpaca-en-demo has {len(rows)} rows; more than {-cut['validation']} are needed to hold some out"
        )
    parts = {
        "test": rows[cut["test"] :],
        "validation": rows[cut["validation"] : cut["test"]],
        "train": rows[: cut["validation"]],
    }
    seen: set[str] = set()
    for part in parts.values():
        part[:] = list({_plain(row): row for row in part if _plain(row) not in seen}.values())
        seen |= {_plain(row) for row in part}
    return {part: parts[part] for part in ("train", "validation", "test")}, stand_in


def _plain(row: Instruction) -> str:
    return " ".join(f"{row.instruction} {row.input}".lower().split())


def _rows(tokenizer: Any, rows: Sequence[Instruction], context: int) -> list[Row]:
    """Token ids that fit: the asked text gives way first, to half of the context, then the response is cut."""
    before, after, end = (tokenizer.encode(text).ids for text in (BEFORE, AFTER, END))
    asked = tokenizer.encode_batch([f"{row.instruction}\n{row.input}".rstrip("\n") for row in rows])
    answers = tokenizer.encode_batch([row.output for row in rows])
    room = max(1, context // 2 - len(before) - len(after))
    found = []
    for question, answer in zip(asked, answers, strict=True):
        prompt = [*before, *question.ids[:room], *after]
        found.append(Row(tuple(prompt), tuple([*answer.ids, *end][: max(1, context + 1 - len(prompt))])))
    return found


Task = Literal["upper", "reverse", "count", "first", "last", "repeat", "add", "longest"]
_WORDS = (
    "river stone cloud garden window silver morning letter market bridge forest candle winter summer castle "
    "paper orange button pocket ladder mirror island desert harbor meadow thunder basket blanket copper engine "
    "feather hammer kitchen lantern needle ocean pencil quarter ribbon saddle temple valley walnut yellow anchor "
    "barrel"
)
_ASKED: dict[Task, tuple[str, ...]] = {
    "upper": ("Write these words in capital letters.", "Put the words into upper case."),
    "reverse": ("Write these words in reverse order.", "Turn the order of the words round."),
    "count": ("How many words are there?", "Count the words."),
    "first": ("Which word comes first in the alphabet?", "Name the alphabetically first word."),
    "last": ("Which word comes last in the alphabet?", "Name the alphabetically last word."),
    "repeat": ("Say these words twice.", "Repeat the words once more."),
    "add": ("Add the numbers.", "What is the sum of the numbers?"),
    "longest": ("Which word is the longest?", "Name the longest word."),
}


def generated_instructions(count: int = 999, seed: int = 0) -> list[Instruction]:
    """Short tasks on drawn words and numbers with their right answers, no two alike: the stand-in for public rows."""
    import random

    rng, vocabulary = random.Random(seed), _WORDS.split()
    found: dict[str, Instruction] = {}
    while len(found) < count:
        task: Task = rng.choice(list(_ASKED))
        words = rng.sample(vocabulary, rng.randint(2, 6))
        numbers = [rng.randint(1, 99) for _ in words]
        answer = {
            "upper": " ".join(words).upper(),
            "reverse": " ".join(reversed(words)),
            "count": f"There are {len(words)} words.",
            "first": f"The first is {min(words)}.",
            "last": f"The last is {max(words)}.",
            "repeat": " ".join(words * 2),
            "add": f"The sum is {sum(numbers)}.",
            "longest": f"The longest is {max(words, key=len)}.",
        }[task]
        given = " ".join(map(str, numbers)) if task == "add" else " ".join(words)
        row = Instruction(rng.choice(_ASKED[task]), given, answer)
        found.setdefault(_plain(row), row)
    return list(found.values())
