"""Plain texts for language models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from auto_research.data.rows import MalformedRow, find, read_json_list, read_text, require

WIKITEXT_SPLITS = ("train", "valid", "test")


def read_wikitext2(folder: Path | str) -> dict[str, str]:
    """WikiText-2: the texts of `train.txt`, `valid.txt` and `test.txt`, by split.

    Tokens are divided by spaces, rare words are `<unk>` (Merity et al., 2016). `train.txt` may be absent, and then
    so is its entry. Raises UserError for a missing or empty file, MalformedRow (file, line) for bytes that are not
    UTF-8.
    """
    folder = Path(folder)
    texts = {}
    for split in WIKITEXT_SPLITS:
        name = f"{split}.txt"
        path = find(folder, name) if split == "train" else require(folder, name)
        if path is not None:
            texts[split] = read_text(path)
    return texts


def read_tiny_shakespeare(folder: Path | str) -> str:
    """Tiny Shakespeare: the text of `input.txt` (1,115,394 characters).

    Raises UserError for a missing or empty file, MalformedRow (file, line) for bytes that are not UTF-8.
    """
    return read_text(require(Path(folder), "input.txt"))


@dataclass(frozen=True)
class Instruction:
    """What is asked (instruction, and an input that may be empty) and the response to learn."""

    instruction: str
    input: str
    output: str


def read_alpaca(folder: Path | str) -> list[Instruction]:
    """Alpaca-style rows: `alpaca_en_demo.json`, one JSON list of objects with `instruction`, `input` and `output`.

    Raises UserError for a missing or empty file, MalformedRow for text that is no JSON list, and for a row without
    one of the three texts or with an empty instruction or output; its number is then that of the row.
    """
    path = require(Path(folder), "alpaca_en_demo.json")
    rows = read_json_list(path)
    found = []
    for number, row in enumerate(rows, start=1):
        texts = [row.get(name) if isinstance(row, dict) else None for name in ("instruction", "input", "output")]
        words = [text for text in texts if isinstance(text, str)]
        if len(words) < 3:
            raise MalformedRow(path, number, f"row {number} lacks a text 'instruction', 'input' or 'output'")
        if not (words[0].strip() and words[2].strip()):
            raise MalformedRow(path, number, f"row {number} has an empty instruction or output")
        found.append(Instruction(*words))
    return found
