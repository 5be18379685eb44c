"""ScienceQA: the official format, prompts that give nothing away, pictures, and shapes in the same form."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from auto_research.data import scienceqa, shapes
from auto_research.data.scienceqa import (
    INSTRUCTIONS,
    LETTERS,
    Question,
    ask,
    permutation,
    picture,
    read_scienceqa,
    require_pictures,
    shape_questions,
    subset,
)
from auto_research.runtime.errors import UserError


def problem(**changes: Any) -> dict[str, Any]:
    """A problem with every field of the official file."""
    return {
        "question": "Which of these states is farthest north?",
        "choices": ["West Virginia", "Louisiana", "Arizona", "Oklahoma"],
        "answer": 0,
        "hint": "The map has a compass rose.",
        "image": "image.png",
        "task": "closed choice",
        "grade": "grade2",
        "subject": "social science",
        "topic": "geography",
        "category": "Geography",
        "skill": "Read a map: cardinal directions",
        "lecture": "LECTURE-TEXT north is at the top",
        "solution": "SOLUTION-TEXT it is West Virginia",
        "split": "val",
        **changes,
    }


def lay(folder: Path, problems: dict[str, Any], splits: dict[str, list[str]], images: str = "") -> Path:
    """A folder in the official format; every named picture is a small PNG of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "problems.json").write_text(json.dumps(problems), encoding="utf-8")
    (folder / "pid_splits.json").write_text(json.dumps(splits), encoding="utf-8")
    for number, (id, one) in enumerate(problems.items()):
        if one.get("image"):
            path = folder / images / one["split"] / id / one["image"]
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 10), (number, 0, 200)).save(path)
    return folder


@pytest.fixture
def official(tmp_path: Path) -> Path:
    problems = {
        "1": problem(split="train", image=None, hint=""),
        "2": problem(),
        "3": problem(image=None, hint="", choices=["yes", "no"], answer=1),
        "7": problem(split="test", answer=3),
    }
    splits = {"train": ["1"], "val": ["3", "2"], "test": ["7"], "trainval": ["1", "3", "2"], "minival": ["2"]}
    return lay(tmp_path / "scienceqa", problems, splits)


def test_the_official_format_is_read(official: Path) -> None:
    read = read_scienceqa(official)
    assert {part: [question.id for question in found] for part, found in read.items()} == {
        "train": ["1"],
        "val": ["3", "2"],
        "test": ["7"],
        "trainval": ["1", "3", "2"],
        "minival": ["2"],
    }
    one = read["minival"][0]
    assert one is read["val"][1]
    assert (one.text, one.answer) == ("Which of these states is farthest north?", 0)
    assert one.choices == ("West Virginia", "Louisiana", "Arizona", "Oklahoma")
    assert (one.subject, one.topic, one.grade) == ("social science", "geography", "grade2")
    assert one.image == official / "val" / "2" / "image.png"
    assert read["val"][0].image is None
    require_pictures(read["val"])
    assert picture(one).size == (20, 10)
    assert picture(read["val"][0]) is None


def test_pictures_may_lie_in_a_folder_of_their_own(tmp_path: Path) -> None:
    lay(tmp_path, {"2": problem()}, {"train": [], "val": ["2"], "test": []}, images="images")
    one = read_scienceqa(tmp_path)["val"][0]
    assert one.image == tmp_path / "images" / "val" / "2" / "image.png"
    require_pictures([one])


def test_lecture_and_solution_go_no_further(official: Path) -> None:
    for question in itertools.chain(*read_scienceqa(official).values()):
        assert "TEXT" not in json.dumps(asdict(question), default=str)
        for style, hint, order in itertools.product(INSTRUCTIONS, (True, False), ("given", "reversed", "shuffled")):
            assert "TEXT" not in ask(question, style, hint=hint, order=order).text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"question": " "}, "no text 'question'"),
        ({"choices": ["only"]}, "1 choices"),
        ({"choices": ["a", 2]}, "not a list of texts"),
        ({"choices": ["a", " "]}, "not a list of texts"),
        ({"answer": 4}, "'answer' is 4"),
        ({"answer": -1}, "'answer' is -1"),
        ({"answer": True}, "'answer' is True"),
        ({"answer": "A"}, "'answer' is 'A'"),
        ({"hint": ["x"]}, "'hint' is not a text"),
        ({"image": "../../image.png"}, "is not in <split>/<id>/"),
        ({"image": "image.png", "split": ".."}, "is not in <split>/<id>/"),
    ],
)
def test_a_problem_outside_the_format_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    lay(tmp_path, {"2": problem(image=None)}, {"train": [], "val": ["2"], "test": []})
    (tmp_path / "problems.json").write_text(json.dumps({"2": problem(**changes)}))
    with pytest.raises(UserError, match=r"problems\.json, problem '2': .*" + said.replace("[", r"\[")):
        read_scienceqa(tmp_path)


def test_broken_files_are_one_sentence(official: Path) -> None:
    def refused(name: str, content: str | None) -> str:
        path = official / name
        kept = path.read_text()
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(UserError) as caught:
            read_scienceqa(official)
        path.write_text(kept)
        return str(caught.value)

    assert "has no file pid_splits.json" in refused("pid_splits.json", None)
    assert "is no JSON" in refused("problems.json", '{"1": ')
    assert "no JSON object" in refused("problems.json", "[1]")
    assert "has no split 'test'" in refused("pid_splits.json", '{"train": [], "val": ["2"]}')
    assert "not a list of problem ids" in refused("pid_splits.json", '{"train": [], "val": [2], "test": []}')
    assert "names problem '9'" in refused("pid_splits.json", '{"train": [], "val": ["9"], "test": []}')
    assert "in 'val' and in 'test'" in refused("pid_splits.json", '{"train": [], "val": ["2"], "test": ["2"]}')
    assert "twice in 'val'" in refused("pid_splits.json", '{"train": [], "val": ["2", "2"], "test": []}')


def test_a_missing_or_broken_picture_is_one_sentence(official: Path) -> None:
    one = read_scienceqa(official)["minival"][0]
    assert isinstance(one.image, Path)
    one.image.write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"image\.png cannot be read"):
        picture(one)
    one.image.unlink()
    with pytest.raises(UserError, match=r"image\.png is not there: unpack"):
        require_pictures([one])


def test_transparent_parts_of_a_picture_are_white() -> None:
    stream = io.BytesIO()
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(stream, "PNG")
    seen = picture(Question("1", "?", ("a", "b"), 0, image=stream.getvalue()))
    assert seen.mode == "RGB"
    assert np.asarray(seen).min() == 255


def test_prompts_of_the_three_styles() -> None:
    one = Question("5", "Which is it?", ("red", "blue"), 1, hint="It is like the sky.")
    assert ask(one).text == (
        "Question: Which is it?\nContext: It is like the sky.\nChoices:\nA. red\nB. blue\nAnswer with the letter."
    )
    first = ask(one, "context-first").text.splitlines()
    assert first[:2] == ["Context: It is like the sky.", "Question: Which is it?"]
    assert sorted(first) == sorted(ask(one).text.splitlines())
    assert ask(one, "elimination").text.splitlines()[:-1] == ask(one).text.splitlines()[:-1]
    assert "Rule out" in ask(one, "elimination").text
    assert "sky" not in ask(one, hint=False).text
    assert ask(one, "context-first", hint=False).text == ask(one, hint=False).text


def test_an_order_says_which_choice_a_letter_means() -> None:
    one = Question("5", "Which?", ("red", "green", "blue"), 1)
    turned = ask(one, order="reversed")
    assert (turned.order, turned.choices) == ((2, 1, 0), ("blue", "green", "red"))
    assert "A. blue\nB. green\nC. red" in turned.text
    seen = {permutation(Question(str(id), "Which?", ("x", "y", "z"), 0), "shuffled") for id in range(60)}
    assert seen == set(itertools.permutations(range(3)))
    assert permutation(one, "shuffled") == permutation(one, "shuffled")


def test_a_subset_is_fixed_and_does_not_depend_on_the_order() -> None:
    questions = [Question(str(id), "?", ("a", "b"), 0) for id in range(50)]
    assert subset(questions, 7) == subset(questions[::-1], 7) == subset(questions, 50)[:7]
    assert len(subset(questions, 99)) == 50


def test_content_is_equal_for_repetitions_alone(official: Path) -> None:
    one, other, test = (read_scienceqa(official)[part][-1] for part in ("val", "train", "test"))
    assert one.content != other.content
    assert one.content != test.content, "the same words about another picture"
    turned = Question("x", one.text, one.choices[::-1], 3, one.hint, one.image)
    assert turned.content == one.content


def test_shapes_in_the_form_of_science_questions() -> None:
    questions = shape_questions("validation", 90)
    assert questions == shape_questions("validation", 90)
    scenes = shapes.scenes("validation", 90)
    for number, question in enumerate(questions):
        topic = shapes.TOPICS.index(question.topic)
        right = scenes.attributes[number, topic]
        assert question.choices[question.answer] == shapes.CHOICES[topic][right]
        assert sorted(question.choices) == sorted(shapes.CHOICES[topic])
        if question.image is None:
            words = [shapes.CHOICES[i][value] for i, value in enumerate(scenes.attributes[number])]
            assert all(word in question.hint for word in words), "what is asked can be read in the hint"
        else:
            assert question.hint == ""
            assert np.array_equal(np.asarray(picture(question)).transpose(2, 0, 1), scenes.images[number])
    assert sum(question.image is None for question in questions) == 30
    counts = {topic: sum(question.topic == topic for question in questions) for topic in shapes.TOPICS}
    assert counts == dict.fromkeys(shapes.TOPICS, 30)
    assert {LETTERS[question.answer] for question in questions} == set("ABCD")


def test_parts_of_the_shapes_share_nothing() -> None:
    parts: tuple[shapes.Part, ...] = ("train", "validation", "test")
    contents = [{question.content for question in shape_questions(part, 60)} for part in parts]
    assert [len(found) for found in contents] == [60, 60, 60]
    assert not set.intersection(*contents[:2])
    assert not contents[2] & (contents[0] | contents[1])
    assert scienceqa.TRAINED >= 60
