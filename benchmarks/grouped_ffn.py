"""Per-token networks as one batched product against a Python loop over tokens, side by side in one run.

    python benchmarks/grouped_ffn.py [--device cpu] [--width 768] [--tokens 16] [--batch 512] [--repeats 5]

Both sides use the same weights and must agree. Rounds alternate between them, so that a busy machine slows both; the
figure is the median round, forward and backward. It says nothing about model-FLOPs utilisation or serving latency.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from auto_research.layers.token_mixing import PerTokenFFN
from auto_research.runtime.device import device_for


def looped(network: PerTokenFFN, x: Tensor) -> Tensor:
    """The same networks, one token after another: (B, T, D) -> (B, T, D)."""
    rise, fall = network.rise, network.fall
    assert rise.bias is not None
    assert fall.bias is not None
    # unbind keeps the loop honest: indexing would make a gradient of full size for each token.
    parts = zip(*(p.unbind(0) for p in (rise.weight, rise.bias, fall.weight, fall.bias)), strict=True)
    tokens = [F.gelu(row @ w1 + b1) @ w2 + b2 for row, (w1, b1, w2, b2) in zip(x.unbind(1), parts, strict=True)]
    return torch.stack(tokens, 1)


def seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    """Wall-clock of one forward and backward pass, the device's queue included."""
    started = time.perf_counter()
    run().sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter() - started


def main() -> None:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    for name, value in {"width": 768, "tokens": 16, "batch": 512, "expansion": 2, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    args = parser.parse_args()
    device, dtype = device_for(args.device), getattr(torch, args.dtype)
    torch.manual_seed(0)
    network = PerTokenFFN(args.tokens, args.width, args.expansion * args.width).to(device, dtype)
    x = torch.randn(args.batch, args.tokens, args.width, device=device, dtype=dtype)
    with torch.no_grad():
        gap = float((network(x) - looped(network, x)).abs().max())
    times: dict[str, list[float]] = {"grouped": [], "loop": []}
    for round_ in range(args.repeats + 1):
        for name, run in (("grouped", lambda: network(x)), ("loop", lambda: looped(network, x))):
            elapsed = seconds(run, device)
            if round_:  # the first round warms up
                times[name].append(elapsed)
    median = {name: statistics.median(values) for name, values in times.items()}
    print(
        json.dumps(
            {
                **vars(args),
                "device": str(device),
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "largest difference": gap,
                "seconds": {name: round(value, 5) for name, value in median.items()},
                "samples per second": {name: round(args.batch / value, 1) for name, value in median.items()},
                "speed-up": round(median["loop"] / median["grouped"], 3),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
