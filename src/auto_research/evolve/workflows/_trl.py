"""What the workflows that train with TRL share: arguments, order of the data, a watch over training, and resuming.

Weights are FP32 and computation is BF16 (autocast): Adam's first step is about the learning rate, which is less than
half a BF16 unit of most weights, so weights held in BF16 hardly move. How many moved in the first step is counted and
recorded, and fewer than half are a failure.

A checkpoint carries the identity of the run that made it (data order, dtypes, configuration), and only a run with the
same identity goes on from it.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from auto_research.evolve import cells
from auto_research.evolve.workflow import NonFinite, Progress, digest
from auto_research.runtime.bf16 import fast_bf16
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import write_json_atomic

SEAL = "identity.json"
"""Written into a checkpoint's folder last: a checkpoint without it is not whole."""

LEAST_MOVED = 0.5
"""Share of the weights that the first step has to move."""


class Unmoved(ArithmeticError):
    """The first step moved fewer than half of the weights: the training is not one."""


@dataclass(frozen=True)
class Moved:
    """What the first step did to the trainable parameters, as bytes compare.

    Attributes:
        changed: parameters with another value than before.
        counted: parameters of tensors that got a gradient. The A of a fresh adapter gets none: its B is zero.
        trainable: all trainable parameters.
    """

    changed: int
    counted: int
    trainable: int

    @property
    def share(self) -> float:
        """Of the parameters that got a gradient."""
        return self.changed / self.counted if self.counted else 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """For the record."""
        return {
            "changed_share": self.share,
            "changed_parameters": float(self.changed),
            "trainable_parameters": float(self.trainable),
        }


@dataclass(frozen=True)
class Identity:
    """What a run and a checkpoint that it goes on from must have in common.

    Attributes:
        order: digest of the training rows in the order of their use.
        weights, compute: dtypes, such as `float32` and `bfloat16`.
        configuration: all else that decides the weights, by name; JSON-like.
    """

    order: str
    weights: str
    compute: str
    configuration: Mapping[str, Any]

    def parts(self) -> dict[str, Any]:
        """Name in words -> value."""
        named = {"data order": self.order, "dtype of the weights": self.weights, "compute dtype": self.compute}
        return json.loads(json.dumps(named | dict(self.configuration)))


@dataclass
class Trained:
    """What `fit` did.

    Attributes:
        losses: step -> training loss, of the steps that this call ran.
        history: the same of all steps of the training, those before a resume included.
        resumed_from: the step of the checkpoint that it went on from; 0 from the start.
        moved: by the first step of the whole training, whichever call ran it.
    """

    losses: dict[int, float]
    history: dict[int, float]
    resumed_from: int
    moved: Moved


def seeded_order(rows: int, count: int, seed: int) -> list[int]:
    """Indices of the `count` rows that a training uses, in order: one permutation an epoch, the last one cut short.

    The trainer then reads them one after the other, so the order depends on nothing but these three numbers and a
    resumed training skips exactly what was read.
    """
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < count:
        order += torch.randperm(rows, generator=generator).tolist()
    return order[:count]


def order_digest(rows: Sequence[Any]) -> str:
    """Of the training rows (JSON-like) in the order of their use."""
    return digest(list(rows))


def arguments(
    folder: Path,
    *,
    device: str,
    seed: int,
    steps: int,
    batch: int,
    learning_rate: float,
    max_length: int,
    accumulate: int = 1,
    save_every: int = 0,
    warmup: float = 0.0,
    schedule: str = "linear",
    compute: str = "bfloat16",
) -> dict[str, Any]:
    """Keyword arguments that `SFTConfig`, `DPOConfig`, `ORPOConfig` and `CPOConfig` share.

    Args:
        folder: receives the checkpoints.
        steps: optimiser updates of the whole training, of batch * accumulate rows each.
        save_every: steps between two checkpoints; 0 keeps none but where `fit` stops.
        warmup: share of the steps.
        compute: `bfloat16` (autocast) or `float32`.
    """
    return {
        "output_dir": str(folder),
        "use_cpu": device == "cpu",
        "seed": seed,
        "data_seed": seed,
        "train_sampling_strategy": "sequential",  # over rows that `seeded_order` has put in order
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": device != "cpu",
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulate,
        "learning_rate": learning_rate,
        "lr_scheduler_type": schedule,
        "warmup_steps": math.ceil(warmup * steps),
        "max_length": max_length,
        "bf16": compute == "bfloat16",
        "activation_checkpointing": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # or a loss that is no number would be logged as 0
        "save_strategy": "steps",
        "save_steps": save_every or steps + 1,
        "save_total_limit": 2,
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def as_dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as the trainers want them, in memory."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    return Dataset.from_list([dict(row) for row in rows])


def with_adapter(model: Any, r: int, seed: int) -> Any:
    """`model` itself for r 0, else with trainable LoRA adapters of rank r, initialised from `seed`."""
    if not r:
        return model
    from auto_research.checkpoints.adapters import lora

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return lora(model, r)


@contextmanager
def libraries_quiet() -> Iterator[None]:
    """Keeps progress bars and load reports out of a cell's log; TRL's note on experimental trainers too."""
    import os
    import warnings

    from auto_research.checkpoints.store import quiet

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def fit(
    trainer: Any, identity: Identity, progress: Progress, *, stop_at: int = 0, least_moved: float = LEAST_MOVED
) -> Trained:
    """Trains to the end, or to `stop_at` and leaves a checkpoint there; goes on from the newest checkpoint if any.

    Checkpoints are those in the trainer's output folder. The last step leaves none: its weights are the result.

    Args:
        trainer: a trainer of TRL with `arguments`, whose rows are in the order of their use.
        identity: of this run; written into its checkpoints.
        progress: told every step's loss.
        least_moved: share of the weights that the first step has to move; 0 only counts them.

    Raises:
        UserError: the newest checkpoint belongs to another run.
        NonFinite: a loss, or a norm of gradients.
        Unmoved: the first step moved less than `least_moved`.
    """
    folder = newest_checkpoint(Path(trainer.args.output_dir))
    watch = Watch(identity, progress, stop_at, least_moved)
    if folder is not None:
        seal = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        refuse_other(folder, seal["identity"], identity)
        watch.moved = Moved(**seal["moved"])
        watch.earlier = {int(step): loss for step, loss in seal["losses"].items()}
        print(f"resumed from {folder.name}", flush=True)
    trainer.add_callback(watch)
    with libraries_quiet(), fast_bf16(trainer.args.device):
        trainer.train(resume_from_checkpoint=str(folder) if folder else None)
    assert watch.moved is not None
    return Trained(watch.losses, watch.history, watch.resumed_from, watch.moved)


@contextmanager
def checkpoint_folder() -> Iterator[Path]:
    """Where checkpoints go: beside the attempts of a cell, so that the next attempt finds them; else for now only."""
    kept = cells.checkpoints()
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
    else:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)


def newest_checkpoint(folder: Path) -> Path | None:
    """The `checkpoint-<step>` of the highest step that is whole; None without one.

    One that a kill cut short, or whose weights are truncated, is passed over.
    """
    from auto_research.checkpoints.store import is_readable

    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    whole = [path for path in found if (path / SEAL).is_file() and all(map(is_readable, path.glob("*.safetensors")))]
    return whole[-1] if whole else None


def refuse_other(folder: Path, made: Mapping[str, Any], identity: Identity) -> None:
    """Raises `UserError` unless the checkpoint in `folder`, made by a run with the parts `made`, is of this run."""
    mine = identity.parts()
    for name in [*mine, *made]:
        if made.get(name) != mine.get(name):
            raise UserError(
                f"{folder} cannot be resumed: its {name} is {_shown(made.get(name))} and this run's is "
                f"{_shown(mine.get(name))}; restore that setting, or start again in an empty folder"
            )


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


@dataclass(eq=False)
class Watch(TrainerCallback):
    """Sees every step of a trainer: losses, what the first step moves, where to stop, what belongs to a checkpoint."""

    identity: Identity
    progress: Progress
    stop_at: int = 0
    least_moved: float = LEAST_MOVED
    moved: Moved | None = None
    earlier: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    resumed_from: int = 0
    _before: dict[str, torch.Tensor] = field(default_factory=dict)
    _counted: set[str] = field(default_factory=set)

    @property
    def history(self) -> dict[int, float]:
        """Losses of all steps, those of earlier sessions included."""
        return self.earlier | self.losses

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Keeps the weights of the start, on the host; tells where a resumed training stands."""
        self.resumed_from = int(state.global_step)
        if self.resumed_from in self.earlier:  # loading took its time
            self.progress(self.resumed_from, self.earlier[self.resumed_from])
        if self.moved is None:
            self._before = {
                name: weight.detach().to("cpu", copy=True)
                for name, weight in model.named_parameters()
                if weight.requires_grad
            }

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Before the first update: which weights got a gradient."""
        if self._before:
            self._counted = {
                name
                for name, weight in model.named_parameters()
                if weight.grad is not None and bool(weight.grad.count_nonzero() > 0)
            }

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """After the first update: what it moved. At the planned stop: a checkpoint, and the end."""
        if self._before:
            now = {name: weight.detach().to("cpu") for name, weight in model.named_parameters() if name in self._before}
            self.moved = compare_weights(self._before, now, self._counted)
            self._before = {}
            if self.moved.share < self.least_moved:
                raise Unmoved(
                    f"the first step moved {self.moved.share:.1%} of the weights, less than {self.least_moved:.0%}: "
                    f"with weights in {self.identity.weights} the steps are rounded away, or the learning rate is too "
                    "small"
                )
        if self.stop_at and state.global_step == self.stop_at:
            control.should_save = control.should_training_stop = True
        elif state.global_step >= state.max_steps:
            control.should_save = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Reports the loss of a step."""
        logs = logs or {}
        if "loss" not in logs:
            return
        step, loss = int(state.global_step), float(logs["loss"])
        self.losses[step] = loss
        self.progress(step, loss)
        for name in ("loss", "grad_norm"):
            if name in logs and not math.isfinite(float(logs[name])):
                raise NonFinite(f"the {name} is {logs[name]} at step {step}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Seals the checkpoint just written."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        assert self.moved is not None
        seal = {"identity": self.identity.parts(), "moved": asdict(self.moved), "losses": self.history}
        write_json_atomic(folder / SEAL, seal)


def compare_weights(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], counted: set[str] | None = None
) -> Moved:
    """How many parameters differ, in all tensors or in those of `counted`."""
    names = set(before) if counted is None else set(before) & counted
    changed = sum(int((before[name] != after[name]).sum()) for name in names)
    return Moved(changed, sum(before[name].numel() for name in names), sum(w.numel() for w in before.values()))


def equal_tensors(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> int:
    """How many tensors of the same name are equal bit for bit."""
    return sum(bits_equal(tensor, other[name]) for name, tensor in one.items() if name in other)


def bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree; -0.0 is not 0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(*(t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (one, other))))


BITS = {16: "bfloat16", 32: "float32"}
"""Metrics are numbers: how a record writes a dtype, and reads it."""


def dtype_metrics(identity: Identity) -> dict[str, float]:
    """Bits of the weights and of the computation, for the record; `BITS` names them."""
    bits = {name: float(number) for number, name in BITS.items()}
    return {"weight_bits": bits[identity.weights], "compute_bits": bits[identity.compute]}
