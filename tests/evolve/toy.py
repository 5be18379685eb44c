"""A workflow that trains in milliseconds, for tests of everything around it.

Name it `toy:ToyWorkflow` (or another class below) with this folder on `sys.path` or `PYTHONPATH`; `conftest.py` here
sees to both, and isolated processes inherit both.

A line y = 2 x + 0.4 with noise, fitted by mini-batch gradient descent in numpy:

* operator `bias` really helps, operator `shuffle` (targets of a quarter of the batch exchanged) really hurts,
  operator `decor` is planted: its axis is offered and nothing reads it;
* `train.lr` is a range; `train.momentum` counts only under `train.optimiser = momentum`.

Faults are planted by environment variables, read where they strike:

* `TOY_FAULT`: hang, nan, memory, always-memory, segfault, kill, exception, io, stall, output, corrupt, disk,
  peek, peek-finaliser, peek-reload;
  `SEED=FAULT,SEED=FAULT` plants one for some seeds, and `once-FAULT` strikes only the first time;
* `TOY_FAULT_WHERE`: `axis=value`, only candidates that have it;
* `TOY_NOTES`: folder of the marks of `once-`, and of `hang.json` with the ids of grandchild and child;
* `TOY_DATA`: changes the data.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from auto_research.evolve.space import Axis, Constraint, Genome, Space
from auto_research.evolve.workflow import (
    Cost,
    Data,
    Described,
    Evidence,
    Operator,
    Progress,
    Scores,
    SealedTest,
    Sizes,
    Workflow,
    digest,
    disjoint,
)
from auto_research.runtime.budget import Budget


def design(x: np.ndarray, genome: Genome) -> np.ndarray:
    """Columns [n, 1 or 2]: the input, and ones with the bias operator."""
    columns = [x, np.ones_like(x)] if genome["model.bias"] == "on" else [x]
    return np.stack(columns, axis=1)


def exchange(y: np.ndarray) -> np.ndarray:
    """Targets of the first quarter of a batch, turned round: the operator that hurts."""
    quarter = max(2, len(y) // 4)
    return np.concatenate([-2 * y[:quarter], y[quarter:]])


def ornament(y: np.ndarray) -> np.ndarray:
    """What the planted no-op operator claims to use; nothing calls it."""
    return y


class ToyWorkflow(Workflow):
    """Fit a line; see the module."""

    key = "toy"
    title = "Toy line"
    model = "line"
    dataset = "points"
    metric = "closeness"
    level = "L0 mechanism"
    preload = ("numpy",)
    space = Space(
        (
            Axis("model.bias", values=("off", "on"), source="toy"),
            Axis("data.exchange", values=("off", "on"), stage="data", changes="data", group="data", source="toy"),
            Axis("model.decor", values=("off", "on"), source="toy"),
            Axis("train.lr", "log-float", low=0.01, high=0.3, default=0.05, stage="train", group="joint", source="toy"),
            Axis("train.optimiser", values=("plain", "momentum"), stage="train", group="joint", source="toy"),
            Axis(
                "train.momentum",
                values=(0.5, 0.8),
                condition={"train.optimiser": ("momentum",)},
                stage="train",
                group="joint",
                source="toy",
            ),
        ),
        (
            Constraint(
                "stable",
                lambda g: not (g.get("train.momentum") == 0.8 and float(g["train.lr"]) > 0.25),
                "momentum 0.8 diverges above a rate of 0.25",
            ),
        ),
    )
    operators: ClassVar[tuple[Operator, ...]] = (
        Operator(
            "bias", "A constant term", {"model.bias": ("on",)}, "0001.00001", "core_mechanism",
            keywords=("bias", "offset", "intercept", "偏置"), code=("toy.design",),
        ),
        Operator(
            "exchange", "Exchanged targets", {"data.exchange": ("on",)}, "0001.00002", "simplified",
            omitted=("everything useful",), keywords=("exchange", "noise"), code=("toy.exchange",),
        ),
        Operator(
            "decor", "An ornament without effect", {"model.decor": ("on",)}, "0001.00003", "core_mechanism",
            keywords=("decor",), code=("toy.ornament",),
        ),
    )  # fmt: skip
    evidence = (
        Evidence("Curves instead of lines", "0001.00004", "there is no operator for curves", "an axis", ("curve",)),
    )

    def sizes(self, budget: Budget) -> Sizes:
        steps = {"smoke": 40, "standard": 80, "full": 160}[budget]
        values = {"steps": steps, "rows": 96, "micro_batch": 8, "accumulate": 1, "pause_ms": 0, "burn_ms": 0}
        return Sizes(budget, values)

    def _rows(self, part: str, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng({"train": 1, "validation": 2, "test": 3}[part])
        x = random.uniform(-1, 1, sizes["rows"])
        return x, 2 * x + 0.4 + 0.2 * random.standard_normal(sizes["rows"])

    def _texts(self, part: str, sizes: Sizes) -> list[str]:
        return [f"{x:.12f}" for x in self._rows(part, sizes)[0]]

    def load(self, sizes: Sizes, dataset_dir: Path | None) -> Data:
        parts = {part: self._rows(part, sizes) for part in ("train", "validation")}
        parts["train"][1][0] += bool(os.environ.get("TOY_DATA"))
        hygiene = disjoint({part: self._texts(part, sizes) for part in ("train", "validation", "test")})
        return Data(parts, {"points": digest(*parts["train"], *parts["validation"])}, hygiene, sizes["rows"], "")

    def load_test(self, sizes: Sizes, dataset_dir: Path | None) -> Any:
        return self._rows("test", sizes)

    def train(self, genome: Genome, data: Data, seed: int, sizes: Sizes, device: str, progress: Progress) -> Any:
        x, y = data.parts["train"]
        random = np.random.default_rng(seed)
        weights = 0.5 * random.standard_normal(design(x[:1], genome).shape[1])
        velocity = np.zeros_like(weights)
        fault = strikes(genome, seed)
        for step in range(sizes["steps"]):
            time.sleep(sizes["pause_ms"] / 1000)
            burn(sizes["burn_ms"] / 1000)
            gradient: Any = np.zeros_like(weights)
            loss = 0.0
            batch = random.permutation(len(x))[: sizes["accumulate"] * sizes["micro_batch"]]
            for rows in np.split(batch, sizes["accumulate"]):
                target = exchange(y[rows]) if genome["data.exchange"] == "on" else y[rows]
                columns = design(x[rows], genome)
                error = columns @ weights - target
                gradient += 2 * columns.T @ error / len(rows) / sizes["accumulate"]
                loss += float(error @ error) / len(rows) / sizes["accumulate"]
            velocity = float(genome.get("train.momentum", 0.0)) * velocity - float(genome["train.lr"]) * gradient
            weights = weights + velocity
            progress(step + 1, loss)
            if fault and step == 2:
                plant(fault, sizes, progress)
        return {"weights": weights, "genome": dict(genome), "fault": fault}

    def save(self, artefact: Any, folder: Path) -> None:
        np.save(folder / "weights.npy", artefact["weights"])
        if artefact["fault"] == "corrupt":
            atexit.register((folder.parent / "result.json").write_text, '{"metrics": {"clo')
        if artefact["fault"] == "disk":
            raise OSError(28, "No space left on device")

    def restore(self, genome: Genome, data: Data, folder: Path, sizes: Sizes, device: str) -> Any:
        return {"weights": np.load(folder / "weights.npy"), "genome": dict(genome), "fault": ""}

    def _score(self, artefact: Any, rows: tuple[np.ndarray, np.ndarray]) -> Scores:
        x, y = rows
        units = 1 / (1 + (design(x, artefact["genome"]) @ artefact["weights"] - y) ** 2)
        return Scores({"closeness": float(units.mean()), "worst": float(units.min())}, units.tolist())

    def validate(self, artefact: Any, data: Data, sizes: Sizes, device: str) -> Scores:
        return self._score(artefact, data.parts["validation"])

    def test(self, artefact: Any, test: Any, data: Data, sizes: Sizes, device: str) -> Scores:
        return self._score(artefact, test)

    def floors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        mean = data.parts["train"][1].mean()
        return {"mean": float(np.mean(1 / (1 + (mean - data.parts["validation"][1]) ** 2)))}

    def anchors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        x, y = data.parts["train"]
        weights = np.linalg.lstsq(np.stack([x, np.ones_like(x)], axis=1), y, rcond=None)[0]
        best = {"weights": weights, "genome": {"model.bias": "on"}}
        return {"least squares": self._score(best, data.parts["validation"]).metrics["closeness"]}

    def cost(self, genome: Genome, sizes: Sizes, data: Data) -> Cost:
        parameters = 2 if genome["model.bias"] == "on" else 1
        return Cost(parameters, 4.0 * parameters * sizes["micro_batch"], 1_000_000, {"columns": parameters})

    def match(self, genome: Genome, baseline: Cost, sizes: Sizes, data: Data) -> str:
        return "one more parameter" if genome["model.bias"] == "on" else ""

    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        read = {name: value for name, value in genome.items() if name != "model.decor"}
        return Described(
            {**read, **{k: v for k, v in sizes.values.items() if k not in ("pause_ms", "burn_ms")}},
            {"weights": [2 if genome["model.bias"] == "on" else 1]},
            {"name": "squared error"},
        )

    def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
        few = Sizes(sizes.budget, {**sizes.values, "steps": 3, "pause_ms": 0, "burn_ms": 0})
        losses: list[float] = []
        artefact = self.train(genome, data, 0, few, "cpu", lambda step, loss: losses.append(loss))
        return {
            "forward": digest(design(data.parts["validation"][0], genome) @ artefact["weights"]),
            "loss": digest(losses),
            "cost": digest(self.cost(genome, sizes, data).parameters),
        }


class LeakyToy(ToyWorkflow):
    """One validation row is in the training data."""

    key = "toy-leaky"

    def _texts(self, part: str, sizes: Sizes) -> list[str]:
        texts = super()._texts(part, sizes)
        return [super()._texts("train", sizes)[0], *texts[1:]] if part == "validation" else texts


class DeterministicToy(ToyWorkflow):
    """Seeds change nothing: comparisons are over examples."""

    key = "toy-deterministic"
    stochastic = False

    def train(self, genome: Genome, data: Data, seed: int, sizes: Sizes, device: str, progress: Progress) -> Any:
        return super().train(genome, data, 0, sizes, device, progress)


class FixedToy(ToyWorkflow):
    """Fixed candidates, measured and not selected."""

    key = "toy-fixed"
    select = False

    def smoke_plan(self) -> list[Genome] | None:
        start = self.space.baseline()
        return [self.space.resolve({**start, "train.lr": rate}) for rate in (0.02, 0.1, 0.2)]


class HopelessToy(ToyWorkflow):
    """Nothing improves: the operator that helps is not offered."""

    key = "toy-hopeless"
    operators = tuple(operator for operator in ToyWorkflow.operators if operator.id != "bias")


# ---------------------------------------------------------------------------------------------------- faults


def burn(seconds: float) -> None:
    """Spend processor time of this process, whatever its neighbours do."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        np.dot(np.ones(1000), np.ones(1000))


def strikes(genome: Genome, seed: int) -> str:
    """The fault planted for this cell, or nothing."""
    fault = os.environ.get("TOY_FAULT", "")
    axis, _, value = os.environ.get("TOY_FAULT_WHERE", "").partition("=")
    if axis and str(genome.get(axis)) != value:
        return ""
    if "=" in fault:
        fault = dict(entry.split("=") for entry in fault.split(",")).get(str(seed), "")
    if fault.startswith("once-"):
        try:
            (Path(os.environ["TOY_NOTES"]) / f"{fault}-{seed}").touch(exist_ok=False)
        except FileExistsError:
            return ""
    return fault.removeprefix("once-")


def plant(fault: str, sizes: Sizes, progress: Progress) -> None:
    """Bring about a fault inside a training loop."""
    if fault == "hang":  # with a grandchild of its own session; neither reacts to SIGTERM
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
        (Path(os.environ["TOY_NOTES"]) / "hang.json").write_text(json.dumps([child.pid, os.getpid()]))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        step = 3
        while True:  # alive by its heartbeat: only the deadline can end it
            time.sleep(0.05)
            progress(step := step + 1, 1.0)
    if fault == "stall":
        time.sleep(600)
    if fault == "nan":
        progress(4, float("nan"))
    if fault == "memory":  # fails under a memory limit of 1,200 MB unless the micro-batch was halved once
        np.zeros(sizes["micro_batch"] * 192 * 2**20, dtype=np.uint8)
    if fault == "always-memory":
        raise MemoryError("planted")
    if fault == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exception":
        raise ValueError("planted: shapes do not match")
    if fault == "io":
        raise ConnectionResetError("planted: the file server went away")
    if fault == "output":
        print("x" * 79 + "\n", end="", flush=True)
        for _ in range(20_000):
            print("noise " * 13)
        print("the last line")
        raise ValueError("planted after much output")
    if fault == "peek":
        ToyWorkflow().load_test(sizes, None)
    if fault.startswith("peek-"):
        module = sys.modules[SealedTest.__module__]
        if fault == "peek-reload":  # forgets that this process searches
            module = importlib.reload(module)
        module.become_finaliser(Path(os.environ["TOY_NOTES"]) / "r/events.jsonl", 1)
        ToyWorkflow().load_test(sizes, None)
