"""What scoring costs: parameters and FLOPs of one example, against counts by hand."""

from __future__ import annotations

import torch
from torch import nn

from auto_research.tasks.request_cost import priced, scoring_cost


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
