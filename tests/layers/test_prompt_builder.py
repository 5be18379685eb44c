"""Template choice, marginal gains and the budgeted subset, against a plain loop over one case at a time."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.layers.prompt_builder import PromptScorer, plan_prompts

K, C, F, S = 3, 4, 2, 2


def make(seed, rows=5):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    scorer = PromptScorer(K, C, F, S, width=8)
    scorer.calibrate(torch.randn(20, generator=generator))
    features = torch.randn(rows, F, generator=generator)
    scene = torch.randn(rows, S, generator=generator)
    template_cost = torch.randint(3, 9, (rows, K), generator=generator)
    component_cost = torch.randint(1, 6, (rows, C), generator=generator)
    return scorer, features, scene, template_cost, component_cost


def by_loop(scorer, features, scene, template_cost, component_cost, budget, gain):
    """One case: (template, components, score)."""

    def value(template, chosen):
        one_hot = torch.eye(K)[template]
        mask = torch.tensor([float(c in chosen) for c in range(C)])
        return float(scorer(one_hot, mask, features, scene))

    fitting = [k for k in range(K) if template_cost[k] <= budget] or [int(template_cost.argmin())]
    template = max(fitting, key=lambda k: value(k, ()))
    picked, cost = [], int(template_cost[template])
    for c in range(C):
        if value(template, [*picked, c]) - value(template, picked) > gain and cost + component_cost[c] <= budget:
            picked.append(c)
            cost += int(component_cost[c])
    best, best_value = (), value(template, ())
    for size in range(len(picked) + 1):
        for subset in combinations(picked, size):
            found = value(template, subset)
            if found > best_value + 1e-6:
                best, best_value = subset, found
    return template, set(best), best_value


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 25), st.sampled_from([-0.2, 0.0, 0.2]))
@torch.no_grad()
def test_plan_against_a_loop(seed, budget, gain):
    made = make(seed)
    plan = plan_prompts(*made, budget=budget, gain_threshold=gain)
    scorer, *tables = made
    for row in range(5):
        template, chosen, score = by_loop(scorer, *(t[row] for t in tables), budget, gain)
        assert int(plan.template[row]) == template
        assert {c for c in range(C) if plan.components[row, c]} == chosen
        assert float(plan.score[row]) == pytest.approx(score, abs=1e-5)
        cost = int(made[3][row, template] + made[4][row][plan.components[row]].sum())
        assert cost <= budget or not chosen


def test_sharpness_changes_the_probabilities_and_never_the_choice():
    made = make(1)
    soft, sharp = (plan_prompts(*made, budget=30, sharpness=beta) for beta in (0.1, 10.0))
    assert torch.equal(soft.template, sharp.template)
    assert torch.equal(soft.components, sharp.components)
    assert not torch.allclose(soft.probability, sharp.probability)
    torch.testing.assert_close(sharp.probability.sum(1), torch.ones(5))
    assert torch.equal(sharp.probability.argmax(1), sharp.template)


def test_a_high_gain_threshold_adds_nothing():
    plan = plan_prompts(*make(2), budget=100, gain_threshold=1e6)
    assert not plan.components.any()


def test_the_final_subset_drops_a_component_that_a_later_one_made_useless():
    """Two components that are worth one alone and less together: the greedy pass takes the weaker first."""

    class Rival(PromptScorer):
        def forward(self, template, chosen, features, scene):
            a, b = chosen[..., 0].float(), chosen[..., 1].float()
            return a * 1.0 + b * 3.0 - 1.5 * a * b + 0.0 * template.sum(-1)

    tables = (torch.zeros(1, F), torch.zeros(1, S), torch.ones(1, K, dtype=torch.long), torch.ones(1, 2).long())
    plan = plan_prompts(Rival(K, 2, F, S), *tables, budget=10)
    assert plan.components.tolist() == [[False, True]]
    assert float(plan.score[0]) == 3.0


def test_the_scorer_learns_a_linear_rule_in_the_targets_unit():
    torch.manual_seed(0)
    scorer = PromptScorer(K, C, F, S, width=16)
    chosen = torch.randint(2, (256, C)).float()
    batch = {
        "template": torch.eye(K)[torch.randint(K, (256,))],
        "chosen": chosen,
        "features": torch.zeros(256, F),
        "scene": torch.zeros(256, S),
        "target": 50 + 10 * chosen[:, 0],
    }
    scorer.calibrate(batch["target"])
    optimiser = torch.optim.Adam(scorer.parameters(), 0.03)
    for _ in range(150):
        optimiser.zero_grad()
        scorer.loss(batch).backward()
        optimiser.step()
    assert float((scorer.scores(batch) - batch["target"]).detach().abs().max()) < 1.0
