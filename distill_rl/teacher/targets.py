"""From a teacher's hidden states to its targets, a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distill_rl.config.memory import TEACHER_CHUNK_BYTES as CHUNK_BYTES
from distill_rl.config.memory import TEACHER_CHUNK_TOKENS as CHUNK_TOKENS
from distill_rl.losses import DenseLogits, HiddenStates, TopKLogprobs, vocab_parallel_logprobs, vocab_parallel_topk
from distill_rl.parallel.vocabulary import mask_padded_columns


def chunk_tokens(columns: int) -> int:
    """Tokens per chunk for a rank that holds `columns` columns of the output layer.

    1,024, or as many as fit into 256 MiB of fp32 logits (512 at a vocabulary of 131,072), but at least one.
    """
    return max(1, min(CHUNK_TOKENS, CHUNK_BYTES // (4 * columns)))


def topk_targets(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    labels: Tensor,
    *,
    k: int,
    temperature: float,
    vocabulary_size: int,
    chunk: int,
) -> TopKLogprobs:
    """Top-k log-probabilities over the whole vocabulary, with the rest and the label's; nothing is renormalised.

    Logits of at most `chunk` tokens exist at once.

    Args:
        hidden: [N, H] last hidden states, the same on every tensor-parallel rank.
        head: [n, H] → logits [n, V], plain or DTensor Shard(-1).
        labels: int64 [N], shifted; the label log-probability of an ignored position means nothing.
        k: entries kept per token.
        temperature: of the softmax.
        vocabulary_size: columns from here on are padding and get no probability.

    Returns:
        Plain tensors of N rows, equal on every tensor-parallel rank.
    """
    whole: dict[str, Tensor] = {}
    for rows, logits in _chunks(hidden, head, vocabulary_size, chunk):
        found = vocab_parallel_topk(logits, k, labels=labels[rows], temperature=temperature)
        for name, part in found.to_tensors(torch.float32).items():
            _put(whole, name, part, rows, hidden.shape[0])
        del logits, found
    return TopKLogprobs.from_tensors(whole, temperature)


def logits_targets(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    labels: Tensor,
    *,
    temperature: float,
    vocabulary_size: int,
    chunk: int,
    wire_dtype: torch.dtype,
) -> DenseLogits:
    """All logits in `wire_dtype`, and the label's log-probability at `temperature`; arguments as of `topk_targets`.

    Returns:
        Plain tensors of N rows with every column of the output layer, padding at −inf, equal on every
        tensor-parallel rank.
    """
    whole: dict[str, Tensor] = {}
    for rows, logits in _chunks(hidden, head, vocabulary_size, chunk):
        found = vocab_parallel_logprobs(logits, labels[rows], temperature=temperature)
        assert isinstance(found, Tensor)
        _put(whole, "label_logprob", found, rows, hidden.shape[0], torch.float32)
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        _put(whole, "logits", logits, rows, hidden.shape[0], wire_dtype)
        del logits
    return DenseLogits(whole["logits"], whole["label_logprob"])


def hidden_targets(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    labels: Tensor,
    *,
    temperature: float,
    vocabulary_size: int,
    chunk: int,
    with_entropy: bool = False,
) -> tuple[HiddenStates, Tensor | None]:
    """The hidden states as they are, with the label's log-probability at `temperature`; arguments as of `topk_targets`.

    Returns:
        Plain tensors of N rows, equal on every tensor-parallel rank; and on request the entropies, fp32 [N] in nats.
    """
    whole: dict[str, Tensor] = {}
    for rows, logits in _chunks(hidden, head, vocabulary_size, chunk):
        found = vocab_parallel_logprobs(logits, labels[rows], temperature=temperature, return_entropy=with_entropy)
        of_label, *of_all = found if isinstance(found, tuple) else (found,)
        _put(whole, "label_logprob", of_label, rows, hidden.shape[0], torch.float32)
        for each in of_all:
            _put(whole, "entropy", each, rows, hidden.shape[0], torch.float32)
        del logits
    return HiddenStates(hidden, whole["label_logprob"]), whole.get("entropy")


def _chunks(
    hidden: Tensor, head: Callable[[Tensor], Tensor], vocabulary_size: int, chunk: int
) -> Iterator[tuple[slice, Tensor]]:
    """Rows, and their logits without padding; who is done with a chunk lets go of it before asking for the next."""
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        yield rows, mask_padded_columns(head(hidden[rows]), vocabulary_size)


def _put(
    whole: dict[str, Tensor], name: str, part: Tensor, rows: slice, num_rows: int, dtype: torch.dtype | None = None
) -> None:
    """Writes `part` where it belongs in the tensor of all rows: parts put together at the end would be there twice."""
    if name not in whole:
        whole[name] = part.new_empty(num_rows, *part.shape[1:], dtype=dtype or part.dtype)
    whole[name][rows] = part


def entropy(target: TopKLogprobs | DenseLogits, temperature: float, chunk: int) -> Tensor:
    """Per row, in nats, fp32 [N], at `temperature`; of top-k targets with everything outside the k as one more outcome."""
    if isinstance(target, DenseLogits):
        rows = (part.float().div_(temperature).log_softmax(1) for part in target.logits.split(chunk))
        return torch.cat([_entropy_of(logprobs) for logprobs in rows])
    assert target.rest_logprob is not None
    return _entropy_of(torch.cat([target.logprobs.float(), target.rest_logprob.float()[:, None]], 1))


def _entropy_of(logprobs: Tensor) -> Tensor:
    return -torch.where(logprobs == -torch.inf, 0, logprobs.exp() * logprobs).sum(1)
