"""What a rehearsal costs: plain CPU, a bare dispatch mode and the rehearsal, side by side in one run.

``python benchmarks/rehearsal_overhead.py`` prints a table and, with ``--json FILE``, writes the numbers. Each workload
is timed in turn under the three regimes, several rounds interleaved, by CPU time of the thread; the fastest round of
each counts: on a shared machine the minimum is what the program costs. Gates: 3.2 times plain CPU on op-bound steps,
1.2 on matmul-bound ones, 1.5 on a whole small training run, 0.5 s start-up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from auto_research.rehearsal import rehearse

#: kind -> the largest admitted ratio of rehearsal to plain CPU.
GATES = {"op": 3.2, "matmul": 1.2, "run": 1.5}


class Bare(TorchDispatchMode):
    """A mode that does nothing: the price of leaving C++ at all."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def small_add(device: str) -> Callable[[], object]:
    """One addition of 16 elements."""
    x, y = torch.ones(16, device=device), torch.ones(16, device=device)
    return lambda: [x + y for _ in range(200)]


def mlp(device: str) -> Callable[[], object]:
    """A step of a small multilayer perceptron with AdamW."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(64, 32).to(device), torch.randn(64, 1).to(device)

    def step() -> None:
        for _ in range(10):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def encoder(width: int, length: int, batch: int) -> Callable[[str], Callable[[], object]]:
    """A step of a two-layer transformer encoder of the given width."""

    def make(device: str) -> Callable[[], object]:
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(batch, length, width).to(device)

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def bpr(device: str) -> Callable[[], object]:
    """A step of matrix factorisation with the pairwise ranking loss."""
    users, items = nn.Embedding(2000, 32).to(device), nn.Embedding(5000, 32).to(device)
    optimizer = torch.optim.Adam([*users.parameters(), *items.parameters()])
    u, i, j = (torch.randint(0, 2000, (256,)).to(device) for _ in range(3))

    def step() -> None:
        user = users(u)
        loss = -F.logsigmoid((user * items(i)).sum(-1) - (user * items(j)).sum(-1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def matmul(device: str) -> Callable[[], object]:
    """A 512 x 512 matrix product."""
    x = torch.randn(512, 512).to(device)
    return lambda: [x @ x for _ in range(5)]


def gru(device: str) -> Callable[[], object]:
    """A step of a GRU over 20 positions: many small operators."""
    embedding, layer = nn.Embedding(500, 64).to(device), nn.GRU(64, 64, batch_first=True).to(device)
    parameters = [*embedding.parameters(), *layer.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    rows = torch.randint(1, 500, (64, 21)).to(device)

    def step() -> None:
        hidden, _ = layer(embedding(rows[:, :-1]))
        loss = F.cross_entropy((hidden @ embedding.weight.T).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def whole_run(device: str) -> Callable[[], object]:
    """A small next-item run as a script has it: loader, self-attentive model, clipping, full-ranking evaluation."""
    items, length, width = 2000, 50, 64

    def run() -> None:
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randint(1, items, (512, length + 1)))
        embedding = nn.Embedding(items, width).to(device)
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, batch_first=True, dropout=0.1)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=device)
        parameters = [*embedding.parameters(), *model.parameters()]
        optimizer = torch.optim.AdamW(parameters)
        for (rows,) in torch.utils.data.DataLoader(data, batch_size=128, shuffle=True):
            rows = rows.to(device)
            hidden = model(embedding(rows[:, :-1]), mask=causal)
            loss = F.cross_entropy((hidden @ embedding.weight.T).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            scores = model(embedding(rows[:, :-1]), mask=causal)[:, -1] @ embedding.weight.T
            scores.topk(10).indices.cpu().numpy()

    return run


WORKLOADS: tuple[tuple[str, str, Callable[[str], Callable[[], object]]], ...] = (
    ("add, 16 elements (200)", "info", small_add),
    ("MLP step, AdamW (10)", "op", mlp),
    ("encoder step, width 32", "op", encoder(32, 16, 8)),
    ("BPR step", "op", bpr),
    ("matmul 512 (5)", "matmul", matmul),
    ("encoder step, width 256", "matmul", encoder(256, 64, 16)),
    ("GRU step, 20 positions", "op", gru),
    ("whole next-item run", "run", whole_run),
)


def _seconds(function: Callable[[], object]) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start


def measure(make: Callable[[str], Callable[[], object]], rounds: int) -> dict[str, float]:
    """Fastest time of each regime, in seconds; regimes take turns, short steps are repeated within a turn."""
    plain, bare = make("cpu"), make("cpu")
    best = {"plain": float("inf"), "bare": float("inf"), "rehearsal": float("inf")}
    plain(), bare()
    repeats = max(2, round(0.1 / _seconds(plain)))

    def turn(regime: str, function: Callable[[], object]) -> None:
        best[regime] = min(best[regime], *(_seconds(function) for _ in range(repeats)))

    for _ in range(rounds):
        turn("plain", plain)
        with Bare():
            turn("bare", bare)
        with rehearse(keep_going=True):
            rehearsed = make("cuda")
            rehearsed()
            turn("rehearsal", rehearsed)
            del rehearsed
    return best


def startup(rounds: int = 5) -> float:
    """Seconds of CPU time that starting a rehearsal adds to importing torch, the least of `rounds` interpreters."""
    source = str(Path(__file__).resolve().parents[1] / "src")
    code = (
        f"import time, sys, torch; sys.path.insert(0, {source!r}); start = time.process_time()\n"
        "from auto_research.rehearsal import rehearse\n"
        "with rehearse(): pass\n"
        "print(time.process_time() - start)"
    )
    command = [sys.executable, "-c", code]
    return min(float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(rounds))


def main() -> int:
    """Print the table; exit 1 where a gate is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    missed = False
    print(f"{'workload':28} {'plain ms':>9} {'bare':>6} {'rehearsal':>9} {'gate':>5}")
    for name, kind, make in WORKLOADS:
        best = measure(make, options.rounds)
        bare, ratio = best["bare"] / best["plain"], best["rehearsal"] / best["plain"]
        gate = GATES.get(kind)
        missed |= gate is not None and ratio > gate
        rows.append({"workload": name, "kind": kind, **best, "bare_ratio": bare, "ratio": ratio, "gate": gate})
        print(f"{name:28} {best['plain'] * 1e3:9.2f} {bare:6.2f} {ratio:9.2f} {gate or '':>5}", flush=True)
    added = startup()
    missed |= added > 0.5
    print(f"start-up adds {added:.2f} s (gate 0.5)")
    if options.json:
        record = {"torch": torch.__version__, "threads": 1, "workloads": rows, "startup_seconds": added}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
