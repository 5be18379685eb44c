"""What scoring costs: parameters and FLOPs of one example, against counts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auto_research.tasks.click import miniature
from auto_research.tasks.request_cost import SplitCost, one_request, priced, scoring_cost, split_cost


class OneLayer(nn.Module):
    """A linear map of x (B, 5) to one logit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.logged: dict[str, float] = {"kept": 1.0}

    def scores(self, batch):
        assert not self.training
        return self.layer(batch["x"]).squeeze(-1)


SAMPLE = {"x": torch.ones(4, 5), "label": torch.ones(4)}


def test_cost_is_trainable_scalars_and_the_flops_of_one_example():
    assert scoring_cost(OneLayer, SAMPLE) == (5 + 1, 2 * 5)


def test_asking_for_a_cost_draws_no_random_numbers():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    scoring_cost(OneLayer, SAMPLE)
    assert torch.equal(before, torch.get_rng_state())


def test_a_priced_model_is_the_same_model_ready_to_train_and_tells_its_flops():
    torch.manual_seed(0)
    plain = OneLayer()
    torch.manual_seed(0)
    model = priced(OneLayer, SAMPLE)()
    assert torch.equal(plain.layer.weight, model.layer.weight)
    assert model.training
    assert model.logged == {"kept": 1.0, "flops": 10.0}


class Halves(nn.Module):
    """7 columns of a request mapped to 3 once; for each candidate, 3 mapped to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.request, self.candidate = nn.Linear(7, 3), nn.Linear(3, 1)

    def request_side(self, batch):
        return self.request(torch.ones(len(batch["user"]), 7))

    def candidate_scores(self, side, batch):
        rows = side.repeat_interleave(len(batch["item"]) // len(side), dim=0)
        return self.candidate(rows).squeeze(-1)


@pytest.mark.parametrize("candidates", [1, 5])
def test_cost_is_split_where_the_work_is_done(candidates):
    cost = split_cost(Halves, miniature(detailed=True), candidates)
    assert cost == SplitCost(request=2 * 7 * 3, candidate=2 * 3)
    assert cost.amortised(1) == 2 * 7 * 3 + 2 * 3
    assert cost.amortised(100) == pytest.approx(6.42)


def test_the_request_is_the_one_with_the_longest_history_and_items_repeat():
    task = miniature(detailed=True, history_length=30)
    event, items = one_request(task, task.num_items + 2)
    lengths = (task.rows(task.test, torch.device("cpu"))["history_item"] > 0).sum(1)
    assert int((task.rows(event, torch.device("cpu"))["history_item"] > 0).sum()) == int(lengths.max())
    assert items.tolist() == [*range(task.num_items), 0, 1]
