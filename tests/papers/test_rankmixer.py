"""RankMixer: tokenisation, size laws, the two-router loss and the arms of the protocol."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decisions import difference
from torch.nn import functional as F

from auto_research.layers.experts import Routing
from auto_research.layers.token_mixing import PerTokenFFN
from auto_research.layers.towers import forward_flops
from auto_research.papers.ranking.rankmixer import (
    ATTENTION,
    DENSE,
    DTSI,
    NO_MIXING,
    RATIOS,
    SHARED_FLOPS,
    SHARED_PARAMETERS,
    SIZES,
    TOP_K,
    RankMixer,
    RankMixerConfig,
    RankMixerTrunk,
    decision_rule,
    variants,
)
from auto_research.study.verdict import conclude
from auto_research.tasks.click import miniature

CPU = torch.device("cpu")
TINY = RankMixerConfig(width=16, field_width=8)


@pytest.fixture(scope="module")
def task():
    return miniature()


@pytest.fixture(scope="module")
def batch(task):
    return task.rows(task.train[:16], CPU)


def model_of(task, **changes):
    torch.manual_seed(0)
    return RankMixer(task.fields, replace(TINY, **changes), liked=task.liked_code)


def test_tokens_are_equal_slices_with_a_linear_map_each():
    trunk, e = RankMixerTrunk(21, replace(TINY, tokens=4)), torch.randn(3, 21)
    assert (trunk.slice, trunk.padding) == (6, 3)
    padded = torch.cat([e, torch.zeros(3, 3)], 1)
    for i in range(4):
        expected = padded[:, 6 * i : 6 * (i + 1)] @ trunk.tokenise.weight[i] + trunk.tokenise.bias[i]
        torch.testing.assert_close(trunk.tokens(e)[:, i], expected)


def test_with_eight_groups_each_token_is_one_group_of_fields(task, batch):
    model = model_of(task)
    assert model.trunk.slice == TINY.field_width
    e = model.features(batch)
    changed = model.features({**batch, "hour": (batch["hour"] + 5) % 24})
    moved = (model.trunk.tokens(e) != model.trunk.tokens(changed)).any(-1).any(0)
    groups = list(dict.fromkeys(f.group for f in task.fields))
    assert moved.tolist() == [name == "context" for name in groups]


def test_the_tokens_are_heterogeneous_fields(task):
    assert list(dict.fromkeys(f.group for f in task.fields)) == [
        "user",
        "profile",
        "item",
        "content",
        "context",
        "last item",
        "history",
        "statistics",
    ]


def test_read_out_is_the_mean_over_tokens_and_a_tower(task, batch):
    model = model_of(task)
    x = model.trunk.tokens(model.features(batch))
    for block in model.trunk.blocks:
        x = block(x)
    torch.testing.assert_close(model.scores(batch), model.trunk.tower(x.sum(1) / 8))


def test_width_must_be_a_multiple_of_the_tokens(task):
    with pytest.raises(ValueError, match="multiple of the 8 tokens"):
        model_of(task, width=20)


@pytest.mark.parametrize("size", SIZES)
def test_size_law_of_parameters_and_flops(size):
    config = SIZES[size]
    with torch.device("meta"):
        trunk = RankMixerTrunk(256, config)
        x = torch.empty(2, config.tokens, config.width)
    networks = [b.feed_forward for b in trunk.blocks]
    weights = sum(w.numel() for n in networks for w in (n.rise.weight, n.fall.weight))
    k, depth, tokens, width = config.expansion, config.blocks, config.tokens, config.width
    assert weights == config.block_parameters == 2 * k * depth * tokens * width**2
    flops = forward_flops(lambda: [n(x) for n in networks]) / 2
    assert flops == config.block_flops == 4 * k * depth * tokens * width**2


@pytest.mark.parametrize(
    ("width", "tokens", "total", "expansion"), [(768, 16, 107e6, 2.8), (1536, 32, 1.1e9, 3.7)], ids=["100M", "1B"]
)
def test_the_published_totals_imply_the_expansion_that_the_sheet_derives(width, tokens, total, expansion):
    one = RankMixerConfig(width=width, tokens=tokens, expansion=1).block_parameters
    assert total / one == pytest.approx(expansion, abs=0.1)


def test_dtsi_loss_is_both_tasks_plus_lambda_times_the_serving_gates(task, batch):
    model = model_of(task, ffn="relu", active=0.5, penalty_start=0.01, penalty_limit=0.1)
    e, label = model.features(batch), batch["label"]
    losses = {}
    for name in ("train", "infer"):
        routing = Routing(name)
        losses[name] = F.binary_cross_entropy_with_logits(model.trunk(e, routing), label)
    gates = sum(g.sum() / len(label) for g in routing.gates)
    torch.testing.assert_close(model.loss(batch), losses["train"] + losses["infer"] + 0.01 * gates)


def test_both_routers_learn_and_only_the_serving_one_is_made_sparse(task, batch):
    model = model_of(task, ffn="relu", active=0.5)
    model.loss(batch).backward()
    for block in model.trunk.blocks:
        for router in block.feed_forward.routers.values():
            assert router.linear.weight.grad.abs().sum() > 0
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    with torch.no_grad():
        model.penalty.weight.fill_(0.01)
    for step in range(80):
        optimiser.zero_grad()
        model.loss(batch).backward()
        optimiser.step()
        model.on_step_end(step)
    ratios = {}
    for name in ("train", "infer"):
        routing = Routing(name)
        model.trunk(model.features(batch), routing)
        ratios[name] = float(routing.active_ratio())
    assert ratios["infer"] < 0.75 < ratios["train"]


def test_scores_come_from_the_serving_router(task, batch):
    model = model_of(task, ffn="relu").eval()
    before = model.scores(batch)
    with torch.no_grad():
        for block in model.trunk.blocks:
            block.feed_forward.routers["for_train"].linear.bias.add_(1)
    assert torch.equal(model.scores(batch), before)
    with torch.no_grad():
        model.trunk.blocks[0].feed_forward.routers["for_infer"].linear.bias.add_(1)
    assert not torch.equal(model.scores(batch), before)


def test_sparse_inference_skips_idle_experts_and_scores_the_same(task, batch):
    model = model_of(task, ffn="relu").eval()
    with torch.no_grad():
        for block in model.trunk.blocks:
            block.feed_forward.routers["for_infer"].linear.bias.fill_(-0.1)
    e = model.features(batch)
    every, active = Routing("infer"), Routing("infer", only_active=True)
    torch.testing.assert_close(model.trunk(e, every), model.trunk(e, active), atol=1e-5, rtol=1e-4)
    assert 0.05 < every.active_ratio() < 0.95


def test_lambda_moves_after_each_update(task, batch):
    model = model_of(task, ffn="relu", active=0.25, penalty_start=1e-4)
    model.loss(batch)
    model.on_step_end(0)
    assert float(model.penalty.weight) == pytest.approx(1.2e-4)  # all gates begin open


def test_report_of_the_load(task):
    model = model_of(task, ffn="top-k", active=0.25)
    model.logged["flops"] = 1_000_000.0
    figures = task.evaluate(model, "test", CPU).diagnostics
    assert figures["active ratio"] == pytest.approx(0.25)
    assert figures["active flops"] == pytest.approx(1_000_000 - 0.75 * model.config.block_flops)
    assert {f"active ratio, block {b} token {t}" for b in range(2) for t in range(8)} <= set(figures)
    assert model_of(task).report() == {}


def test_balance_adds_the_balancing_loss(task, batch):
    plain, balanced = model_of(task, ffn="top-k", active=0.5), model_of(task, ffn="top-k", active=0.5, balance=0.1)
    routing = Routing()
    plain.trunk(plain.features(batch), routing)
    torch.testing.assert_close(balanced.loss(batch), plain.loss(batch) + 0.1 * routing.penalty())


def test_arms_a_to_h_with_fair_budgets(task, batch):
    models = {v.name: v.build() for v in variants(task, TINY) if v.kind != "floor"}
    assert set(models) == {
        "dlrm-mlp",
        "dcn-v2",
        SHARED_FLOPS,
        SHARED_PARAMETERS,
        NO_MIXING,
        ATTENTION,
        DENSE,
        *TOP_K.values(),
        *DTSI.values(),
    }
    count = {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()}
    flops = {name: m.logged["flops"] for name, m in models.items()}
    for name in ("dlrm-mlp", "dcn-v2", SHARED_PARAMETERS, NO_MIXING):
        assert count[name] == pytest.approx(count[DENSE], rel=0.03), name
    assert flops[SHARED_FLOPS] == flops[NO_MIXING] == flops[DENSE]
    assert count[SHARED_FLOPS] < count[DENSE]
    assert count[ATTENTION] > count[DENSE]
    assert flops[ATTENTION] > flops[DENSE]
    assert flops[SHARED_PARAMETERS] > 4 * flops[DENSE]
    networks = {name: models[name].trunk.blocks[0].feed_forward for name in (*TOP_K.values(), *DTSI.values())}
    dense = models[DENSE].trunk.blocks[0].feed_forward
    assert isinstance(dense, PerTokenFFN)
    for network in networks.values():
        assert network.experts.rise.weight.shape == dense.rise.weight.shape
    assert [networks[TOP_K[r]].k for r in RATIOS] == [4, 2, 1]
    assert [models[DTSI[r]].penalty.budget for r in RATIOS] == [1.0, 0.5, 0.25]
    # The embeddings are the same for all.
    shapes = {name: [p.shape for p in m.features.parameters()] for name, m in models.items()}
    assert all(s == shapes[DENSE] for s in shapes.values())


def test_without_a_profile_seven_groups_are_still_cut_into_eight_tokens(task):
    fields = [f for f in task.fields if f.group != "profile"]
    model = RankMixer(fields, TINY)
    assert model.features.width == 56
    assert model.trunk.slice == 7
    assert model.trunk.padding == 0


def test_layer_norm_and_loss_stay_in_float32_under_bfloat16(task, batch):
    model = model_of(task, ffn="relu")
    seen = []
    for block in model.trunk.blocks:
        block.mixing_norm.register_forward_hook(lambda module, inputs, output: seen.append(module.weight.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(batch)
        routing = Routing("infer")
        model.trunk(model.features(batch), routing)
    assert loss.dtype == torch.float32
    assert {p.dtype for p in routing.penalties} == {torch.float32}
    assert set(seen) == {torch.float32}
    loss.backward()


def rule_on(gaps):
    """The verdict when each (method, baseline) has the given (low, high); all others are clearly positive."""

    def compare(method, baseline, metric):
        interval = gaps.get((method, baseline), (0.001, 0.003))
        return difference(method, baseline, metric, interval, 0.8)

    return conclude(decision_rule(), compare, budget="standard", seeds=3)[0]


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ({}, "reproduced"),
        ({(DENSE, SHARED_FLOPS): (-0.001, 0.002)}, "inconclusive"),
        ({(DENSE, NO_MIXING): (-0.003, -0.001)}, "not reproduced"),
        ({(DENSE, ATTENTION): (-0.0007, 0.0)}, "reproduced"),  # less than 0.1 % of 0.8
        ({(DENSE, ATTENTION): (-0.0020, -0.0009)}, "not reproduced"),
        ({(DENSE, SHARED_PARAMETERS): (-0.003, -0.001)}, "reproduced"),  # reported, decides nothing
        ({(DTSI["1/4"], DTSI["1"]): (-0.0009, 0.001)}, "inconclusive"),
        ({(DTSI["1/4"], TOP_K["1/4"]): (-0.003, -0.001)}, "not reproduced"),
    ],
)
def test_decision_rule_of_the_protocol(gaps, verdict):
    assert rule_on(gaps) == verdict


def test_the_full_budget_takes_movielens_1m_and_nothing_else(tmp_path, monkeypatch):
    from auto_research.papers._registry import adapter
    from auto_research.runtime.errors import MissingData
    from auto_research.study.context import Study

    monkeypatch.setenv("AUTO_RESEARCH_CACHE", str(tmp_path / "cache"))
    study = Study(adapter("rankmixer").card, budget="full", device="cpu", dataset_dir=tmp_path, quiet=True)
    with pytest.raises(MissingData, match="auto-research prepare ml-1m"):
        adapter("rankmixer").load()(study)
