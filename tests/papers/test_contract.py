"""What every paper is held to, for free: the contract of `Specimen`, over the whole registry."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import pytest
import torch

from auto_research.papers._registry import adapter, adapters
from auto_research.runtime.device import seed_everything
from auto_research.tasks.base import trainable

KEYS = list(adapters())


def specimens_of(key):
    module = adapter(key).load_module()
    return module.specimens() if hasattr(module, "specimens") else []


def neural():
    """(key, index of specimen) of every trainable model, found without importing torch models twice."""
    return [
        pytest.param(key, index, id=f"{key}-{specimen.name}".replace(" ", "_"))
        for key in KEYS
        for index, specimen in enumerate(specimens_of(key))
    ]


SPECIMENS = neural()


def fetch(key, index):
    return specimens_of(key)[index]


def build(specimen, seed=0):
    seed_everything(seed)
    return specimen.build()


def scores(specimen, model, batch):
    model.eval()
    with torch.no_grad():
        return specimen.scores(model, batch)


def rows(batch, index):
    return {name: value[index] for name, value in batch.items()}


@pytest.mark.parametrize("key", KEYS)
def test_card_names_an_entry_and_embedded_data(key):
    from auto_research.data.catalogue import CATALOGUE

    found = adapter(key)
    assert callable(found.load())
    assert all(name in CATALOGUE for name in found.card.datasets)
    assert CATALOGUE[found.card.datasets[-1]].embedded, "the last data set must come with the package"
    assert all(names[-1].startswith("micro-") for names in found.card.checkpoints.values())
    assert len(found.page) > 400, "the page says too little"
    assert found.card.family == found.card_path.parent.name.replace("_", "-")


def test_importing_papers_has_no_side_effects(tmp_path):
    modules = sorted({a.module for a in adapters().values()})
    program = (
        "import importlib, torch\n"
        "torch.manual_seed(7); before = torch.get_rng_state(); threads = torch.get_num_threads()\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "assert torch.equal(before, torch.get_rng_state()), 'an import drew random numbers'\n"
        "assert threads == torch.get_num_threads(), 'an import changed the threads'\n"
        "assert torch.get_default_dtype() == torch.float32\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key, index", SPECIMENS)
def test_scores_are_finite_and_of_the_declared_shape(key, index):
    specimen = fetch(key, index)
    found = scores(specimen, build(specimen), specimen.batch)
    assert tuple(found.shape) == specimen.shape
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("key, index", SPECIMENS)
def test_every_trainable_parameter_receives_a_gradient_and_moves(key, index):
    specimen = fetch(key, index)
    model = build(specimen)
    model.train()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    reached = dict.fromkeys(before, False)
    optimiser = torch.optim.SGD(trainable(model), lr=0.1)
    # Three updates: what starts at exactly zero hides the gradient of what feeds it for one.
    for _ in range(3):
        optimiser.zero_grad()
        model.loss(specimen.batch).backward()
        for name, p in model.named_parameters():
            if p.requires_grad and p.grad is not None:
                assert torch.isfinite(p.grad).all(), name
                reached[name] |= bool((p.grad != 0).any())
        optimiser.step()
    after = dict(model.named_parameters())
    stuck = [
        name
        for name, value in before.items()
        if not (reached[name] and not torch.equal(value, after[name]))
        and not any(name.startswith(prefix) for prefix in specimen.frozen)
    ]
    assert not stuck


@pytest.mark.parametrize("key, index", SPECIMENS)
def test_one_batch_can_be_overfitted(key, index):
    specimen = fetch(key, index)
    model = build(specimen)
    model.train()
    optimiser = torch.optim.AdamW(trainable(model), lr=specimen.overfit_rate, weight_decay=0.0)
    first = None
    for step in range(specimen.overfit_steps):
        optimiser.zero_grad()
        value = model.loss(specimen.batch)
        first = float(value.detach()) if first is None else first
        value.backward()
        optimiser.step()
        if getattr(model, "on_step_end", None):
            model.on_step_end(step)
    last = float(model.loss(specimen.batch).detach())
    assert last - specimen.loss_floor < 0.5 * (first - specimen.loss_floor), (first, last)


@pytest.mark.parametrize("key, index", SPECIMENS)
def test_saving_and_loading_changes_no_score(key, index):
    specimen = fetch(key, index)
    model = build(specimen)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = build(specimen, seed=1)
    other.load_state_dict(torch.load(file, weights_only=True))
    expected = scores(specimen, model, specimen.batch)
    assert torch.equal(expected, scores(specimen, other, specimen.batch))


@pytest.mark.parametrize("key, index", SPECIMENS)
def test_one_seed_gives_one_model(key, index):
    specimen = fetch(key, index)
    first, second = build(specimen), build(specimen)
    for one, two in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    losses = []
    for model in (first, second):
        seed_everything(3)
        model.train()
        losses.append(float(model.loss(specimen.batch).detach()))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("key, index", SPECIMENS)
def test_batch_size_and_order_change_nothing(key, index):
    specimen = fetch(key, index)
    if specimen.batchwise:
        return
    model = build(specimen)
    whole = scores(specimen, model, specimen.batch)
    size = len(next(iter(specimen.batch.values())))
    assert size >= 4
    order = torch.arange(size).flip(0)
    torch.testing.assert_close(scores(specimen, model, rows(specimen.batch, order)), whole[order], atol=1e-5, rtol=1e-4)
    alone = torch.cat([scores(specimen, model, rows(specimen.batch, slice(i, i + 1))) for i in range(size)])
    torch.testing.assert_close(alone, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("key, index", SPECIMENS)
def test_padding_changes_nothing(key, index):
    specimen = fetch(key, index)
    if specimen.pad is None:
        return
    model = build(specimen)
    padded = specimen.pad(copy.deepcopy(specimen.batch))
    assert any(padded[name].shape != specimen.batch[name].shape for name in padded), "pad added no padding"
    torch.testing.assert_close(
        scores(specimen, model, padded), scores(specimen, model, specimen.batch), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("key, index", SPECIMENS)
def test_no_score_depends_on_a_later_event(key, index):
    specimen = fetch(key, index)
    if specimen.change_later is None:
        return
    model = build(specimen)
    changed = specimen.change_later(copy.deepcopy(specimen.batch))
    assert any(not torch.equal(changed[n], specimen.batch[n]) for n in changed), "nothing later was changed"
    torch.testing.assert_close(
        scores(specimen, model, changed), scores(specimen, model, specimen.batch), atol=1e-6, rtol=1e-5
    )


def effect(specimen, build_one):
    """Parameter shapes, loss and scores of a model; two different models differ in at least one."""
    seed_everything(0)
    model = build_one()
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    model.train()
    seed_everything(1)
    loss = float(model.loss(specimen.batch).detach())
    return shapes, loss, scores(specimen, model, specimen.batch)


@pytest.mark.parametrize("key, index", SPECIMENS)
def test_every_switch_changes_parameters_loss_or_scores(key, index):
    specimen = fetch(key, index)
    shapes, loss, found = effect(specimen, specimen.build)
    idle = []
    for name, switched in specimen.switches.items():
        other_shapes, other_loss, other = effect(specimen, switched)
        same_scores = other.shape == found.shape and torch.equal(other, found)
        if shapes == other_shapes and loss == other_loss and same_scores:
            idle.append(name)
    assert not idle


@pytest.mark.parametrize("key", KEYS)
def test_every_documented_option_is_a_switch(key):
    documented = set(adapter(key).card.options)
    switched = {name.split("=")[0].strip() for s in specimens_of(key) for name in s.switches}
    assert documented <= switched, f"options without a test of their effect: {documented - switched}"
