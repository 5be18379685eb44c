"""ScienceQA: multiple-choice questions of school science, half of them about a picture (Lu et al., 2209.09513).

Read is the official format: `problems.json` (id -> problem), `pid_splits.json` (split -> ids) and the pictures
`<split>/<id>/image.png`, beside the two files or in their folder `images`. A problem also has a lecture and a solution;
both give the answer away, so nothing here carries them any further.

Where ScienceQA is not at hand, visual shapes asked in the same form stand in (`shape_questions`): two thirds of them
show a picture, the others say in their hint what a picture showed.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from auto_research.data import rows, shapes
from auto_research.runtime.errors import UserError

FOLDER = "scienceqa"
"""Where it lies under `--dataset-dir` and in the cache."""
PROBLEMS, SPLITS = "problems.json", "pid_splits.json"
PARTS = ("train", "val", "test")
"""The splits that share no problem; the others (trainval, minitrain, minival, minitest) are made of these."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ELSEWHERE = "lay the files of ScienceQA there as published"

Style = Literal["direct", "context-first", "elimination"]
Order = Literal["given", "reversed", "shuffled"]


@dataclass(frozen=True)
class Question:
    """What may be shown of a problem, and its answer.

    Attributes:
        choices: two or more, in the published order.
        answer: index of the right choice.
        hint: context to be read with the question; empty where there is none.
        image: a PNG or JPEG file, or its bytes; None for a question without a picture.
    """

    id: str
    text: str
    choices: tuple[str, ...]
    answer: int
    hint: str = ""
    image: Path | bytes | None = None
    subject: str = ""
    topic: str = ""
    grade: str = ""

    @property
    def content(self) -> str:
        """What is asked whatever the order of the choices, and the digest of the picture: equal for repetitions."""
        words = json.dumps([self.text, sorted(self.choices), self.hint])
        if self.image is None:
            return words
        return f"{words} {hashlib.sha256(_bytes(self)).hexdigest()}"


# ------------------------------------------------------------------------------------------------ official files


def read_scienceqa(folder: Path | str) -> dict[str, list[Question]]:
    """The questions of every split of `pid_splits.json`, in its order. Pictures are named, not opened.

    Raises `UserError`, which names the file and the problem, for missing or broken files, a problem outside the format,
    an id that `problems.json` lacks, and a problem in two of train, val and test.
    """
    folder = Path(folder)
    problems, splits = (_object(folder, name) for name in (PROBLEMS, SPLITS))
    where = folder / SPLITS
    if missing := [part for part in PARTS if part not in splits]:
        raise UserError(f"{where} has no split '{missing[0]}': {ELSEWHERE}.")
    owner: dict[str, str] = {}
    for part, ids in splits.items():
        if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids):
            raise UserError(f"{where}: split '{part}' is not a list of problem ids: {ELSEWHERE}.")
        seen: set[str] = set()
        for id in ids:
            if id not in problems:
                raise UserError(f"{where}: split '{part}' names problem {id!r}, which {PROBLEMS} does not have.")
            if id in seen:
                raise UserError(f"{where}: problem {id!r} is twice in '{part}': {ELSEWHERE}.")
            if part in PARTS and owner.setdefault(id, part) != part:
                raise UserError(f"{where}: problem {id!r} is in '{owner[id]}' and in '{part}': {ELSEWHERE}.")
            seen.add(id)
    root = folder / "images" if (folder / "images").is_dir() else folder
    read: dict[str, Question] = {}
    for ids in splits.values():
        for id in ids:
            if id not in read:
                read[id] = _question(folder / PROBLEMS, id, problems[id], root, owner.get(id))
    return {part: [read[id] for id in ids] for part, ids in splits.items()}


def _object(folder: Path, name: str) -> dict[str, Any]:
    path = rows.find(folder, name)
    if path is None:
        raise UserError(f"{folder} has no file {name}: {ELSEWHERE}.")
    try:
        found = json.loads(rows.read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error}): {ELSEWHERE}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object: {ELSEWHERE}.")
    return found


def _question(path: Path, id: str, problem: Any, root: Path, part: str | None) -> Question:
    """Checks a problem and keeps what may be shown: neither its lecture nor its solution."""

    def refuse(reason: str) -> UserError:
        return UserError(f"{path}, problem {id!r}: {reason}; correct it or fetch the file again.")

    if not isinstance(problem, Mapping):
        raise refuse("it is not a JSON object")
    text, choices, answer, image = (problem.get(name) for name in ("question", "choices", "answer", "image"))
    hint = problem.get("hint") or ""
    if not isinstance(text, str) or not text.strip():
        raise refuse("it has no text 'question'")
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise refuse("its 'choices' are not a list of texts")
    if not 2 <= len(choices) <= len(LETTERS):
        raise refuse(f"it has {len(choices)} choices, not 2 to {len(LETTERS)}")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise refuse(f"its 'answer' is {answer!r}, not the index of one of {len(choices)} choices")
    if not isinstance(hint, str):
        raise refuse("its 'hint' is not a text")
    picture = None
    if image is not None:
        split = problem.get("split", part)
        if not all(isinstance(name, str) and Path(name).name == name for name in (image, id)) or split not in PARTS:
            raise refuse(f"its picture {image!r} of split {split!r} is not in <split>/<id>/")
        picture = root / split / id / image
    kept = {name: str(problem.get(name) or "") for name in ("subject", "topic", "grade")}
    named = tuple(choice.strip() for choice in choices)
    return Question(id, text.strip(), named, answer, hint.strip(), picture, **kept)


def require_pictures(questions: Iterable[Question]) -> None:
    """Raises `UserError` when the file of a picture is not there."""
    for question in questions:
        if isinstance(question.image, Path) and not question.image.is_file():
            raise UserError(
                f"the picture {question.image} is not there: unpack train.zip, val.zip and test.zip of ScienceQA "
                f"beside {PROBLEMS}."
            )


def _bytes(question: Question) -> bytes:
    return rows.read_bytes(question.image) if isinstance(question.image, Path) else question.image or b""


def picture(question: Question) -> Any:
    """The picture as a PIL image in RGB, transparent parts white; None for a question without one.

    Raises `UserError` for a file that is no picture.
    """
    if question.image is None:
        return None
    from PIL import Image

    try:
        with Image.open(io.BytesIO(_bytes(question))) as opened:
            if opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info:
                painted = opened.convert("RGBA")
                ground = Image.new("RGBA", painted.size, "white")
                return Image.alpha_composite(ground, painted).convert("RGB")
            return opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        name = question.image if isinstance(question.image, Path) else f"of question {question.id}"
        raise UserError(f"the picture {name} cannot be read ({error}): fetch it again.") from error


def subset(questions: Iterable[Question], count: int) -> list[Question]:
    """`count` questions at most, the first in the order of the digests of their ids: the same on every machine."""
    return sorted(questions, key=lambda question: hashlib.sha256(question.id.encode()).digest())[:count]


# ------------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Asked:
    """A question as it is put to a model.

    Attributes:
        text: the prompt; a picture stands before it.
        order: choice `order[k]` of the question is the one with letter k.
        choices: texts of the choices in that order.
    """

    text: str
    order: tuple[int, ...]
    choices: tuple[str, ...]


INSTRUCTIONS: dict[Style, str] = {
    "direct": "Answer with the letter.",
    "context-first": "Answer with the letter.",
    "elimination": "Rule out the wrong choices, then answer with the letter.",
}


def ask(question: Question, style: Style = "direct", *, hint: bool = True, order: Order = "given") -> Asked:
    """The prompt of a question in a style.

    `direct`: question, context, choices. `context-first`: the context before the question. `elimination`: as `direct`,
    and asked to rule out wrong choices first. `hint` False leaves the context out.
    """
    placed = permutation(question, order)
    choices = tuple(question.choices[index] for index in placed)
    asked = [f"Question: {question.text}"]
    if hint and question.hint:
        asked.insert(0 if style == "context-first" else 1, f"Context: {question.hint}")
    lettered = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices)]
    return Asked("\n".join([*asked, "Choices:", *lettered, INSTRUCTIONS[style]]), placed, choices)


def permutation(question: Question, order: Order) -> tuple[int, ...]:
    """The indices of the choices as they are lettered; `shuffled` depends on the question alone."""
    given = range(len(question.choices))
    if order == "given":
        return tuple(given)
    if order == "reversed":
        return tuple(reversed(given))
    digests = [hashlib.sha256(f"{question.id} {index}".encode()).digest() for index in given]
    return tuple(sorted(given, key=digests.__getitem__))


# -------------------------------------------------------------------------------------------------------- shapes

ASKED = ("What colour is the shape?", "Which shape is it?", "Where is the shape?")
NAMED = (shapes.COLOURS, shapes.SHAPES, shapes.PLACES)
"""Choices of each question."""
TRAINED = 2048
"""Questions of the training part that the checkpoint built for them has learned from."""
_SEED = 20_250_102


def shape_questions(part: shapes.Part, count: int) -> list[Question]:
    """`count` questions about visual shapes, one a picture; two thirds show it, the others describe it in the hint.

    Colour, shape and place are asked about equally often, with their choices always in the same order: who knows the
    letters need not read the choices, which only another order of them brings to light. Parts share no picture layout,
    and no number of the pictures that are only described. Deterministic.
    """
    scenes = shapes.scenes(part, count)
    parts = get_args(shapes.Part)
    random = np.random.default_rng([_SEED, parts.index(part)])
    kinds = random.permutation(np.arange(count) % 9)
    made = []
    for number, (attributes, kind) in enumerate(zip(scenes.attributes.tolist(), kinds.tolist(), strict=True)):
        topic, described = kind % 3, kind < 3
        colour, shape, place = (NAMED[i][value] for i, value in enumerate(attributes))
        hint = f"Picture {len(parts) * number + parts.index(part)} shows a {colour} {shape} at the {place}."
        made.append(
            Question(
                id=f"{part}-{number}",
                text=ASKED[topic],
                choices=NAMED[topic],
                answer=attributes[topic],
                hint=hint if described else "",
                image=None if described else _png(scenes.images[number]),
                subject="visual shapes",
                topic=shapes.TOPICS[topic],
            )
        )
    return made


def _png(pixels: Any) -> bytes:
    """A picture (3, H, W) uint8 as a PNG file."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(stream, "PNG")
    return stream.getvalue()
