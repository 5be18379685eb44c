"""TIGER's own parts: tokenizer, arms, cold start, diversity and the decision rule."""

import types

import pytest
import torch

from auto_research.data.sequences import ItemTable
from auto_research.layers.semantic_ids import SemanticIds
from auto_research.papers.generative import tiger
from auto_research.papers.generative.tiger import (
    LSH,
    NO_COLLISION,
    POPULAR,
    RANDOM,
    TIGER,
    Tiger,
    TigerConfig,
    as_large_as,
    decision,
    id_tables,
    matched_sasrec,
    train_tokenizer,
)
from auto_research.tasks.base import count_parameters

CONFIG = TigerConfig(codes=8, hidden_widths=(16,), latent=6, dim=16, heads=2, hidden=32, layers=1, beams=12)


def clustered_content(items: int = 120) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(8, 12, generator=draw)
    noise = 0.3 * torch.randn(items, 12, generator=draw)
    vectors = centres[torch.arange(items) % 8] + noise
    return vectors / vectors.norm(dim=1, keepdim=True)


def test_tokenizer_learns_uses_its_codes_and_is_frozen():
    content = clustered_content()
    torch.manual_seed(0)
    tokenizer = train_tokenizer(content, CONFIG, steps=400, seed=0, device=torch.device("cpu"))
    with torch.no_grad():
        reconstruction, _ = tokenizer(content)
    assert (content - reconstruction).square().sum(1).mean() < 0.8 * content.square().sum(1).mean()
    ids = SemanticIds.number(tokenizer.encode(content), 8)
    assert min(ids.report()[f"code_usage_level_{level}"] for level in range(3)) >= 0.8
    assert not any(parameter.requires_grad for parameter in tokenizer.parameters())
    # Same cluster, same first code, more often than not; the hierarchy follows content.
    first = ids.codes[:, 0]
    same = torch.arange(120)[:, None] % 8 == torch.arange(120) % 8
    agree = first[:, None] == first
    assert agree[same].float().mean() > 2 * agree[~same].float().mean()


def test_tokenizer_depends_on_the_seed_alone():
    content = clustered_content()
    made = []
    for _ in range(2):
        torch.manual_seed(5)
        made.append(train_tokenizer(content, CONFIG, steps=5, seed=1, device=torch.device("cpu")).encode(content))
    assert torch.equal(*made)


def arms() -> dict[str, SemanticIds]:
    codes = torch.randint(8, (60, 3), generator=torch.Generator().manual_seed(0))
    return id_tables(codes, clustered_content(60), CONFIG)


def test_arms_share_vocabulary_and_parameter_count():
    tables = arms()
    tables[RANDOM] = tables[TIGER].shuffled(torch.Generator().manual_seed(1))
    sizes = {table.sizes for table in tables.values()}
    assert len(sizes) == 1
    tables[NO_COLLISION] = tables[TIGER].unnumbered()
    counts = {count_parameters(as_large_as(tables[TIGER], table, CONFIG)) for table in tables.values()}
    assert counts == {count_parameters(Tiger(tables[TIGER], CONFIG.generator))}
    sasrec = count_parameters(matched_sasrec(60, counts.copy().pop(), CONFIG))
    assert abs(sasrec - counts.pop()) / sasrec < 0.1
    assert int(tables[LSH].codes.max()) < max(tables[LSH].sizes)


def test_random_ids_match_the_methods_last_token_distribution():
    table = arms()[TIGER]
    shuffled = table.shuffled(torch.Generator().manual_seed(1))
    assert torch.equal(table.codes[:, -1].bincount(), shuffled.codes[:, -1].bincount())
    assert not torch.equal(table.codes, shuffled.codes)


def test_items_without_a_collision_token_share_an_id_in_order_of_popularity():
    codes = torch.tensor([[0, 0, 0], [0, 0, 0], [1, 2, 3], [0, 0, 0]])
    ids = SemanticIds.number(codes, 8).unnumbered()
    torch.manual_seed(0)
    model = Tiger(ids, CONFIG.generator, torch.tensor([1.0, 9.0, 4.0, 5.0])).eval()
    listed = model.recommend({"sequence": torch.tensor([[3]]), "user": torch.tensor([0])}, 4)[0].tolist()
    assert listed in ([2, 4, 1, 3], [3, 2, 4, 1])


def cold_model() -> tuple[Tiger, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    ids = SemanticIds.number(torch.randint(3, (40, 3)), 3)
    model = Tiger(ids, CONFIG.generator).eval()
    return model, {"sequence": torch.randint(1, 41, (3, 5)), "user": torch.arange(3)}


@pytest.mark.parametrize("epsilon", [0.0, 0.2, 0.5, 1.0])
def test_cold_start_follows_its_prefix_and_stays_within_epsilon(epsilon):
    model, batch = cold_model()
    unseen = torch.randint(3, (25, 3), generator=torch.Generator().manual_seed(4))
    top = 10
    items, cold = model.with_unseen(batch, unseen, top, epsilon)
    warm = model.recommend(batch, top)
    assert (cold.sum(1) <= int(epsilon * top)).all()
    for row in range(3):
        prefix, brought = None, []
        for item, is_cold in zip(items[row].tolist(), cold[row].tolist(), strict=True):
            if is_cold:
                assert unseen[item - 1].tolist() == prefix
                brought.append(item)
            else:
                prefix = model.codes[item - 1, :3].tolist()
        assert len(set(brought)) == len(brought)
        known = items[row][~cold[row]]
        assert torch.equal(known, warm[row][: len(known)])
    if epsilon == 0.0:
        assert torch.equal(items, warm)
    if epsilon == 1.0:
        assert cold.any()


def test_cold_start_equals_a_loop():
    model, batch = cold_model()
    unseen = torch.randint(3, (25, 3), generator=torch.Generator().manual_seed(4))
    items, cold = model.with_unseen(batch, unseen, 10, 0.3)
    ranked = model.recommend(batch, 12)
    for row in range(3):
        expected, taken, used = [], 0, set()
        for item in ranked[row].tolist():
            expected.append((item, False))
            for number, codes in enumerate(unseen.tolist()):
                if codes == model.codes[item - 1, :3].tolist() and number not in used and taken < 3:
                    expected.append((number + 1, True))
                    used.add(number)
                    taken += 1
        assert list(zip(items[row].tolist(), cold[row].tolist(), strict=True)) == expected[:10]


def test_heat_at_coarse_levels_spreads_the_lists_over_categories():
    torch.manual_seed(0)
    ids = SemanticIds.number(torch.randint(32, (200, 3)), 32)
    model = Tiger(ids, CONFIG.generator).eval()
    batch = {"sequence": torch.randint(1, 201, (8, 5)), "user": torch.arange(8)}
    generator = torch.Generator().manual_seed(0)

    def categories(temperatures: tuple[float, ...]) -> float:
        """Different first codes that a user is shown over five lists."""
        lists = torch.cat([model.diverse(batch, 10, temperatures, generator) for _ in range(5)], dim=1)
        return sum(len(model.codes[row - 1, 0].unique()) for row in lists) / len(lists)

    assert categories((100.0, 100.0, 0.0, 0.0)) > 1.5 * categories((0.0,) * 4)


def comparison_of(ours: list[float], control: list[float], floor: float):
    values = {TIGER: ours, RANDOM: control, POPULAR: [floor] * 3}
    return types.SimpleNamespace(per_seed=lambda name, _: torch.tensor(values[name], dtype=torch.float64))


@pytest.mark.parametrize(
    ("ours", "control", "floor", "states"),
    [
        ([0.05, 0.052, 0.051], [0.03, 0.031, 0.032], 0.015, ["holds", "holds", "holds"]),
        ([0.03, 0.031, 0.032], [0.05, 0.052, 0.051], 0.015, ["reversed", "holds", "holds"]),
        ([0.010, 0.011, 0.012], [0.02, 0.021, 0.022], 0.015, ["undecided", "undecided", "holds"]),
        ([0.05, 0.03, 0.04], [0.049, 0.029, 0.039], 0.015, ["undecided", "holds", "holds"]),
        ([0.02, 0.021, 0.022], [0.010, 0.011, 0.012], 0.015, ["holds", "holds", "undecided"]),
    ],
)
def test_decision_rule(ours, control, floor, states):
    clauses = decision(comparison_of(ours, control, floor))
    assert [clause.decide(lambda *_: None)[0] for clause in clauses] == states


@pytest.mark.parametrize(("budget", "encoded"), [("smoke", True), ("standard", False)])
def test_beyond_smoke_word_counts_stand_in_for_the_micro_encoder(budget, encoded, monkeypatch):
    from auto_research.papers._registry import adapter
    from auto_research.study.context import Study
    from auto_research.tasks.content import tfidf_vectors

    titles = ["red pen", "red ink pen", "tall desk", "desk lamp", "oak desk with lamp", "paper cup", "cup and pen set"]
    split = types.SimpleNamespace(items_table=ItemTable.of_ids([str(i) for i in range(len(titles))], titles))
    asked = []

    def encode(resolved, texts, device, max_length):
        asked.append(resolved.name)
        return torch.zeros(len(texts), 4)

    monkeypatch.setattr(tiger, "text_vectors", encode)
    study = Study(card=adapter("tiger").card, budget=budget, checkpoints="micro", device="cpu", quiet=True)
    content = tiger.content_of(study, split, TigerConfig(), torch.device("cpu"))
    assert asked == (["micro-encoder"] if encoded else [])
    if not encoded:
        torch.testing.assert_close(content, tfidf_vectors(split.items_table.text("title")))
        assert any("word counts" in note for note in study.notes)


def test_full_budget_has_the_papers_shape():
    from auto_research.papers._registry import adapter
    from auto_research.study.context import Study

    study = Study(card=adapter("tiger").card, budget="full", device="cpu", quiet=True)
    config = tiger.configured(study)
    assert (config.codes, config.levels, config.dim, config.heads, config.head_dim) == (256, 3, 128, 6, 64)
    assert (config.hidden, config.layers, config.dropout, config.user_tokens) == (1024, 4, 0.1, 2000)
    assert (config.hidden_widths, config.latent, config.beta) == ((512, 256, 128), 32, 0.25)
