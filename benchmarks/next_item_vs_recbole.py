"""Next-item training and evaluation beside RecBole's SASRec on MovieLens-100K, in one run.

    python benchmarks/next_item_vs_recbole.py --recbole-python PATH/bin/python --data FOLDER/ml-100k

Equal on both sides: leave-one-out split, width, depth, heads, feed-forward width, dropout, sequence length, full
cross-entropy, learning rate, targets an update, threads. Different, and the point: RecBole feeds each training target
as a sequence of its own, this project predicts all positions of a sequence at once. An epoch is one visit of every
training target on both sides; the counts are compared before anything is measured.

Rounds alternate (the same number of updates and one validation on each side, by default an epoch), so that a busy
machine slows both; figures are medians. Quality is NDCG@10 on test at the round that is best on validation, both by
this project's evaluation (whole catalogue, history excluded) and, for RecBole, also as it reports it itself (history
not excluded). A RecBole epoch takes minutes on a small CPU: `--updates 4 --rounds 3` measures speed alone. RecBole
lives in an environment of its own: python3 -m venv ENV && ENV/bin/pip install torch recbole "pandas<3".
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
NAME = "events"  # under the name ml-100k RecBole would read the copy that it carries


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
    """This project's task and SASRec, some updates at a time."""

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
        rows = len(task.windows(np.random.default_rng(0))[0])
        self.batch = max(1, round(options.targets * rows / task.training_targets))
        self.batches = task.batches(options.seed, self.batch, CPU)
        self.best: tuple[float, dict[str, Tensor]] = (-1.0, {})

    def train(self, updates: int) -> dict[str, float]:
        started, cpu = time.perf_counter(), time.process_time()
        self.model.train()
        targets, total = 0, 0.0
        for _ in range(updates):
            batch = next(self.batches)
            self.optimiser.zero_grad(set_to_none=True)
            loss = self.model.loss(batch)
            loss.backward()
            self.optimiser.step()
            targets += int((batch["target"] > 0).sum())
            total += loss.item()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        return {"seconds": seconds, "cpu": cpu, "loss": total / updates, "targets": targets}

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
    (folder / NAME).mkdir()
    np.savetxt(
        folder / NAME / f"{NAME}.inter",
        rows,
        fmt="%d",
        delimiter="\t",
        header="user_id:token\titem_id:token\ttimestamp:float",
        comments="",
    )


def same_protocol(file: Path, task: NextItem) -> float:
    """NDCG@10 of RecBole's test scores under this project's evaluation; its test targets must be the same."""
    found = np.load(file)
    if (task.split.test_target[found["user"].astype(np.int64)] != found["target"].astype(np.int64)).any():
        raise SystemExit("the two sides hold out different test items: not comparable")
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
    parser.add_argument("--rounds", type=int, default=10, help="rounds of both sides")
    parser.add_argument("--updates", type=int, default=0, help="updates a round; an epoch by default")
    parser.add_argument("--more-rounds", type=int, default=40, help="rounds of this project alone, afterwards")
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
            "name": NAME,
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
            "epochs": options.rounds,
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
        rounds: dict[str, list[dict[str, float]]] = {"RecBole": [], "here": []}
        checks: dict[str, list[dict[str, float]]] = {"RecBole": [], "here": []}
        updates = options.updates or -(-task.training_targets // options.targets)
        for number in range(options.rounds):
            found = theirs.ask(f"train {updates}")
            # Its last batch of an epoch is smaller; on average an update has this many targets.
            share = task.training_targets / -(-task.training_targets // options.targets)
            rounds["RecBole"].append({**found, "targets": updates * share})
            rounds["here"].append(ours.train(updates))
            checks["RecBole"].append(theirs.ask("validate"))
            checks["here"].append(ours.validate())
            print(
                f"round {number + 1}, {updates} updates: RecBole {rounds['RecBole'][-1]['seconds']:.1f} s, "
                f"here {rounds['here'][-1]['seconds']:.1f} s; validation NDCG@10 (own protocols) "
                f"{checks['RecBole'][-1]['ndcg']:.4f}, {checks['here'][-1]['ndcg']:.4f}",
                file=sys.stderr,
                flush=True,
            )
        reported = theirs.ask(f"test {folder}/scores.npz")["ndcg"]
        their_quality = same_protocol(Path(folder) / "scores.npz", task)
        theirs.close()
    equal_updates = ours.test()
    for _ in range(options.more_rounds):
        ours.train(updates)
        ours.validate()

    record: dict[str, Any] = {
        "question": "next-item training and evaluation beside RecBole's SASRec on MovieLens-100K",
        "settings": {k: v for k, v in vars(options).items() if k not in ("data", "output", "recbole_python")},
        "recbole": theirs.facts,
        "parameters": {"recbole": theirs.facts["parameters"], "here": count_parameters(ours.model)},
        "rows an update here": ours.batch,
        "updates a round": updates,
        "targets an epoch": task.training_targets,
        "rounds": rounds,
        "validations": checks,
        "environment": environment(),
        "load average": os.getloadavg(),
    }

    def speeds(unit: str) -> dict[str, dict[str, float]]:
        """Medians over rounds, per second of wall-clock or of processor time."""
        targets = {side: statistics.median(r["targets"] / r[unit] for r in rounds[side]) for side in rounds}
        users = {side: statistics.median(task.split.num_users / c[unit] for c in checks[side]) for side in checks}
        table = {
            "epochs/s": {side: value / task.training_targets for side, value in targets.items()},
            "targets/s": targets,
            "evaluated users/s": users,
        }
        return {name: {**row, "ratio": row["here"] / row["RecBole"]} for name, row in table.items()}

    record["a second of wall-clock"] = speeds("seconds")
    record["a second of processor time"] = speeds("cpu")
    record["test ndcg@10"] = {
        "RecBole": their_quality,
        "here": equal_updates,
        "here, after more updates": ours.test(),
        "RecBole, as it reports it": reported,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(options.output, record)
    print(f"{'':48}{'RecBole':>12}{'here':>12}{'ratio':>9}")
    for unit in ("a second of wall-clock", "a second of processor time"):
        for measure, row in record[unit].items():
            name = f"{measure.removesuffix('/s')} {unit}"
            print(f"{name:48}{row['RecBole']:12.4g}{row['here']:12.4g}{row['ratio']:8.1f}x")
    print(f"{'test NDCG@10, equal updates':48}{their_quality:12.4f}{equal_updates:12.4f}")
    print(f"{'test NDCG@10, more updates here':48}{'':12}{record['test ndcg@10']['here, after more updates']:12.4f}")
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
