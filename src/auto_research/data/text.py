"""Plain texts for language models."""

from __future__ import annotations

from pathlib import Path

from auto_research.data.rows import find, read_text, require

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
