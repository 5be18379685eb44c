"""RankMixer on MovieLens: split by hand, floors, what the encoders may see, every axis, and that training learns."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from auto_research.data import catalogue
from auto_research.data.sequences import Interactions, ItemTable, UserTable
from auto_research.evolve.genome import effects, provenance
from auto_research.evolve.records import Candidate
from auto_research.evolve.workflow import Data, NonFinite, SealedTest, Sizes
from auto_research.evolve.workflows import workflow as find_workflow
from auto_research.evolve.workflows._rankmixer import (
    LAST,
    RECENT,
    Corpus,
    Held,
    Histories,
    Recommender,
    Window,
    assess,
    batches,
    build,
    co_occurrence,
    evaluated,
    fit,
    histories,
    predictor_ndcg,
    rank_all,
    recipe,
    searchable,
    split,
)
from auto_research.evolve.workflows.rankmixer_movielens import RankMixerMovieLens
from auto_research.runtime.errors import UserError
from auto_research.tasks.base import train_steps

CPU = torch.device("cpu")
WORKFLOW = RankMixerMovieLens()
SIZES = Sizes("smoke", {"steps": 60, "users": 1000, "slice_users": 1000, "length": 64, "item_width": 16, "tokens": 4})


def interactions(users: int = 40, items: int = 48, longest: int = 90, seed: int = 0) -> Interactions:
    """Each user walks through one of four neighbourhoods of items and now and then jumps; some ratings are bad."""
    generator = np.random.default_rng(seed)
    rows = []
    for user in range(users):
        home, length = user % 4, int(generator.integers(12, longest))
        seen: list[int] = []
        for step in range(length):
            near = [i for i in range(items) if i % 4 == home and i not in seen]
            item = int(near[0] if near and generator.random() < 0.7 else generator.integers(items))
            if item in seen:
                continue
            seen.append(item)
            rating = 3.0 if generator.random() < 0.1 else 5.0
            rows.append((user, item, rating, 10_000 * user + 60 * step))
    user, item, rating, time = (np.array(column) for column in zip(*rows))
    table = UserTable(
        np.arange(users) % 2, 15 + np.arange(users), np.arange(users) % 3, np.zeros(users, dtype=np.int64),
        ("F", "M"), ("a", "b", "c"), ("0",),
    )  # fmt: skip
    names = ItemTable.of_ids([str(i) for i in range(items)])
    return Interactions.from_events("toy", user, item, rating.astype(np.float32), time, names, table)


@pytest.fixture(scope="module")
def data() -> Data:
    return searchable(interactions(), users=1000)


def genome(**changes: object) -> dict:
    return WORKFLOW.space.feasible({name.replace("_", ".", 1): value for name, value in changes.items()})[0]


def model_of(data: Data, seed: int = 0, **changes: object) -> Recommender:
    torch.manual_seed(seed)
    return build(genome(**changes), SIZES, data.parts).eval()


def batch_of(corpus: Corpus, users: list[int], length: int = 64) -> dict[str, torch.Tensor]:
    """Validation batches, made one event at a time."""
    history, gap = (
        torch.zeros(len(users), length, dtype=torch.int64),
        torch.zeros(len(users), length, dtype=torch.int64),
    )
    for row, user in enumerate(users):
        begin, end = corpus.train.offsets[user], corpus.train.offsets[user + 1]
        for back, index in enumerate(range(end - 1, max(begin, end - length) - 1, -1)):
            history[row, -1 - back] = int(corpus.train.items[index]) + 1
            seconds = int(corpus.valid.time[user] - corpus.train.times[index])
            gap[row, -1 - back] = int(np.log2(1 + seconds))
    return {"history": history, "gap": gap, "user": torch.tensor(users)}


def scores_of(model: Recommender, batch: dict[str, torch.Tensor], items: int) -> torch.Tensor:
    with torch.no_grad():
        return model.score(model.prepare(batch), torch.arange(1, items + 1).expand(len(batch["user"]), -1))


# -- data ----------------------------------------------------------------------------------------------------------


def test_leave_two_out_by_hand():
    # User 0: item 9 was no favourite, 3 and 1 came in one second, 5 came twice. User 1 has six favourites only.
    item = [0, 9, 3, 1, 5, 2, 5, 4, 6, 7] + [0, 1, 2, 3, 4, 5]
    rating = [5, 3, 4, 4, 5, 5, 5, 4, 5, 5] + [5] * 6
    time = [1, 2, 3, 3, 4, 5, 6, 7, 8, 9] + [1, 2, 3, 4, 5, 6]
    user = [0] * 10 + [1] * 6
    made = Interactions.from_events(
        "hand", np.array(user), np.array(item), np.array(rating, dtype=np.float32), np.array(time),
        ItemTable.of_ids([str(i) for i in range(10)]),
    )  # fmt: skip
    corpus, test = split(made)
    assert corpus.train.items.tolist() == [0, 1, 3, 5, 2, 4]
    assert corpus.train.times.tolist() == [1, 3, 3, 4, 5, 7]
    assert (corpus.valid.target.tolist(), corpus.valid.time.tolist()) == ([6], [8])
    assert (test.target.tolist(), test.time.tolist()) == ([7], [9])
    assert test.history.items.tolist() == [0, 1, 3, 5, 2, 4, 6]
    assert corpus.counts.tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 0]  # neither held-out item
    assert corpus.num_items == 9  # nobody rated item 8
    assert corpus.num_users == 1
    assert corpus.profile.shape == (1, 0)


def test_a_catalogue_of_items_with_enough_positives():
    made = interactions()
    events, size, users = histories(made, min_positives=22)
    count = np.bincount(made.item[made.rating >= 4], minlength=made.num_items)
    assert size == int((count >= 22).sum()) < made.num_items
    assert np.bincount(events.items, minlength=size).min() > 0
    assert (np.diff(events.offsets) >= 7).all()
    assert len(users) == len(events.offsets) - 1


def test_the_split_is_clean_and_training_does_not_see_held_out_events(data):
    made = interactions()
    assert data.hygiene["distinct validation"] == data.hygiene["distinct test"] == data.parts.num_users
    assert {v for k, v in data.hygiene.items() if "share" in k or "later" in k} == {0}
    last = made.offsets[1:] - 1
    rating = made.rating.copy()
    changed = made.item.copy()
    unused = [np.setdiff1d(np.arange(48), made.item[a:b])[0] for a, b in zip(made.offsets[:-1], made.offsets[1:])]
    changed[last], rating[last] = unused, 5.0  # every user's last event is another favourite
    rest = searchable(replace(made, item=changed, rating=rating), users=1000).parts
    base = searchable(replace(made, rating=rating), users=1000).parts
    for one, other in ((rest.train.items, base.train.items), (rest.counts, base.counts)):
        assert one.tolist() == other.tolist()
    assert rest.valid.target.tolist() == base.valid.target.tolist()


def test_test_is_sealed():
    with pytest.raises(SealedTest):
        WORKFLOW.load_test(SIZES, None)


def test_windows_end_before_the_moment_of_asking(data):
    corpus: Corpus = data.parts
    users = [0, 3, 7]
    window = Window(corpus.train, CPU)
    rows = torch.tensor(users)
    found = window.before(rows, window.stop[rows], torch.from_numpy(corpus.valid.time)[rows], 64)
    expected = batch_of(corpus, users)
    assert torch.equal(found["history"], expected["history"])
    real = expected["history"] > 0
    assert torch.equal(found["gap"][real], expected["gap"][real])


def test_an_epoch_visits_every_event_that_has_one_before_it(data):
    corpus: Corpus = data.parts
    wanted = [
        (user, int(item) + 1)
        for user in range(corpus.num_users)
        for item in corpus.train.items[corpus.train.offsets[user] + 1 : corpus.train.offsets[user + 1]]
    ]
    steps = -(-len(wanted) // 32)
    seen, first = [], None
    for batch in batches(genome(train_batch=32), corpus, 1, SIZES, steps, CPU):
        first = batch if first is None else first
        for user, history, target in zip(batch["user"].tolist(), batch["history"], batch["target"].tolist()):
            seen.append((user, target))
            own = corpus.train.items[corpus.train.offsets[user] : corpus.train.offsets[user + 1]] + 1
            place = int(np.flatnonzero(own == target)[0])
            assert history[history > 0].tolist() == own[max(0, place - RECENT) : place].tolist()
    assert sorted(seen[: len(wanted)]) == sorted(wanted)
    fewer = next(iter(batches(genome(train_batch=32, train_negatives=15), corpus, 1, SIZES, steps, CPU)))
    assert torch.equal(fewer["target"], first["target"])
    assert (first["negative"].shape, fewer["negative"].shape) == ((32, 31), (32, 15))
    assert first["negative"].min() >= 1


# -- floors and anchors --------------------------------------------------------------------------------------------


def slow_ndcg(scores: np.ndarray, corpus: Corpus) -> float:
    """By sorting: NDCG@10 with the target first among its equals."""
    total = 0.0
    for user in range(corpus.num_users):
        own = corpus.train.items[corpus.train.offsets[user] : corpus.train.offsets[user + 1]]
        target = int(corpus.valid.target[user])
        rank = 1 + sum(scores[user][i] > scores[user][target] for i in range(corpus.num_items) if i not in own)
        total += 1 / np.log2(1 + rank) if rank <= 10 else 0.0
    return total / corpus.num_users


def test_floors_and_anchor_by_a_second_method(data):
    corpus: Corpus = data.parts
    popular = np.tile(np.bincount(corpus.train.items, minlength=corpus.num_items), (corpus.num_users, 1))
    assert WORKFLOW.floors(data, SIZES)["popularity"] == pytest.approx(slow_ndcg(popular, corpus))
    follows = np.zeros((corpus.num_items, corpus.num_items))
    scores = np.zeros((corpus.num_users, corpus.num_items))
    own = [corpus.train.items[a:b].tolist() for a, b in zip(corpus.train.offsets[:-1], corpus.train.offsets[1:])]
    for sequence in own:
        for i, before in enumerate(sequence):
            for j in range(i + 1, min(i + 21, len(sequence))):
                follows[before, sequence[j]] += 1 / (j - i)
    np.testing.assert_allclose(co_occurrence(corpus), follows)
    for user, sequence in enumerate(own):
        scores[user] = follows[sequence[-5:]].sum(0)
    assert WORKFLOW.anchors(data, SIZES)["co-occurrence of the last 5"] == pytest.approx(slow_ndcg(scores, corpus))


def test_a_random_order_scores_its_expectation(data):
    corpus: Corpus = data.parts
    users = np.repeat(np.arange(corpus.num_users), 400)
    drawn = np.random.default_rng(0).random((len(users), corpus.num_items))
    found = predictor_ndcg(drawn, corpus, corpus.valid, users)
    assert found == pytest.approx(WORKFLOW.floors(data, SIZES)["random"], rel=0.05)


def test_reference_lines_of_latest_small_are_those_that_were_measured():
    sizes = Sizes("standard", {**SIZES.values, "users": 10**9})
    embedded = catalogue.entry("ml-latest-small").read(catalogue.EMBEDDED / "ml-latest-small")
    data = searchable(embedded, users=10**9)
    corpus: Corpus = data.parts
    assert (corpus.num_users, corpus.num_items) == (586, 1956)
    assert len(corpus.train.items) + 2 * corpus.num_users == 41_147
    assert {v for k, v in data.hygiene.items() if "share" in k or "later" in k} == {0}
    lines = WORKFLOW.floors(data, sizes) | WORKFLOW.anchors(data, sizes)
    assert lines["random"] == pytest.approx(0.0023, abs=2e-4)
    assert lines["popularity"] == pytest.approx(0.0210, abs=1e-4)
    assert lines["co-occurrence of the last 5"] == pytest.approx(0.0660, abs=2e-4)


# -- the model -----------------------------------------------------------------------------------------------------

ENCODERS = ("recent-mean", "longer", "target-attention")


@pytest.mark.parametrize("encoder", ENCODERS)
def test_old_history_matters_to_longer_and_not_to_the_recent_mean(data, encoder):
    model = model_of(data, seq_encoder=encoder)
    corpus: Corpus = data.parts
    long = np.argsort(-np.diff(corpus.train.offsets))[:4].tolist()
    batch = batch_of(corpus, long)
    cut = {**batch, "history": batch["history"].clone()}
    cut["history"][:, :-RECENT] = 0
    before, after = (scores_of(model, b, corpus.num_items) for b in (batch, cut))
    if encoder == "recent-mean":
        assert torch.equal(before, after)
    else:
        assert ((before - after).abs().amax(1) > 1e-5).all()


@pytest.mark.parametrize("encoder", ENCODERS)
def test_padding_users_and_candidates_in_any_order_change_nothing(data, encoder):
    model = model_of(data, seq_encoder=encoder)
    corpus: Corpus = data.parts
    batch = batch_of(corpus, [0, 1, 2, 3], length=61)
    expected = scores_of(model, batch, corpus.num_items)
    padded = {k: v if v.dim() == 1 else torch.nn.functional.pad(v, (3, 0)) for k, v in batch.items()}
    torch.testing.assert_close(scores_of(model, padded, corpus.num_items), expected, atol=1e-5, rtol=1e-5)
    rows, items = torch.tensor([2, 0, 3, 1]), torch.randperm(corpus.num_items) + 1
    with torch.no_grad():
        side = model.prepare({name: value[rows] for name, value in batch.items()})
        found = model.score(side, items.expand(4, -1))
    torch.testing.assert_close(found, expected[rows][:, items - 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_every_token_depends_on_real_inputs(data, encoder):
    model = model_of(data, seq_encoder=encoder)
    batch = batch_of(data.parts, [0, 1])
    items = torch.tensor([[1], [2]])

    def tokens(batch: dict[str, torch.Tensor], items: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model.trunk.tokens(model.fields(model.prepare(batch), items).flatten(0, 1))

    base = tokens(batch, items)
    assert base.shape == (2, 4, 32)
    assert (base[0] != base[1]).any(-1).all()  # no token is the same for both examples
    history = batch["history"].clone()
    history[:, -1] = history[:, -1] % 40 + 3
    earlier = batch["history"].clone()
    earlier[:, -3] = earlier[:, -3] % 40 + 3
    everyone = {"candidate": 0, "last": 1, "summary": 2, "user": 3}
    for name, changed, must in (
        ("candidate", tokens(batch, items + 7), everyone),
        ("last", tokens({**batch, "history": history}, items), {"last": 1, "summary": 2}),
        ("earlier", tokens({**batch, "history": earlier}, items), {"summary": 2}),
        ("user", tokens({**batch, "user": torch.tensor([5, 6])}, items), {"user": 3}),
    ):
        moved = (changed != base).any(-1).all(0)
        assert all(moved[place] for place in must.values()), name


def test_the_user_side_is_computed_once_for_the_whole_catalogue(data):
    model = model_of(data, seq_encoder="longer")
    corpus: Corpus = data.parts
    rows: list[int] = []
    model.encoder.encoder.inner.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    rank_all(model, corpus, corpus.valid, np.arange(5), 64, CPU)
    assert rows == [5 * 64 // 4]  # 16 groups for each of five users, whatever the number of candidates


@pytest.mark.parametrize("loss", ["sampled-softmax", "bce"])
def test_losses_by_hand(data, loss):
    model = model_of(data, train_loss=loss)
    batch = next(iter(batches(genome(train_batch=32, train_negatives=15), data.parts, 0, SIZES, 1, CPU)))
    batch["negative"][:, 0] = batch["target"]  # must not compete
    side = model.prepare(batch)
    own = model.score(side, batch["target"][:, None])[:, 0].double()
    other = model.score(side, batch["negative"]).double()
    total = 0.0
    for row in range(32):
        rivals = other[row][batch["negative"][row] != batch["target"][row]]
        if loss == "bce":
            total += float((-torch.sigmoid(own[row]).log() - (1 - torch.sigmoid(rivals)).log().mean()).detach())
        else:
            total -= float((own[row] - torch.cat([own[row, None], rivals]).logsumexp(0)).detach())
    assert model.loss(batch).item() == pytest.approx(total / 32, abs=1e-5)


def test_sparse_blocks_train_two_routers_and_serve_one(data):
    corpus: Corpus = data.parts
    trained, _ = fit(genome(mix_block="sparse-moe"), corpus, 0, SIZES, "cpu", 4, lambda step, loss: None)
    fresh = model_of(data, mix_block="sparse-moe")
    moved = {n for (n, p), (_, q) in zip(trained.named_parameters(), fresh.named_parameters()) if not torch.equal(p, q)}
    assert any("for_train" in name for name in moved)
    assert any("for_infer" in name for name in moved)
    assert float(trained.penalty.weight) != trained.penalty.start
    batch = batch_of(corpus, [0, 1])
    before = scores_of(trained, batch, corpus.num_items)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "for_train" in name:
                parameter.add_(1.0)
        assert torch.equal(scores_of(trained, batch, corpus.num_items), before)
        for name, parameter in trained.named_parameters():
            if "for_infer" in name:
                parameter.add_(1.0)
        assert not torch.equal(scores_of(trained, batch, corpus.num_items), before)


# -- the space -----------------------------------------------------------------------------------------------------


def test_values_of_axes_move_what_they_are_about(data):
    found = effects(WORKFLOW, SIZES, data, axes=["seq.encoder", "longer.inner", "mix.match", "train.lr"])
    assert [effect.text for effect in found if not effect.holds] == []
    moved = {effect.axis: set(effect.moved) for effect in found}
    assert moved["seq.encoder"] >= {"forward", "loss", "cost"}
    assert moved["longer.inner"] >= {"forward", "loss", "cost"}
    assert moved["train.lr"] == {"loss"}


@pytest.mark.slow
def test_every_axis_has_an_effect(data):
    found = effects(WORKFLOW, SIZES, data)
    assert {effect.axis for effect in found} == {axis.name for axis in WORKFLOW.space.axes}
    assert [effect.text for effect in found if not effect.holds] == []
    assert "data_order" in next(set(effect.moved) for effect in found if effect.axis == "train.batch")


def test_parameters_are_matched_or_the_difference_is_shown(data):
    baseline = WORKFLOW.cost(genome(), SIZES, data)
    shared = WORKFLOW.cost(genome(mix_block="shared-ffn"), SIZES, data)
    assert WORKFLOW.match(genome(mix_block="shared-ffn"), baseline, SIZES, data) == ""
    assert shared.flops > baseline.flops
    quick = WORKFLOW.cost(genome(mix_block="shared-ffn", mix_shared="flops"), SIZES, data)
    assert quick.flops == baseline.flops
    assert quick.parameters < baseline.parameters
    longer = WORKFLOW.cost(genome(seq_encoder="longer"), SIZES, data)
    assert "parameters" in WORKFLOW.match(genome(seq_encoder="longer"), baseline, SIZES, data)
    for block in ("dense", "shared-ffn", "sparse-moe"):
        wanted = WORKFLOW.cost(genome(seq_encoder="longer", mix_block=block), SIZES, data)
        control = WORKFLOW.cost(genome(mix_match="longer", mix_block=block), SIZES, data)
        assert abs(control.parameters / wanted.parameters - 1) < 0.02
    assert longer.extra["user flops"] > baseline.extra["user flops"]


def test_queries_that_the_history_does_not_have_are_repaired(data):
    asked = {"seq.encoder": "longer", "longer.merge": 8, "longer.queries": 16}
    repaired, rules = WORKFLOW.space.feasible(asked)
    assert (repaired["longer.queries"], rules) == (8, ["queries within the history"])
    untouched, rules = WORKFLOW.space.feasible({**asked, "seq.length": 128})
    assert (untouched["longer.queries"], rules) == (16, [])
    assert "longer.inner" not in WORKFLOW.space.feasible({"seq.encoder": "longer", "longer.merge": 1})[0]
    with pytest.raises(UserError, match="fewer than"):
        build(
            WORKFLOW.space.resolve({"seq.encoder": "longer"}),
            Sizes("smoke", {**SIZES.values, "length": 16}),
            data.parts,
        )


def test_the_smoke_plan_is_an_ablation_of_single_operators():
    start = WORKFLOW.space.baseline()
    parent = Candidate(id="baseline", generation=0, origin="baseline", genome=start)
    plan = WORKFLOW.smoke_plan()
    assert [list(p) for p in plan] == [["seq.encoder", "longer.queries"], ["mix.block", "mix.shared"]]
    for child in plan:
        found = provenance(WORKFLOW, WORKFLOW.space.resolve({**start, **child}), [parent], "planned")
        assert found["origin"] == "paper-operator"
        assert len(found["operators"]) == 1


# -- training and evaluation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seq_encoder": "longer"},
        {"seq_encoder": "target-attention"},
        {"mix_block": "sparse-moe"},
        {"mix_block": "shared-ffn"},
        {"train_loss": "bce"},
    ],
    ids=str,
)
def test_every_part_learns_a_batch_by_heart(data, changes):
    wanted = genome(train_lr=1e-2, train_batch=32, train_negatives=15, **changes)
    model = model_of(data, **changes).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = {name: value[:12] for name, value in next(iter(batches(wanted, data.parts, 0, SIZES, 1, CPU))).items()}
    losses = train_steps(model, itertools.repeat(batch), steps=40, recipe=recipe(wanted))
    assert losses[-1] < 0.6 * losses[0]
    untouched = {name for name, value in model.named_parameters() if torch.equal(value, before[name])}
    # Softmax over the events of a history does not see what all of them share.
    assert {name for name in untouched if "score.2.bias" not in name} == set()


def test_training_reports_its_steps_and_ends_ready_to_serve(data):
    seen: list[int] = []
    model, losses = fit(genome(), data.parts, 0, SIZES, "cpu", 25, lambda step, loss: seen.append(step))
    assert seen == [20, 25]
    assert len(losses) == 25
    assert not model.training


def test_the_same_seed_trains_the_same_model_and_another_does_not(data):
    def weights(seed: int) -> torch.Tensor:
        model = fit(genome(), data.parts, seed, SIZES, "cpu", 3, lambda step, loss: None)[0]
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(5), weights(5))
    assert not torch.equal(weights(5), weights(6))


def test_a_loss_that_is_not_finite_ends_the_cell(data, monkeypatch):
    monkeypatch.setattr(Recommender, "loss", lambda self, batch: self.items.weight.sum() * float("nan"))
    with pytest.raises(NonFinite):
        fit(genome(), data.parts, 0, SIZES, "cpu", 2, lambda step, loss: None)


def test_stored_weights_give_the_same_scores(data, tmp_path):
    wanted = genome(seq_encoder="longer", mix_block="sparse-moe")
    model = WORKFLOW.train(wanted, data, 0, Sizes("smoke", {**SIZES.values, "steps": 2}), "cpu", lambda s, loss: None)
    WORKFLOW.save(model, tmp_path / "artefact")
    again = WORKFLOW.restore(wanted, data, tmp_path / "artefact", SIZES, "cpu")
    first, second = (WORKFLOW.validate(m, data, SIZES, "cpu") for m in (model, again))
    assert first.units == second.units
    assert {k: v for k, v in first.metrics.items() if k != "scoring_seconds"} == {
        k: v for k, v in second.metrics.items() if k != "scoring_seconds"
    }


class Clairvoyant(Recommender):
    """Scores by a table, to test the evaluation."""

    def __init__(self, data: Data, table: torch.Tensor) -> None:
        torch.nn.Module.__init__(self)
        inner = build(genome(), SIZES, data.parts)
        self.items, self.encoder, self.penalty, self.trunk = inner.items, inner.encoder, None, inner.trunk
        self.table, self.lengths = table, []

    def prepare(self, batch):  # type: ignore[no-untyped-def]
        self.lengths.append(int((batch["history"] > 0).sum(1).max()))
        return batch["user"]

    def score(self, side, candidates):  # type: ignore[no-untyped-def]
        return self.table[side].gather(1, candidates)


def test_metrics_of_a_known_table(data):
    corpus: Corpus = data.parts
    table = torch.rand(corpus.num_users, corpus.num_items + 1)
    target = torch.from_numpy(corpus.valid.target) + 1
    table[torch.arange(corpus.num_users), target] = 2.0
    for user in range(corpus.num_users):  # what the user knows must not stand in the way
        table[user, corpus.train.items[corpus.train.offsets[user] : corpus.train.offsets[user + 1]] + 1] = 3.0
    model = Clairvoyant(data, table)
    found = assess(model, corpus, corpus.valid, SIZES, "cpu")
    assert found.metrics["ndcg@10"] == found.metrics["hit@10"] == found.metrics["ndcg@10/long"] == 1.0
    assert found.units == [1.0] * corpus.num_users
    lengths = model.lengths[:-1]  # without the counting of FLOPs
    half = len(lengths) // 2
    assert (max(lengths[:half]), max(lengths[half:])) == (RECENT, LAST)
    table[torch.arange(corpus.num_users), target] = -1.0
    assert assess(Clairvoyant(data, table), corpus, corpus.valid, SIZES, "cpu").metrics["ndcg@10"] < 0.2


def test_evaluated_users_are_always_the_same(data):
    corpus: Corpus = data.parts
    some = evaluated(corpus, 7)
    assert some.tolist() == evaluated(corpus, 7).tolist() == sorted(some.tolist())
    assert len(some) == 7
    assert evaluated(corpus, 10**9).tolist() == list(range(corpus.num_users))


def test_the_test_history_holds_the_validation_item():
    _, held = split(interactions())
    corpus = searchable(interactions(), users=1000).parts
    assert isinstance(held, Held)
    ends = held.history.offsets[1:] - 1
    assert held.history.items[ends].tolist() == corpus.valid.target.tolist()
    assert isinstance(held.history, Histories)


def test_the_key_finds_the_workflow_and_its_embedded_data():
    found = find_workflow("rankmixer-movielens")
    assert isinstance(found, RankMixerMovieLens)
    assert found.sizes("smoke")["steps"] == 800
    assert (found.start("smoke")["mix.width"], found.start("standard")["mix.width"]) == (32, 64)
    assert all(found.sizes(budget)["length"] >= 128 for budget in ("standard", "full"))


@pytest.mark.slow
def test_the_smoke_run_beats_popularity_with_every_candidate():
    embedded = catalogue.entry("ml-latest-small").read(catalogue.EMBEDDED / "ml-latest-small")
    sizes = WORKFLOW.sizes("smoke")
    data = searchable(embedded, users=sizes["users"])
    floor = max(WORKFLOW.floors(data, sizes).values())
    for child in ({}, *WORKFLOW.smoke_plan()):
        candidate = WORKFLOW.space.resolve({**WORKFLOW.start("smoke"), **child})
        model = WORKFLOW.train(candidate, data, 0, sizes, "cpu", lambda step, loss: None)
        assert WORKFLOW.validate(model, data, sizes, "cpu").metrics["ndcg@10"] > floor
