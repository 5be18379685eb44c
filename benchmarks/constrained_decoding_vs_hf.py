"""Trie-constrained beam search: ours against Hugging Face `generate` with `prefix_allowed_tokens_fn`.

Both decode the same small random T5 with the same beams over the same ids. Equal output is proved first (sequences, and
scores to 1e-4); then the two are timed in turns, in one process, and the medians compared.

    PYTHONPATH=src python benchmarks/constrained_decoding_vs_hf.py [--items 3000] [--batch 128] [--beams 50]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auto_research.layers.decoding import T5Decoder, beam_search
from auto_research.layers.semantic_ids import SemanticIds, Trie, Vocabulary
from auto_research.runtime.records import write_json_atomic
from auto_research.runtime.versions import environment

Inputs = dict[str, Tensor]


def small_t5(vocabulary: int, dim: int = 64, layers: int = 2, seed: int = 0) -> Any:
    """A random T5 whose distributions are far from flat, so that beams differ clearly."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=vocabulary,
        d_model=dim,
        d_kv=dim // 4,
        d_ff=4 * dim,
        num_layers=layers,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=None,
        decoder_start_token_id=1,
        dropout_rate=0.0,
    )
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
    return model


def random_ids(items: int, codes: int, levels: int = 3, seed: int = 0) -> tuple[SemanticIds, Vocabulary]:
    """Ids of random codes with a collision token."""
    generator = torch.Generator().manual_seed(seed)
    ids = SemanticIds.number(torch.randint(codes, (items, levels), generator=generator), codes)
    return ids, Vocabulary(ids.sizes)


def random_inputs(tokens: Tensor, batch: int, history: int = 8, seed: int = 0) -> Inputs:
    """Histories of random items, of 1 to `history` of them, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    sequence = tokens[torch.randint(len(tokens), (batch, history), generator=generator)]
    kept = torch.randint(1, history + 1, (batch, 1), generator=generator)
    real = (torch.arange(history).flip(0) < kept)[..., None].expand_as(sequence)
    return {
        "input_ids": sequence.where(real, 0).flatten(1),
        "attention_mask": real.flatten(1).long(),
    }


def ours(model: Any, trie: Trie, inputs: Inputs, beams: int) -> tuple[Tensor, Tensor]:
    """Sequences (B, N, m) and scores (B, N)."""
    found = beam_search(T5Decoder(model, trie.length), inputs, beams=beams, trie=trie)
    return found.tokens, found.scores


def allowed_tokens(tokens: Tensor) -> dict[tuple[int, ...], list[int]]:
    """Prefix -> tokens that may follow, as a dictionary: the usual way with `prefix_allowed_tokens_fn`."""
    table: dict[tuple[int, ...], set[int]] = {}
    for row in tokens.tolist():
        for position, token in enumerate(row):
            table.setdefault(tuple(row[:position]), set()).add(token)
    return {prefix: sorted(following) for prefix, following in table.items()}


def hugging_face(
    model: Any, table: dict[tuple[int, ...], list[int]], inputs: Inputs, beams: int, length: int
) -> tuple[Tensor, Tensor]:
    """Sequences (B, N, m) and scores (B, N) of `generate`."""

    def prefix_allowed_tokens_fn(_: int, sequence: Tensor) -> list[int]:
        return table.get(tuple(sequence[1:].tolist()), [0])  # [0]: a dead beam

    with torch.no_grad():
        out = model.generate(
            **inputs,
            num_beams=beams,
            num_return_sequences=beams,
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            length_penalty=0.0,
            early_stopping=False,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            return_dict_in_generate=True,
            output_scores=True,
        )
    rows = len(inputs["input_ids"])
    return out.sequences[:, 1:].view(rows, beams, length), out.sequences_scores.view(rows, beams)


def disagreement(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[int, float]:
    """(rows whose sets of sequences differ or stand in another order beyond ties, largest score difference)."""
    (tokens_a, scores_a), (tokens_b, scores_b) = first, second
    gap = float((scores_a - scores_b).abs().max())
    differing = (tokens_a != tokens_b).any(-1)
    # Two neighbours whose scores agree to 1e-5 may swap places: rounding decides.
    near = (scores_a[:, 1:] - scores_a[:, :-1]).abs() < 1e-5
    tie = torch.zeros_like(differing)
    tie[:, 1:] |= near
    tie[:, :-1] |= near
    return int((differing & ~tie).any(1).sum()), gap


def main() -> None:
    """Proves equality, times both, writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--items", type=int, default=3000)
    parser.add_argument("--codes", type=int, default=64)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--beams", type=int, default=50)
    parser.add_argument("--history", type=int, default=20, help="longest history, in items (TIGER's is 20)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/constrained_decoding_vs_hf.json"))
    options = parser.parse_args()
    ids, vocabulary = random_ids(options.items, options.codes)
    tokens = vocabulary.tokens(ids.codes)
    model, trie, table = small_t5(len(vocabulary)), Trie(tokens), allowed_tokens(tokens)
    inputs = random_inputs(tokens, options.batch, options.history)

    def run_ours() -> tuple[Tensor, Tensor]:
        return ours(model, trie, inputs, options.beams)

    def run_theirs() -> tuple[Tensor, Tensor]:
        return hugging_face(model, table, inputs, options.beams, ids.length)

    wrong, gap = disagreement(run_ours(), run_theirs())
    print(f"rows with another result: {wrong} of {options.batch}; largest score difference {gap:.2e}")
    if wrong or gap > 1e-4:
        raise SystemExit("the two searches disagree")
    seconds: dict[str, list[float]] = {"ours": [], "hugging_face": []}
    for _ in range(options.rounds):
        for name, search in (("ours", run_ours), ("hugging_face", run_theirs)):
            started = time.process_time()
            search()
            seconds[name].append(time.process_time() - started)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = median["hugging_face"] / median["ours"]
    print(f"CPU time: ours {median['ours']:.3f} s, Hugging Face {median['hugging_face']:.3f} s, {ratio:.1f} times")
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(
        options.output,
        {
            "question": "constrained beam search against Hugging Face generate + prefix_allowed_tokens_fn, equal beams",
            "settings": settings | {"tokens_an_id": ids.length, "vocabulary": len(vocabulary)},
            "equal": {"rows_with_another_result": wrong, "largest_score_difference": gap},
            "cpu_seconds_per_batch": seconds,
            "median_cpu_seconds": median,
            "ratio": ratio,
            "environment": environment(),
        },
    )
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
