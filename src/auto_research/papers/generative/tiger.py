"""TIGER: Recommender Systems with Generative Retrieval (arXiv:2305.05065, Google, NeurIPS 2023). Official code: none.

An item is named by a short code that an RQ-VAE derives from its text; a sequence-to-sequence Transformer reads the
names of a user's items and spells the name of the next one, so the Transformer itself is the index. Items with similar
text share the beginning of their names: what is learned about one helps the others, and unseen items can be returned.

Deviations: a MiniLM sentence encoder stands in for Sentence-T5; AdamW for Adagrad and for inverse-square-root decay;
learned positions (item counted from the latest, code within the id) instead of T5's relative buckets; 64 codes a level
and a narrower, shallower Transformer at the standard budget (`full` has the paper's width and depth, 256 codes).

Letters: I items, D content width, L learned levels of K codes, m = L + 1 tokens an id, B batch, T history items.

- content x_i (I, D)  --RQ-VAE-->  codes (I, L)  --collision token-->  ids (I, m): `layers.quantise`, `.semantic_ids`
- [user, id(item_1), ..., id(item_T)] (B, 1 + m T)  --encoder, decoder-->  log p(c_t | c_<t, history), t = 0..m-1, and a
  beam search over the trie of ids: `layers.encoder_decoder`, `layers.decoding`
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from auto_research.data.sequences import Interactions, SequenceSplit, leave_one_out
from auto_research.layers.decoding import teacher_forced_scores
from auto_research.layers.encoder_decoder import GeneratorConfig, SemanticIdTransformer
from auto_research.layers.quantise import RQVAE, lsh_codes
from auto_research.layers.semantic_ids import SemanticIds, Trie, expand
from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Variant
from auto_research.study.context import Study
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import Clause, State, fact
from auto_research.tasks.base import Batch, Recipe, count_parameters, train_steps
from auto_research.tasks.baselines import MarkovCounts, MostPopular, SASRec, training_counts
from auto_research.tasks.content import text_vectors, tfidf_vectors
from auto_research.tasks.semantic_retrieval import SemanticRetrieval

RANDOM, TIGER, LSH, NO_COLLISION = "random ids", "rq-vae ids", "lsh ids", "no collision token"
SASREC, POPULAR, MARKOV = "sasrec", "most popular", "markov of 5"
METRIC = "ndcg@10"


@dataclass(frozen=True)
class TigerConfig:
    """Options of the tokenizer and of the generator.

    Attributes:
        levels, codes: L quantiser levels of K codes.
        hidden_widths, latent: the RQ-VAE's encoder between content and latent; the decoder mirrors it.
        beta: weight of the commitment term.
        revive_every: updates between two moves of unused codes onto residuals; 0 never moves them.
        kmeans_init: k-means initialisation of the codebooks.
        content: `encoder` (the card's text encoder) or `tfidf` (word counts, SVD to 256).
        user_tokens: size of the block of hashed user tokens; 0 leaves the user out.
    """

    levels: int = 3
    codes: int = 64
    hidden_widths: tuple[int, ...] = (512, 256, 128)
    latent: int = 32
    beta: float = 0.25
    revive_every: int = 25
    kmeans_init: bool = True
    content: Literal["encoder", "tfidf"] = "encoder"
    user_tokens: int = 2000
    dim: int = 64
    heads: int = 4
    hidden: int = 256
    layers: int = 2
    head_dim: int | None = None
    dropout: float = 0.1
    max_items: int = 20
    beams: int = 50

    @property
    def generator(self) -> GeneratorConfig:
        """The sequence model's shape."""
        return GeneratorConfig(
            dim=self.dim,
            heads=self.heads,
            hidden=self.hidden,
            encoder_layers=self.layers,
            decoder_layers=self.layers,
            head_dim=self.head_dim,
            dropout=self.dropout,
            max_items=self.max_items,
            user_tokens=self.user_tokens,
            beams=self.beams,
        )


# -- stage A: the tokenizer -----------------------------------------------------------------------------------------


def content_batches(content: Tensor, batch_size: int, seed: int) -> Iterator[Batch]:
    """Endless batches `{"content": (B, D)}`, each epoch in a new order that depends on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(content), generator=generator).split(batch_size):
            yield {"content": content[rows.to(content.device)]}


def train_tokenizer(content: Tensor, config: TigerConfig, *, steps: int, seed: int, device: torch.device) -> RQVAE:
    """Trains the RQ-VAE on content (I, D) and freezes it. The codebooks start from k-means of the first latents."""
    content = content.to(device)
    tokenizer = RQVAE(
        content.shape[1],
        hidden=config.hidden_widths,
        latent=config.latent,
        levels=config.levels,
        size=config.codes,
        beta=config.beta,
        revive_every=config.revive_every,
    ).to(device)
    if config.kmeans_init:
        first = content[torch.randperm(len(content))[:8192].to(device)]
        tokenizer.initialise(first)
    recipe = Recipe(learning_rate=1e-3, batch_size=256, schedule="cosine")
    train_steps(tokenizer, content_batches(content, recipe.batch_size, seed), steps=steps, recipe=recipe)
    return tokenizer.eval().requires_grad_(False)


# -- stage B: the generator -----------------------------------------------------------------------------------------


class Tiger(SemanticIdTransformer):
    """The generator, with the two abilities that the paper draws from hierarchical ids: cold start and diversity."""

    def diverse(
        self, batch: Batch, top: int, temperatures: tuple[float, ...], generator: torch.Generator | None = None
    ) -> Tensor:
        """Items (B, top), ids + 1: sampled at one temperature a level; heat at coarse levels spreads categories."""
        found = self.beams(batch, max(top, self.config.beams), temperatures=temperatures, generator=generator)
        assert found.leaves is not None
        return self.trie.items(found.leaves, top) + 1

    def with_unseen(self, batch: Batch, unseen_codes: Tensor, top: int, epsilon: float) -> tuple[Tensor, Tensor]:
        """A list into which items that were never trained on enter by their learned codes.

        unseen_codes (N, L): codes of the unseen items, numbered 0..N-1. When a generated id begins with the codes of
        unseen items, they follow its item in the list, as long as at most ⌊epsilon · top⌋ of the list are unseen.

        Returns (items (B, top), unseen (B, top) bool): item ids + 1, or where `unseen` is True the unseen item's
        number + 1; 0 past the end.
        """
        levels = unseen_codes.shape[1]
        cold = Trie(self.vocabulary.tokens(unseen_codes.to(self.codes.device)))
        found = self.beams(batch, max(top, self.config.beams))
        assert found.leaves is not None
        known = self.trie.items(found.leaves, found.leaves.shape[1]) + 1  # (B, N)
        tokens = self.item_tokens[known][..., :levels]
        node = cold.find(tokens).masked_fill(known == 0, -1)
        # A prefix that came before brings its unseen items once.
        earlier = (node[:, :, None] == node[:, None, :]).tril(-1).any(-1)
        node = node.masked_fill(earlier, -1)
        inside = node.clamp_min(0)
        newcomers = (cold.leaf_first[inside + 1] - cold.leaf_first[inside]).masked_fill(node < 0, 0)
        # Entry n of the list takes one place for its known item and one for each newcomer.
        row, source, within = expand(newcomers + 1, known.shape[1] + len(unseen_codes))
        entry = source.clamp_min(0)
        is_cold = (within > 0) & (source >= 0)
        cold_item = cold.leaf_items[(cold.leaf_first[inside[row, entry]] + within - 1).clamp(0, len(unseen_codes) - 1)]
        listed = torch.where(is_cold, cold_item + 1, known[row, entry]).masked_fill(source < 0, 0)
        allowed = math.floor(epsilon * top)
        keep = (listed > 0) & ~(is_cold & (is_cold.cumsum(1) > allowed))
        order = (~keep).int().argsort(dim=1, stable=True)
        listed, is_cold = listed.masked_fill(~keep, 0).gather(1, order), (is_cold & keep).gather(1, order)
        return listed[:, :top], is_cold[:, :top]


class MarkovOfFive(MarkovCounts):
    """Transition counts of the five latest items, added up; popularity orders the rest."""

    def scores(self, batch: Batch) -> Tensor:
        return self.transitions(batch["sequence"][:, -5:]) + self.popularity


def matched_sasrec(num_items: int, parameters: int, config: TigerConfig) -> SASRec:
    """SASRec of the width whose number of parameters is nearest to `parameters`; same depth and dropout."""

    def build(dim: int) -> SASRec:
        return SASRec(
            num_items, dim, heads=2, layers=config.layers, max_length=config.max_items, dropout=config.dropout
        )

    def weights(dim: int) -> int:
        with torch.device("meta"):
            return count_parameters(build(dim))

    widths = range(8, 513, 4)
    above = bisect_left(widths, parameters, key=weights)
    nearest = widths[max(0, above - 1) : above + 1] or widths[-1:]
    return build(min(nearest, key=lambda dim: abs(weights(dim) - parameters)))


# -- the comparison -------------------------------------------------------------------------------------------------


def prepare(study: Study) -> SequenceSplit:
    """The data set of this run, left one out; ratings count from 4 stars, users from 7 positive events."""
    data = study.dataset()
    if isinstance(data, Interactions):
        data = data.positive(4.0).with_min_events(7)
        if study.budget == "smoke":
            data = data.subset_users(study.size("users", smoke=100, standard=100), seed=0)
        return leave_one_out(data)
    return data


def content_of(study: Study, split: SequenceSplit, config: TigerConfig, device: torch.device) -> Tensor:
    """Content vectors (I, D): title, what kind of item it is, and the description's beginning beyond smoke.

    Beyond smoke, word counts stand in for an encoder that knows too little to tell items apart.
    """
    table = split.items_table
    fields = ["title"] + (["genres"] if table.genre_names else []) + (["brand"] if table.brand else [])
    if table.description is not None and study.budget != "smoke":
        fields.append("description")
    texts = table.text(*fields)
    if config.content == "tfidf":
        return tfidf_vectors(texts)
    encoder = study.checkpoint("text_encoder")
    if encoder.name == "micro-encoder" and study.budget != "smoke":
        study.note("content is word counts (TF-IDF, SVD to 256): the micro encoder cannot tell items apart")
        return tfidf_vectors(texts)
    length = study.size("text tokens", smoke=16, standard=64, full=128)
    return text_vectors(encoder, texts, device, max_length=length)


def id_tables(codes: Tensor, content: Tensor, config: TigerConfig) -> dict[str, SemanticIds]:
    """The ids of the arms, all in one vocabulary: the collision token's range is that of the largest group."""
    planes = int(math.log2(config.codes))
    generator = torch.Generator().manual_seed(0)
    semantic = SemanticIds.number(codes, config.codes)
    hashed = SemanticIds.number(lsh_codes(content, config.levels, planes, generator=generator), config.codes)
    capacity = max(semantic.capacity, hashed.capacity)
    return {TIGER: semantic.widened(capacity), LSH: hashed.widened(capacity)}


def as_large_as(
    reference: SemanticIds, table: SemanticIds, config: TigerConfig, priority: Tensor | None = None
) -> Tiger:
    """A generator on the ids of `table` with exactly as many parameters as one on the ids of `reference`.

    Ids without the collision token need fewer rows, of the vocabulary and of both position tables; spare rows of the
    vocabulary, of the same width, make up for them.
    """
    spare = sum(reference.sizes) - sum(table.sizes) + 2 * (reference.length - table.length)
    return Tiger(table, replace(config.generator, spare_tokens=spare), priority)


def decision(comparison: Comparison) -> list[Clause]:
    """The decision rule, from the test results.

    Reproduced: RQ-VAE ids are ahead of random ids by more than the pooled standard deviation over seeds, and ahead of
    popularity. Not reproduced: the gap is reversed and both are above popularity. Otherwise inconclusive.
    """
    floor = float(comparison.per_seed(POPULAR, METRIC).mean())
    ours, control = comparison.per_seed(TIGER, METRIC), comparison.per_seed(RANDOM, METRIC)
    gap = float(ours.mean() - control.mean())
    pooled = float(((ours.var() + control.var()) / 2).sqrt()) if len(ours) > 1 else math.inf
    above = {name: float(values.mean()) > floor for name, values in ((TIGER, ours), (RANDOM, control))}
    state: State = "undecided"
    if gap > pooled:
        state = "holds"
    elif gap < 0 and all(above.values()):
        state = "reversed"
    clauses = [
        fact(
            f"{TIGER} is ahead of {RANDOM} on {METRIC} by more than the pooled deviation over seeds",
            state,
            f"gap {gap:+.5f}, pooled deviation {pooled:.5f}",
        )
    ]
    clauses += [
        fact(
            f"{name} is above the popularity floor on {METRIC}",
            "holds" if above[name] else "undecided",
            f"{float(values.mean()):.5f} against {floor:.5f}",
        )
        for name, values in ((TIGER, ours), (RANDOM, control))
    ]
    return clauses


def configured(study: Study) -> TigerConfig:
    """The sizes of a budget; `full` is the paper's."""
    config = TigerConfig(
        codes=study.size("codes", smoke=32, standard=64, full=256),
        dim=study.size("width", smoke=32, standard=64, full=128),
        heads=study.size("heads", smoke=4, standard=4, full=6),
        head_dim=study.size("head width", smoke=8, standard=16, full=64),
        hidden=study.size("hidden", smoke=128, standard=256, full=1024),
        layers=study.size("layers", smoke=1, standard=2, full=4),
        beams=study.size("beams", smoke=20, standard=50),
    )
    if config.codes & (config.codes - 1):
        config = replace(config, codes=1 << (config.codes.bit_length() - 1))
        study.note(f"{config.codes} codes a level: LSH ids need a power of two")
    return config


def run(study: Study, config: TigerConfig | None = None) -> Comparison:
    """Tokenizer, then the generator on RQ-VAE ids against random, LSH and unnumbered ids, SASRec and two floors."""
    device = device_for(study.device)
    config = config or configured(study)
    smoke = study.budget == "smoke"
    split = prepare(study)
    with study.stage("content", trains=False):
        content = content_of(study, split, config, device)
    with study.stage("quantise"):
        torch.manual_seed(study.seeds[0])
        steps = study.steps("rqvae", smoke=30, standard=400, full=20_000)
        tokenizer = train_tokenizer(content, config, steps=steps, seed=study.seeds[0], device=device)
        ids = id_tables(tokenizer.encode(content.to(device)).cpu(), content, config)
    semantic = ids[TIGER]
    report = semantic.report()
    used = [report[f"code_usage_level_{level}"] for level in range(semantic.levels)]
    study.note(
        f"RQ-VAE ids of {len(semantic)} items: {report['prefix_uniqueness']:.1%} distinct prefixes, "
        f"codes used per level {', '.join(f'{share:.0%}' for share in used)}"
    )
    if not smoke and min(used) < 0.8:
        study.note("less than 80 % of a level's codes are in use, the paper's condition for a trained tokenizer")

    def generator(table: SemanticIds, priority: Tensor | None = None) -> Tiger:
        return as_large_as(semantic, table, config, priority)

    def random_ids() -> Tiger:
        # Its own generator: drawing ids must not change the weights that a seed gives.
        return generator(semantic.shuffled(torch.Generator().manual_seed(torch.initial_seed())))

    counts = training_counts(split)[1:]
    parameters = count_parameters(generator(semantic))
    task = SemanticRetrieval(
        split,
        config.max_items,
        validation_cases=study.size("validation cases", smoke=50, standard=500, full=5000),
        test_cases=study.size("test cases", smoke=50, standard=2000, full=1_000_000),
        list_length=config.beams,
    )
    comparison = study.compare(
        task,
        baseline=Variant(RANDOM, random_ids, note="the RQ-VAE ids, dealt to the items at random for each seed"),
        candidates=[
            Variant(TIGER, lambda: generator(semantic), kind="method"),
            Variant(LSH, lambda: generator(ids[LSH]), note="random hyperplanes, log2 K of them a level"),
            Variant(
                NO_COLLISION,
                lambda: generator(semantic.unnumbered(), counts),
                note="three tokens; items that share them are ordered by popularity",
            ),
            Variant(SASREC, lambda: matched_sasrec(split.num_items, parameters, config), kind="control"),
            Variant(POPULAR, lambda: MostPopular(split), kind="floor"),
            Variant(MARKOV, lambda: MarkovOfFive(split), kind="floor"),
        ],
        steps=study.steps("generator", smoke=20, standard=600, full=200_000),
        recipe=Recipe(batch_size=16 if smoke else 64, warmup=0.1, validations=1 if smoke else 3),
        learning_rates=(3e-3,) if smoke else (1e-3, 3e-3),
        device=device,
    )
    return replace(comparison, clauses=decision(comparison))


# -- what the registry's contract tests receive ---------------------------------------------------------------------


def specimens() -> list[Specimen]:
    """A tiny tokenizer and a tiny generator."""
    config = TigerConfig(
        codes=8, hidden_widths=(16, 12), latent=6, dim=16, heads=2, hidden=32, layers=1, beams=5, user_tokens=7
    )
    draw = torch.Generator().manual_seed(0)
    items, rows, length = 24, 6, 4
    codes = torch.randint(config.codes, (items, config.levels), generator=draw)
    ids = SemanticIds.number(codes, config.codes)
    sequence = torch.randint(1, items + 1, (rows, length), generator=draw)
    sequence[0, :2] = 0
    target = torch.randint(1, items + 1, (rows, length), generator=draw)
    batch = {"sequence": sequence, "target": target, "user": torch.arange(rows)}

    def catalogue_scores(model: Tiger, batch: Batch) -> Tensor:
        return teacher_forced_scores(model, batch, model.item_tokens[1:])

    def padded(batch: Batch) -> Batch:
        return batch | {name: F.pad(batch[name], (3, 0)) for name in ("sequence", "target")}

    def later(batch: Batch) -> Batch:
        return batch | {"target": batch["target"].roll(1, 0)}

    def build(config: TigerConfig, table: SemanticIds = ids) -> Tiger:
        return Tiger(table, config.generator)

    # Four kinds of item, so that few codes can describe them.
    content = torch.randn(4, 20, generator=draw).repeat(8, 1) + 0.1 * torch.randn(32, 20, generator=draw)

    def tokenizer(config: TigerConfig) -> RQVAE:
        model = RQVAE(
            20,
            hidden=config.hidden_widths,
            latent=config.latent,
            levels=config.levels,
            size=config.codes,
            beta=config.beta,
            revive_every=config.revive_every,
        )
        if config.kmeans_init:
            model.initialise(content)
        return model

    return [
        Specimen(
            name="generator",
            build=lambda: build(config),
            batch=batch,
            scores=catalogue_scores,
            shape=(rows, items),
            pad=padded,
            change_later=later,
            switches={
                "user_tokens": lambda: build(replace(config, user_tokens=0)),
                "collision_token": lambda: build(config, ids.unnumbered()),
                "shuffled_ids": lambda: build(config, ids.shuffled(torch.Generator().manual_seed(1))),
                "head_dim": lambda: build(replace(config, head_dim=12)),
                "layers": lambda: build(replace(config, layers=2)),
            },
        ),
        Specimen(
            name="rq-vae",
            build=lambda: tokenizer(config),
            batch={"content": content},
            scores=lambda model, batch: model(batch["content"])[0],
            shape=(32, 20),
            why_no_padding="one content vector an item, no sequence",
            why_no_order="items have no time order",
            switches={
                "beta": lambda: tokenizer(replace(config, beta=0.5)),
                "kmeans_init": lambda: tokenizer(replace(config, kmeans_init=False)),
                "levels": lambda: tokenizer(replace(config, levels=2)),
                "codes": lambda: tokenizer(replace(config, codes=4)),
            },
        ),
    ]
