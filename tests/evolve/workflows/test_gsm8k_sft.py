"""GSM8K tuning: rows and loss mask, stop and resume, counted weights, held-out scores, effects of all axes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from auto_research.data.reasoning import Problem
from auto_research.evolve.cells import CHECKPOINTS
from auto_research.evolve.genome import effects
from auto_research.evolve.records import Candidate, CellResult, Trial
from auto_research.evolve.space import CONTROL, Infeasible
from auto_research.evolve.workflow import NonFinite, SealedTest, Sizes
from auto_research.evolve.workflows import _gsm8k_sft as tuning
from auto_research.evolve.workflows import _trl, gsm8k_sft
from auto_research.evolve.workflows._checkpoints import Checkpoint
from auto_research.evolve.workflows.gsm8k_sft import Gsm8kTuning
from auto_research.runtime.errors import UserError

SMALL = {"micro": 1, "longest": 220, "rows": 6, "validation": 5, "test": 3, "generated": 3, "new_tokens": 6}
SIZES = Sizes("smoke", Gsm8kTuning().sizes("smoke").values | SMALL)


@pytest.fixture(scope="module")
def workflow():
    return Gsm8kTuning()


@pytest.fixture(scope="module")
def data(workflow):
    return workflow.load(SIZES, None)


def genome(**changes):
    return Gsm8kTuning.space.resolve({name.replace("_", ".", 1): value for name, value in changes.items()})


def training(data, seed=0, sizes=SIZES, **changes):
    made = genome(**changes)
    rows, _ = tuning.chosen(data.parts.rows["train"], str(made["data.filter"]), sizes["rows"], sizes["longest"])
    return tuning.Training(data.parts.checkpoint, rows, tuning.plan_of(made, sizes), seed, sizes, "cpu")


def unwatched(step, loss):
    assert step > 0


# ------------------------------------------------------------------------------------------------------------ rows


def test_a_response_is_the_steps_and_the_answer_without_calculator_marks(data):
    tokenizer = data.parts.checkpoint.tokenizer()
    problem = Problem("Six eggs in 2 boxes?", "6/2 = <<6/2=3>>3 eggs.", "3")
    (row,) = tuning.encode([problem], tokenizer)
    assert tokenizer.decode(row.prompt).endswith("Six eggs in 2 boxes?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(row.response) == "6/2 = 3 eggs.\nAnswer: 3<|im_end|>\n"


def test_the_trainer_trains_on_the_same_tokens_in_the_same_order(data, tmp_path):
    for mask in ("response", "sequence"):
        made = training(data, loss_mask=mask)
        trainer, _ = made.trainer(tmp_path)
        sampled = list(trainer._get_train_sampler())
        assert sampled == list(range(len(made.rows)))
        for row, prepared in zip(made.rows, trainer.train_dataset):
            ids = row.prompt + row.response
            assert prepared["input_ids"] == ids
            assert prepared["labels"] == (ids if mask == "sequence" else [-100] * len(row.prompt) + row.response)
    assert trainer.model.dtype == torch.float32
    assert trainer.args.bf16


def test_filters_and_overlong_rows_are_counted(data):
    def row(calculations, length):
        return tuning.Row(Problem("q", "<<1+1=2>>" * calculations, "2"), [0] * (length - 1), [1])

    rows = [row(1, 5), row(2, 50), row(3, 5), row(4, 5), row(8, 50), row(0, 5)]
    assert tuning.chosen(rows, "all", 9, 10) == ([rows[0], rows[2], rows[3], rows[5]], 2)
    assert tuning.chosen(rows, "all", 2, 10) == ([rows[0], rows[2]], 1)
    assert tuning.chosen(rows, "short", 9, 10) == ([rows[0], rows[5]], 1)
    assert tuning.chosen(rows, "hard", 9, 10) == ([rows[2], rows[3]], 1)


def test_a_filter_that_leaves_no_row_is_infeasible(workflow, data):
    with pytest.raises(Infeasible, match="no training row that is hard has at most 20 tokens"):
        workflow.cost(genome(data_filter="hard"), Sizes("smoke", SIZES.values | {"longest": 20}), data)


def test_validation_is_the_last_part_of_the_training_rows(workflow, data, tmp_path):
    from auto_research.data import catalogue

    published = catalogue.load("gsm8k")
    assert list(data.parts.problems["validation"]) == published["train"][-500:]
    assert list(data.parts.problems["train"]) == published["train"][:-500]
    assert [r.problem for r in data.parts.rows["validation"]] == [
        r.problem
        for r in tuning.encode(published["train"][-500:][:40], data.parts.checkpoint.tokenizer())
        if len(r) <= SIZES["longest"]
    ][:5]
    assert data.hygiene["train and validation share"] == data.hygiene["train and test share"] == 0
    assert data.examples == 5
    assert "800 of 7473" in data.stand_in
    assert "micro-lm, built here" in data.stand_in
    assert list(data.checkpoints) == ["micro-lm"]
    assert set(data.digests) == {"gsm8k", "checkpoint micro-lm"}
    with pytest.raises(SealedTest):
        workflow.load_test(SIZES, None)
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    line = json.dumps({"question": "How many?", "answer": "2.\n#### 2"}) + "\n"
    (folder / "train.jsonl").write_text(line * 500)
    (folder / "test.jsonl").write_text(line)
    with pytest.raises(UserError, match="500 training problems, of which the last 500 are for validation"):
        workflow.load(SIZES, tmp_path)
    with pytest.raises(UserError, match="no validation row has at most 3 tokens"):
        workflow.load(Sizes("smoke", SIZES.values | {"longest": 3}), None)


# ------------------------------------------------------------------------------------------------- stop and resume


@pytest.fixture(scope="module")
def sessions(data, tmp_path_factory):
    """(folder, stopped, resumed, its weights, straight, its weights): one training in two sessions and in one."""
    folder, elsewhere = tmp_path_factory.mktemp("stopped"), tmp_path_factory.mktemp("straight")
    stopped, _, _ = training(data).session(folder, unwatched, stop_at=1)
    resumed, one, _ = training(data).session(folder, unwatched)
    straight, other, _ = training(data).session(elsewhere, unwatched)
    return folder, stopped, resumed, dict(one.named_parameters()), straight, dict(other.named_parameters())


def test_a_resumed_training_runs_step_2_alone_and_ends_bit_equal(sessions):
    folder, stopped, resumed, one, straight, other = sessions
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["checkpoint-1"]
    saved = {path.name for path in (folder / "checkpoint-1").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", _trl.SEAL} <= saved
    assert any(name.startswith("rng_state") for name in saved)
    assert (stopped.resumed_from, list(stopped.losses)) == (0, [1])
    assert (resumed.resumed_from, list(resumed.losses)) == (1, [2])
    assert (straight.resumed_from, list(straight.losses)) == (0, [1, 2])
    assert resumed.history == straight.losses
    assert _trl.equal_tensors(one, other) == len(one) == len(other) == 38
    start = torch.load(folder / "checkpoint-1" / "optimizer.pt", weights_only=True)
    assert start["state"][0]["exp_avg"].dtype == torch.float32


def test_more_than_half_of_the_weights_move_in_the_first_step(sessions):
    _, stopped, resumed, one, _, _ = sessions
    assert stopped.moved == resumed.moved
    assert stopped.moved.share > 0.9
    assert stopped.moved.trainable == sum(weight.numel() for weight in one.values())
    assert all(weight.dtype == torch.float32 for weight in one.values())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seed": 1}, "data order"),
        ({"train_weights": "bf16"}, "dtype of the weights"),
        ({"train_lr": 1e-4}, "learning rate"),
        ({"train_steps": 2.0}, "data order"),
        ({"data_filter": "hard"}, "data order"),
        ({"loss_mask": "sequence"}, "loss mask"),
        ({"train_neftune_alpha": 5}, "NEFTune alpha"),
    ],
)
def test_another_run_is_refused(data, sessions, changes, name):
    folder = sessions[0]
    made = json.loads((folder / "checkpoint-1" / _trl.SEAL).read_text())["identity"]
    with pytest.raises(UserError, match=f"cannot be resumed: its {name} is"):
        _trl.refuse_other(folder, made, training(data, **changes).identity)


def test_the_refusal_comes_before_any_step(data, sessions):
    with pytest.raises(UserError, match="its data order is"):
        training(data, seed=1).session(sessions[0], lambda step, loss: pytest.fail("it trained"))


@pytest.mark.slow
def test_a_killed_cell_goes_on_where_it_was(workflow, data, sessions, tmp_path, monkeypatch):
    """The first attempt dies in step 2; the second finds checkpoint-1 and ends as if nothing had happened."""
    monkeypatch.setenv(CHECKPOINTS, str(tmp_path / "checkpoints"))

    class Killed(Exception):
        pass

    def until_step_2(step, loss):
        if step == 2:
            raise Killed

    once = Sizes("smoke", SIZES.values | {"verify": 0})
    with pytest.raises(Killed):
        workflow.train(genome(), data, 0, once, "cpu", until_step_2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()] == ["checkpoint-1"]
    steps = []
    artefact = workflow.train(genome(), data, 0, once, "cpu", lambda step, loss: steps.append(step))
    assert steps == [1, 2], "where it stands, then the step that was missing"
    assert artefact.facts["resumed_from_step"] == artefact.facts["steps_after_resume"] == 1
    assert artefact.facts["first_train_loss"] == sessions[4].losses[1]
    assert _trl.equal_tensors(dict(artefact.model.named_parameters()), sessions[5]) == 38
    stored = tmp_path / "stored"
    stored.mkdir()
    workflow.save(artefact, stored)
    assert not (tmp_path / "checkpoints").exists()


def test_a_loss_that_is_no_number_ends_the_cell(data, tmp_path, monkeypatch):
    load = Checkpoint.load

    def broken(self, device, dtype=None):
        model, tokenizer = load(self, device, dtype)
        with torch.no_grad():
            model.get_input_embeddings().weight[:] = float("nan")
        return model, tokenizer

    monkeypatch.setattr(Checkpoint, "load", broken)
    with pytest.raises(NonFinite):
        training(data).session(tmp_path, lambda step, loss: None)


# ---------------------------------------------------------------------------------------- adapters and BF16 weights


@pytest.fixture(scope="module")
def adapted(workflow, data):
    """A training of adapters with its uninterrupted twin."""
    return workflow.train(genome(lora_r=8, train_lr=1e-3), data, 0, SIZES, "cpu", unwatched)


@pytest.mark.slow
def test_adapters_resume_bit_equal_and_their_b_moves_first(adapted, data):
    facts, shape = adapted.facts, data.parts.checkpoint.shape
    assert facts["tensors_bit_equal"] == facts["tensors"] == 38 + len(shape.adapter(8))
    assert facts["trainable_parameters"] == shape.trainable(8)
    assert facts["changed_share"] > 0.5
    # The gradient of A is zero as long as B is, so the first step moves the B matrices alone.
    assert facts["changed_parameters"] <= sum(out * 8 for out, _ in shape.linear.values())


@pytest.mark.slow
def test_weights_held_in_bf16_are_warned_of_and_barred(workflow, data):
    once = Sizes("smoke", SIZES.values | {"verify": 0})
    with pytest.warns(UserWarning, match="the weights are held in BF16"):
        artefact = workflow.train(genome(train_weights="bf16", train_lr=1e-6), data, 0, once, "cpu", unwatched)
    assert artefact.facts["weight_bits"] == 16
    assert artefact.facts["changed_share"] < 0.5
    (said,) = workflow.violations(artefact.facts)
    assert "of the weights moved in the first step" in said
    assert workflow.violations({"changed_share": 0.9}) == []
    assert workflow.space["train.weights"].group == CONTROL


# ---------------------------------------------------------------------------------------------------------- scores


def test_the_likelihood_is_that_of_single_rows(data):
    model, _ = data.parts.checkpoint.load("cpu")
    rows = data.parts.rows["validation"]
    nats, counts = tuning.response_nats(model, rows, "cpu")
    for row, total, count in zip(rows, nats, counts):
        with torch.no_grad():
            logs = model(input_ids=torch.tensor([row.prompt + row.response])).logits[0].double().log_softmax(-1)
        first = len(row.prompt)
        wanted = -sum(float(logs[first + i - 1, token]) for i, token in enumerate(row.response))
        assert float(total) == pytest.approx(wanted, rel=1e-5)
        assert int(count) == len(row.response)


def test_scores_and_the_floor_agree(workflow, data):
    checkpoint = data.parts.checkpoint
    untrained = tuning.Artefact(*checkpoint.load("cpu"))
    scores = workflow.validate(untrained, data, SIZES, "cpu")
    floors = workflow.floors(data, SIZES)
    assert scores.metrics["response_nll"] == pytest.approx(floors["untrained checkpoint"])
    assert sum(scores.units) / len(scores.units) == pytest.approx(scores.metrics["response_nll"])
    assert floors["uniform"] == pytest.approx(torch.tensor(float(checkpoint.shape.vocabulary)).log().item())
    assert scores.metrics["response_tokens"] == sum(len(row.response) for row in data.parts.rows["validation"])


def test_generation_in_a_batch_is_that_of_single_prompts(data):
    artefact = tuning.Artefact(*data.parts.checkpoint.load("cpu"))
    rows = data.parts.rows["validation"][:3]
    texts, lengths = tuning.generate(artefact, rows, 6, "cpu")
    for row, text, length in zip(rows, texts, lengths):
        ids = torch.tensor([row.prompt])
        for _ in range(6):
            with torch.no_grad():
                ids = torch.cat([ids, artefact.model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
            if ids[0, -1] == artefact.tokenizer.eos_token_id:
                break
        new = ids[0, len(row.prompt) :]
        assert length == len(new)
        assert text == artefact.tokenizer.decode(new, skip_special_tokens=True)


def test_answers_are_matched_exactly(data, monkeypatch):
    rows = data.parts.rows["validation"][:3]
    said = [f"So it is\nAnswer: {rows[0].problem.answer}.00", "Answer: -7777", f"it is {rows[2].problem.answer}"]
    monkeypatch.setattr(tuning, "generate", lambda artefact, asked, tokens, device: (said[: len(asked)], [4, 5, 6]))
    artefact = tuning.Artefact(*data.parts.checkpoint.load("cpu"))
    metrics = tuning.score(artefact, rows, SIZES, "cpu").metrics
    assert metrics["exact_match"] == pytest.approx(2 / 3)
    assert metrics["format_rate"] == pytest.approx(2 / 3)
    assert metrics["generated_tokens"] == 5


@pytest.mark.slow
def test_stored_models_score_as_the_trained_ones(workflow, data, adapted, tmp_path):
    scores = workflow.validate(adapted, data, SIZES, "cpu")
    workflow.save(adapted, tmp_path)
    assert not list(tmp_path.glob("model*.safetensors")), "the adapter alone is stored"
    made = genome(lora_r=8, train_lr=1e-3)
    restored = workflow.restore(made, data, tmp_path, SIZES, "cpu")
    again = workflow.test(restored, data.parts.rows["validation"], data, SIZES, "cpu")
    assert again.units == pytest.approx(scores.units)
    assert {name: scores.metrics[name] for name in again.metrics} == pytest.approx(again.metrics)
    assert scores.metrics["tensors_bit_equal"] == adapted.facts["tensors_bit_equal"]


# ---------------------------------------------------------------------------------------------- cost, effects, words


def test_cost_follows_the_genome(workflow, data):
    base, lora = (workflow.cost(genome(lora_r=r), SIZES, data) for r in (0, 8))
    bf16 = workflow.cost(genome(train_weights="bf16"), SIZES, data)
    shape = data.parts.checkpoint.shape
    assert (base.parameters, lora.parameters) == (shape.parameters, shape.trainable(8))
    assert lora.flops == pytest.approx(base.flops * 2 / 3)
    assert lora.memory_bytes < base.memory_bytes
    assert bf16.memory_bytes < base.memory_bytes
    assert base.extra["training_steps"] == 2
    whole = workflow.cost(genome(loss_mask="sequence"), SIZES, data)
    assert whole.extra["trained_tokens"] > base.extra["trained_tokens"]
    described = workflow.describe(genome(lora_r=8), SIZES, data)
    assert len(described.parameters) == 38 + len(shape.adapter(8))


def test_budgets_beyond_smoke_begin_with_adapters(workflow):
    assert workflow.start("smoke") == workflow.space.baseline()
    for budget in ("standard", "full"):
        assert workflow.start(budget)["lora.r"] == 16
        assert workflow.sizes(budget)["validation"] == 500
        assert workflow.sizes(budget)["steps"] >= 200


@pytest.mark.slow
def test_every_axis_value_has_an_effect(workflow, data):
    found = effects(workflow, SIZES, data)
    wanted = {(axis.name, value) for axis in workflow.space.axes for value in axis.probes()}
    assert {(effect.axis, effect.value) for effect in found} == wanted
    assert all(effect.holds for effect in found), [effect.text for effect in found if not effect.holds]
    moved = {(effect.axis, effect.value): set(effect.moved) for effect in found}
    assert "data_order" in moved["data.filter", "hard"]
    assert {"forward", "loss"} <= moved["loss.mask", "sequence"]
    assert {"forward", "loss"} <= moved["train.neftune_alpha", 5]
    assert "forward" in moved["train.weights", "bf16"]
    assert {"forward", "cost"} <= moved["lora.r", 8]


def test_the_record_says_what_moved_and_what_was_resumed():
    metrics = {
        "response_nll": 1.2,
        "weight_bits": 32.0,
        "compute_bits": 16.0,
        "changed_share": 0.976,
        "changed_parameters": 976.0,
        "trainable_parameters": 1000.0,
        "resumed_from_step": 1.0,
        "steps_after_resume": 1.0,
        "tensors": 272.0,
        "tensors_bit_equal": 272.0,
    }
    candidate = Candidate(id="baseline", generation=0, origin="baseline", genome={})
    cell = CellResult(cell="c", candidate="baseline", seed=0, role="search", state="completed", metrics=metrics)
    found = gsm8k_sft.account([Trial(candidate=candidate, state="completed", cells=[cell])])
    assert found["sentence"] == (
        "baseline: float32 weights, bfloat16 computation; the first step moved 97.6% of 1,000 trainable weights; it "
        "was resumed from step 1, and 272 of 272 tensors equal those of an uninterrupted training bit for bit."
    )
    (row,) = found["candidates"]
    assert (row["weights"], row["compute"], row["resumed_from_step"]) == ("float32", "bfloat16", 1.0)
    assert gsm8k_sft.account([])["sentence"] == "No training was completed."


# ------------------------------------------------------------------------------------------------------- rehearsal

REHEARSED = """
from pathlib import Path
import sys
from auto_research.evolve.workflow import Sizes
from auto_research.evolve.workflows.gsm8k_sft import Gsm8kTuning

workflow = Gsm8kTuning()
sizes = Sizes("smoke", workflow.sizes("smoke").values | {sizes})
data = workflow.load(sizes, None)
for number, made in enumerate([workflow.space.baseline(), *workflow.smoke_plan()]):
    artefact = workflow.train(made, data, 0, sizes, "cuda", lambda step, loss: None)
    assert next(artefact.model.parameters()).device.type == "cuda"
    folder = Path(sys.argv[1]) / str(number)
    folder.mkdir()
    workflow.save(artefact, folder)
    workflow.validate(workflow.restore(made, data, folder, sizes, "cuda"), data, sizes, "cuda")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rehearsal_on_a_virtual_card_has_no_finding(tmp_path):
    script, report = tmp_path / "cell.py", tmp_path / "report.json"
    script.write_text(REHEARSED.replace("{sizes}", repr(SMALL | {"validation": 2, "generated": 2})))
    call = [sys.executable, "-m", "auto_research.rehearsal", "--card", "a30", "--json", str(report), str(script)]
    done = subprocess.run([*call, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    summary = json.loads(report.read_text())
    assert summary["findings"] == []
    assert summary["share"]["flops_on_device"] > 0.9
