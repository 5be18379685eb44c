"""Lessons for a base that nothing was taught; the mixture of sources is tested beside the paper that uses it."""

import pytest
import torch

from auto_research.tasks import intent_tuning as tuning
from auto_research.tasks.generation import IGNORED, scratch_causal_lm
from auto_research.tasks.intent_queries import ACTIONS, QueryCatalogue

PHRASES = ["gel pens", "ink cartridge", "ring binder"]


def catalogue(number):
    phrase = [*PHRASES, ""]
    short = [f"thing {number} {i}" for i in range(4)]
    return QueryCatalogue(short, short, [""] * 4, phrase, {p: f"other {p}" for p in PHRASES})


@pytest.fixture(scope="module")
def tokenizer():
    torch.manual_seed(0)
    texts = tuning.lesson_texts([catalogue(1), catalogue(2)])
    return scratch_causal_lm(texts, vocabulary=320, width=16, layers=1, heads=2, phrases=PHRASES)[1]


def test_the_tokenizer_sees_titles_paraphrases_and_every_action_with_every_phrase():
    texts = tuning.lesson_texts([catalogue(1)])
    assert {f"{action} {phrase}\n" for action in ACTIONS for phrase in PHRASES} <= set(texts)
    assert {"thing 1 0\n", "other gel pens\n"} <= set(texts)


def test_lessons_label_the_type_of_a_title_and_the_latest_of_a_list(tokenizer):
    batch = next(tuning.lessons([catalogue(1), catalogue(2)], tokenizer, torch.device("cpu"), conversations=6))
    seen = set()
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"].bool(), batch["labels"], strict=True):
        assert not (labels[~mask] != IGNORED).any()
        assert torch.equal(labels[labels != IGNORED], ids[labels != IGNORED])
        text = tokenizer.decode(ids[mask])
        turns = text.split("<|im_end|>\n<|im_start|>assistant\n")
        answers = [turn.split("<|im_end|>")[0] for turn in turns[1:]]
        labelled = tokenizer.decode(labels[labels != IGNORED]).split("<|im_end|>")
        assert [answer.strip() for answer in answers] == [answer.strip() for answer in labelled[:-1]]
        assert len(answers) == 4
        for n, (question, answer) in enumerate(zip(turns, answers, strict=False)):
            lines = question.strip().split("\n")
            if n % 2 == 0:
                item = int(lines[-2].split()[-1])
                assert lines[-1] == "type?"
                assert answer.strip() == PHRASES[item]
            else:
                assert lines[-1] == "latest?"
                assert lines[-2].endswith(answer.strip())
            seen.add((n % 2, answer.strip()))
        assert len({line.split()[1] for line in text.split("\n") if line.startswith("thing")}) == 1
    assert len(seen) > 3
