"""RankMixer on MovieLens: which reader of the history, and which feed-forward network, ranks the next film best.

Model: four feature tokens (candidate, last item, summary of the history, user) go through RankMixer blocks
(arXiv:2507.15551). The summary comes from the mean of the latest items, from LONGER (arXiv:2505.04421) or from DIN's
target attention (arXiv:1706.06978).

Data: ratings of 4 and more are positive; users with at least 7 positives; per user the last positive is the test
target, the one before it the validation target, the rest trains. Events of one second have no order in the published
files: the item id decides. MovieLens 100K where it is on this machine, otherwise the embedded latest-small, whose
catalogue is the items with at least 5 positives. Every item but those of the user's history competes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from auto_research.data import catalogue
from auto_research.data.sequences import Interactions
from auto_research.evolve.space import Axis, Constraint, Genome, Space, Value
from auto_research.evolve.workflow import (
    Cost,
    Data,
    Described,
    Evidence,
    Operator,
    Progress,
    Scores,
    Sizes,
    Workflow,
    digest,
)
from auto_research.runtime.budget import Budget

if TYPE_CHECKING:
    from auto_research.evolve.workflows._rankmixer import Corpus, Held, Recommender

BUDGET = "budget"
"""Value of `seq.length`: as many events as the budget's size `length` says."""

SHORTEST = 64
"""The least that any budget's size `length` is."""

_LONGER: dict[str, tuple[Value, ...]] = {"seq.encoder": ("longer",)}
_RANKMIXER, _LONGER_PAPER, _DIN = "arXiv:2507.15551", "arXiv:2505.04421", "arXiv:1706.06978"


def _most_queries(genome: Genome) -> int:
    """Tokens that a full history has at least, whatever the budget."""
    length = genome["seq.length"]
    return (SHORTEST if length == BUDGET else int(length)) // int(genome["longer.merge"])


def _fewer_queries(genome: Genome) -> Genome:
    fitting = [int(v) for v in SPACE["longer.queries"].values if int(v) <= _most_queries(genome)]
    return {**genome, "longer.queries": max(fitting)}


SPACE = Space(
    (
        Axis("seq.encoder", values=("recent-mean", "longer", "target-attention"), source=_LONGER_PAPER),
        Axis(
            "seq.length",
            "categorical",
            (BUDGET, 32, 128, 256),
            condition={"seq.encoder": ("longer", "target-attention")},
            stage="data",
            changes="data",
            group="data",
            source=_LONGER_PAPER,
        ),
        Axis("longer.merge", "int", (4, 8, 1), condition=_LONGER, changes="compute", source=_LONGER_PAPER),
        Axis("longer.inner", values=("on", "off"), condition={**_LONGER, "longer.merge": (4, 8)}, source=_LONGER_PAPER),
        Axis("longer.queries", "int", (8, 4, 16), condition=_LONGER, changes="compute", source=_LONGER_PAPER),
        Axis(
            "longer.globals",
            values=("cls+user+target", "user+target", "cls+target", "target"),
            condition=_LONGER,
            source=_LONGER_PAPER,
        ),
        Axis("longer.layers", "int", (1, 2, 3), condition=_LONGER, changes="compute", source=_LONGER_PAPER),
        Axis("mix.block", values=("dense", "shared-ffn", "sparse-moe"), source=_RANKMIXER),
        Axis(
            "mix.shared",
            values=("parameters", "flops"),
            condition={"mix.block": ("shared-ffn",)},
            source="one network for all tokens, as large as all of theirs or as quick",
        ),
        Axis(
            "mix.match",
            values=("none", "longer"),
            condition={"seq.encoder": ("recent-mean", "target-attention")},
            source="control: as many parameters as with LONGER",
        ),
        Axis("mix.layers", "int", (2, 1, 3, 4), changes="compute", source=_RANKMIXER),
        Axis("mix.width", "int", (32, 64, 96, 128), changes="compute", source=_RANKMIXER),
        Axis("mix.expansion", "int", (2, 3, 4), changes="compute", source=_RANKMIXER),
        Axis("train.lr", "log-float", low=3e-4, high=1e-2, default=3e-3, stage="train", group="joint"),
        Axis("train.batch", "int", (64, 32, 128), stage="train", changes="data", group="data"),
        Axis("train.negatives", "int", (31, 15, 63, 127), stage="train", changes="data", group="data"),
        Axis("train.loss", values=("sampled-softmax", "bce"), stage="train", changes="loss", group="joint"),
    ),
    (
        Constraint(
            "queries within the history",
            lambda g: "longer.queries" not in g or int(g["longer.queries"]) <= _most_queries(g),
            "more latest tokens were asked from than the merged history has",
            _fewer_queries,
        ),
    ),
)


class RankMixerMovieLens(Workflow):
    """See the module."""

    key = "rankmixer-movielens"
    title = "RankMixer on MovieLens, with LONGER among the candidates"
    model = "rankmixer"
    dataset = "movielens"
    metric = "ndcg@10"
    schedule = (("structure",), ("data",), ("joint",), ("structure", "data", "joint"))
    space: ClassVar[Space] = SPACE
    operators = (
        Operator(
            "longer",
            "LONGER: merged events, inner Transformer, global tokens, hybrid attention, cached user side",
            {"seq.encoder": ("longer",)},
            _LONGER_PAPER,
            "core_mechanism",
            omitted=("recomputation and mixed precision in training", "several behaviour types and their fields"),
            keywords=("longer", "long sequence", "long history", "token merge", "长序列", "长行为", "长期兴趣", "合并"),
            code=(
                "auto_research.layers.longer.LongerEncoder",
                "auto_research.layers.longer.EventEmbedding",
                "auto_research.layers.longer.attend_apart",
                "auto_research.evolve.workflows._rankmixer.Longer",
            ),
        ),
        Operator(
            "shared-ffn",
            "One feed-forward network for all tokens (RankMixer's ablation)",
            {"mix.block": ("shared-ffn",)},
            _RANKMIXER,
            "core_mechanism",
            keywords=("shared", "feed-forward", "ffn", "ablation", "共享", "前馈"),
            code=("auto_research.layers.transformer.FeedForward",),
        ),
        Operator(
            "sparse-moe",
            "ReLU-routed experts with two routers (dense training, sparse inference)",
            {"mix.block": ("sparse-moe",)},
            _RANKMIXER,
            "core_mechanism",
            omitted=("the paper's rule for the penalty's weight, which is not given",),
            keywords=("sparse", "moe", "experts", "router", "稀疏", "专家", "路由"),
            code=("auto_research.layers.experts.ReLUExperts", "auto_research.layers.experts.AdaptivePenalty"),
        ),
        Operator(
            "target-attention",
            "Target attention over the history (DIN)",
            {"seq.encoder": ("target-attention",)},
            _DIN,
            "simplified",
            omitted=("Dice", "mini-batch aware regularisation", "weights that are not normalised"),
            keywords=("target attention", "din", "interest", "目标注意力", "兴趣"),
            code=(
                "auto_research.layers.towers.TargetAttention",
                "auto_research.evolve.workflows._rankmixer.Targeted",
            ),
        ),
    )
    evidence = (
        Evidence(
            "HSTU: Actions Speak Louder than Words",
            "arXiv:2402.17152",
            "its pointwise attention over one stream of items and actions is no block of this model",
            "an encoder value of seq.encoder with its aggregated attention, and tests of it",
            keywords=("hstu", "generative recommender", "生成式"),
        ),
        Evidence(
            "OneTrans: unified feature interaction and sequence modelling with one Transformer",
            "arXiv:2510.26104",
            "it puts events and feature tokens into one stack and so replaces encoder and blocks together",
            "a model value that owns both, compared at equal parameters",
            keywords=("onetrans", "unified", "统一"),
        ),
    )

    def sizes(self, budget: Budget) -> Sizes:
        """Steps, evaluated users (all, where there are fewer), events read, width of item vectors, feature tokens.

        `slice_users` of the evaluated ones are scored again with their last four events alone.
        """
        everyone = 10**9
        values = {
            "smoke": {"steps": 800, "users": 200, "slice_users": 40, "length": 64, "item_width": 16, "tokens": 4},
            "standard": {
                "steps": 4000,
                "users": everyone,
                "slice_users": everyone,
                "length": 160,
                "item_width": 16,
                "tokens": 4,
            },
            "full": {
                "steps": 40_000,
                "users": everyone,
                "slice_users": everyone,
                "length": 512,
                "item_width": 32,
                "tokens": 8,
            },
        }
        return Sizes(budget, values[budget])

    def start(self, budget: Budget) -> Genome:
        """The baseline: its few steps are long ones in the smoke run, its tokens twice as wide beyond it.

        Measured on validation, embedded films, 800 steps: NDCG@10 0.021 at 3e-3 and 0.037 at 1e-2, popularity 0.017.
        """
        return self.space.resolve({"train.lr": 1e-2, "train.negatives": 15} if budget == "smoke" else {"mix.width": 64})

    def smoke_plan(self) -> list[Genome]:
        """LONGER with few queries; the shared network at the dense ones' cost, a quarter of equal parameters'."""
        return [{"seq.encoder": "longer", "longer.queries": 4}, {"mix.block": "shared-ffn", "mix.shared": "flops"}]

    # -- data

    def _read(self, sizes: Sizes, dataset_dir: Path | None) -> tuple[Interactions, str]:
        wanted = "ml-1m" if sizes.budget == "full" else "ml-100k"
        for name in (wanted, "ml-100k"):
            if catalogue.find(name, dataset_dir) is not None:
                break
        else:
            name = "ml-latest-small"
        missing = (
            f"{wanted} is not on this machine, {name} stands in" if sizes.budget == "full" and name != wanted else ""
        )
        data = catalogue.load(name, dataset_dir)
        assert isinstance(data, Interactions)
        return data, missing

    def load(self, sizes: Sizes, dataset_dir: Path | None) -> Data:
        from auto_research.evolve.workflows import _rankmixer as films

        data, stand_in = self._read(sizes, dataset_dir)
        return films.searchable(data, sizes["users"], stand_in)

    def load_test(self, sizes: Sizes, dataset_dir: Path | None) -> Held:
        from auto_research.evolve.workflows import _rankmixer as films

        return films.split(self._read(sizes, dataset_dir)[0])[1]

    # -- one candidate

    def train(
        self, genome: Genome, data: Data, seed: int, sizes: Sizes, device: str, progress: Progress
    ) -> Recommender:
        from auto_research.evolve.workflows import _rankmixer as films

        return films.fit(genome, data.parts, seed, sizes, device, sizes["steps"], progress)[0]

    def save(self, artefact: Recommender, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: value.cpu().contiguous() for name, value in artefact.state_dict().items()},
            folder / "model.safetensors",
        )

    def restore(self, genome: Genome, data: Data, folder: Path, sizes: Sizes, device: str) -> Recommender:
        from safetensors.torch import load_file

        from auto_research.evolve.workflows import _rankmixer as films

        model = films.build(genome, sizes, data.parts)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.to(device).eval()

    def validate(self, artefact: Recommender, data: Data, sizes: Sizes, device: str) -> Scores:
        from auto_research.evolve.workflows import _rankmixer as films

        return films.assess(artefact, data.parts, data.parts.valid, sizes, device)

    def test(self, artefact: Recommender, test: Held, data: Data, sizes: Sizes, device: str) -> Scores:
        from auto_research.evolve.workflows import _rankmixer as films

        return films.assess(artefact, data.parts, test, sizes, device)

    # -- reference lines

    def floors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """The expectation of a random order, and popularity in training."""
        from auto_research.evolve.workflows import _rankmixer as films

        corpus: Corpus = data.parts
        users = films.evaluated(corpus, sizes["users"])
        candidates = corpus.num_items - np.diff(corpus.valid.history.offsets)[users]
        gain = float((1 / np.log2(np.arange(2, 12))).sum())
        popular = np.broadcast_to(corpus.counts.astype(np.float64), (len(users), corpus.num_items)).copy()
        return {
            "random": float((gain / candidates).mean()),
            "popularity": films.predictor_ndcg(popular, corpus, corpus.valid, users),
        }

    def anchors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """What followed the last five items in training, nearer followers counting more."""
        from auto_research.evolve.workflows import _rankmixer as films

        corpus: Corpus = data.parts
        users = films.evaluated(corpus, sizes["users"])
        history = corpus.valid.history
        index = history.offsets[1:][users, None] - np.arange(1, 6)
        scores = films.co_occurrence(corpus)[history.items[index]].sum(1)  # at least five events: MIN_EVENTS - 2
        return {"co-occurrence of the last 5": films.predictor_ndcg(scores, corpus, corpus.valid, users)}

    # -- what a candidate is

    def cost(self, genome: Genome, sizes: Sizes, data: Data) -> Cost:
        import torch

        from auto_research.evolve.workflows import _rankmixer as films

        with torch.random.fork_rng(devices=[]):
            model = films.build(genome, sizes, data.parts).eval()
        user, candidate = films.flops(model, films.history_length(genome, sizes))
        size, scored = int(genome["train.batch"]), 1 + int(genome["train.negatives"])
        passes = 2 if model.penalty is not None else 1
        parameters = films.parameter_count(model)
        activations = size * scored * sizes["tokens"] * int(genome["mix.width"]) * int(genome["mix.layers"]) * 64
        return Cost(
            parameters,
            3.0 * size * (user + passes * scored * candidate),
            16 * parameters + activations * passes + 400 * 2**20,
            {"user flops": float(user), "candidate flops": float(candidate)},
        )

    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        import torch

        from auto_research.evolve.workflows import _rankmixer as films

        with torch.random.fork_rng(devices=[]):
            model = films.build(genome, sizes, data.parts)
        return Described(
            {
                **genome,
                "seq.length": films.history_length(genome, sizes),
                **{name: sizes[name] for name in ("steps", "item_width", "tokens")},
            },
            {name: list(value.shape) for name, value in model.named_parameters()},
            {
                "name": str(genome["train.loss"]),
                "negatives": int(genome["train.negatives"]),
                "sparsity": films.ACTIVE if model.penalty is not None else 0.0,
            },
        )

    def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
        import torch

        from auto_research.evolve.workflows import _rankmixer as films

        corpus: Corpus = data.parts
        cpu = torch.device("cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            fresh = films.build(genome, sizes, corpus).eval()
            users = torch.from_numpy(np.argsort(-np.diff(corpus.train.offsets), kind="stable")[:8].copy())
            window = films.Window(corpus.train, cpu)
            when = torch.from_numpy(corpus.valid.time)[users]
            batch = window.before(users, window.stop[users], when, films.history_length(genome, sizes))
            items = torch.arange(1, 17).expand(len(users), -1)
            with torch.no_grad():
                forward = fresh.score(fresh.prepare(batch), items)
            losses = films.fit(genome, corpus, 0, sizes, "cpu", 2, lambda step, loss: None)[1]
        drawn = films.batches(genome, corpus, 0, sizes, 2, cpu)
        order = [digest(b["target"], b["negative"]) for b in drawn]
        cost = self.cost(genome, sizes, data)
        return {
            "forward": digest(forward),
            "loss": digest(losses),
            "data_order": digest(order),
            "cost": digest([cost.parameters, cost.flops, cost.extra]),
        }
