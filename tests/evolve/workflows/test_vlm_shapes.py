"""Visual shapes: floors and anchor, the wall between labels and inputs, evaluation, training, effects of all axes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from auto_research.data import shapes
from auto_research.evolve.genome import effects, make_candidate
from auto_research.evolve.plan import plan_generation, random_plan
from auto_research.evolve.records import RunConfig
from auto_research.evolve.workflow import Data, NonFinite, SealedTest, Sizes
from auto_research.evolve.workflows import vlm_shapes as v
from auto_research.evolve.workflows import workflow
from auto_research.layers import vision_language as vl

SIZES = Sizes("smoke", {"steps": 4, "train": 480, "validation": 48, "test": 48, "pictures": 0})


@pytest.fixture(scope="module")
def shapes_workflow():
    return workflow("vlm-shapes")


@pytest.fixture(scope="module")
def data(shapes_workflow):
    return shapes_workflow.load(SIZES, None)


def genome(**changes):
    return v.VisualShapes.space.resolve({name.replace("_", ".", 1): value for name, value in changes.items()})


def quiet(step, loss):
    assert step > 0
    assert np.isfinite(loss)


def test_words_are_tokens_of_one_small_vocabulary():
    assert v.VOCABULARY[vl.PAD] == v.PAD
    assert v.VOCABULARY[vl.END] == v.END
    assert len(v.VOCABULARY) == 18

    def spoken(row):
        return " ".join(v.VOCABULARY[token] for token in row if token > vl.END)

    assert tuple(map(spoken, v.question_tokens().tolist())) == shapes.QUESTIONS
    assert tuple(map(spoken, v.answer_tokens().tolist())) == shapes.ANSWERS
    assert (v.answer_tokens() == vl.END).sum(1).tolist() == [1] * 9
    assert not {token for row in v.question_tokens().tolist() for token in row if token} & {
        token for row in v.answer_tokens().tolist() for token in row if token
    }


def test_floors_and_anchor(shapes_workflow, data):
    floors = shapes_workflow.floors(data, SIZES)
    validation, train = data.parts.validation.scenes, data.parts.train.scenes
    right = 0
    for row in validation.attributes:
        for question in range(3):
            counts = [int((train.attributes[:, question] == a).sum()) for a in range(len(shapes.CHOICES[question]))]
            right += counts.index(max(counts)) == row[question]
    assert floors["most frequent training answer"] == pytest.approx(right / (3 * len(validation)))
    assert floors["most frequent training answer"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 4) / 3)
    assert floors["uniform guess"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 4) / 3)
    assert list(shapes_workflow.anchors(data, SIZES).values()) == [pytest.approx(0.75)]


def test_the_anchor_follows_the_data(shapes_workflow, data):
    few = replace(data.parts, validation=data.parts.validation.first(4))  # one colour and shape, four places
    assert list(shapes_workflow.anchors(Data(few, {}, {}, 4), SIZES).values()) == [pytest.approx(0.75)]
    few = replace(data.parts, validation=data.parts.validation.first(1))
    assert list(shapes_workflow.anchors(Data(few, {}, {}, 1), SIZES).values()) == [pytest.approx(1.0)]


def test_the_split_is_clean_and_the_test_part_sealed(shapes_workflow, data):
    assert data.hygiene == {
        "distinct train": 480,
        "distinct validation": 48,
        "distinct test": 48,
        "train and validation share": 0,
        "train and test share": 0,
        "validation and test share": 0,
    }
    assert data.examples == 48
    assert not data.stand_in
    assert set(vars(data.parts)) == {"train", "validation", "pixels"}
    with pytest.raises(SealedTest):
        shapes_workflow.load_test(SIZES, None)


def test_pixels_are_standardised_by_the_training_part(data):
    share = data.parts.train.images / 255
    assert data.parts.pixels == (pytest.approx(share.mean(), abs=1e-4), pytest.approx(share.std(), abs=1e-4))


def test_labels_reach_targets_and_no_input(shapes_workflow, data):
    train = data.parts.train
    scenes = train.scenes
    wrong = replace(train, scenes=replace(scenes, attributes=(scenes.attributes + 1) % np.array([3, 2, 4])))
    true, false = (next(shapes_workflow.batches(shown, 48, 0, "cpu")) for shown in (train, wrong))
    for name in ("picture", "images", "question", "hidden"):
        assert torch.equal(true[name], false[name])
    assert not torch.equal(true["answer"], false["answer"])
    model = shapes_workflow._build(genome(), data, 0, "cpu").eval()
    visual = model.see(model.encoder(true["images"]))
    one, other = (model(visual, torch.cat([b["question"], b["answer"]], dim=2).flatten(0, 1)) for b in (true, false))
    asked = v.QUESTION_TOKENS  # the logits that choose the first word know no word of any answer
    assert torch.equal(one[:, asked - 1], other[:, asked - 1])
    assert not torch.allclose(one[:, asked], other[:, asked])


def test_evaluation_gives_the_model_no_label(shapes_workflow, data):
    model, _ = shapes_workflow._fit(genome(), data, 0, 15, "cpu", None)
    validation = data.parts.validation.scenes
    questions = data.parts.validation.exercises()[0]
    given = v.answer(model, v.see(model, validation.images, "cpu"), questions)
    for attributes in (validation.attributes, (validation.attributes + 1) % np.array([3, 2, 4])):
        scenes = replace(validation, attributes=attributes)
        right = [
            [" ".join(v.VOCABULARY[t] for t in row if t > 1) == shapes.ANSWERS[a] for row, a in zip(rows, answers)]
            for rows, answers in zip(given.tolist(), scenes.answers.tolist())
        ]
        scores = v.evaluate(model, v.Shown(scenes), "cpu")
        assert scores.metrics["accuracy"] == pytest.approx(np.mean(right))
        assert scores.units == pytest.approx(np.mean(right, axis=1).tolist())


class Reader:
    """A model that reads the pictures exactly, or all but the place."""

    def __init__(self, place=True, stammer=False):
        self.place, self.stammer = place, stammer

    def encoder(self, images):
        return images

    def see(self, images):
        signal = images - 0.1
        colour = signal.sum((2, 3)).argmax(1)
        body = signal.amax(1)
        centre = (
            body[:, :16].sum((1, 2)) < body[:, 16:].sum((1, 2)),
            body[:, :, :16].sum((1, 2)) < body[:, :, 16:].sum((1, 2)),
        )
        place = 2 * centre[0].long() + centre[1].long()
        box = (body > 0.1).any(1).sum(1) * (body > 0.1).any(2).sum(1)
        cross = (body.clamp(min=0.1) - 0.1).sum((1, 2)) / 0.7 / box.clamp(min=1) < 0.62
        return torch.stack([colour, cross.long(), place if self.place else torch.zeros_like(place)], 1)[:, None].float()

    def generate(self, visual, question, length):
        assert torch.equal(question, v.question_tokens().repeat(len(visual), 1))
        answer = v.answer_tokens()[visual[:, 0].long() + torch.tensor(shapes.FIRST_ANSWER)].flatten(0, 1)
        if self.stammer:
            answer[:, 1] = answer[:, 0]
        return answer


def test_scores_of_a_perfect_and_of_a_position_blind_reader(shapes_workflow):
    validation = v.Shown(shapes.scenes("validation", 600))
    scores = v.evaluate(Reader(), validation, "cpu")
    assert scores.metrics["accuracy"] == scores.metrics["accuracy_untrained_combinations"] == 1
    assert scores.metrics["known_answers"] == 1
    assert scores.metrics["blank_accuracy"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 4) / 3)
    assert scores.metrics["shuffled_accuracy"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 4) / 3, abs=0.04)
    dependency = 1 - scores.metrics["shuffled_accuracy"]
    assert scores.metrics["visual_dependency"] == pytest.approx(dependency)
    assert scores.metrics["composite"] == pytest.approx(1 + 0.25 * dependency)
    assert scores.units == [1.0] * 600
    blind = v.evaluate(Reader(place=False), validation, "cpu")
    assert blind.metrics["accuracy"] == pytest.approx(0.75)
    assert blind.metrics["accuracy_place"] == pytest.approx(0.25)
    assert np.mean(blind.units) == pytest.approx(0.75)


def test_half_an_answer_is_no_answer():
    scores = v.evaluate(Reader(stammer=True), v.Shown(shapes.scenes("validation", 48)), "cpu")
    assert scores.metrics["accuracy"] == scores.metrics["known_answers"] == 0


def test_every_picture_is_asked_everything_once_an_epoch_in_an_order_of_the_seed(shapes_workflow, data):
    train = data.parts.train.first(16)

    def epoch(seed):
        stream = shapes_workflow.batches(train, 12, seed, "cpu")
        return torch.cat([next(stream)["picture"] for _ in range(4)])

    assert sorted(epoch(0).tolist()) == list(range(16))
    assert torch.equal(epoch(0), epoch(0))
    assert not torch.equal(epoch(0), epoch(1))
    batch = next(shapes_workflow.batches(train, 12, 0, "cpu"))
    assert batch["hidden"].sum(1).tolist() == [4] * 4
    for picture, image, question, answer in zip(batch["picture"], batch["images"], batch["question"], batch["answer"]):
        assert torch.equal(image, torch.from_numpy(train.images[picture]).float() / 255)
        assert torch.equal(question, v.question_tokens())
        assert torch.equal(answer, v.answer_tokens()[train.scenes.answers[picture]])


def test_a_seed_repeats_itself_and_another_does_not(shapes_workflow, data):
    first, again, other = (shapes_workflow.train(genome(), data, seed, SIZES, "cpu", quiet) for seed in (0, 0, 1))
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.tokens.weight, other.tokens.weight)


def test_stored_weights_answer_like_the_trained_model(shapes_workflow, data, tmp_path):
    changed = genome(model_connector="resampler", train_objective="sigmoid+masked-view")
    model = shapes_workflow.train(changed, data, 3, SIZES, "cpu", quiet)
    shapes_workflow.save(model, tmp_path)
    restored = shapes_workflow.restore(changed, data, tmp_path, SIZES, "cpu")
    validation = data.parts.validation
    assert torch.equal(v.see(model, validation.images, "cpu"), v.see(restored, validation.images, "cpu"))
    assert shapes_workflow.validate(model, data, SIZES, "cpu") == shapes_workflow.validate(restored, data, SIZES, "cpu")
    assert shapes_workflow.test(restored, validation, data, SIZES, "cpu") == v.evaluate(model, validation, "cpu")


def test_training_reports_and_learns(shapes_workflow, data):
    beats = []
    _, losses = shapes_workflow._fit(genome(), data, 0, 45, "cpu", lambda step, loss: beats.append((step, loss)))
    assert [step for step, _ in beats] == [10, 20, 30, 40, 45]
    assert beats[-1][1] == pytest.approx(losses[-1])
    assert np.mean(losses[-10:]) < 0.6 * losses[0]


def test_a_loss_that_is_no_number_ends_the_cell(shapes_workflow, data, monkeypatch):
    monkeypatch.setattr(vl, "answer_loss", lambda model, visual, question, answer: visual.sum() * float("nan"))
    with pytest.raises(NonFinite):
        shapes_workflow.train(genome(), data, 0, SIZES, "cpu", lambda step, loss: None)


def test_cost_is_that_of_the_model(shapes_workflow, data):
    baseline = shapes_workflow.cost(genome(), SIZES, data)
    model = shapes_workflow._build(genome(), data, 0, "cpu")
    assert baseline.parameters == sum(p.numel() for p in model.parameters())
    described = shapes_workflow.describe(genome(), SIZES, data)
    assert baseline.parameters == sum(int(np.prod(shape)) for shape in described.parameters.values())
    assert baseline.extra == {"visual_tokens": 16}
    folded = shapes_workflow.cost(genome(model_connector="pixel-shuffle"), SIZES, data)
    assert folded.extra == {"visual_tokens": 4}
    assert folded.flops < baseline.flops
    # Three passes over the matrices: each picture's 16 tokens meet the encoder's and the decoder's, each text token the
    # decoder's. The last block computes what is asked for, which only the bounds allow for.
    matrices = {
        name: sum(p.numel() for p in part.parameters() if p.dim() == 2)
        for name, part in (("encoder", model.encoder), ("decoder", model.decoder))
    }
    text = v.QUESTION_TOKENS + v.ANSWER_TOKENS - 1
    most = 6 * 16 * (16 * matrices["encoder"] + (16 + 3 * text) * matrices["decoder"])
    assert 0.6 * most < baseline.flops < 1.1 * most
    assert "+7" in shapes_workflow.match(genome(model_connector="pixel-shuffle"), baseline, SIZES, data)
    assert shapes_workflow.match(genome(model_positions="off"), baseline, SIZES, data) == ""


def test_every_axis_value_has_an_effect(shapes_workflow, data):
    found = effects(shapes_workflow, SIZES, data)
    wanted = {(axis.name, value) for axis in shapes_workflow.space.axes for value in axis.probes()}
    assert {(effect.axis, effect.value) for effect in found} == wanted
    assert all(effect.holds for effect in found), found
    moved = {(effect.axis, effect.value): set(effect.moved) for effect in found}
    assert {"forward", "loss"} <= moved["model.positions", "off"]
    assert "data_order" in moved["train.batch", 24]
    assert moved["train.objective", "masked-view"] == {"loss", "cost"}
    assert moved["train.lr", 3e-4] == {"loss"}


# ------------------------------------------------------------------------------------------------ labelled pictures


@pytest.fixture(scope="module")
def drawn(shapes_workflow, tmp_path_factory):
    """Data with sixty labelled pictures in Fashion-MNIST's format: class c is a bright bar in rows 2c to 2c + 5."""
    import struct

    folder = tmp_path_factory.mktemp("data")
    (folder / "fashion-mnist").mkdir()
    labels = np.arange(60, dtype=np.uint8) % 10
    images = np.random.default_rng(0).integers(0, 30, (60, 28, 28), dtype=np.uint8)
    for image, label in zip(images, labels):
        image[2 * label : 2 * label + 6] = 230
    for part, chosen in (("train", slice(0, 40)), ("t10k", slice(40, 60))):
        for name, values in (
            (f"{part}-images-idx3-ubyte", images[chosen]),
            (f"{part}-labels-idx1-ubyte", labels[chosen]),
        ):
            head = struct.pack(f">{1 + values.ndim}I", 0x800 + values.ndim, *values.shape)
            (folder / "fashion-mnist" / name).write_bytes(head + values.tobytes())
    sizes = Sizes("standard", SIZES.values | {"pictures": 20})
    return sizes, folder, shapes_workflow.load(sizes, folder)


def test_labelled_pictures_join_beyond_the_smoke_run(shapes_workflow, drawn):
    sizes, folder, data = drawn
    assert shapes_workflow.sizes("smoke")["pictures"] == 0
    assert min(shapes_workflow.sizes(budget)["pictures"] for budget in ("standard", "full")) > 1000
    train, held = data.parts.train, data.parts.validation
    assert (len(train.labelled), len(held.labelled)) == (20, 4)
    assert data.examples == len(held) == 52
    assert data.hygiene["fashion-mnist train and fashion-mnist test share"] == 0
    assert data.hygiene["distinct fashion-mnist test"] == 20
    assert "fashion-mnist" in data.digests
    with pytest.raises(SealedTest):
        shapes_workflow.load_test(sizes, folder)


def test_a_labelled_picture_is_asked_one_question(shapes_workflow, drawn):
    _, _, data = drawn
    held = data.parts.validation
    questions, answers, words = held.exercises()
    assert questions.shape == (52, 3, v.QUESTION_TOKENS)
    assert (answers[:48, :, 0] > 0).all()
    assert (answers[48:, 1:] == 0).all(), "what is not asked is padding"
    assert answers[48:, 0, 0].tolist() == (len(v.VOCABULARY) + held.labelled.labels).tolist()
    assert (answers[48:, 0] == vl.END).sum(1).tolist() == [1] * 4
    assert words[48:, -1].tolist() == answers[48:, 0, 0].tolist()
    said = [" ".join(v.VOCABULARY[t] for t in row if t > 0) for row in questions[48].tolist()]
    assert said == [v.WHAT] * 3
    model, _ = shapes_workflow._fit(genome(), data, 0, 2, "cpu", None)
    assert model.tokens.num_embeddings == len(v.VOCABULARY) + 10


def test_scores_of_labelled_pictures(shapes_workflow, drawn):
    sizes, _, data = drawn
    held = data.parts.validation

    class Knowing(Reader):
        """Reads shapes exactly and takes every labelled picture for class 3."""

        def generate(self, visual, question, length):
            shape = (question.view(-1, 3, v.QUESTION_TOKENS) == v.question_tokens()).all(-1).all(-1)
            answer = v.answer_tokens()[visual[:, 0].long() + torch.tensor(shapes.FIRST_ANSWER)]
            answer[~shape] = held.names()[3]
            return answer.flatten(0, 1)

    scores = v.evaluate(Knowing(), held, "cpu")
    right = (held.labelled.labels == 3).astype(float)
    assert scores.metrics["accuracy_labelled_pictures"] == pytest.approx(right.mean())
    assert scores.metrics["accuracy_place"] == scores.metrics["known_answers"] == 1
    assert scores.units == [1.0] * 48 + right.tolist()
    assert scores.metrics["accuracy"] == pytest.approx((48 + right.sum()) / 52)
    usual = np.bincount(data.parts.train.labelled.labels).argmax()
    floor = shapes_workflow.floors(data, sizes)
    chance = (1 / 3 + 1 / 2 + 1 / 4) / 3
    assert floor["most frequent training answer"] == pytest.approx(
        (48 * chance + (held.labelled.labels == usual).sum()) / 52
    )
    assert floor["uniform guess"] == pytest.approx((48 * chance + 4 / 10) / 52)
    assert list(shapes_workflow.anchors(data, sizes).values()) == [pytest.approx((48 * 0.75 + 4) / 52)]


def test_the_summary_says_what_the_control_shows(shapes_workflow):
    from auto_research.evolve.records import Candidate, CellResult, Trial

    def a_trial(name, positions, accuracy, place):
        metrics = {"accuracy": accuracy, "accuracy_place": place, "blank_accuracy": 0.36}
        cell = CellResult(cell=name, candidate=name, seed=0, role="search", state="completed", metrics=metrics)
        candidate = Candidate(id=name, generation=0, origin="baseline", genome={"model.positions": positions})
        return Trial(candidate=candidate, state="completed", mean=accuracy, cells=[cell])

    seeing, blind = a_trial("baseline", "on", 0.99, 0.98), a_trial("g1-1", "off", 0.74, 0.23)
    found = shapes_workflow.summarise([seeing, blind])
    assert found["sentence"].startswith("Negative control: without positions accuracy 0.740, places 0.230")
    assert found["sentence"].endswith("up to 0.990.")
    assert found["candidates"][1] == {"candidate": "g1-1", "accuracy": 0.74, "place": 0.23, "blank_accuracy": 0.36}
    assert "sentence" not in shapes_workflow.summarise([seeing])


def config(**changes):
    return RunConfig(run="r", workflow="vlm-shapes", generations=1, population=3, seeds=[0], **changes)


def test_the_smoke_plan_is_two_connectors_and_the_control(shapes_workflow, data):
    baseline = make_candidate(shapes_workflow, "baseline", 0, genome(), [], "planned", SIZES, data, [0], None)
    from auto_research.evolve.records import Trial

    plan = plan_generation(
        config(), shapes_workflow, 1, baseline, [Trial(candidate=baseline, state="completed")], SIZES, data
    )
    made = [(c.origin, c.operators, list(c.difference)) for c in plan.candidates]
    assert made == [
        ("paper-operator", ["resampler"], ["model.connector"]),
        ("paper-operator", ["pixel-shuffle"], ["model.connector"]),
        ("hyperparameter-mutation", [], ["model.positions"]),
    ]
    assert all(not c.reason and not c.duplicate_of for c in plan.candidates)


def test_no_sampler_draws_the_negative_control(shapes_workflow, data):
    drawn = random_plan(config(), shapes_workflow, SIZES, data, 4)
    assert {c.genome["model.positions"] for c in drawn} == {"on"}
    assert len({c.genome["model.connector"] for c in drawn}) > 1
    changed = config(changes={"model.positions": "off"})
    assert {c.genome["model.positions"] for c in random_plan(changed, shapes_workflow, SIZES, data, 2)} == {"off"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_smoke_run_meets_its_targets(shapes_workflow):
    sizes = shapes_workflow.sizes("smoke")
    data = shapes_workflow.load(sizes, None)
    floor = max(shapes_workflow.floors(data, sizes).values())
    for made in [shapes_workflow.space.baseline(), *shapes_workflow.smoke_plan()]:
        model = shapes_workflow.train(made, data, 0, sizes, "cpu", quiet)
        metrics = shapes_workflow.validate(model, data, sizes, "cpu").metrics
        if made["model.positions"] == "on":
            assert metrics["accuracy"] >= 0.95
            assert metrics["accuracy_untrained_combinations"] >= 0.9
        else:
            assert floor < metrics["accuracy"] <= 0.80
            assert metrics["accuracy_place"] <= 0.35
        assert metrics["visual_dependency"] > 0.3
        assert metrics["blank_accuracy"] == pytest.approx(floor, abs=0.1)
