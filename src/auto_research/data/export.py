"""Data sets as chat messages in JSON lines: what TRL's trainers and scripts read, without any code of ours between."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from auto_research.data.preferences import Pair
from auto_research.data.reasoning import Problem, with_validation
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import write_text_atomic

EXPORTED = ("gsm8k", "ultrafeedback", "dpo-en-demo")
"""Data sets that have a form as messages."""


def row_of(example: Problem | Pair) -> dict[str, Any]:
    """`prompt` and `completion` of a problem, or `prompt`, `chosen` and `rejected` of a pair, as lists of messages."""
    if isinstance(example, Problem):
        return dict(example.messages)
    return {
        "prompt": [message._asdict() for message in example.prompt],
        "chosen": [{"role": "assistant", "content": example.chosen}],
        "rejected": [{"role": "assistant", "content": example.rejected}],
    }


def export(name: str, folder: Path, dataset_dir: Path | None = None) -> dict[str, tuple[int, int]]:
    """Writes the parts of a data set into `folder`: `train.jsonl`, and `validation.jsonl` and `test.jsonl` if any.

    The validation part of GSM8K is the one that the workflows use. Pairs that say nothing about preference (ties, equal
    or empty answers) are left out. Returns part -> (rows written, rows left out).

    Raises `UserError`: a data set without such a form, one that is nowhere, an unwritable folder.
    """
    from auto_research.data import catalogue

    if name not in EXPORTED:
        raise UserError(f"{name} has no form as messages; these have: {', '.join(EXPORTED)}")
    loaded = catalogue.load(name, dataset_dir)
    if name == "gsm8k":
        loaded = with_validation(loaded)
    parts: Mapping[str, Iterable[Problem | Pair]] = loaded if isinstance(loaded, dict) else {"train": loaded}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {folder} ({error.strerror}); choose another folder") from error
    written = {}
    for part, examples in parts.items():
        everything = list(examples)
        kept = [one for one in everything if not (isinstance(one, Pair) and one.fault)]
        lines = [json.dumps(row_of(one), ensure_ascii=False) + "\n" for one in kept]
        write_text_atomic(folder / f"{part}.jsonl", "".join(lines))
        written[part] = (len(kept), len(everything) - len(kept))
    return written
