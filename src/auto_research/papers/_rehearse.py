"""The smoke run of one paper as a program that was written for CUDA: what a rehearsal of adapters runs.

python -m auto_research.rehearsal -m auto_research.papers._rehearse rankmixer
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from auto_research.papers._registry import adapter
from auto_research.papers._reproduce import Request, payload
from auto_research.runtime.errors import EXIT_CODE, UserError
from auto_research.study.context import CheckpointChoice

DTYPES = ("checkpoint", "fp32", "bf16")


def run(
    key: str, *, dtype: str = "checkpoint", checkpoints: CheckpointChoice = "auto", dataset_dir: Path | None = None
) -> None:
    """Runs the smoke budget of a paper on `cuda` in this process.

    `dtype` is that of the checkpoints the paper loads: their own, or one of `DTYPES`. Raises `UserError`.
    """
    import torch

    from auto_research.checkpoints.resolve import weights_as
    from auto_research.study.execute import run_adapter

    request = Request(budget="smoke", device="cuda", checkpoints=checkpoints, dataset_dir=dataset_dir)
    chosen = adapter(key)
    request.check([chosen])
    with weights_as({"checkpoint": None, "fp32": torch.float32, "bf16": torch.bfloat16}[dtype]):
        run_adapter(payload(chosen, request))


def main() -> int:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description="Run the smoke budget of a paper on cuda.")
    parser.add_argument("key")
    parser.add_argument("--dtype", choices=DTYPES, default="checkpoint")
    parser.add_argument("--checkpoints", choices=("auto", "micro"), default="auto")
    parser.add_argument("--dataset-dir", type=Path)
    options = parser.parse_args()
    try:
        run(options.key, dtype=options.dtype, checkpoints=options.checkpoints, dataset_dir=options.dataset_dir)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
