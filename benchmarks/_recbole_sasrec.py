"""RecBole's SASRec behind a line protocol, for `next_item_vs_recbole.py`; run by the Python that has RecBole.

Reads one JSON object of settings, then one command a line (`train UPDATES`, `validate`, `test FILE`, `quit`), and
answers each with one JSON line on standard output. Needs nothing of this project.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def shim() -> None:
    """What RecBole 1.2 expects of older numpy, torch and ray."""
    aliases = {"float_": np.float64, "complex_": np.complex128, "bool8": np.bool_, "unicode_": np.str_}
    for name, value in aliases.items():
        if not hasattr(np, name):
            setattr(np, name, value)
    load = torch.load
    torch.load = lambda *a, **k: load(*a, **{"weights_only": False, **k})
    try:
        import ray  # noqa: F401
    except ImportError:  # only its hyper-parameter search uses it
        for name in ("ray", "ray.tune", "ray.tune.schedulers"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["ray"].tune = sys.modules["ray.tune"]  # type: ignore[attr-defined]


class Stretch:
    """The next `length` batches of an endless pass over a loader, in the form that RecBole's trainer takes."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.batches, self.length = loader, iter(loader), 0
        self.shuffle = False  # the loader itself shuffles at each pass

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            batch = next(self.batches, None)
            if batch is None:
                self.batches = iter(self.loader)
                batch = next(self.batches)
            yield batch


def main() -> None:
    """Trains, validates and tests on command."""
    shim()
    answers, sys.stdout = sys.stdout, sys.stderr  # RecBole's own printing must not mix with the answers
    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    torch.set_num_threads(settings.pop("threads"))

    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.model.sequential_recommender import SASRec
    from recbole.trainer import Trainer
    from recbole.utils import init_seed

    config = Config(model="SASRec", dataset=settings.pop("name"), config_dict=settings)
    init_seed(config["seed"], True)
    dataset = create_dataset(config)
    train, valid, test = data_preparation(config, dataset)
    model = SASRec(config, train.dataset).to(config["device"])
    trainer = Trainer(config, model)

    def say(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    import recbole

    say(
        version=recbole.__version__,
        torch=torch.__version__,
        targets=len(train.dataset),
        users=len(test.dataset),
        items=int(dataset.item_num) - 1,
        parameters=sum(p.numel() for p in model.parameters()),
    )
    best: tuple[float, dict[str, Any]] = (-1.0, {})
    stretch = Stretch(train)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "quit":
            return
        started, cpu = time.perf_counter(), time.process_time()
        if command == "train":
            stretch.length = int(arguments[0])
            loss = trainer._train_epoch(stretch, 0, show_progress=False) / stretch.length
            say(seconds=time.perf_counter() - started, cpu=time.process_time() - cpu, loss=float(loss))
        elif command == "validate":
            result = trainer.evaluate(valid, load_best_model=False, show_progress=False)
            taken = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}
            value = float(result["ndcg@10"])
            if value > best[0]:
                best = (value, copy.deepcopy(model.state_dict()))
            say(**taken, ndcg=value)
        elif command == "test":
            model.load_state_dict(best[1])
            result = trainer.evaluate(test, load_best_model=False, show_progress=False)
            model.eval()
            users, targets, scores = [], [], []
            with torch.no_grad():
                for batch in test:
                    interaction = batch[0].to(config["device"])
                    users.append(interaction[dataset.uid_field].cpu())
                    targets.append(batch[3].cpu())  # the positive item of each row
                    scores.append(model.full_sort_predict(interaction).float().cpu())
            ids = np.arange(dataset.item_num)
            np.savez(
                arguments[0],
                user=dataset.id2token(dataset.uid_field, torch.cat(users).numpy()).astype(str),
                target=dataset.id2token(dataset.iid_field, torch.cat(targets).numpy()).astype(str),
                item=dataset.id2token(dataset.iid_field, ids).astype(str),
                scores=torch.cat(scores).numpy(),
            )
            say(ndcg=float(result["ndcg@10"]))
        else:
            raise SystemExit(f"unknown command {command!r}")


if __name__ == "__main__":
    main()
