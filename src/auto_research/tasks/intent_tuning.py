"""What a writer of next queries is tuned on: a mixture of sources, and lessons for a base that nothing was taught.

Rows are (prompt ids, completion ids). Sources draw on training users and the catalogue alone.

Letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from auto_research.tasks.base import Batch
from auto_research.tasks.behaviour_prompts import PromptWriter, random_make_up
from auto_research.tasks.generation import IGNORED, Pieces, chat_frame, completion_batch, left_padded
from auto_research.tasks.intent_queries import ACTIONS, IntentData, QueryCatalogue, complements

SOURCES = ("behaviour", "complement", "rewrite", "human")


class Mixture:
    """Rows of the four sources, drawn by their shares.

    Behaviour and human rows are next-item cases under random prompt make-ups; the human source is each training
    user's last one. Complements come from co-purchases of training users, rewrites from a synonym table.
    """

    def __init__(self, data: IntentData, writer: PromptWriter, shares: Mapping[str, float]) -> None:
        unknown = set(shares) - set(SOURCES)
        if unknown:
            raise ValueError(f"unknown training source {sorted(unknown)}; known are {', '.join(SOURCES)}")
        self.data, self.writer = data, writer
        make: dict[str, Callable[[], Sequence[Any]]] = {
            "behaviour": lambda: data.training_cases[0],
            "complement": lambda: sorted(complements(data).items()),
            "rewrite": lambda: sorted(data.catalogue.paraphrase.items()),
            "human": lambda: data.training_cases[1],
        }
        self.pools = {source: pool for source in SOURCES if shares.get(source, 0) > 0 and (pool := make[source]())}
        self.sources = list(self.pools)
        self.shares = torch.tensor([shares[source] for source in self.sources])

    def row(self, source: str, budget: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
        """One training row."""
        pool, writer = self.pools[source], self.writer
        drawn = pool[int(torch.randint(len(pool), (1,), generator=generator))]
        if source == "complement":
            item, query = drawn
            asked = writer.pieces(f"bought {self.data.catalogue.short[item]}\ngoes with?")
        elif source == "rewrite":
            query, other = drawn
            asked = writer.pieces(f"same as {other}?")
        else:
            query = self.data.catalogue.phrase[drawn.target]
            template, chosen = random_make_up(generator)
            prompt = writer.write(drawn, template, writer.fitting(drawn, template, chosen, budget), budget)
            return prompt, [*writer.pieces(query), writer.end]
        return [*writer.before, *asked, *writer.after], [*writer.pieces(query), writer.end]

    def batches(self, seed: int, batch_size: int, device: torch.device, budgets: Sequence[int]) -> Iterator[Batch]:
        """Endless completion batches; one token budget a batch, so that padding stays short."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            budget = budgets[int(torch.randint(len(budgets), (1,), generator=generator))]
            drawn = torch.multinomial(self.shares, batch_size, replacement=True, generator=generator).tolist()
            prompts, completions = zip(*(self.row(self.sources[s], budget, generator) for s in drawn), strict=True)
            yield completion_batch(prompts, completions, self.writer.pad, device)


def lesson_texts(catalogues: Sequence[QueryCatalogue]) -> list[str]:
    """What a tokenizer for `lessons` is learned from: titles, paraphrases, and every phrase after every action."""
    texts = [f"{text}\n" for catalogue in catalogues for text in (*catalogue.short, *catalogue.paraphrase.values())]
    lines = (f"{action} {phrase}\n" for c in catalogues for phrase in c.queries for action in ACTIONS)
    return [*texts, *lines]


def lessons(
    catalogues: Sequence[QueryCatalogue], tokenizer: Any, device: torch.device, *, conversations: int = 8, seed: int = 0
) -> Iterator[Batch]:
    """Endless batches (`input_ids`, `attention_mask`, `labels`) for a base that knows nothing yet.

    They teach two skills that a pretrained checkpoint brings along: naming the type of a title, and finding the latest
    entry of a list (of random items). Only the catalogue is read, no behaviour of any user. A row is a conversation of
    four turns about one catalogue, of which only the answers are labelled.
    """
    pieces, (before, after), end = Pieces(tokenizer), chat_frame(tokenizer), int(tokenizer.eos_token_id)
    generator = torch.Generator().manual_seed(seed)
    known = [[i for i, phrase in enumerate(catalogue.phrase) if phrase] for catalogue in catalogues]

    def draw(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    def turn(which: int, naming: bool) -> tuple[list[int], list[int]]:
        """A question about random items and its answer."""
        catalogue, pool = catalogues[which], known[which]
        items = [pool[draw(len(pool))] for _ in range(1 if naming else 2 + draw(4))]
        listed = [f"{ACTIONS[draw(len(ACTIONS))]} {catalogue.phrase[item]}\n" for item in items]
        asked = [f"{catalogue.short[items[0]]}\n", "type?"] if naming else [*listed, "latest?"]
        answer = catalogue.phrase[items[-1]]
        return [*before, *(token for text in asked for token in pieces(text)), *after], [*pieces(answer), end]

    def conversation(number: int) -> tuple[list[int], list[int]]:
        """Ids and labels."""
        ids: list[int] = []
        labels: list[int] = []
        for n in range(4):
            question, answer = turn(number % len(catalogues), naming=n % 2 == 0)
            ids += [*question, *answer]
            labels += [*[IGNORED] * len(question), *answer]
        return ids, labels

    while True:
        ids, labels = zip(*(conversation(i) for i in range(conversations)), strict=True)
        padded, mask = left_padded(ids, int(tokenizer.pad_token_id), device)
        yield {"input_ids": padded, "attention_mask": mask, "labels": left_padded(labels, IGNORED, device)[0]}
