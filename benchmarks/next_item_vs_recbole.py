"""Next-item training and evaluation beside RecBole's SASRec on MovieLens-100K, in one run.

    python benchmarks/next_item_vs_recbole.py --recbole-python PATH/bin/python --data FOLDER/ml-100k

Equal on both sides: leave-one-out split, width, depth, heads, feed-forward width, dropout, sequence length, full
cross-entropy, learning rate, targets an update, threads. Different, and the point: RecBole feeds each training target
as a sequence of its own, this project predicts all positions of a sequence at once. An epoch is one visit of every
training target on both sides; the counts are compared before anything is measured.

Rounds alternate (one epoch and one validation each), so that a busy machine slows both; figures are medians. Quality
is NDCG@10 on test at the epoch that is best on validation, both by this project's evaluation (whole catalogue, history
excluded) and, for RecBole, also as it reports it itself (history not excluded). RecBole lives in an environment of
its own: python3 -m venv ENV && ENV/bin/pip install torch recbole.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from auto_research.data.movielens import read_100k
from auto_research.data.sequences import Interactions
from auto_research.runtime.device import seed_everything
from auto_research.runtime.records import write_json_atomic
from auto_research.runtime.versions import environment
from auto_research.tasks.base import Batch, count_parameters
from auto_research.tasks.baselines import SASRec
from auto_research.tasks.next_item import NextItem, sequence_split

CPU = torch.device("cpu")


class Theirs:
    """RecBole in its own process, one command at a time."""

    def __init__(self, python: str, settings: dict[str, Any], threads: int) -> None:
        script = Path(__file__).with_name("_recbole_sasrec.py")
        self.process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=settings["data_path"],
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""},
        )
        self.facts = self.ask(json.dumps({**settings, "threads": threads}))

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("RecBole's process ended; its messages are above")
        return json.loads(answer)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("quit\n")
        self.process.stdin.close()
        self.process.wait()


class Ours:
    """This project's task and SASRec, one epoch at a time."""

    def __init__(self, task: NextItem, options: argparse.Namespace) -> None:
        seed_everything(options.seed)
        self.task = task
        self.model = SASRec(
            task.num_items,
            options.width,
            options.heads,
            options.layers,
            hidden=options.hidden,
            max_length=options.length,
            dropout=options.dropout,
            loss="softmax",
            activation="gelu",
        )
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=options.rate, betas=(0.9, 0.999), weight_decay=0.0, fused=True
        )
        self.generator = np.random.default_rng(options.seed)
        rows = len(task.windows(np.random.default_rng(0))[0])
        self.batch = max(1, round(options.targets * rows / task.training_targets))
        self.best: tuple[float, dict[str, Tensor]] = (-1.0, {})

    def train(self) -> dict[str, float]:
        started, cpu = time.perf_counter(), time.process_time()
        self.model.train()
        for batch in self.task.epoch(self.generator, self.batch, CPU):
            self.optimiser.zero_grad(set_to_none=True)
            self.model.loss(batch).backward()
            self.optimiser.step()
        return {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}

    def validate(self) -> dict[str, float]:
        started, cpu = time.perf_counter(), time.process_time()
        value = self.task.evaluate(self.model, "validation", CPU)["ndcg@10"]
        taken = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu, "ndcg": value}
        if value > self.best[0]:
            self.best = (value, copy.deepcopy(self.model.state_dict()))
        return taken

    def test(self) -> float:
        """NDCG@10 of the epoch that was best on validation so far; training can go on afterwards."""
        chosen = copy.deepcopy(self.model)
        chosen.load_state_dict(self.best[1])
        return self.task.evaluate(chosen, "test", CPU)["ndcg@10"]


class Table(nn.Module):
    """Scores that were computed elsewhere, by user."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.table = scores

    def scores(self, batch: Batch) -> Tensor:
        return self.table[batch["user"]]


def write_atomic_file(interactions: Interactions, folder: Path) -> None:
    """The same events in RecBole's format; the time is the place in the user's sequence, so that ties agree."""
    place = np.arange(len(interactions)) - interactions.offsets[interactions.user]
    rows = np.stack([interactions.user, interactions.item, place], axis=1)
    (folder / "ml-100k").mkdir()
    np.savetxt(
        folder / "ml-100k" / "ml-100k.inter",
        rows,
        fmt="%d",
        delimiter="\t",
        header="user_id:token\titem_id:token\ttimestamp:float",
        comments="",
    )


def same_protocol(file: Path, task: NextItem) -> float:
    """NDCG@10 of RecBole's test scores under this project's evaluation."""
    found = np.load(file)
    scores = torch.full((task.split.num_users, task.num_items + 1), -1e9)
    known = found["item"] != "[PAD]"
    column = torch.from_numpy(found["item"][known].astype(np.int64) + 1)
    row = torch.from_numpy(found["user"].astype(np.int64))
    scores[row[:, None], column] = torch.from_numpy(found["scores"][:, known])
    return task.evaluate(Table(scores), "test", CPU)["ndcg@10"]


def main() -> None:
    """Alternates epochs of both sides, prints a table and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recbole-python", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of MovieLens-100K")
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/next_item_vs_recbole.json"))
    parser.add_argument("--epochs", type=int, default=10, help="epochs of both sides")
    parser.add_argument("--more-epochs", type=int, default=40, help="epochs of this project alone, afterwards")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.2)
    sizes = {"width": 64, "heads": 2, "layers": 2, "hidden": 256, "length": 50, "targets": 2048}
    for name, value in {**sizes, "threads": 2, "seed": 42}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    interactions = read_100k(options.data)
    task = NextItem(sequence_split(interactions), options.length)
    with tempfile.TemporaryDirectory() as folder:
        write_atomic_file(interactions, Path(folder))
        settings = {
            "data_path": folder,
            "checkpoint_dir": folder,
            "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
            "use_gpu": False,
            "seed": options.seed,
            "MAX_ITEM_LIST_LENGTH": options.length,
            "hidden_size": options.width,
            "inner_size": options.hidden,
            "n_layers": options.layers,
            "n_heads": options.heads,
            "hidden_dropout_prob": options.dropout,
            "attn_dropout_prob": options.dropout,
            "hidden_act": "gelu",
            "loss_type": "CE",
            "train_neg_sample_args": None,
            "learning_rate": options.rate,
            "train_batch_size": options.targets,
            "eval_batch_size": 4096,
            "epochs": options.epochs,
            "eval_args": {
                "split": {"LS": "valid_and_test"},
                "group_by": "user",
                "order": "TO",
                "mode": {"valid": "full", "test": "full"},
            },
            "metrics": ["NDCG", "Hit"],
            "topk": [10],
            "valid_metric": "NDCG@10",
            "show_progress": False,
        }
        theirs, ours = Theirs(options.recbole_python, settings, options.threads), Ours(task, options)
        if theirs.facts["targets"] != task.training_targets:
            raise SystemExit(f"{theirs.facts['targets']} targets there, {task.training_targets} here: not comparable")
        rounds: dict[str, list[dict[str, float]]] = {"their epochs": [], "our epochs": []}
        checks: dict[str, list[dict[str, float]]] = {"their checks": [], "our checks": []}
        for epoch in range(options.epochs):
            rounds["their epochs"].append(theirs.ask("train"))
            rounds["our epochs"].append(ours.train())
            checks["their checks"].append(theirs.ask("validate"))
            checks["our checks"].append(ours.validate())
            print(
                f"epoch {epoch + 1}: RecBole {rounds['their epochs'][-1]['seconds']:.1f} s, "
                f"here {rounds['our epochs'][-1]['seconds']:.1f} s; validation NDCG@10 (own protocols) "
                f"{checks['their checks'][-1]['ndcg']:.4f}, {checks['our checks'][-1]['ndcg']:.4f}",
                file=sys.stderr,
                flush=True,
            )
        reported = theirs.ask(f"test {folder}/scores.npz")["ndcg"]
        their_quality = same_protocol(Path(folder) / "scores.npz", task)
        theirs.close()
    equal_epochs = ours.test()
    for _ in range(options.more_epochs):
        ours.train()
        ours.validate()

    def median(values: list[dict[str, float]], unit: str) -> float:
        return statistics.median(v[unit] for v in values)

    users = task.split.num_users
    record: dict[str, Any] = {
        "question": "next-item training and evaluation beside RecBole's SASRec on MovieLens-100K",
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "recbole": theirs.facts,
        "parameters": {"recbole": theirs.facts["parameters"], "here": count_parameters(ours.model)},
        "rows an update": ours.batch,
        "targets an epoch": task.training_targets,
        "rounds": rounds | checks,
        "environment": environment(),
        "load average": os.getloadavg(),
    }
    for unit in ("seconds", "cpu"):
        epoch_theirs, epoch_ours = (median(rounds[k], unit) for k in ("their epochs", "our epochs"))
        check_theirs, check_ours = (median(checks[k], unit) for k in ("their checks", "our checks"))
        record[unit] = {
            "epochs/s": {"recbole": 1 / epoch_theirs, "here": 1 / epoch_ours, "ratio": epoch_theirs / epoch_ours},
            "targets/s": {"recbole": task.training_targets / epoch_theirs, "here": task.training_targets / epoch_ours},
            "evaluated users/s": {
                "recbole": users / check_theirs,
                "here": users / check_ours,
                "ratio": check_theirs / check_ours,
            },
        }
    record["ndcg@10"] = {
        "recbole": their_quality,
        "here": equal_epochs,
        "here, after more epochs": ours.test(),
        "recbole, as it reports it": reported,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(options.output, record)
    print(f"{'':34}{'RecBole':>12}{'here':>12}{'ratio':>9}")
    for unit, name in (("seconds", "of wall-clock"), ("cpu", "of processor time")):
        for measure in ("epochs/s", "evaluated users/s"):
            row = record[unit][measure]
            print(f"{measure + ' ' + name:34}{row['recbole']:12.4g}{row['here']:12.4g}{row['ratio']:8.1f}x")
    print(f"{'test NDCG@10, equal epochs':34}{their_quality:12.4f}{equal_epochs:12.4f}")
    print(f"{'test NDCG@10, more epochs here':34}{'':12}{record['ndcg@10']['here, after more epochs']:12.4f}")
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
