"""Micro checkpoints: real Transformers models of about a million parameters, built here in seconds.

They let every language and vision path run on a fresh machine, through the same save and load calls as the
real checkpoints. Each is trained for a short, fixed number of steps on the first nine tenths of Tiny
Shakespeare (public domain; the last tenth is held out) or on plain coloured images: enough for a falling
loss, for vectors that follow the words, and for an answer that depends on the image. They know nothing else,
and no result obtained with one says anything about a paper.

The recipe fixes everything: one seed, one thread, the CPU, in a process of its own, so that neither the
caller's random state nor its hooks and device settings matter, and its optimiser steps are not counted as the
caller's. The same machine and library versions give the same bytes.
"""

from __future__ import annotations

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
    """Build ``micro-lm``, ``micro-encoder`` or ``micro-vlm`` in the cache, or find it there.

    Takes seconds the first time. Processes that build at once wait for one of them.
    """
    recipe, _ = RECIPES[name]
    text = _corpus()
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


def _train(model: Any, recipe: Recipe, loss: Callable[[int], Tensor]) -> None:
    """``recipe.steps`` AdamW steps on ``loss(step)``, with linear warm-up and decay; leaves evaluation mode."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
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


# micro-vlm


def _micro_vlm(folder: Path, text: str, recipe: Recipe) -> str:
    """A SmolVLM-class model that names the colour of a plain image."""
    import torch
    from transformers import (
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        SmolVLMConfig,
        SmolVLMForConditionalGeneration,
    )

    side, patch, scale, positions = 64, 16, 2, 512
    tokenizer = _chat_tokenizer(text, recipe, IMAGE_TOKENS, positions)
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": side}, max_image_size={"longest_edge": side}, do_image_splitting=False, do_pad=True
        ),
        tokenizer=tokenizer,
        image_seq_len=(side // patch) ** 2 // scale**2,
        chat_template=CHAT_TEMPLATE,
    )
    shape = {
        "hidden_size": recipe.width,
        "intermediate_size": 2 * recipe.width,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
    }
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos")}
    model = SmolVLMForConditionalGeneration(
        SmolVLMConfig(
            text_config={
                "model_type": "llama",
                "vocab_size": len(tokenizer),
                "num_key_value_heads": recipe.heads // 2,
                "max_position_embeddings": positions,
                **shape,
                **ids,
            },
            vision_config={"image_size": side, "patch_size": patch, **shape},
            scale_factor=scale,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            pad_token_id=tokenizer.pad_token_id,
        )
    )
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


RECIPES: dict[str, tuple[Recipe, Callable[[Path, str, Recipe], str]]] = {
    "micro-lm": (Recipe(version=1, batch=4, steps=100, learning_rate=6e-3), _micro_lm),
    "micro-encoder": (Recipe(version=1, batch=32, tokens=32), _micro_encoder),
    "micro-vlm": (Recipe(version=1, width=64, layers=2, vocabulary=1024, steps=80), _micro_vlm),
}

if __name__ == "__main__":
    _build_here(sys.argv[1], sys.stdin.buffer.read().decode(), Path(sys.argv[2]))
