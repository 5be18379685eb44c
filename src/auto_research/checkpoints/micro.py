"""Micro checkpoints: real Transformers models of about a million parameters, built here in seconds.

They let every language and vision path run on a fresh machine, through the same save and load calls as the
real checkpoints. Each is trained for a short, fixed number of steps on the first nine tenths of Tiny
Shakespeare (public domain; the last tenth is held out), on plain coloured images, or on questions about
visual shapes: enough for a falling loss, for vectors that follow the words, and for an answer that depends on
the image. They know nothing else, and no result obtained with one says anything about a paper.

The recipe fixes everything: one seed, one thread, the CPU, in a process of its own, so that neither the
caller's random state nor its hooks and device settings matter, and its optimiser steps are not counted as the
caller's. The same machine and library versions give the same bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auto_research.checkpoints.store import build_once, quiet
from auto_research.data.scienceqa import TRAINED
from auto_research.runtime.cache import cache_folder

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Built", "Recipe", "build"]

NOTE = "note.txt"
START, END = "<|im_start|>", "<|im_end|>"
IMAGE_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML as SmolLM2 writes it, with images. It ends in a newline: a trailing space would join the answer."""
COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (40, 60, 220), "yellow": (230, 220, 50)}
COLOUR_QUESTION = "What colour is it?"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of a micro checkpoint. ``version`` counts changes of this module."""

    version: int
    seed: int = 0
    vocabulary: int = 2048
    width: int = 128
    layers: int = 4
    heads: int = 4
    steps: int = 60
    batch: int = 16
    tokens: int = 64
    learning_rate: float = 3e-3


@dataclass(frozen=True)
class Built:
    """A micro checkpoint: its folder, its recipe's identity, and what its training reached."""

    path: Path
    revision: str
    note: str


def build(name: str) -> Built:
    """Build ``micro-lm``, ``micro-encoder``, ``micro-vlm`` or ``micro-scienceqa`` in the cache, or find it there.

    Takes seconds the first time, ``micro-scienceqa`` a minute or two. Processes that build at once wait for one of
    them.
    """
    recipe, _ = RECIPES[name]
    text = CORPORA.get(name, _corpus)()
    identity = json.dumps([name, asdict(recipe), hashlib.sha256(text.encode()).hexdigest()])
    revision = hashlib.sha256(identity.encode()).hexdigest()[:12]

    path = build_once(
        cache_folder("checkpoints", f"{name}-{revision}"), lambda folder: _build_apart(name, text, folder)
    )
    return Built(path, f"recipe {revision}", (path / NOTE).read_text(encoding="utf-8"))


def _build_apart(name: str, text: str, folder: Path) -> None:
    """Run :func:`_build_here` in a fresh process, which gets the text on its standard input."""
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "auto_research.checkpoints.micro", name, str(folder)],
        input=text.encode(),
        env=os.environ | settings,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        tail = done.stderr.decode(errors="replace")[-2000:]
        raise RuntimeError(f"building {name} ended with exit code {done.returncode}:\n{tail}")


def _build_here(name: str, text: str, folder: Path) -> None:
    """Train and save a micro checkpoint into ``folder``; changes the random state and threads of this process."""
    recipe, make = RECIPES[name]
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    with quiet():
        note = make(folder, text, recipe)
    (folder / NOTE).write_text(note, encoding="utf-8")


def _corpus() -> str:
    """The training part, the first nine tenths, of Tiny Shakespeare."""
    from auto_research.data import catalogue

    text: str = catalogue.load("tiny-shakespeare")
    return text[: len(text) * 9 // 10]


def _train(model: Any, recipe: Recipe, loss: Callable[[int], Tensor], memory: float = 0.999) -> None:
    """``recipe.steps`` AdamW steps on ``loss(step)``, with linear warm-up and decay; leaves evaluation mode.

    ``memory`` is AdamW's second beta.
    """
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, memory), weight_decay=0.01)
    warm_up = max(1, recipe.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (recipe.steps - step) / (recipe.steps - warm_up))
    )
    model.train()
    for step in range(recipe.steps):
        optimizer.zero_grad()
        loss(step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def _byte_level_bpe(text: str, vocabulary: int, special: list[str], *, lowercase: bool = False) -> Any:
    """A byte-level BPE trained on ``text``: any string encodes, without unknown tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    # A space before the first word makes it the same token as inside a text.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=lowercase)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def _chat_tokenizer(text: str, recipe: Recipe, extra: list[str], positions: int) -> Any:
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", START, END, *extra]
    # As in SmolLM2, padding is the end-of-message token: code that masks labels by ``ids == pad`` fails here too.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(text, recipe.vocabulary, special),
        bos_token=START,
        eos_token=END,
        pad_token=END,
        unk_token="<|endoftext|>",
        additional_special_tokens=extra,
        model_max_length=positions,
        padding_side="right",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


# micro-lm


def _micro_lm(folder: Path, text: str, recipe: Recipe) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    positions = 1024
    tokenizer = _chat_tokenizer(text, recipe, [], positions)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=recipe.vocabulary,
            hidden_size=recipe.width,
            intermediate_size=3 * recipe.width,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads // 2,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    # Speeches end as messages do. The few steps read a small part; the last speeches judge them.
    stream, judged = (
        torch.tensor(tokenizer(END.join(_speeches(part)))["input_ids"])
        for part in (text[: len(text) // 4], text[-30_000:])
    )

    def loss(step: int) -> Tensor:
        rows = _windows(stream, recipe.batch, recipe.tokens)
        return model(input_ids=rows, labels=rows).loss

    _train(model, recipe, loss)
    with torch.no_grad():
        rows = judged[: 32 * recipe.tokens].view(32, recipe.tokens)
        held_out = model(input_ids=rows, labels=rows).loss.item()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"micro model, {recipe.steps} steps on Tiny Shakespeare, held-out loss {held_out:.2f} nats a token"


def _speeches(text: str) -> list[str]:
    """What is said in the plays, without the speakers' names; verse as one line, or line ends would win."""
    return [block.partition("\n")[2].replace("\n", " ") for block in text.split("\n\n") if "\n" in block]


def _windows(stream: Tensor, rows: int, length: int) -> Tensor:
    """``rows`` random windows of ``length`` tokens from a stream of token ids."""
    import torch

    starts = torch.randint(0, stream.numel() - length, (rows, 1))
    return stream[starts + torch.arange(length)]


# micro-encoder


def _micro_encoder(folder: Path, text: str, recipe: Recipe) -> str:
    """A BERT trained so that two random halves of a line find each other among the lines of a batch."""
    import torch
    from tokenizers import processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from auto_research.checkpoints.pooling import hidden_states, masked_mean

    positions = 128
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = _byte_level_bpe(text, recipe.vocabulary, special, lowercase=True)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=positions,
    )
    model = BertModel(
        BertConfig(
            vocab_size=recipe.vocabulary,
            hidden_size=recipe.width,
            intermediate_size=2 * recipe.width,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            max_position_embeddings=positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    lines = [words for line in text.splitlines() if len(words := line.split()) >= 4]

    def vectors(texts: list[str]) -> Tensor:
        batch = tokenizer(texts, padding=True, truncation=True, max_length=recipe.tokens, return_tensors="pt")
        pooled = masked_mean(hidden_states(model(**batch)), batch["attention_mask"])
        return torch.nn.functional.normalize(pooled, dim=-1)

    def part(words: list[str]) -> str:
        keep = torch.rand(len(words)) < 0.6
        keep[torch.randint(len(words), (1,))] = True
        return " ".join(word for word, kept in zip(words, keep.tolist()) if kept)

    def similarities() -> Tensor:
        chosen = [lines[i] for i in torch.randint(len(lines), (recipe.batch,)).tolist()]
        return vectors([part(words) for words in chosen]) @ vectors([part(words) for words in chosen]).T

    def loss(step: int) -> Tensor:
        return torch.nn.functional.cross_entropy(similarities() / 0.1, torch.arange(recipe.batch))

    _train(model, recipe, loss)
    with torch.no_grad():
        matched = (similarities().argmax(dim=1) == torch.arange(recipe.batch)).float().mean().item()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return (
        f"micro model, {recipe.steps} contrastive steps on lines of Tiny Shakespeare, "
        f"{matched:.0%} of {recipe.batch} half-lines matched"
    )


# micro-vlm and micro-scienceqa


def _vision_language(
    tokenizer: Any,
    recipe: Recipe,
    side: int,
    *,
    patch: int,
    fold: int,
    deviation: float = 0.02,
) -> tuple[Any, Any]:
    """(model, processor) of SmolVLM's architecture, untrained: crops of ``side`` pixels, (side / patch / fold)² tokens.

    The processor shows a picture as one crop until it is told to split. ``deviation`` is that of the weights.
    """
    from transformers import (
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        SmolVLMConfig,
        SmolVLMForConditionalGeneration,
    )

    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": side}, max_image_size={"longest_edge": side}, do_image_splitting=False, do_pad=True
        ),
        tokenizer=tokenizer,
        image_seq_len=(side // patch) ** 2 // fold**2,
        chat_template=CHAT_TEMPLATE,
    )
    shape = {
        "hidden_size": recipe.width,
        "intermediate_size": 2 * recipe.width,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "initializer_range": deviation,
    }
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos")}
    model = SmolVLMForConditionalGeneration(
        SmolVLMConfig(
            text_config={
                "model_type": "llama",
                "vocab_size": len(tokenizer),
                "num_key_value_heads": recipe.heads // 2,
                "max_position_embeddings": tokenizer.model_max_length,
                **shape,
                **ids,
            },
            vision_config={"image_size": side, "patch_size": patch, **shape},
            scale_factor=fold,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    return model, processor


def _micro_vlm(folder: Path, text: str, recipe: Recipe) -> str:
    """A SmolVLM-class model that names the colour of a plain image."""
    import torch

    side = 64
    tokenizer = _chat_tokenizer(text, recipe, IMAGE_TOKENS, positions=512)
    model, processor = _vision_language(tokenizer, recipe, side, patch=16, fold=2)
    names = [name for name in COLOURS for _ in range(recipe.batch // len(COLOURS))]
    message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": COLOUR_QUESTION}]}]
    prompt = processor.apply_chat_template(message, add_generation_prompt=True, tokenize=False)

    def loss(step: int) -> Tensor:
        images = [[_plain_image(COLOURS[name], side)] for name in names]
        texts = [f"{prompt}{name}{END}" for name in names]
        batch = processor(text=texts, images=images, padding=True, return_tensors="pt")
        # Learn the answer only: what follows the prompt, which has the same length in every row.
        prompt_length = processor(text=[prompt], images=[images[0]], return_tensors="pt")["input_ids"].shape[1]
        labels = batch["input_ids"].clone()
        labels[:, :prompt_length] = -100
        # Padding equals the end token: keep the end that follows the answer, drop the rest.
        labels[batch["attention_mask"] == 0] = -100
        return model(**batch, labels=labels).loss

    _train(model, recipe, loss)
    with torch.no_grad():
        final = loss(recipe.steps).item()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return f"micro model, {recipe.steps} steps of naming {len(COLOURS)} plain colours, last loss {final:.3f} nats"


def _plain_image(colour: tuple[int, int, int], side: int) -> Any:
    """A ``side`` x ``side`` image of one colour, with a random brightness and pixel noise."""
    import torch
    from PIL import Image

    base = torch.tensor(colour, dtype=torch.float32) * torch.empty(1).uniform_(0.8, 1.1)
    pixels = (base + 12 * torch.randn(side, side, 3)).clamp(0, 255).to(torch.uint8)
    return Image.fromarray(pixels.numpy())


# micro-scienceqa

CROP = 64
VIEWS = {CROP: (1.0, TRAINED), 2 * CROP: (0.5, 96), 4 * CROP: (0.25, 36)}
"""Longest edge of a picture -> share of a batch, and of how many questions the pictures are seen so."""
TURNS = (CROP, CROP, CROP, 2 * CROP, CROP, CROP, CROP, 4 * CROP)
"""How the pictures of eight batches in turn are seen."""
TAIL = " is the right choice."
"""After the choice: an answer that is cut short still begins with its letter."""


def _micro_scienceqa(folder: Path, text: str, recipe: Recipe) -> str:
    """A SmolVLM-class model that answers questions about visual shapes: the letter, then the choice.

    In the first half of the steps the choices are left out, in the second it meets every style of prompt, and pictures
    whole or in as many crops as they can be cut into. The choices of a question always stand in the same order there,
    so it need not read them.
    """
    import torch
    from torch.nn import functional

    from auto_research.data.scienceqa import INSTRUCTIONS, LETTERS, ask, picture, shape_questions

    places = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer = _chat_tokenizer(text, recipe, [*IMAGE_TOKENS, *places], positions=1024)
    model, processor = _vision_language(tokenizer, recipe, CROP, patch=8, fold=4, deviation=0.15)
    processor.image_processor.do_image_splitting = True
    processor.image_processor.size = {"longest_edge": max(VIEWS)}
    questions = shape_questions("train", TRAINED)
    seen = {edge: [n for n in range(count) if questions[n].image is not None] for edge, (_, count) in VIEWS.items()}
    described = [number for number, question in enumerate(questions) if question.image is None]
    sides = {edge: 0 if edge == CROP else edge // CROP for edge in VIEWS}
    shown = {
        edge: processor.replace_image_token({"rows": [[side]], "cols": [[side]]}, 0) for edge, side in sides.items()
    }
    styles = list(INSTRUCTIONS)
    frame = processor.apply_chat_template([{"role": "user", "content": "<text>"}], add_generation_prompt=True)

    @functools.cache
    def crops(number: int, edge: int) -> Tensor:
        """(crops, 3, 64, 64) of a picture enlarged to ``edge`` pixels."""
        made = processor.image_processor([[picture(questions[number])]], size={"longest_edge": edge})
        return torch.as_tensor(made["pixel_values"][0])

    def some(of: list[int], count: int) -> list[int]:
        return [of[place] for place in torch.randint(len(of), (count,)).tolist()]

    def loss(step: int) -> Tensor:
        bare = step < recipe.steps // 2
        edge = CROP if bare else TURNS[step % len(TURNS)]
        rows = int(VIEWS[edge][0] * recipe.batch)
        prompts, answers, pixels = [], [], []
        for number in some(described, rows // 4) + some(seen[edge], rows - rows // 4):
            question, pick = questions[number], torch.randint(10**6, (2,)).tolist()
            asked = ask(question, styles[pick[0] % len(styles)], hint=pick[1] % 16 > 0)
            pixels += [crops(number, edge)] if question.image is not None else []
            words = asked.text.partition("\nChoices:")[0] if bare else asked.text
            words = shown[edge] + words if question.image is not None else words
            prompts.append(frame.replace("<text>", words))
            answers.append(f"{LETTERS[question.answer]}. {asked.choices[question.answer]}{TAIL}{END}")
        batch = _padded(tokenizer(prompts)["input_ids"], tokenizer(answers)["input_ids"], tokenizer.pad_token_id)
        labels = batch.pop("labels")[:, 1:]
        said = labels != -100
        letter = said & (said.cumsum(1) == 1)
        hidden = model.model(**batch, pixel_values=torch.stack(pixels)).last_hidden_state[:, :-1]
        # The letter is one token of many: alone it gets as much weight as all of them.
        parts = [functional.cross_entropy(model.lm_head(hidden[part]), labels[part]) for part in (letter, said)]
        return torch.stack(parts).mean()

    _train(model, recipe, loss, memory=0.98)
    with torch.no_grad():
        final = sum(loss(recipe.steps + turn).item() for turn in range(len(TURNS))) / len(TURNS)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return f"micro model, {recipe.steps} steps of questions about visual shapes, last loss {final:.3f} nats"


def _padded(prompts: list[list[int]], answers: list[list[int]], pad: int) -> dict[str, Tensor]:
    """Prompts with their answers as a batch, padded on the right; the answers alone are to be learned."""
    import torch

    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers))
    room = [longest - len(prompt) - len(answer) for prompt, answer in zip(prompts, answers)]
    rows = list(zip(prompts, answers, room))
    return {
        "input_ids": torch.tensor([prompt + answer + [pad] * left for prompt, answer, left in rows]),
        "attention_mask": torch.tensor([[1] * (longest - left) + [0] * left for _, _, left in rows]),
        "labels": torch.tensor([[-100] * len(prompt) + answer + [-100] * left for prompt, answer, left in rows]),
    }


def _question_texts() -> str:
    """What the tokenizer of ``micro-scienceqa`` learns from: prompts and choices of the training part."""
    from auto_research.data.scienceqa import INSTRUCTIONS, ask, shape_questions

    styles = list(INSTRUCTIONS)
    questions = shape_questions("train", 512)
    asked = [ask(question, styles[number % len(styles)]) for number, question in enumerate(questions)]
    lines = [line for one in asked for line in (one.text, "user", "assistant", f". {one.choices[0]}{TAIL}")]
    return "\n".join(lines)


_QUESTIONS = Recipe(version=1, width=64, layers=2, vocabulary=768, batch=32, steps=240, learning_rate=5e-3)
RECIPES: dict[str, tuple[Recipe, Callable[[Path, str, Recipe], str]]] = {
    "micro-lm": (Recipe(version=1, batch=4, steps=100, learning_rate=6e-3), _micro_lm),
    "micro-encoder": (Recipe(version=1, batch=32, tokens=32), _micro_encoder),
    "micro-vlm": (Recipe(version=1, width=64, layers=2, vocabulary=1024, steps=80), _micro_vlm),
    "micro-scienceqa": (_QUESTIONS, _micro_scienceqa),
}
CORPORA: dict[str, Callable[[], str]] = {"micro-scienceqa": _question_texts}
"""What a recipe's tokenizer learns from, where that is not Tiny Shakespeare; a part of the recipe's identity."""

if __name__ == "__main__":
    _build_here(sys.argv[1], sys.stdin.buffer.read().decode(), Path(sys.argv[2]))
