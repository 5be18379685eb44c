"""DIN: what is pooled and by what; the arms share everything but the pooling."""

from __future__ import annotations

import torch

from auto_research.papers.baselines.din import DIN, DINConfig
from auto_research.tasks.click import miniature

CPU = torch.device("cpu")


def test_the_same_history_is_pooled_differently_for_another_candidate():
    task = miniature()
    event = task.test[:1].repeat(2)
    batch = task.rows(event, CPU, candidate=torch.tensor([0, 5]))
    fields = [f.name for f in task.fields]

    def history(model):
        width = model.features.width // 8
        group = list(dict.fromkeys(f.group for f in task.fields)).index("history")
        return model.features(batch)[:, group * width : (group + 1) * width]

    assert "history" in fields
    pooled = history(DIN(task.fields, DINConfig(field_width=8)))
    assert not torch.allclose(pooled[0], pooled[1])
    even = history(DIN(task.fields, DINConfig(field_width=8, history="mean")))
    torch.testing.assert_close(even[0], even[1])


def test_din_adds_only_the_activation_unit_to_its_base_model():
    task = miniature()
    base = dict(DIN(task.fields, DINConfig(history="mean")).named_parameters())
    din = dict(DIN(task.fields, DINConfig()).named_parameters())
    added = set(din) - set(base)
    assert added
    assert all(name.startswith("features.attention.") for name in added)
    assert all(din[name].shape == p.shape for name, p in base.items())


def test_dice_uses_running_statistics_when_it_serves():
    task = miniature()
    batch = task.rows(task.train[:12], CPU)
    model = DIN(task.fields, DINConfig(field_width=8, hidden=(16, 8), activation="dice"))
    model.train()
    model.loss(batch)
    model.eval()
    whole = model.scores(batch)
    alone = model.scores({name: value[:1] for name, value in batch.items()})
    torch.testing.assert_close(alone, whole[:1])
