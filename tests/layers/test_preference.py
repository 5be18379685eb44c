"""Preference losses against TRL's own, float64 values by hand, and their limits."""

import math
import warnings
from collections import defaultdict
from types import SimpleNamespace

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from auto_research.layers import preference

# Summed log-probabilities of four pairs and their lengths.
CHOSEN = torch.tensor([-1.25, -6.0, -0.5, -20.0])
REJECTED = torch.tensor([-3.5, -2.0, -0.75, -9.0])
REFERENCE_CHOSEN = torch.tensor([-2.0, -5.5, -0.5, -18.0])
REFERENCE_REJECTED = torch.tensor([-3.0, -2.5, -0.25, -11.0])
CHOSEN_LENGTH = torch.tensor([2.0, 5.0, 1.0, 7.0])
REJECTED_LENGTH = torch.tensor([3.0, 2.0, 1.0, 4.0])
SUMS = (CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED)
MEANS = (CHOSEN / CHOSEN_LENGTH, REJECTED / REJECTED_LENGTH)


@pytest.fixture(scope="module")
def trl():
    """TRL's loss code, called on numbers instead of models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.cpo import CPOTrainer
        from trl.experimental.orpo import ORPOTrainer
        from trl.trainer.dpo_trainer import DPOTrainer
    return SimpleNamespace(cpo=CPOTrainer, orpo=ORPOTrainer, dpo=DPOTrainer)


def trl_dpo(trainer, loss_type: str, beta: float) -> torch.Tensor:
    """TRL's mean DPO-family loss on the pairs above, whose tokens share their sequence's log-probability evenly."""
    lengths = torch.cat([CHOSEN_LENGTH, REJECTED_LENGTH])
    width = int(lengths.max())
    counted = torch.arange(width) < lengths[:, None]
    per_token = torch.where(counted, (torch.cat([CHOSEN, REJECTED]) / lengths)[:, None], 0.0)
    mask = F.pad(counted.long(), (1, 0))  # the first token is the prompt
    zeros = torch.zeros_like(per_token)
    outputs = SimpleNamespace(log_probs=per_token, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    fake = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0],
        beta=beta, use_weighting=False, _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask,
        "ref_chosen_logps": REFERENCE_CHOSEN, "ref_rejected_logps": REFERENCE_REJECTED,
    }  # fmt: skip
    return trainer._compute_loss(fake, lambda **_: outputs, inputs, False)


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo_equals_trl(trl, beta: float) -> None:
    assert torch.allclose(preference.dpo_loss(*SUMS, beta=beta).mean(), trl_dpo(trl.dpo, "sigmoid", beta))


@pytest.mark.parametrize("tau", [0.1, 0.5])
def test_normalised_ipo_equals_trl(trl, tau: float) -> None:
    ours = preference.ipo_loss(*SUMS, tau=tau, chosen_length=CHOSEN_LENGTH, rejected_length=REJECTED_LENGTH)
    assert torch.allclose(ours.mean(), trl_dpo(trl.dpo, "ipo", tau))


@pytest.mark.parametrize("tau", [0.1, 0.5])
def test_summed_ipo_equals_trl_on_log_ratios(trl, tau: float) -> None:
    """TRL's CPO trainer has the IPO formula on whatever two numbers it is given: here the sums of log-ratios."""
    fake = SimpleNamespace(alpha=0.0, loss_type="ipo", beta=tau, accelerator=SimpleNamespace(device="cpu"))
    theirs = trl.cpo.cpo_loss(fake, CHOSEN - REFERENCE_CHOSEN, REJECTED - REFERENCE_REJECTED)[0]
    assert torch.allclose(preference.ipo_loss(*SUMS, tau=tau), theirs)


@pytest.mark.parametrize("weight", [0.1, 1.0])
def test_orpo_equals_trl(trl, weight: float) -> None:
    fake = SimpleNamespace(beta=weight, accelerator=SimpleNamespace(device="cpu"))
    theirs, *_, log_odds = trl.orpo.odds_ratio_loss(fake, *MEANS)
    assert torch.allclose(preference.orpo_loss(*MEANS, weight=weight), -MEANS[0] - theirs, atol=1e-6)
    assert torch.allclose(preference.log_odds_ratio(*MEANS).mean(), log_odds, atol=1e-6)


@pytest.mark.parametrize(("beta", "gamma"), [(2.0, 1.0), (10.0, 2.5)])
def test_simpo_equals_trl(trl, beta: float, gamma: float) -> None:
    fake = SimpleNamespace(
        alpha=0.0, loss_type="simpo", beta=beta, simpo_gamma=gamma, label_smoothing=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    theirs = trl.cpo.cpo_loss(fake, *MEANS)[0]
    assert torch.allclose(preference.simpo_loss(*MEANS, beta=beta, gamma=gamma), theirs)


def test_sequence_log_probabilities_equal_trl(trl) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 11, generator=draw)
    tokens = torch.randint(0, 11, (3, 6), generator=draw)
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 0]]).bool()
    labels = tokens.where(mask, -100)
    total, length = preference.sequence_log_probabilities(logits[:, :-1], tokens[:, 1:], mask[:, 1:])
    assert torch.allclose(total, trl.orpo.get_batch_logps(logits, labels))
    assert torch.allclose(total / length, trl.orpo.get_batch_logps(logits, labels, average_log_prob=True))
    assert length.tolist() == [3, 5, 1]


def test_values_by_hand() -> None:
    """The first pair: log-ratios +0.75 and -0.5, so a margin of 1.25; means -0.625 and -7/6."""
    sums = [x[:1].double() for x in SUMS]
    assert preference.margin(*sums).item() == 1.25
    assert preference.dpo_loss(*sums, beta=0.1).item() == pytest.approx(math.log(1 + math.exp(-0.125)), abs=1e-12)
    assert preference.ipo_loss(*sums, tau=0.1).item() == pytest.approx((1.25 - 5) ** 2, abs=1e-12)
    lengths = {"chosen_length": CHOSEN_LENGTH[:1].double(), "rejected_length": REJECTED_LENGTH[:1].double()}
    expected = (0.375 + 0.5 / 3 - 5) ** 2
    assert preference.ipo_loss(*sums, tau=0.1, **lengths).item() == pytest.approx(expected, abs=1e-12)
    win, lose = -0.625, -3.5 / 3
    logit = [p - math.log(1 - math.exp(p)) for p in (win, lose)]
    odds = 0.1 * math.log(1 + math.exp(-(logit[0] - logit[1])))
    means = torch.tensor([win]).double(), torch.tensor([-3.5]).double() / 3
    assert preference.orpo_loss(*means, weight=0.1).item() == pytest.approx(-win + odds, abs=1e-12)
    simple = math.log(1 + math.exp(-(2.5 * (win - lose) - 1.25)))
    assert preference.simpo_loss(*means, beta=2.5, gamma=1.25).item() == pytest.approx(simple, abs=1e-12)


def test_first_step_values_do_not_depend_on_data() -> None:
    """Policy = reference: DPO is ln 2, IPO (1 / 2 tau)^2 = 25 at tau 0.1, summed or normalised."""
    same = (CHOSEN, REJECTED, CHOSEN, REJECTED)
    lengths = {"chosen_length": CHOSEN_LENGTH, "rejected_length": REJECTED_LENGTH}
    assert torch.allclose(preference.dpo_loss(*same, beta=0.3), torch.full((4,), math.log(2)))
    assert torch.allclose(preference.ipo_loss(*same, tau=0.1), torch.full((4,), 25.0))
    assert torch.allclose(preference.ipo_loss(*same, tau=0.1, **lengths), torch.full((4,), 25.0))


def test_ipo_has_a_finite_target_where_dpo_has_none() -> None:
    """Beyond a margin of 1 / (2 tau) IPO pulls back, DPO still pushes."""
    chosen = torch.tensor([8.0], requires_grad=True)
    zero = torch.zeros(1)
    (pull,) = torch.autograd.grad(preference.ipo_loss(chosen, zero, zero, zero, tau=0.1).sum(), chosen)
    (push,) = torch.autograd.grad(preference.dpo_loss(chosen, zero, zero, zero, beta=0.1).sum(), chosen)
    assert pull.item() == pytest.approx(2 * (8 - 5))
    assert push.item() < 0


def test_one_length_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="both lengths"):
        preference.ipo_loss(*SUMS, chosen_length=CHOSEN_LENGTH)


def test_reference_gets_no_gradient() -> None:
    leaves = [x.clone().requires_grad_() for x in SUMS]
    preference.dpo_loss(*leaves).sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, True, False, False]


@given(st.floats(-100.0, -1e-6))
def test_log1m_exp_is_accurate_in_float32(value: float) -> None:
    """Against fifty digits."""
    single = torch.tensor([value])
    with mpmath.workdps(50):
        exact = float(mpmath.log(1 - mpmath.exp(single.item())))
    assert preference.log1m_exp(single).item() == pytest.approx(exact, rel=1e-6)


def test_log1m_exp_where_the_direct_form_fails() -> None:
    small = torch.tensor([-1e-8])
    assert torch.log(1 - small.exp()).item() == -math.inf
    limit = torch.finfo(torch.float32).eps
    assert preference.log1m_exp(small).item() == pytest.approx(math.log(limit), rel=1e-3)
    large = torch.tensor([-40.0])
    assert torch.log(1 - large.exp()).item() == 0
    assert preference.log1m_exp(large).item() == pytest.approx(-math.exp(-40), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_saturated_policies_keep_finite_losses_and_gradients(dtype: torch.dtype) -> None:
    win = torch.tensor([0.0, -60.0, -1e-9, -0.7], dtype=dtype, requires_grad=True)
    lose = torch.tensor([-60.0, 0.0, -1e-9, -0.7], dtype=dtype, requires_grad=True)
    loss = preference.orpo_loss(win, lose)
    loss.sum().backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for values in (loss, win.grad, lose.grad):
        assert values.isfinite().all()


def test_gradients_agree_with_numbers() -> None:
    values = [x.double().requires_grad_() for x in MEANS]
    assert torch.autograd.gradcheck(lambda a, b: preference.orpo_loss(a, b), values)
    assert torch.autograd.gradcheck(lambda a, b: preference.simpo_loss(a, b), values)
