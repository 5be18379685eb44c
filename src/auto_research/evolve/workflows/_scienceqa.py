"""Putting multiple-choice questions to a vision-language model: recipe, batches, decoding, and reading the answers."""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from auto_research.data.scienceqa import LETTERS, Asked, Order, Question, Style, ask, picture
from auto_research.evolve.space import Genome
from auto_research.evolve.workflow import Scores

if TYPE_CHECKING:
    from torch import Tensor

REFERENCE_EDGE = 512
"""Pixels of a side of SmolVLM2's crops: what the image axis counts in. A model with smaller crops scales it along."""
PARSE_BONUS = 0.001
"""Weight of the parse rate in `fitness`."""

# ------------------------------------------------------------------------------------------------ reading answers

_FIRST = 0xE000  # private use: character _FIRST + i stands for the text of choice i
_TEXTS = f"{chr(_FIRST)}-{chr(_FIRST + len(LETTERS))}"
_LABEL = re.compile(rf"(?<!\w)(?:(?P<letter>[A-Z])|\((?P<small>[a-z])(?=\))|(?P<text>[{_TEXTS}]))(?!\w)")
_OPEN = r"[\s\"'“‘(\[{{<>=:*-]*"
_NOUN = r"(?:\s*\b(?:the|correct|right|best|option|choice|answer|letter|a|an))*"
_VERB = "(?:is|are|was|be|it's|that's|answer|option|choice|letter|choose|select|pick|think|say|guess|with|so|thus)"
_SET_OFF = re.compile(rf"(?:^|[\n:(\[{{\"“=>*]|[.,;!?]\s|\s-\s|\b{_VERB}\b){_NOUN}{_OPEN}$", re.IGNORECASE)
_FINAL = re.compile(
    rf"\banswer\b(?:\s+(?:is|would be|must be|should be)\b)?\s*[:=]?\s*(?:(?:option|choice|letter)\b)?{_OPEN}$",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"(?:\b(?:not|never|neither|nor|except|than|wrong|incorrect|(?:eliminat|exclud)\w+|(?:rul|cross)\w* out)|n't)"
    rf"{_NOUN}{_OPEN}$",
    re.IGNORECASE,
)
_ENDS = re.compile(
    r"[\"'”’)\]}*]*(?:$|\n|[,;:!?/&]|\.(?!\w)|\s+[-–—(]|\s*[\"”)\]}]|\s+(?:because|since|as|for|which|is|due)\b)",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"[\"'”’)\]}*]*\s*(?:(?:is|are|was)\s+(?:not|wrong|incorrect|false|eliminated|excluded|out)|isn't|cannot|can't)\b",
    re.IGNORECASE,
)
_JOINED = re.compile(rf"[)\]]*\s*[,/&]\s*[(\[]*(?P<next>[A-Z{_TEXTS}])(?!\w)")


def parse(said: str, choices: Sequence[str]) -> int | None:
    """Index of the choice that an answer names; None when it names none, several, or one that there is not.

    What counts is a capital letter that stands alone as a label, or the full text of a choice, at a place where an
    answer may stand: at the beginning, after a stop or a colon, or after words such as `the answer is`. A letter inside
    a word, the article `A`, and what is ruled out (`not B`, `C is wrong`) do not count. The last `answer is` decides;
    otherwise all labels must agree, and a label outweighs the text after it.
    """
    said, texts = _plain(said), [_plain(choice).rstrip(".") for choice in choices]
    if not said:
        return None
    bare = said.strip(" .,:;!?()[]{}\"'")
    if re.fullmatch("[A-Za-z]", bare):
        return _index(bare, len(choices))
    same = [i for i, text in enumerate(texts) if text == said.rstrip(".")]
    same = same or [i for i, text in enumerate(texts) if text.casefold() == said.rstrip(".").casefold()]
    if same:
        return same[0] if len(same) == 1 else None
    said = _masked(said, texts)
    letters: list[int | None] = []
    named: list[int | None] = []
    final: list[int | None] = []
    for found in _LABEL.finditer(said):
        before, after = said[: found.start()], said[found.end() :]
        if _REFUSED.search(before) or _DENIED.match(after) or not _SET_OFF.search(before):
            continue
        letter = found["letter"] or found["small"]
        follows = ord(after.lstrip()[:1] or " ") - _FIRST
        index = _index(letter, len(choices)) if letter else ord(found["text"]) - _FIRST
        # `B gravity` is a label and its text, `A magnet` may be an article and a noun.
        labels = bool(letter) and 0 <= follows < len(choices) and (letter != "A" or follows == index)
        if not (_ENDS.match(after) or labels):
            continue
        (letters if letter else named).append(index)
        if _FINAL.search(before):
            joined = _JOINED.match(after)
            other = joined and (
                _index(joined["next"], len(choices)) if joined["next"].isascii() else ord(joined["next"]) - _FIRST
            )
            final.append(None if joined and other != index else index)
    for decisive in (final[-1:], letters, named):
        if decisive:
            return decisive[0] if len(set(decisive)) == 1 else None
    return None


def _plain(text: str) -> str:
    """One form for one sign, no emphasis, single spaces within a line."""
    text = unicodedata.normalize("NFKC", text).replace("’", "'").replace("*", "").replace("`", "")
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


def _index(letter: str, count: int) -> int | None:
    index = LETTERS.index(letter.upper())
    return index if index < count else None


def _masked(said: str, texts: Sequence[str]) -> str:
    """The answer with one sign for each full text of a choice, the longest first; letters alone stay letters."""
    known = {text: i for i, text in enumerate(texts) if len(text) > 1 or text.isdecimal()}
    folded = {text.casefold(): i for text, i in known.items()}
    exact = len(folded) < len(known)  # genotypes such as Bb and bb differ in case alone
    names = sorted(known, key=len, reverse=True)
    if not names:
        return said
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in names), 0 if exact else re.IGNORECASE)
    return pattern.sub(lambda found: chr(_FIRST + (known[found[0]] if exact else folded[found[0].casefold()])), said)


# ------------------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True)
class Recipe:
    """How a question is put to a model and how its answer is taken; what the code reads and nothing else.

    Attributes:
        edge: pixels of the longest edge a picture is scaled to before it is cut into crops; a crop's side shows it as
            one crop.
        mode: `generate` text and parse it, or compare the likelihoods of the letters.
        tokens: new ones at most; 0 without generation.
    """

    style: Style
    hint: bool
    order: Order
    edge: int
    mode: Literal["generate", "letter-likelihood"]
    tokens: int

    @classmethod
    def of(cls, genome: Genome, crop: int) -> Recipe:
        """The recipe of a genome for a model whose crops have `crop` pixels a side.

        Without splitting a picture is one crop whatever its size, as it is with an edge of one crop.
        """
        edge = int(genome.get("image.longest_edge", REFERENCE_EDGE))
        return cls(
            style=cast(Style, genome["prompt.style"]),
            hint=genome["prompt.hint"] == "on",
            order=cast(Order, genome["prompt.choice_order"]),
            edge=max(crop, edge * crop // REFERENCE_EDGE),
            mode=cast(Any, genome["answer.mode"]),
            tokens=int(genome.get("decode.max_new_tokens", 0)),
        )


@dataclass(frozen=True)
class Given:
    """An answer.

    Attributes:
        choice: index of the choice in the question's own order; None when the answer names none.
        text: what was said, or the likeliest letter.
        visual: visual tokens that the model read.
        new: tokens that it wrote, its end included.
    """

    choice: int | None
    text: str
    visual: int
    prompt: int
    new: int


class Reader:
    """A frozen model that answers by one recipe."""

    def __init__(self, model: Any, processor: Any, recipe: Recipe) -> None:
        self.model, self.processor, self.recipe = model, processor, recipe
        self.tokenizer = processor.tokenizer

    def prompt(self, question: Question) -> tuple[str, Asked]:
        """The text before the answer, in the model's own chat format, and the letters' meaning."""
        recipe = self.recipe
        asked = ask(question, recipe.style, hint=recipe.hint, order=recipe.order)
        shown = [{"type": "image"}] if question.image is not None else []
        message = {"role": "user", "content": [*shown, {"type": "text", "text": asked.text}]}
        return self.processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False), asked

    def batch(self, questions: Sequence[Question], device: Any) -> tuple[dict[str, Tensor], list[Asked]]:
        """Inputs of a forward pass, prompts padded on the left so that every answer begins at the same place.

        input_ids and attention_mask (N, T); with pictures pixel_values (N, most crops, 3, side, side) and their mask,
        absent crops all zero, which the model leaves out.
        """
        prompts, asked = zip(*map(self.prompt, questions))
        images = [[picture(question)] if question.image is not None else [] for question in questions]
        seen = (
            {
                "images": images,
                "size": {"longest_edge": self.recipe.edge},
                "do_image_splitting": self.recipe.edge > self.processor.image_processor.max_image_size["longest_edge"],
            }
            if any(images)
            else {}
        )
        made = self.processor(text=list(prompts), padding=True, padding_side="left", return_tensors="pt", **seen)
        return {name: value.to(device) for name, value in made.items()}, list(asked)

    def answer(self, questions: Sequence[Question], batch: int) -> Iterator[Given]:
        """The answers, in the order of the questions, `batch` at a time."""
        import torch

        for first in range(0, len(questions), batch):
            some = questions[first : first + batch]
            with torch.inference_mode():
                inputs, asked = self.batch(some, self.model.device)
                written = self.recipe.mode == "generate"
                texts, new = self._generate(inputs) if written else self._likeliest(inputs, asked)
            visual = (inputs["input_ids"] == self.model.config.image_token_id).sum(1).tolist()
            prompt = inputs["attention_mask"].sum(1).tolist()
            for one, text, *counts in zip(asked, texts, visual, prompt, new, strict=True):
                named = parse(text, one.choices)
                yield Given(None if named is None else one.order[named], text, *counts)

    def _generate(self, inputs: dict[str, Tensor]) -> tuple[list[str], list[int]]:
        """Greedy texts and the numbers of their tokens, the end included."""
        import torch

        ends = self.model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else ends or [self.tokenizer.eos_token_id]
        out = self.model.generate(
            **inputs,
            do_sample=False,
            num_beams=1,
            max_new_tokens=self.recipe.tokens,
            eos_token_id=ends,
            pad_token_id=self.tokenizer.pad_token_id,
        )[:, inputs["input_ids"].shape[1] :]
        ended = torch.isin(out, torch.tensor(ends, device=out.device))
        # What follows the first end is padding, which may be the end token itself.
        new = torch.where(ended.any(1), ended.long().argmax(1) + 1, out.shape[1]).tolist()
        rows = [row[:count] for row, count in zip(out.tolist(), new, strict=True)]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True), new

    def _likeliest(self, inputs: dict[str, Tensor], asked: Sequence[Asked]) -> tuple[list[str], list[int]]:
        """The letter with the highest probability as the next token, among those of the question."""
        import torch

        scores = self.letter_scores(inputs)
        count = torch.tensor([len(one.choices) for one in asked], device=scores.device)
        absent = torch.arange(scores.shape[1], device=scores.device) >= count[:, None]
        best = scores.masked_fill(absent, -torch.inf).argmax(1).tolist()
        return [LETTERS[index] for index in best], [0] * len(best)

    def letter_scores(self, inputs: dict[str, Tensor]) -> Tensor:
        """log p of each letter as the next token (N, letters), with or without a space before it."""
        import torch

        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = self.model(**inputs, position_ids=positions, logits_to_keep=1).logits[:, -1].float()
        spelled = [
            [ids[0] for form in (letter, f" {letter}") if len(ids := self._ids(form)) == 1] for letter in LETTERS
        ]
        logged = logits.log_softmax(-1)
        never = torch.full_like(logged[:, 0], -torch.inf)
        return torch.stack([logged[:, ids].logsumexp(-1) if ids else never for ids in spelled], 1)

    def _ids(self, text: str) -> list[int]:
        return cast(list[int], self.tokenizer(text, add_special_tokens=False)["input_ids"])


# ---------------------------------------------------------------------------------------------------- evaluation


def evaluate(reader: Reader, questions: Sequence[Question], batch: int, again: int) -> Scores:
    """Accuracy of the answers; an answer that names no choice is wrong. Units are questions: 1 right, 0 wrong.

    `order_agreement` is the share of the first `again` questions on which the same choice is taken when the choices
    are lettered in the opposite order.
    """
    from dataclasses import replace

    started = time.perf_counter()
    given = list(reader.answer(questions, batch))
    seconds = (time.perf_counter() - started) / len(questions)
    right = np.array([one.choice == question.answer for one, question in zip(given, questions, strict=True)], float)
    shown = np.array([question.image is not None for question in questions])
    parsed = np.array([one.choice is not None for one in given], float)
    metrics = {"accuracy": float(right.mean()), "parse_rate": float(parsed.mean())}
    metrics["fitness"] = metrics["accuracy"] + PARSE_BONUS * metrics["parse_rate"]
    for name, part in (("with_picture", shown), ("text_only", ~shown)):
        if part.any():
            metrics[f"accuracy_{name}"] = float(right[part].mean())
    metrics |= {
        "visual_tokens": float(np.mean([one.visual for one, seen in zip(given, shown, strict=True) if seen] or [0])),
        "prompt_tokens": float(np.mean([one.prompt for one in given])),
        "generated_tokens": float(np.mean([one.new for one in given])),
        "seconds_per_example": seconds,
    }
    if repeated := list(questions[:again]):
        turned = [
            replace(question, choices=question.choices[::-1], answer=len(question.choices) - 1 - question.answer)
            for question in repeated
        ]
        second = list(reader.answer(turned, batch))
        agreed = [
            one.choice is not None and two.choice is not None and one.choice + two.choice == len(question.choices) - 1
            for one, two, question in zip(given, second, repeated)
        ]
        metrics["order_agreement"] = float(np.mean(agreed))
    return Scores(metrics, right.tolist())
