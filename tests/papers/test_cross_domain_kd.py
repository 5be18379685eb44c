"""Equations of auxiliary distillation, the gap between the domains, and that no target label reaches the teacher."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from auto_research.data.sequences import Interactions, ItemTable
from auto_research.papers.distillation import cross_domain_kd as kd
from auto_research.runtime.errors import UserError
from auto_research.tasks import cross_domain as cd


def ratings(users=40, items=30, events=20, seed=0, genre="Children"):
    rng = np.random.default_rng(seed)
    genres = np.zeros((items, 2), dtype=bool)
    genres[: items // 2, 0] = True
    genres[items // 2 :, 1] = True
    table = replace(
        ItemTable.of_ids([str(i) for i in range(items)]),
        genres=genres,
        genre_names=(genre, "Drama"),
        year=1950 + np.arange(items),
    )
    item = np.argsort(rng.random((users, items)), axis=1)[:, :events]
    return Interactions.from_events(
        "made up",
        user=np.repeat(np.arange(users), events),
        item=item.ravel(),
        rating=rng.integers(1, 6, users * events).astype(np.float32),
        time=rng.permutation(users * events) * 3600,
        items=table,
    )


@pytest.fixture(scope="module")
def task():
    return cd.split_domains(ratings(), history=8)


@pytest.fixture(scope="module")
def batch():
    return kd.specimens()[0].batch


def bce(logit, label):
    p = 1 / (1 + np.exp(-np.float64(logit)))
    return -(label * np.log(p) + (1 - label) * np.log(1 - p))


def test_loss_is_the_papers_sum_by_a_loop(batch):
    config = kd.StudentConfig(20, width=8, distillation="auxiliary", weight=0.3)
    torch.manual_seed(0)
    model = kd.Student(config).eval()
    states = model.task_states(batch)
    served, teacher = model.served(states), model.teacher_head(states["click"])
    total = 0.0
    for b in range(len(served)):
        for k in range(2):
            total += bce(served[b, k].item(), batch["label"][b, k].item())
        for head, m in enumerate((1, 0)):  # satisfied, click
            total += 0.3 * bce(teacher[b, head].item(), batch["zero-shot"][b, m].item())
    assert model.loss(batch).item() == pytest.approx(total / len(served), rel=1e-5)


def test_direct_distillation_puts_the_twin_label_on_the_served_logit(batch):
    config = kd.StudentConfig(20, width=8, distillation="direct", weight=2.0)
    torch.manual_seed(0)
    model = kd.Student(config).eval()
    z = model.scores(batch)
    hard, soft = batch["label"], batch["zero-shot"][:, [1, 2]]
    expected = np.mean([sum(bce(z[b, k].item(), hard[b, k].item()) + 2 * bce(z[b, k].item(), soft[b, k].item())
                            for k in range(2)) for b in range(len(z))])  # fmt: skip
    assert model.loss(batch).item() == pytest.approx(expected, rel=1e-5)


def test_the_distilled_logit_never_reaches_what_is_served(batch):
    torch.manual_seed(0)
    model = kd.Student(kd.StudentConfig(20, width=8, distillation="auxiliary")).eval()
    before = model.scores(batch)
    with torch.no_grad():
        model.teacher_head.weight.add_(5)
    assert torch.equal(before, model.scores(batch))
    assert torch.equal(before, model.scores({**batch, "zero-shot": 1 - batch["zero-shot"]}))


def test_transfer_passes_through_shared_layers_and_the_attached_task_only(batch):
    torch.manual_seed(0)
    model = kd.Student(kd.StudentConfig(20, width=8, distillation="auxiliary"))
    states = model.task_states(batch)
    kd._bce(model.teacher_head(states["click"]), batch["zero-shot"][:, [1, 0]]).backward()
    assert model.shared[0][0].weight.grad.abs().sum() > 0
    assert model.layers["click"][0].weight.grad.abs().sum() > 0
    assert model.layers["like"][0].weight.grad is None
    assert model.heads["click"].weight.grad is None


def test_the_student_at_serving_has_the_size_of_one_without_distillation():
    plain = kd.Student(kd.StudentConfig(20)).state_dict()
    distilled = kd.Student(kd.StudentConfig(20, distillation="auxiliary")).state_dict()
    assert {name for name in distilled if not name.startswith("teacher_head")} == set(plain)


def test_shuffled_labels_keep_their_distribution(batch):
    model = kd.Student(kd.StudentConfig(20, distillation="auxiliary", labels="shuffled"))
    torch.manual_seed(3)
    shuffled = model.teacher_labels(batch)
    assert not torch.equal(shuffled, batch["zero-shot"])
    torch.testing.assert_close(shuffled.sort(0).values, batch["zero-shot"].sort(0).values)
    constant = kd.Student(kd.StudentConfig(20, distillation="auxiliary", labels="constant")).teacher_labels(batch)
    torch.testing.assert_close(constant, batch["zero-shot"].mean(0).expand_as(constant))


def test_domains_share_no_user_and_differ_in_schema_tasks_and_base_rates(task):
    assert not set(task.source.user.tolist()) & set(task.target.user.tolist())
    niche = set(range(1, 16))
    assert set(task.target.item.tolist()) <= niche
    assert set(task.target.history.flatten().tolist()) <= niche | {0}
    assert set(task.source.item.tolist()) - niche
    assert set(task.source.item.tolist()) & niche, "the teacher must know niche items by name"
    assert task.source.source_labels()[:, 1].mean() != task.target.target_labels()[:, 0].mean()
    view = cd.teacher_view(task.target, task.genres, task.year, cd.DEFAULT_SURFACE)
    assert set(view) - set(cd.student_view(task.target)) == {"genres", "year", "surface"}


def test_labels_by_hand():
    rating = torch.tensor([5.0, 4.0, 3.5, 2.0, 0.0])
    one = torch.zeros(5, dtype=torch.long)
    examples = cd.Examples(one, one[:, None], one, one, rating)
    assert examples.source_labels().tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert examples.target_labels().tolist() == [[1, 1], [1, 0], [0, 0], [0, 0], [0, 0]]


def test_histories_hold_strictly_earlier_events_of_the_same_user():
    interactions = ratings(users=6)
    found = cd.histories(interactions, 5)
    for event in range(len(interactions)):
        same = interactions.user == interactions.user[event]
        earlier = np.flatnonzero(same & (interactions.time < interactions.time[event]))
        expected = interactions.item[earlier][-5:] + 1
        assert found[event].tolist() == [0] * (5 - len(expected)) + expected.tolist()


def test_negatives_were_never_rated_and_fall_into_the_part_of_their_event(task):
    interactions = ratings()
    generator = torch.Generator().manual_seed(0)
    examples, event = cd.make_examples(interactions, torch.arange(30), negatives=2, history=4, generator=generator)
    rated = set(zip(interactions.user.tolist(), (interactions.item + 1).tolist(), strict=True))
    columns = (examples.user.tolist(), examples.item.tolist(), examples.rating.tolist())
    for user, item, rating in zip(*columns, strict=True):
        assert ((user, item) in rated) == (rating > 0)
    assert (examples.user == torch.from_numpy(interactions.user)[event]).all()
    parts = [set(part.tolist()) for part in (task.train, task.validation, task.test)]
    assert len(set().union(*parts)) == sum(map(len, parts)) == len(task.target)


def test_no_target_label_reaches_the_teacher_or_an_input():
    one = ratings()
    changed = replace(one, rating=6 - one.rating)
    first, second = cd.split_domains(one, history=8), cd.split_domains(changed, history=8)
    torch.manual_seed(0)
    teacher = kd.Teacher(30, 2, width=8)
    cpu = torch.device("cpu")
    torch.testing.assert_close(
        kd.teacher_predictions(teacher, first, cpu), kd.teacher_predictions(teacher, second, cpu)
    )
    for name, value in first.rows(torch.arange(len(first.target))).items():
        if name != "label":
            assert torch.equal(value, second.rows(torch.arange(len(second.target)))[name]), name


def test_teacher_labels_are_constants_in_the_open_interval(task):
    torch.manual_seed(0)
    labels = kd.teacher_predictions(kd.Teacher(30, 2, width=8), task, torch.device("cpu"))
    assert not labels.requires_grad
    assert ((labels > 0) & (labels < 1)).all()
    with pytest.raises(ValueError, match="constant"):
        task.store_teacher("zero-shot", torch.rand(3, 3))


def test_part_of_the_target_keeps_validation_and_test():
    whole, part = (cd.split_domains(ratings(), history=8, train_share=s) for s in (1.0, 0.3))
    assert torch.equal(whole.test, part.test)
    assert torch.equal(whole.validation, part.validation)
    assert set(part.train.tolist()) < set(whole.train.tolist())
    assert 0.2 < len(part.train) / len(whole.train) < 0.4


def test_calibration_metric_by_hand(task):
    class Half(torch.nn.Module):
        def scores(self, batch):
            return torch.zeros(len(batch["item"]), 2)

    evaluation = task.evaluate(Half(), "test", torch.device("cpu"))
    labels = task.target.take(task.test).target_labels()[:, 0]
    assert evaluation["calibration"] == pytest.approx(abs(np.log(0.5 * len(labels) / labels.sum().item())))
    assert evaluation["log_loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert evaluation["auc"] == 0.5


def test_data_without_niche_genres_is_refused():
    with pytest.raises(UserError, match="niche"):
        cd.split_domains(ratings(genre="Horror"))


@pytest.mark.parametrize("users, share", [(250, 0.2), (610, 0.2), (943, 0.2), (2000, 0.1), (6040, 0.05)])
def test_the_target_is_a_twentieth_of_many_users_and_a_fifth_of_few(users, share):
    assert cd.target_share(users) == pytest.approx(share)


def test_the_share_of_target_users_is_kept():
    for options, expected in (({}, 8), ({"target_users": 0.5}, 20)):
        task = cd.split_domains(ratings(), history=8, **options)
        assert len(set(task.target.user.tolist())) == expected
        assert len(set(task.source.user.tolist())) == 40 - expected
