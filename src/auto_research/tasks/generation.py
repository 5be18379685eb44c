"""Short text written by a causal language model: supervised fine-tuning on completions, decoding and scoring.

Rows are padded on the *left*, so that every completion ends at the last column: one batched forward serves training,
scoring and decoding, and the language head is evaluated only where a token is predicted (with a vocabulary of 49,000
that is most of the cost). Labels are made from the completion itself, never from `ids == pad`: in many checkpoints
padding and end of message are the same token, and the end must be learned.

Letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.quantised_linear import bytes_on_disk
from auto_research.layers.semantic_ids import Trie
from auto_research.tasks.base import Batch

IGNORED = -100


class Pieces:
    """Token ids of short texts, kept, so that prompts are put together from pieces whose lengths add up exactly."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Ids of `text` without special tokens added. Callers must not change the list."""
        ids = self._ids.get(text)
        if ids is None:
            ids = self._ids[text] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def chat_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids before and after a user's message, ready for the answer: ChatML where the tokenizer knows it, else lines."""
    vocabulary = tokenizer.get_vocab()
    chat = "<|im_start|>" in vocabulary and "<|im_end|>" in vocabulary
    before, after = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n") if chat else ("", "\nAnswer:\n")
    pieces = Pieces(tokenizer)
    return pieces(before), pieces(after)


def left_padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Ids and mask (B, T) int64 of rows of ids."""
    width = max((len(row) for row in rows), default=0)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], dtype=torch.long)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], dtype=torch.long)
    return ids.view(len(rows), width).to(device), mask.view(len(rows), width).to(device)


def completion_batch(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad: int, device: torch.device | str = "cpu"
) -> Batch:
    """`input_ids`, `attention_mask` and `labels` (B, T); labels are -100 outside the completions.

    Raises ValueError for a row with an empty prompt or completion: there would be nothing to predict (from).
    """
    if not all(prompts) or not all(completions):
        raise ValueError("every row needs a prompt and a completion of at least one token")
    ids, mask = left_padded([[*p, *c] for p, c in zip(prompts, completions, strict=True)], pad, device)
    length = torch.tensor([len(c) for c in completions], device=ids.device)
    column = torch.arange(ids.shape[1], device=ids.device)
    labels = ids.masked_fill(column < ids.shape[1] - length[:, None], IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def positions(mask: Tensor) -> Tensor:
    """Position of each token among the real ones of its row (B, T); padding stands at 0."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def completion_log_probabilities(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probability of each label under teacher forcing, and where there is one: float32 and bool, both (B, N).

    N is the number of columns from the first label of any row to the end. The softmax is float32 in any model dtype.
    """
    labels = batch["labels"]
    first = int((labels != IGNORED).any(0).int().argmax())
    if first == 0:
        raise ValueError("the first token of a row has nothing to be predicted from; give every row a prompt")
    keep = labels.shape[1] - first
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        position_ids=positions(batch["attention_mask"]),
        logits_to_keep=keep + 1,
        use_cache=False,
    ).logits[:, :-1]
    wanted = labels[:, first:]
    real = wanted != IGNORED
    picked = F.log_softmax(logits.float(), dim=-1).gather(2, wanted.clamp(min=0)[..., None])[..., 0]
    return picked.masked_fill(~real, 0.0), real


@torch.no_grad()
def sequence_log_probability(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    pad: int,
    device: torch.device,
    *,
    batch_size: int = 64,
) -> Tensor:
    """Summed log-probability (B,) float32, on the CPU, of each completion after its prompt."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(completions[i]))
    out = torch.zeros(len(prompts))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = completion_batch([prompts[i] for i in rows], [completions[i] for i in rows], pad, device)
        out[rows] = completion_log_probabilities(model, batch)[0].sum(1).cpu()
    return out


def query_trie(queries: Sequence[Sequence[int]], end: int) -> Trie:
    """A trie over token sequences of different lengths, each closed and filled up with the end token."""
    length = max(len(query) for query in queries) + 1
    return Trie(torch.tensor([[*query, *[end] * (length - len(query))] for query in queries]))


@torch.no_grad()
def greedy_decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end: int,
    pad: int,
    device: torch.device,
    trie: Trie | None = None,
    batch_size: int = 64,
) -> list[list[int]]:
    """The most likely continuation of each prompt, token by token, up to the end token (left out).

    Prompts of similar length share a batch; keys and values are cached. With a trie only its sequences can be
    written, and they are written whole: `max_new_tokens` then does not cut them.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        ids, mask = left_padded([prompts[i] for i in rows], pad, device)
        steps = trie.length if trie is not None else max_new_tokens
        for i, answer in zip(rows, _greedy(model, ids, mask, steps, end, trie).tolist(), strict=True):
            answers[i] = answer[: answer.index(end)] if end in answer else answer
    return answers


def cache_name(model: nn.Module) -> str:
    """What a Transformers model calls its keys and values, as argument and in its output."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _greedy(model: nn.Module, ids: Tensor, mask: Tensor, steps: int, end: int, trie: Trie | None) -> Tensor:
    """Tokens (B, n), n <= steps; a finished row goes on with the end token."""
    place, kept = positions(mask), cache_name(model)
    cache: Any = None
    done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    nodes = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
    written = []
    trie = trie.to(ids.device) if trie is not None else None
    for step in range(steps):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=place,
            use_cache=True,
            logits_to_keep=1,
            **{kept: cache},
        )
        cache, logits = getattr(out, kept), out.logits[:, -1].float()
        if trie is None:
            token = logits.argmax(-1)
        else:
            child, following, real = trie.following(nodes, step)
            best = logits.gather(1, following).masked_fill(~real, -torch.inf).argmax(1, keepdim=True)
            token, nodes = following.gather(1, best)[:, 0], child.gather(1, best)[:, 0]
        token = torch.where(done, end, token)
        written.append(token)
        done = done | (token == end)
        if bool(done.all()):
            break
        ids, place = token[:, None], place[:, -1:] + 1
        mask = F.pad(mask, (0, 1), value=1)
    return torch.stack(written, dim=1)


class CompletionModel(nn.Module):
    """A causal language model seen as something that is trained on completions and scores them.

    Args:
        model: a Transformers model, with adapters or without.
        prompt_loss: also learn the prompt's tokens (an ablation of completion-only training).
    """

    def __init__(self, model: nn.Module, *, prompt_loss: bool = False) -> None:
        super().__init__()
        self.model, self.prompt_loss = model, prompt_loss

    def loss(self, batch: Batch) -> Tensor:
        """Mean negative log-probability of the completions' tokens."""
        if self.prompt_loss:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            first = torch.arange(ids.shape[1], device=ids.device) == (mask == 0).sum(1, keepdim=True)
            batch = {**batch, "labels": ids.masked_fill((mask == 0) | first, IGNORED)}
        log_probability, real = completion_log_probabilities(self.model, batch)
        return -log_probability.sum() / real.sum()

    def scores(self, batch: Batch) -> Tensor:
        """Summed log-probability (B,) of the completions."""
        return completion_log_probabilities(self.model, batch)[0].sum(1)


def scratch_causal_lm(
    texts: Sequence[str],
    *,
    vocabulary: int,
    width: int,
    layers: int,
    heads: int,
    phrases: Sequence[str] = (),
    context: int = 512,
) -> tuple[Any, Any]:
    """An untrained Llama and a byte-level BPE of its own, learned from `texts`: (model, tokenizer).

    The fall-back where no pretrained checkpoint is affordable; results must be labelled as such. Weights are drawn
    from the global generator. End of message and padding are one token, as in SmolLM2. Each of `phrases` becomes one
    token where it stands as whole words: a small model then names it in one step.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    # The space before a phrase belongs to it, as in byte-level BPE.
    bpe.add_tokens([AddedToken(phrase, single_word=True, lstrip=True, normalized=False) for phrase in phrases])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        model_max_length=context,
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=width**-0.5,  # at the usual 0.02 a model this small needs hundreds of steps to start
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


class ServedLM:
    """A merged model on the device with its decoding cache: equal prompts are decoded once.

    On CUDA it serves in bfloat16. Merging and quantisation have happened in float32 before, never from rounded
    weights; quantised layers rebuild themselves in the activations' dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        device: torch.device,
        *,
        longest: int = 12,
        batch_size: int = 64,
        only: Sequence[str] = (),
    ) -> None:
        """`only`: a closed query set; nothing else can be written then. `longest`: tokens of a query."""
        self.tokenizer, self.device, self.longest, self.batch_size = tokenizer, device, longest, batch_size
        self.end, self.pad = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)
        self.bytes = bytes_on_disk(model)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        as_it_is = all(p.dtype == dtype and p.device == device for p in model.parameters())
        self.model = (model if as_it_is else copy.deepcopy(model).to(device=device, dtype=dtype)).eval()
        pieces = Pieces(tokenizer)
        self.trie = query_trie([pieces(query) for query in only], self.end).to(device) if only else None
        self._written: dict[tuple[int, ...], str] = {}

    def write(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """A query for each prompt, in lower case with single spaces."""
        new = [p for p in dict.fromkeys(map(tuple, prompts)) if p not in self._written]
        ids = greedy_decode(
            self.model,
            new,
            max_new_tokens=self.longest,
            end=self.end,
            pad=self.pad,
            device=self.device,
            trie=self.trie,
            batch_size=self.batch_size,
        )
        for prompt, answer in zip(new, ids, strict=True):
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            self._written[prompt] = " ".join(text.lower().split())
        return [self._written[tuple(p)] for p in prompts]
