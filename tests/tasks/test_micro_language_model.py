"""Shapes and costs of micro language models, training and evaluation, against counts, caches and slow loops."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from auto_research.tasks import micro_language_model as micro
from auto_research.tasks.base import Recipe
from auto_research.tasks.language_model import bigram_nats, unigram
from auto_research.tasks.micro_language_model import Shape

MHA = Shape("llama", 2048, 128, 2, 4, 4, 336, True, 128, 0)
FAMILIES = {
    "mha": MHA,
    "gqa": replace(MHA, kv_heads=2),
    "mqa": replace(MHA, kv_heads=1),
    "sliding": replace(MHA, family="mistral", window=8),
    "mla": replace(MHA, family="deepseek_v2", latent=32, rotary=16),
    "gelu": replace(MHA, family="arcee"),
    "learned": replace(MHA, family="opt"),
    "alibi": replace(MHA, family="falcon"),
    "alibi mqa": replace(MHA, family="falcon", kv_heads=1),
}
SMALL = {
    name: replace(shape, vocabulary=50, width=32, hidden=32, positions=64, rotary=4 if shape.rotary else 0, end=3)
    for name, shape in FAMILIES.items()
}


def text(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(50, (length,), generator=torch.Generator().manual_seed(seed))


def test_parameter_counts_are_the_measured_ones():
    assert [FAMILIES[name].count for name in ("mha", "gqa", "mqa")] == [651_904, 619_136, 602_752]
    four = replace(MHA, layers=4, hidden=352)
    assert [replace(four, kv_heads=g).count for g in (4, 2, 1)] == [1_066_112, 1_000_576, 967_808]
    assert replace(four, family="deepseek_v2", latent=32, rotary=16).count == 1_025_280
    points = [
        replace(MHA, width=w, layers=n, hidden=micro.feed_forward_width(w)) for w, n in ((64, 2), (96, 2), (128, 3))
    ]
    assert [p.count for p in points] == [231_744, 418_272, 846_720]
    assert MHA.non_embedding == 651_904 - 2048 * 128
    assert replace(MHA, tied=False).count == MHA.count + 2048 * 128
    assert replace(MHA, tied=False).non_embedding == MHA.non_embedding


@pytest.mark.parametrize("name", SMALL)
def test_the_model_is_what_the_shape_says(name):
    shape = SMALL[name]
    model = micro.build(shape, 0)
    assert {n: list(p.shape) for n, p in model.named_parameters()} == shape.parameters()
    assert sum(p.numel() for p in model.parameters()) == shape.count
    again, other = micro.build(shape, 0), micro.build(shape, 1)
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters())]
    assert all(same)
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("name", SMALL)
def test_no_logit_sees_a_later_token(name):
    model = micro.build(SMALL[name], 0).eval()
    ids = text(24)[None]
    changed = ids.clone()
    changed[0, 10] = (ids[0, 10] + 1) % 50
    with torch.no_grad():
        moved = (model(ids).logits - model(changed).logits).abs().amax(-1)[0] > 1e-7
    assert not moved[:10].any()
    assert moved[10:12].all()


@pytest.mark.parametrize("name", SMALL)
def test_the_cache_has_the_bytes_of_the_formula_and_changes_no_token(name):
    shape = SMALL[name]
    model = micro.build(shape, 0).eval()
    ids = text(20)[None]
    with torch.no_grad():
        out = model(ids, use_cache=True)
    cache = getattr(out, "cache", None) or out.past_key_values
    found = sum(part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values))
    assert found == shape.kv_bytes(20)
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    cached, uncached = (model.generate(ids, use_cache=use, pad_token_id=3, **options) for use in (True, False))
    assert cached.shape == (1, 36)
    assert torch.equal(cached, uncached)


def test_cache_formulas():
    assert [FAMILIES[n].kv_numbers for n in ("mha", "gqa", "mqa", "mla")] == [256, 128, 64, 48]
    assert FAMILIES["gqa"].kv_bytes_per_token == 2 * 128 * 4
    assert FAMILIES["sliding"].kv_bytes(5) == 5 * FAMILIES["mha"].kv_bytes_per_token
    assert FAMILIES["sliding"].kv_bytes(100) == 7 * FAMILIES["mha"].kv_bytes_per_token
    paper = Shape("deepseek_v2", 100, 8192, 1, 128, 128, 64, True, 8, 0, latent=4 * 64, rotary=32)
    assert paper.kv_numbers == 2.25 * (2 * paper.head_width)  # as GQA with 2.25 groups


def test_gqa_with_as_many_groups_as_heads_is_mha_and_heads_share_in_order():
    grouped, single = micro.build(SMALL["gqa"], 0).eval(), micro.build(SMALL["mha"], 0).eval()
    # Head i uses group floor(i g / h): repeating each group's rows twice gives the same function with four heads.
    state = grouped.state_dict()
    for name, value in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = value.view(2, 8, 32).repeat_interleave(2, 0).reshape(32, 32)
    single.load_state_dict(state)
    ids = text(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(grouped(ids).logits, single(ids).logits)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_window_sees_exactly_its_tokens(layers):
    model = micro.build(replace(SMALL["sliding"], layers=layers), 0).eval()
    ids = text(40)[None]
    changed = ids.clone()
    changed[0, 10] = (ids[0, 10] + 1) % 50
    with torch.no_grad():
        moved = ((model(ids).logits - model(changed).logits).abs().amax(-1)[0] > 1e-7).nonzero()[:, 0]
    assert moved.tolist() == list(range(10, 10 + layers * 7 + 1))  # a layer reaches 7 further: (t - 8, t]


def test_rope_knows_distances_only_and_learned_positions_do_not():
    ids = text(12)
    for name, invariant in (("mha", True), ("learned", False)):
        model = micro.build(SMALL[name], 0).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)  # so that attention is far from uniform
            plain = model(ids[None], position_ids=torch.arange(12)[None]).logits
            moved = model(ids[None], position_ids=torch.arange(12)[None] + 17).logits
        assert torch.allclose(plain, moved, atol=1e-3) is invariant, name


def test_alibi_falls_linearly_with_distance():
    model = micro.build(SMALL["alibi"], 0).eval()
    attention = model.transformer.h[0].self_attention
    seen: dict[str, torch.Tensor] = {}
    attention.query_key_value.register_forward_hook(lambda m, i, o: seen.update(qkv=o))
    attention.dense.register_forward_pre_hook(lambda m, i: seen.update(mixed=i[0]))
    with torch.no_grad():
        attention.query_key_value.weight.view(4, 3, 8, 32)[:, :2] = 0  # all scores 0: the bias alone decides
        model(text(12)[None], use_cache=False)
    values, mixed = seen["qkv"].view(12, 4, 3, 8)[:, :, 2], seen["mixed"].view(12, 4, 8)
    distance = torch.arange(12)[:, None] - torch.arange(12)
    for head in range(4):
        slope = 2.0 ** (-2 * (head + 1)) / math.sqrt(8)  # Falcon scales the bias as it does the scores
        weights = (-slope * distance).masked_fill(distance < 0, -torch.inf).softmax(-1)
        torch.testing.assert_close(mixed[:, head], weights @ values[:, head])


def test_swiglu_and_gelu_have_equal_parameters_and_their_formulas():
    assert FAMILIES["gelu"].count == FAMILIES["mha"].count
    assert FAMILIES["gelu"].feed_forward == 504
    x = torch.randn(3, 32)
    gated, plain = (micro.build(SMALL[name], 0).model.layers[0].mlp for name in ("mha", "gelu"))
    expected = F.linear(
        F.silu(F.linear(x, gated.gate_proj.weight)) * F.linear(x, gated.up_proj.weight), gated.down_proj.weight
    )
    torch.testing.assert_close(gated(x), expected)
    hidden = F.linear(x, plain.up_proj.weight)
    torch.testing.assert_close(
        plain(x), F.linear(hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2))), plain.down_proj.weight)
    )


def test_flops_are_those_of_the_products():
    shape, length = SMALL["gqa"], 16
    model = micro.build(shape, 0).eval()
    from torch.utils.flop_counter import FlopCounterMode

    model.set_attn_implementation("eager")  # two visible products
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(text(length)[None], use_cache=False)
    # Eager attention computes the masked half as well: span is then the whole context.
    causal = shape.layers * 2 * shape.heads * 2 * shape.head_width
    assert shape.flops_per_token(length) * length == pytest.approx(
        counter.get_total_flops() - causal * length * (length - (length + 1) / 2)
    )
    windowed = SMALL["sliding"]
    saved = SMALL["mha"].flops_per_token(length) - windowed.flops_per_token(length)
    lost = sum(max(0, t + 1 - windowed.window) for t in range(length)) / length
    assert saved == pytest.approx(2 * 2 * windowed.heads * 2 * windowed.head_width * lost)


def test_matching_meets_its_target_or_refuses():
    for name in ("gqa", "mqa", "mla"):
        for measure in (lambda s: float(s.count), lambda s: s.flops_per_token(128)):
            matched = FAMILIES[name].matched(measure(MHA), measure)
            assert matched is not None
            assert measure(matched) == pytest.approx(measure(MHA), rel=2e-3)
            assert matched.kv_numbers == FAMILIES[name].kv_numbers
    assert replace(MHA, tied=False).matched(float(MHA.count), lambda s: float(s.count)) is None


def test_impossible_shapes_are_refused():
    for change in ({"width": 100}, {"kv_heads": 3}, {"hidden": 33}):
        with pytest.raises(ValueError, match=r"divide|even"):
            replace(MHA, **change)


def test_every_token_of_a_text_is_predicted_once():
    model = micro.build(SMALL["mha"], 0).eval()
    tokens, context = text(43), 10
    nats = micro.text_nats(model, tokens, end=3, context=context, batch=3)
    expected = []
    for t in range(43):  # one token at a time, from the start of its window
        start = t // context * context
        before = ([3] if start == 0 else [int(tokens[start - 1])]) + tokens[start:t].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([before])).logits[0, -1].double()
        expected.append(float(-logits.log_softmax(-1)[tokens[t]]))
    assert nats.shape == (43,)
    torch.testing.assert_close(nats, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-5)
    assert micro.bits_per_byte(math.log(2) * 80, 40) == pytest.approx(2.0)


@pytest.mark.parametrize("name", SMALL)
def test_only_responses_count_and_filling_changes_nothing(name):
    model = micro.build(SMALL[name], 0).eval()
    rows = [([1, 2, 4], [5, 6, 3]), ([7, 8], [9, 10, 11, 12, 3])]
    ids, labels = micro.response_batch([p for p, _ in rows], [r for _, r in rows], pad=3)
    assert labels.tolist() == [[-100, -100, 5, 6, 3, -100], [-100, 9, 10, 11, 12, 3]]
    assert ids.tolist() == [[1, 2, 4, 5, 6, 3], [7, 8, 9, 10, 11, 12]]
    together = micro.rows_nats(model, [(ids, labels)])
    alone = [micro.rows_nats(model, [micro.response_batch([p], [r], pad=3)]) for p, r in rows]
    assert together[1] == sum(count for _, count in alone) == 8
    assert together[0] == pytest.approx(sum(total for total, _ in alone), rel=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimisers_share_out_all_parameters(kind):
    for name in ("mha", "learned", "alibi"):
        model = micro.build(replace(SMALL[name], tied=False), 0)
        found = micro.optimisers(model, Recipe(), kind)
        owned = [[p for group in o.param_groups for p in group["params"]] for o in found]
        assert sorted(id(p) for ps in owned for p in ps) == sorted(id(p) for p in model.parameters())
        if kind == "muon":
            hidden = {
                id(p) for n, p in model.named_parameters() if p.dim() == 2 and "emb" not in n and "lm_head" not in n
            }
            assert {id(p) for p in owned[1]} == hidden, name
        else:
            assert len(found) == 1


def test_muon_moves_matrices_by_nearly_orthogonal_steps():
    torch.manual_seed(0)
    model = micro.build(SMALL["mha"], 0)
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = weight.detach().clone()
    batch = (text(32)[None, :-1], text(32)[None, 1:])
    micro.train(model, itertools.repeat(batch), 1, Recipe(learning_rate=1e-3, warmup=0.5), optimiser="muon")
    values = torch.linalg.svdvals((weight.detach() - before).double())
    assert values.max() / values[: len(values) // 2].min() < 2  # AdamW's first step is far from it
    plain = micro.build(SMALL["mha"], 0)
    micro.train(plain, itertools.repeat(batch), 1, Recipe(learning_rate=1e-3, warmup=0.5))
    values = torch.linalg.svdvals((plain.model.layers[0].self_attn.q_proj.weight.detach() - before).double())
    assert values.max() / values[: len(values) // 2].min() > 2


def test_training_follows_its_schedule_and_reports():
    model = micro.build(SMALL["mha"], 0)
    seen = []
    batch = (text(32)[None, :-1], text(32)[None, 1:])
    losses = micro.train(
        model, itertools.repeat(batch), 25, Recipe(learning_rate=1e-2, schedule="cosine"),
        progress=lambda step, loss: seen.append((step, loss)), first_step=100,
    )  # fmt: skip
    assert len(losses) == 25
    assert losses[-1] < losses[0] - 0.5
    assert [step for step, _ in seen] == [101, 111, 121, 125]
    assert [loss for _, loss in seen] == pytest.approx([losses[0], losses[10], losses[20], losses[24]])
    assert not model.training
    assert [round(micro.warmup_share(steps) * steps) for steps in (150, 300, 2000, 60, 2)] == [30, 30, 30, 20, 1]


def test_unigram_and_bigram_are_distributions_and_match_counting():
    train, vocabulary = text(400) % 7, 9
    assert unigram(train, vocabulary).exp().sum().item() == pytest.approx(1)
    pairs = torch.cartesian_prod(torch.arange(vocabulary), torch.arange(vocabulary))
    p = torch.stack([(-bigram_nats(train, pair, vocabulary)).exp()[0] for pair in pairs]).view(vocabulary, vocabulary)
    torch.testing.assert_close(p.sum(1), torch.ones(vocabulary, dtype=torch.float64))  # also after unseen tokens
    rows = train.tolist()
    follow = [b for a, b in itertools.pairwise(rows) if a == 2]
    single = (rows.count(4) + 1) / (len(rows) + vocabulary)
    kinds = len(set(follow))
    assert p[2, 4].item() == pytest.approx((follow.count(4) + kinds * single) / (len(follow) + kinds))
    assert p[8, 4].item() == pytest.approx(single)
