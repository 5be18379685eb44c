"""The micro checkpoints, and building a checkpoint folder once."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from auto_research.checkpoints import micro
from auto_research.checkpoints.micro import COLOUR_QUESTION, COLOURS, RECIPES
from auto_research.checkpoints.pooling import encode_texts, masked_mean
from auto_research.checkpoints.resolve import Resolved, load_causal_lm, load_text_encoder, load_vision_language
from auto_research.checkpoints.store import build_once, content_digest
from auto_research.runtime.cache import CACHE_VARIABLE
from auto_research.runtime.errors import UserError


def test_micro_lm_is_a_llama_of_about_a_million_parameters(micro_lm: Resolved) -> None:
    model, tokenizer = load_causal_lm(micro_lm, "cpu")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 3e6
    assert len(tokenizer) == 2048
    assert micro_lm.source == "built here"
    assert "held-out loss" in micro_lm.note


def test_micro_lm_learned_more_than_nothing(micro_lm: Resolved) -> None:
    """On the last tenth of the text, which no recipe reads."""
    from auto_research.data import catalogue

    text: str = catalogue.load("tiny-shakespeare")
    model, tokenizer = load_causal_lm(micro_lm, "cpu")
    ids = tokenizer(text[-8000:].replace("\n", " "), return_tensors="pt")["input_ids"][:, :1024]
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss
    assert loss < torch.tensor(2048.0).log() - 0.5


@pytest.mark.parametrize("text", ["To be, or not to be?", "Amélie (2001) – 日本語 🎬", "", "a\n\n b\t"])
def test_byte_level_bpe_loses_nothing(micro_lm: Resolved, text: str) -> None:
    _, tokenizer = load_causal_lm(micro_lm, "cpu")
    assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text


def test_chat_template_ends_in_a_newline_and_tokens_before_the_answer_stay_the_same(micro_lm: Resolved) -> None:
    _, tokenizer = load_causal_lm(micro_lm, "cpu")
    messages = [{"role": "user", "content": "Who goes there?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nWho goes there?<|im_end|>\n<|im_start|>assistant\n"
    whole = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "A friend."}], tokenize=False)
    assert whole == prompt + "A friend.<|im_end|>\n"
    ids = tokenizer(prompt)["input_ids"]
    assert tokenizer(whole)["input_ids"][: len(ids)] == ids


def test_micro_encoder_vectors_follow_the_words(micro_encoder: Resolved) -> None:
    """Against the same architecture untrained, on texts from another world than the training text."""
    titles = ["Toy Story (1995)", "The Godfather (1972)", "Jurassic Park (1993)", "Wild Wild West (1999)"]
    others = ["Toy Story 2", "The Godfather, Part II", "Lost World: Jurassic Park", "Into the West"]
    trained = encode_texts(micro_encoder, titles, "cpu") @ encode_texts(micro_encoder, others, "cpu").T
    assert trained.argmax(dim=1).tolist() == [0, 1, 2, 3]

    model, tokenizer = load_text_encoder(micro_encoder, "cpu")
    torch.manual_seed(0)
    untrained = type(model)(model.config).eval()

    def vectors(texts: list[str]) -> torch.Tensor:
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.inference_mode():
            return functional.normalize(masked_mean(untrained(**batch).last_hidden_state, batch["attention_mask"]))

    def margin(similarity: torch.Tensor) -> float:
        rest = similarity.masked_fill(torch.eye(4, dtype=torch.bool), 0).sum() / 12
        return float(similarity.diagonal().mean() - rest)

    assert margin(trained) > margin(vectors(titles) @ vectors(others).T) + 0.1


def test_micro_vlm_answers_by_the_image(micro_vlm: Resolved) -> None:
    model, processor = load_vision_language(micro_vlm, "cpu")
    content = [{"type": "image"}, {"type": "text", "text": COLOUR_QUESTION}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    torch.manual_seed(7)
    images = [[micro._plain_image(colour, 64)] for colour in COLOURS.values()]
    batch = processor(text=[prompt] * len(images), images=images, padding=True, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**batch, max_new_tokens=4, do_sample=False)[:, batch["input_ids"].shape[1] :]
    assert processor.batch_decode(ids, skip_special_tokens=True) == list(COLOURS)


@pytest.mark.parametrize("name", list(RECIPES))
def test_same_recipe_same_bytes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another seed gives other weights. A short recipe; what ran before must not matter."""
    text = micro._corpus()[:60_000]
    recipe, make = RECIPES[name]
    threads = torch.get_num_threads()
    digests = []
    for run, seed in enumerate((0, 0, 1)):
        monkeypatch.setitem(RECIPES, name, (replace(recipe, steps=2, batch=8, vocabulary=400, seed=seed), make))
        folder = tmp_path / str(run)
        folder.mkdir()
        torch.rand(run + 1)
        micro._build_here(name, text, folder)
        digests.append(content_digest(folder))
    torch.set_num_threads(threads)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
def test_building_leaves_the_callers_state_and_step_count_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    before, threads, steps = torch.get_rng_state(), torch.get_num_threads(), []
    handle = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    try:
        built = micro.build("micro-vlm")
    finally:
        handle.remove()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert steps == []
    assert built.path.is_dir()


def test_a_recipe_has_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(micro, "_build_apart", lambda name, text, folder: (folder / micro.NOTE).write_text("note"))
    first = micro.build("micro-lm")
    recipe, make = RECIPES["micro-lm"]
    monkeypatch.setitem(RECIPES, "micro-lm", (replace(recipe, seed=1), make))
    second = micro.build("micro-lm")
    assert first.path != second.path
    assert first.revision != second.revision


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setitem(RECIPES, "micro-none", RECIPES["micro-lm"])  # the other process does not know it
    with pytest.raises(RuntimeError, match=r"(?s)building micro-none ended with exit code 1:.*KeyError: 'micro-none'"):
        micro.build("micro-none")
    assert not [p for p in (tmp_path / "checkpoints").iterdir() if not p.name.endswith(".lock")]


# Building a folder once


def _slow_build(target: Path, log: Path) -> None:
    def build(folder: Path) -> None:
        with log.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        (folder / "a").write_text("1")
        time.sleep(0.2)  # long enough for the other processes to arrive
        (folder / "b").write_text("2")

    build_once(target, build)
    assert (target / "b").read_text() == "2"


def test_processes_that_build_at_once_build_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    target, log = tmp_path / "deep" / "folder", tmp_path / "log"
    children = [context.Process(target=_slow_build, args=(target, log)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert len(log.read_text().splitlines()) == 1
    assert sorted(p.name for p in target.iterdir()) == ["a", "b"]


def test_a_killed_builder_leaves_no_folder_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "folder"

    def die(folder: Path) -> None:
        (folder / "a").write_text("half")
        os._exit(9)

    child = multiprocessing.get_context("fork").Process(target=build_once, args=(target, die))
    child.start()
    child.join()
    assert child.exitcode == 9
    assert not target.exists()
    assert list(tmp_path.glob("*.part")) or list(tmp_path.glob(".*.part"))
    build_once(target, lambda folder: (folder / "a").write_text("whole") and None)
    assert (target / "a").read_text() == "whole"
    assert not list(tmp_path.glob(".*.part"))


def test_an_unwritable_cache_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"cannot write the checkpoint cache.*{CACHE_VARIABLE}"):
        build_once(tmp_path / "file" / "folder", lambda folder: None)


def test_folders_are_readable_by_whom_the_umask_allows(tmp_path: Path) -> None:
    def private(folder: Path) -> None:
        (folder / "weights").touch(mode=0o600)

    old = os.umask(0o022)
    try:
        target = build_once(tmp_path / "folder", private)
    finally:
        os.umask(old)
    assert (target / "weights").stat().st_mode & 0o777 == 0o644


def test_templates_are_valid_json_settings(micro_vlm: Resolved) -> None:
    """Everything in the folder is text or safetensors: nothing that would have to be unpickled."""
    assert {p.suffix for p in micro_vlm.path.iterdir()} == {".json", ".safetensors", ".jinja", ".txt"}
    for file in micro_vlm.path.glob("*.json"):
        json.loads(file.read_text())
