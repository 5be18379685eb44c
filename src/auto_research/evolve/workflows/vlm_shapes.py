"""A small vision-language model that answers questions about generated shapes in words.

Patches pass an encoder and a connector, and a causal decoder reads [visual tokens; question] and generates the answer
word by word; an answer counts when all its words and its end agree. Colour and shape can be told from a bag of patches,
a place cannot: the model without positions is the built-in negative control, and its ceiling is an anchor.

Beyond the smoke run, labelled pictures join the shapes: Fashion-MNIST or CIFAR-10 from their official files where they
lie on this machine, otherwise scikit-learn's digits. They are asked one question, what they show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from auto_research.data import shapes
from auto_research.data.pictures import Labelled, read_pictures
from auto_research.evolve.space import Axis, Genome, Space
from auto_research.evolve.workflow import (
    Cost,
    Data,
    Described,
    Evidence,
    Level,
    NonFinite,
    Operator,
    Progress,
    Scores,
    Sizes,
    Workflow,
    digest,
    disjoint,
)
from auto_research.runtime.budget import Budget

if TYPE_CHECKING:
    from torch import Tensor

    from auto_research.evolve.records import Trial
    from auto_research.layers.vision_language import Objective, VisionLanguageConfig, VisionLanguageModel
    from auto_research.tasks.base import Batch, Recipe

PAD, END = "<pad>", "<end>"
VOCABULARY = tuple(dict.fromkeys([PAD, END, *" ".join(shapes.QUESTIONS + shapes.ANSWERS).split()]))
"""Words of questions and answers; padding is token 0 and the end of an answer token 1. Class names come after them."""
WHAT = "what is it ?"
"""The question about a labelled picture, in words that the others use too."""
QUESTION_TOKENS = max(len(text.split()) for text in shapes.QUESTIONS)
ANSWER_TOKENS = max(len(text.split()) for text in shapes.ANSWERS) + 1
HIDDEN_SHARE = 0.25
"""Patches hidden in a masked view."""
HEADS = 4
HEARTBEAT_STEPS = 10
PROBE_STEPS = 2
"""Enough for the learning rate to show: it moves the second loss."""
EVALUATION_BATCH = 300
SHOWN = (
    "accuracy",
    *(f"accuracy_{topic}" for topic in shapes.TOPICS),
    "accuracy_labelled_pictures",
    "accuracy_untrained_combinations",
    "shuffled_accuracy",
    "blank_accuracy",
)
"""Metrics of the summary."""
PROCESS_BYTES = 380 * 2**20
"""Of a process that has imported torch; a smoke cell peaks at about 410 MB in all."""


def encode(text: str) -> list[int]:
    """Tokens of known words."""
    return [VOCABULARY.index(word) for word in text.split()]


def question_tokens(questions: Sequence[str] = shapes.QUESTIONS) -> Tensor:
    """Tokens of each question (K, Q), padded on the left, so that every answer begins at the same place."""
    import torch

    rows = [encode(text) for text in questions]
    return torch.tensor([[0] * (QUESTION_TOKENS - len(row)) + row for row in rows])


def answer_tokens() -> Tensor:
    """Tokens of each answer (9, A): its words, the end, padding."""
    import torch

    rows = [[*encode(text), VOCABULARY.index(END)] for text in shapes.ANSWERS]
    return torch.tensor([row + [0] * (ANSWER_TOKENS - len(row)) for row in rows])


def captions(scenes: shapes.Scenes) -> Tensor:
    """What is on each picture in four words, such as `red cross top left`: (N, 4), for the image-text loss."""
    import torch

    texts = [" ".join(shapes.ANSWERS[answer] for answer in row) for row in scenes.answers.tolist()]
    return torch.tensor([encode(text) for text in texts])


@dataclass(frozen=True)
class Shown:
    """Shapes and, beyond the smoke run, labelled pictures with the names of their classes, as one row of exercises."""

    scenes: shapes.Scenes
    labelled: Labelled | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.scenes) + len(self.labelled or ())

    @property
    def images(self) -> np.ndarray:
        """(N, 3, 32, 32) uint8, shapes first."""
        if self.labelled is None:
            return self.scenes.images
        return np.concatenate([self.scenes.images, self.labelled.images])

    def names(self) -> Tensor:
        """Tokens of each class as an answer (C, A)."""
        import torch

        rows = [[len(VOCABULARY) + label, VOCABULARY.index(END)] for label in range(len(self.classes))]
        return torch.tensor([row + [0] * (ANSWER_TOKENS - len(row)) for row in rows]).long().view(-1, ANSWER_TOKENS)

    def exercises(self) -> tuple[Tensor, Tensor, Tensor]:
        """Questions (N, 3, Q), answers (N, 3, A) and captions (N, 4).

        A labelled picture is asked one question: its other two answers are padding, which no loss and no score counts.
        """
        import torch

        count = len(self.scenes)
        questions = question_tokens().expand(count, -1, -1)
        answers = answer_tokens()[torch.from_numpy(self.scenes.answers)]
        words = captions(self.scenes)
        if self.labelled is None:
            return questions, answers, words
        named = self.names()[torch.from_numpy(self.labelled.labels)]
        said = torch.nn.functional.pad(named[:, None], (0, 0, 0, questions.shape[1] - 1))
        caption = torch.nn.functional.pad(named[:, :1], (words.shape[1] - 1, 0))
        what = question_tokens([WHAT] * questions.shape[1]).expand(len(named), -1, -1)
        return torch.cat([questions, what]), torch.cat([answers, said]), torch.cat([words, caption])

    def first(self, count: int) -> Shown:
        """The first shapes and the first labelled pictures, `count` of each."""
        some = self.labelled.first(count) if self.labelled is not None else None
        return Shown(_first(self.scenes, count), some, self.classes)


@dataclass(frozen=True)
class Parts:
    """Training and validation pictures, and mean and standard deviation of the training shapes' pixels in [0, 1]."""

    train: Shown
    validation: Shown
    pixels: tuple[float, float]


def pixel_statistics(images: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of uint8 pixels as shares of 255, to four digits: the same on every machine."""
    counts = np.bincount(images.reshape(-1), minlength=256)
    share, value = counts / counts.sum(), np.arange(256) / 255
    mean = float(share @ value)
    return round(mean, 4), round(float(share @ (value - mean) ** 2) ** 0.5, 4)


class VisualShapes(Workflow):
    """See the module."""

    key: ClassVar[str] = "vlm-shapes"
    title: ClassVar[str] = "micro-VLM / visual-shapes"
    model: ClassVar[str] = "micro-vlm"
    dataset: ClassVar[str] = "visual-shapes"
    metric: ClassVar[str] = "accuracy"
    level: ClassVar[Level] = "L0 mechanism"
    schedule: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("structure",),
        ("post-training",),
        ("joint",),
        ("structure", "post-training", "joint"),
    )
    space: ClassVar[Space] = Space(
        (
            Axis(
                "model.connector",
                values=("linear", "mlp", "resampler", "pixel-shuffle", "gated"),
                source="LLaVA, BLIP-2, SmolVLM, Flamingo; see the operators",
            ),
            Axis(
                "train.objective",
                values=("next-token", "sigmoid", "masked-view", "sigmoid+masked-view"),
                stage="train",
                changes="loss",
                source="arXiv:2502.14786: the answer's loss alone, or with auxiliary losses added",
                group="post-training",
            ),
            Axis(
                "train.auxiliary",
                "log-float",
                low=0.03,
                high=1.0,
                default=0.1,
                condition={"train.objective": ("sigmoid", "masked-view", "sigmoid+masked-view")},
                stage="train",
                changes="loss",
                source="weight of each auxiliary loss",
                group="post-training",
            ),
            Axis("model.width", "int", (64, 32, 96), changes="compute", source="multiples of the heads", group="joint"),
            Axis("model.layers", "int", (2, 1, 3), changes="compute", source="of the decoder", group="joint"),
            Axis(
                "train.lr",
                "log-float",
                low=3e-4,
                high=6e-3,
                default=2e-3,
                stage="train",
                changes="loss",
                source="about the measured 2e-3",
                group="joint",
            ),
            Axis(
                "train.batch",
                "int",
                (48, 24, 96),
                stage="train",
                changes="data",
                source="question-answer pairs a step: all three of a picture",
                group="joint",
            ),
            Axis(
                "model.positions",
                values=("on", "off"),
                source="negative control: without, a place cannot be told",
                group="control",
            ),
        )
    )
    operators: ClassVar[tuple[Operator, ...]] = (
        Operator(
            "mlp",
            "Two-layer connector",
            {"model.connector": ("mlp",)},
            "arXiv:2310.03744",
            "core_mechanism",
            keywords=("connector", "projector", "mlp", "llava", "连接器", "Projektor"),
            code=("auto_research.layers.vision_language.MLP",),
        ),
        Operator(
            "resampler",
            "Learned queries that attend to the patches",
            {"model.connector": ("resampler",)},
            "arXiv:2301.12597",
            "simplified",
            omitted=("the Q-Former's depth and text branch", "its image-text pre-training"),
            keywords=(
                "connector",
                "resampler",
                "queries",
                "q-former",
                "blip",
                "compression",
                "连接器",
                "重采样",
                "压缩",
            ),
            code=("auto_research.layers.vision_language.Resampler",),
        ),
        Operator(
            "pixel-shuffle",
            "Neighbouring patches folded into channels",
            {"model.connector": ("pixel-shuffle",)},
            "arXiv:2504.05299",
            "core_mechanism",
            keywords=("connector", "pixel", "shuffle", "smolvlm", "compression", "tokens", "连接器", "压缩"),
            code=("auto_research.layers.vision_language.PixelShuffle",),
        ),
        Operator(
            "gated",
            "Residual connector behind a tanh gate",
            {"model.connector": ("gated",)},
            "arXiv:2204.14198",
            "simplified",
            omitted=("the gated cross-attention layers inside the language model",),
            keywords=("connector", "gate", "gated", "flamingo", "连接器", "门控"),
            code=("auto_research.layers.vision_language.Gated",),
        ),
        Operator(
            "sigmoid-loss",
            "Sigmoid image-text loss",
            {"train.objective": ("sigmoid", "sigmoid+masked-view")},
            "arXiv:2502.14786",
            "core_mechanism",
            omitted=("separate towers: the text is read by the decoder itself",),
            keywords=("objective", "loss", "contrastive", "sigmoid", "siglip", "alignment", "目标", "对比"),
            code=(
                "auto_research.layers.losses.sigmoid_pairs",
                "auto_research.layers.vision_language.ImageTextContrast",
                "auto_research.layers.vision_language.contrast_loss",
            ),
        ),
        Operator(
            "masked-view",
            "Masked-view consistency",
            {"train.objective": ("masked-view", "sigmoid+masked-view")},
            "arXiv:2502.14786",
            "simplified",
            omitted=("the moving-average teacher: the model's own full view, without gradient", "local crops"),
            keywords=("objective", "loss", "masked", "consistency", "self-supervised", "siglip", "目标", "掩码"),
            code=("auto_research.layers.vision_language.masked_view_loss",),
        ),
    )
    evidence: ClassVar[tuple[Evidence, ...]] = (
        Evidence(
            "Honeybee: convolutional and deformable abstractors",
            "arXiv:2312.06742",
            "there is no operator for its abstractors",
            "a connector that pools with convolutions over the grid of patches",
            ("connector", "abstractor", "locality", "连接器"),
        ),
        Evidence(
            "LLaVA-UHD: pictures of any size in slices",
            "arXiv:2403.11703",
            "all pictures here have one size, and a slice would hold a whole object",
            "pictures of several sizes and a slicing axis",
            ("resolution", "slices", "tiling", "分辨率"),
        ),
    )

    def sizes(self, budget: Budget) -> Sizes:
        """Updates, shapes of each part, and labelled pictures that train at most (0: shapes alone)."""
        steps, train, labelled = {
            "smoke": (600, 4000, 0),
            "standard": (1800, 8000, 4000),
            "full": (12_000, 40_000, 40_000),
        }[budget]
        return Sizes(budget, {"steps": steps, "train": train, "validation": 600, "test": 600, "pictures": labelled})

    def smoke_plan(self) -> list[Genome]:
        start = self.space.baseline()
        return [
            {**start, "model.connector": "resampler"},
            {**start, "model.connector": "pixel-shuffle"},
            {**start, "model.positions": "off"},
        ]

    # -------------------------------------------------------------------------------------------------- data

    def load(self, sizes: Sizes, dataset_dir: Path | None) -> Data:
        """Shapes are generated; labelled pictures are read. The test parts lend their keys to the split check."""
        scenes = shapes.scenes("train", sizes["train"])
        validation = shapes.scenes("validation", sizes["validation"])
        hygiene = disjoint(
            {"train": scenes.keys, "validation": validation.keys, "test": shapes.keys("test", sizes["test"])}
        )
        digests = {
            "train": digest(scenes.images, scenes.attributes),
            "validation": digest(validation.images, validation.attributes),
            "vocabulary": digest(VOCABULARY),
        }
        train, held = Shown(scenes), Shown(validation)
        found = read_pictures(dataset_dir) if sizes["pictures"] else None
        if found is not None:
            shown = found.parts["train"].first(sizes["pictures"])
            seen = found.parts["validation"].first(sizes["validation"])
            train, held = Shown(scenes, shown, found.classes), Shown(validation, seen, found.classes)
            hygiene |= disjoint(
                {
                    f"{found.name} train": shown.keys,
                    f"{found.name} validation": seen.keys,
                    f"{found.name} test": found.parts["test"].keys,
                }
            )
            digests[found.name] = digest(shown.images, shown.labels, seen.images, seen.labels, found.classes)
        return Data(Parts(train, held, pixel_statistics(scenes.images)), digests, hygiene, len(held))

    def load_test(self, sizes: Sizes, dataset_dir: Path | None) -> Any:
        scenes = shapes.scenes("test", sizes["test"])
        found = read_pictures(dataset_dir) if sizes["pictures"] else None
        if found is None:
            return Shown(scenes)
        return Shown(scenes, found.parts["test"].first(sizes["test"]), found.classes)

    def floors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """Each question's most frequent training answer, and a guess among the answers of the question."""
        train, held = data.parts.train, data.parts.validation
        usual = [np.bincount(train.scenes.attributes[:, q]).argmax() for q in range(len(shapes.QUESTIONS))]
        right = (held.scenes.attributes == np.array(usual)).mean(1)
        guessed = np.full(len(held.scenes), np.mean([1 / len(choices) for choices in shapes.CHOICES]))
        if held.labelled is not None:
            label = np.bincount(train.labelled.labels).argmax()
            right = np.concatenate([right, held.labelled.labels == label])
            guessed = np.concatenate([guessed, np.full(len(held.labelled), 1 / len(held.classes))])
        return {"most frequent training answer": float(right.mean()), "uniform guess": float(guessed.mean())}

    def anchors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """The best that can be answered about shapes from colour and shape alone, and all labelled pictures right.

        Places are then answered by their most frequent one for that colour and shape, known in hindsight.
        """
        held: Shown = data.parts.validation
        attributes = held.scenes.attributes
        table = np.zeros((len(shapes.COLOURS), len(shapes.SHAPES), len(shapes.PLACES)))
        np.add.at(table, tuple(attributes.T), 1)
        place = table.max(-1).sum() / len(attributes)
        rest = len(held) - len(attributes)
        return {
            "ceiling of a position-blind model": float((len(attributes) * (2 + place) / 3 + rest) / len(held)),
        }

    # ------------------------------------------------------------------------------------------------- model

    def _config(self, genome: Genome, data: Data) -> VisionLanguageConfig:
        from auto_research.layers.vision_language import VisionLanguageConfig

        mean, deviation = data.parts.pixels
        return VisionLanguageConfig(
            vocabulary=len(VOCABULARY) + len(data.parts.train.classes),
            text=QUESTION_TOKENS + ANSWER_TOKENS,
            dim=int(genome["model.width"]),
            heads=HEADS,
            layers=int(genome["model.layers"]),
            connector=cast(Any, genome["model.connector"]),
            positions=genome["model.positions"] == "on",
            contrast="sigmoid" in str(genome["train.objective"]),
            side=shapes.SIDE,
            mean=mean,
            deviation=deviation,
        )

    def _build(self, genome: Genome, data: Data, seed: int, device: str) -> VisionLanguageModel:
        import torch

        from auto_research.layers.vision_language import VisionLanguageModel

        with torch.random.fork_rng(devices=[]):  # drawn on the CPU: one seed, one model on every device
            torch.manual_seed(seed)
            return VisionLanguageModel(self._config(genome, data)).to(device)

    def _recipe(self, genome: Genome) -> Recipe:
        from auto_research.tasks.base import Recipe

        return Recipe(learning_rate=float(genome["train.lr"]), batch_size=int(genome["train.batch"]), schedule="cosine")

    def batches(self, shown: Shown, batch: int, seed: int, device: str) -> Iterator[Batch]:
        """Endless batches of pictures with their three questions, in random order, every picture once an epoch.

        A batch of B pairs holds B/3 pictures, or all if there are no more. Their order, `picture`, depends on seed and
        batch size alone. Answers and captions are targets only.
        """
        import torch

        from auto_research.layers.vision_language import VisionLanguageConfig

        draw = torch.Generator().manual_seed(seed)
        images = torch.from_numpy(shown.images).to(device)
        questions, answers, words = (part.to(device) for part in shown.exercises())
        rows, patches = min(batch // questions.shape[1], len(shown)), (shapes.SIDE // VisionLanguageConfig.patch) ** 2
        while True:
            order = torch.randperm(len(shown), generator=draw)
            for picture in order[: len(order) - len(order) % rows].split(rows):
                hidden = torch.rand(rows, patches, generator=draw).argsort(1) < round(HIDDEN_SHARE * patches)
                picture = picture.to(device)
                yield {
                    "picture": picture,
                    "images": images[picture].float() / 255,
                    "question": questions[picture],
                    "answer": answers[picture],
                    "caption": words[picture],
                    "hidden": hidden.to(device),
                }

    def _loss(self, genome: Genome) -> Callable[[VisionLanguageModel, Batch], Tensor]:
        from auto_research.layers.vision_language import training_loss

        objective = cast("Objective", genome["train.objective"])
        weight = float(genome.get("train.auxiliary", 0.0))
        return lambda model, batch: training_loss(model, batch, objective, weight)

    def _fit(
        self, genome: Genome, data: Data, seed: int, steps: int, device: str, progress: Progress | None
    ) -> tuple[VisionLanguageModel, list[float]]:
        """The trained model and the loss of each step."""
        from auto_research.tasks.base import NonFiniteLoss, train_steps

        model, recipe, loss = self._build(genome, data, seed, device), self._recipe(genome), self._loss(genome)
        latest: list[Tensor] = []

        def compute(batch: Batch) -> Tensor:
            value = loss(model, batch)
            latest[:] = [value.detach()]
            return value

        def report(step: int) -> None:
            if progress is not None and ((step + 1) % HEARTBEAT_STEPS == 0 or step + 1 == steps):
                progress(step + 1, float(latest[0]))

        batches = self.batches(data.parts.train, recipe.batch_size, seed, device)
        try:
            losses = train_steps(model, batches, steps=steps, recipe=recipe, loss=compute, after_step=report)
        except NonFiniteLoss as error:
            raise NonFinite(str(error)) from error
        return model.eval(), losses

    def train(self, genome: Genome, data: Data, seed: int, sizes: Sizes, device: str, progress: Progress) -> Any:
        return self._fit(genome, data, seed, sizes["steps"], device, progress)[0]

    def save(self, artefact: Any, folder: Path) -> None:
        from safetensors.torch import save_file

        state = {name: value.detach().cpu().contiguous() for name, value in artefact.state_dict().items()}
        save_file(state, folder / "model.safetensors")

    def restore(self, genome: Genome, data: Data, folder: Path, sizes: Sizes, device: str) -> Any:
        from safetensors.torch import load_file

        model = self._build(genome, data, 0, "cpu")
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.to(device).eval()

    # -------------------------------------------------------------------------------------------- evaluation

    def validate(self, artefact: Any, data: Data, sizes: Sizes, device: str) -> Scores:
        return evaluate(artefact, data.parts.validation, device)

    def test(self, artefact: Any, test: Any, data: Data, sizes: Sizes, device: str) -> Scores:
        return evaluate(artefact, test, device)

    # ------------------------------------------------------------------------------------- before it runs

    def cost(self, genome: Genome, sizes: Sizes, data: Data) -> Cost:
        """Counted on one training step (forward and backward) on the CPU."""
        import torch

        from auto_research.runtime.evidence import DeviceWork

        model, recipe, train = self._build(genome, data, 0, "cpu"), self._recipe(genome), data.parts.train
        batch = next(self.batches(train.first(recipe.batch_size), recipe.batch_size, 0, "cpu"))
        with DeviceWork("cost") as work:
            self._loss(genome)(model, batch).backward()
        counts = work.counts()["cpu"]
        with torch.no_grad():
            visual = model.see(model.encoder(batch["images"][:1])).shape[1]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        # Adam keeps weight, gradient and two moments; what the step allocated bounds its activations.
        memory = PROCESS_BYTES + 2 * train.images.nbytes + 16 * parameters + counts["bytes"]
        return Cost(parameters, float(counts["flops"]), memory, {"visual_tokens": float(visual)})

    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        import torch

        from auto_research.layers.vision_language import VisionLanguageModel

        config, recipe = self._config(genome, data), asdict(self._recipe(genome))
        recipe.pop("validations")  # there is no look at validation during training
        with torch.device("meta"):
            model = VisionLanguageModel(config)
        loss: dict[str, Any] = {"name": genome["train.objective"]}
        if "train.auxiliary" in genome:
            loss["auxiliary"] = genome["train.auxiliary"]
        if "masked-view" in str(genome["train.objective"]):
            loss["hidden share"] = HIDDEN_SHARE
        return Described(
            {
                "model": asdict(config),
                "recipe": recipe,
                "steps": sizes["steps"],
                "vocabulary": [*VOCABULARY, *data.parts.train.classes],
            },
            {name: list(parameter.shape) for name, parameter in model.named_parameters()},
            loss,
        )

    def summarise(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """What the negative control shows, and every candidate's answers by question."""
        from auto_research.evolve.promotion import mean_metrics

        found = {t.candidate.id: (t.candidate.genome, mean_metrics(t)) for t in trials if t.mean is not None}
        rows = [
            {"candidate": id} | {name.replace("accuracy_", ""): m[name] for name in SHOWN if name in m}
            for id, (_, m) in found.items()
        ]
        scores = {
            setting: [m for genome, m in found.values() if genome["model.positions"] == setting]
            for setting in ("on", "off")
        }
        if not (scores["on"] and scores["off"]):
            return {"candidates": rows}
        seeing, blind = (max(m[self.metric] for m in scores[setting]) for setting in ("on", "off"))
        place = max(m["accuracy_place"] for m in scores["off"])
        return {
            "sentence": f"Negative control: without positions accuracy {blind:.3f}, places {place:.3f} (one in four is "
            f"chance); with them up to {seeing:.3f}.",
            "candidates": rows,
        }

    def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
        """Two real steps on the first pictures: what the model gives, its losses, the order of pictures, its words.

        Forward and words are the untrained model's, the losses and the order those of training.
        """
        import torch

        train, some = data.parts.train.first(64), data.parts.validation.first(8)
        few = Data(Parts(train, some, data.parts.pixels), {}, {}, len(some))
        model = self._build(genome, few, 0, "cpu").eval()
        visual = see(model, some.images, "cpu")
        question = question_tokens()[:1].expand(len(visual), -1)
        with torch.no_grad():
            logits = model(visual, question)
        _, losses = self._fit(genome, few, 0, PROBE_STEPS, "cpu", None)
        batches = self.batches(train, self._recipe(genome).batch_size, 0, "cpu")
        cost = self.cost(genome, sizes, data)
        return {
            "forward": digest(logits),
            "loss": digest(losses),
            "data_order": digest(*(next(batches)["picture"] for _ in range(PROBE_STEPS))),
            "generated": digest(model.generate(visual, question, ANSWER_TOKENS)),
            "cost": digest(cost.parameters, cost.flops, cost.extra),
        }


def _first(scenes: shapes.Scenes, count: int) -> shapes.Scenes:
    return shapes.Scenes(scenes.images[:count], scenes.attributes[:count], scenes.keys[:count])


def see(model: VisionLanguageModel, images: np.ndarray, device: str) -> Tensor:
    """Visual tokens (N, V, dim) of pictures (N, 3, 32, 32) uint8."""
    import torch

    with torch.no_grad():
        parts = torch.from_numpy(images).split(EVALUATION_BATCH)
        return torch.cat([model.see(model.encoder(part.to(device).float() / 255)) for part in parts])


def answer(model: VisionLanguageModel, visual: Tensor, questions: Tensor) -> Tensor:
    """Greedy answers (N, 3, A) to three questions (N, 3, Q) each about pictures seen as visual tokens (N, V, dim)."""
    import torch

    parts = zip(visual.split(EVALUATION_BATCH), questions.to(visual.device).split(EVALUATION_BATCH), strict=True)
    given = [model.generate(part, asked.flatten(0, 1), ANSWER_TOKENS) for part, asked in parts]
    return torch.cat(given).unflatten(0, (-1, questions.shape[1]))


def evaluate(model: VisionLanguageModel, shown: Shown, device: str) -> Scores:
    """Exact-match accuracy of generated answers, and of the same with the wrong picture and without one.

    Units are pictures: the share of their questions answered. Visual dependency is the accuracy minus that with the
    pictures exchanged in a fixed order, shapes among shapes and labelled pictures among themselves (no picture keeps
    its place); answers that name none of the known ones count as wrong. `composite` adds a quarter of the dependency,
    where positive, to the accuracy.
    """
    import torch

    questions, truth, _ = (part.to(device) for part in shown.exercises())
    asked = (truth[..., 0] != 0).double().cpu()  # (N, 3)
    count, total = len(shown.scenes), len(shown)

    def right(given: Tensor) -> Tensor:
        """Whether each question of each picture is answered, (N, 3); 0 where nothing is asked."""
        return (given == truth).all(-1).double().cpu() * asked

    def share(correct: Tensor) -> Tensor:
        """Share of its questions answered, a picture (N,)."""
        return correct.sum(1) / asked.sum(1)

    visual = see(model, shown.images, device)
    given = answer(model, visual, questions)
    correct = right(given)
    units = share(correct)
    # Said of picture i, asked about its neighbour in a random circle.
    wrong_picture = torch.empty(total, dtype=torch.long)
    for first, last in ((0, count), (count, total)):
        circle = first + torch.from_numpy(np.random.default_rng(0).permutation(last - first))
        wrong_picture[circle] = circle.roll(1)
    shuffled = share(right(given[wrong_picture.to(device)]))
    nothing = see(model, shapes.blank()[None], device)
    ends = [0, -1] if shown.labelled is not None else [0]
    unseen = answer(model, nothing.expand(len(ends), -1, -1), questions[ends])
    blank = share(right(torch.cat([part.expand(n, -1, -1) for part, n in zip(unseen, (count, total - count))])))
    sayable = torch.cat([answer_tokens(), shown.names()]).to(device)
    known = (given[:, :, None] == sayable).all(-1).any(-1).double().cpu() * asked
    accuracy, dependency = float(units.mean()), float(units.mean() - shuffled.mean())
    metrics = {
        "accuracy": accuracy,
        **{f"accuracy_{topic}": float(correct[:count, q].mean()) for q, topic in enumerate(shapes.TOPICS)},
        "shuffled_accuracy": float(shuffled.mean()),
        "blank_accuracy": float(blank.mean()),
        "visual_dependency": dependency,
        "composite": accuracy + 0.25 * max(0.0, dependency),
        "known_answers": float(known.sum() / asked.sum()),
    }
    if total > count:
        metrics["accuracy_labelled_pictures"] = float(units[count:].mean())
    untrained = torch.from_numpy(shown.scenes.untrained)
    for name, chosen in (("trained", ~untrained), ("untrained", untrained)):
        if bool(chosen.any()):
            metrics[f"accuracy_{name}_combinations"] = float(units[:count][chosen].mean())
    return Scores(metrics, units.tolist())
