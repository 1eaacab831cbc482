"""From a teacher's hidden states to its targets, a chunk of tokens at a time.

The logits of all tokens together would be far larger than the targets. So for each chunk of tokens: compute the logits,
mask the padded columns, extract what is exported, and write it to its rows of the result. Only one chunk of logits
exists at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distill_rl.config.memory.teacher import TEACHER_CHUNK_BYTES as CHUNK_BYTES
from distill_rl.config.memory.teacher import TEACHER_CHUNK_TOKENS as CHUNK_TOKENS
from distill_rl.losses import (
    DenseLogits,
    HiddenStates,
    SampledTokens,
    TopKLogprobs,
    vocab_parallel_logprobs,
    vocab_parallel_sample,
    vocab_parallel_topk,
)
from distill_rl.losses.core.checks import Backend
from distill_rl.losses.targets import Wire
from distill_rl.parallel.shards import mask_padded_columns
from distill_rl.types import IGNORE_INDEX


def chunk_tokens(columns: int, free: int | None = None) -> int:
    """Tokens per chunk for a rank that holds `columns` columns of the output layer.

    1,024, or as many as fit into 256 MiB of fp32 logits (512 at a vocabulary of 131,072), but at least one.

    Args:
        free: bytes that are free on the GPU, of which a chunk takes at most a quarter. None: only the bound counts.
    """
    bound = CHUNK_BYTES if free is None else min(CHUNK_BYTES, free // 4)
    return max(1, min(CHUNK_TOKENS, bound // (4 * columns)))


@dataclass(frozen=True, slots=True)
class TargetHead:
    """How hidden states become log-probabilities."""

    logits: Callable[[Tensor], Tensor]
    """Hidden states [n, H] → logits [n, V], plain or DTensor Shard(-1)."""
    temperature: float
    """Of the softmax."""
    vocabulary_size: int
    """Columns from here on are padding and get no probability."""
    chunk: int
    """Number of tokens whose logits exist at once."""
    backend: Backend | None = None
    """`eager`, or None: kernels where they work."""

    def chunks(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields slices of the rows of `hidden`, [N, H], in order, and their logits with padded columns at −inf.

        The caller must drop a chunk's logits before it asks for the next chunk.
        """
        for start in range(0, hidden.shape[0], self.chunk):
            rows = slice(start, start + self.chunk)
            yield rows, mask_padded_columns(self.logits(hidden[rows]), self.vocabulary_size)


def topk_targets(hidden: Tensor, labels: Tensor, head: TargetHead, *, k: int) -> TopKLogprobs:
    """Returns per token the k largest log-probabilities, that of all other tokens together, and the label's.

    They are taken over the whole vocabulary and not renormalised. Collective over the tensor-parallel group.

    Args:
        hidden: [N, H] last hidden states, the same on every tensor-parallel rank.
        labels: int64 [N], shifted; the label log-probability of an ignored position is meaningless.
        k: entries kept per token.

    Returns:
        Plain tensors, fp32 (ids: int32), of N rows, equal on every tensor-parallel rank.
    """
    whole: dict[str, Tensor] = {}
    for rows, logits in head.chunks(hidden):
        top = vocab_parallel_topk(logits, k, labels=labels[rows], temperature=head.temperature, backend=head.backend)
        for name, part in top.to_tensors(torch.float32).items():
            _write(whole, name, part, rows, hidden.shape[0])
        del logits, top
    return TopKLogprobs.from_tensors(whole, head.temperature)


def sampled_targets(hidden: Tensor, labels: Tensor, head: TargetHead, *, draws: int, keys: Tensor) -> SampledTokens:
    """Returns per token the distinct ids of `draws` draws with their counts, the draws' mean log-probability, the label's.

    Collective. Arguments as in `topk_targets`.

    Args:
        keys: int64 [N], see `vocab_parallel_sample`.

    Returns:
        Plain tensors of N rows, ids int32, counts int16, otherwise fp32, equal on every tensor-parallel rank.
    """
    whole: dict[str, Tensor] = {}
    for rows, logits in head.chunks(hidden):
        drawn = vocab_parallel_sample(logits, draws, keys=keys[rows], labels=labels[rows], temperature=head.temperature)
        for name, part in drawn.to_tensors(torch.float32).items():
            _write(whole, name, part, rows, hidden.shape[0])
        del logits, drawn
    return SampledTokens.from_tensors(whole, head.temperature)


def logits_targets(hidden: Tensor, labels: Tensor, head: TargetHead, *, wire_dtype: torch.dtype) -> DenseLogits:
    """Returns all logits in `wire_dtype`, and the label's log-probability in fp32.

    Only the label's log-probability is taken at the temperature; the logits are not divided by it. Collective.
    Arguments as in `topk_targets`.

    Returns:
        Plain tensors of N rows with every column of the output layer, padding at −inf, equal on every tensor-parallel
        rank.
    """
    whole: dict[str, Tensor] = {}
    for rows, logits in head.chunks(hidden):
        label_logprob = vocab_parallel_logprobs(
            logits, labels[rows], temperature=head.temperature, backend=head.backend
        )
        assert isinstance(label_logprob, Tensor)
        _write(whole, "label_logprob", label_logprob, rows, hidden.shape[0], torch.float32)
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        _write(whole, "logits", logits, rows, hidden.shape[0], wire_dtype)
        del logits
    return DenseLogits(whole["logits"], whole["label_logprob"])


def hidden_targets(
    hidden: Tensor, labels: Tensor, head: TargetHead, *, with_entropy: bool = False
) -> tuple[HiddenStates, Tensor | None]:
    """Returns the hidden states as they are with the label's fp32 log-probability, and on request the entropies.

    Collective. Arguments as in `topk_targets`.

    Returns:
        Plain tensors of N rows, equal on every tensor-parallel rank; and the entropies, fp32 [N] in nats, or None.
    """
    whole: dict[str, Tensor] = {}
    for rows, logits in head.chunks(hidden):
        logprobs = vocab_parallel_logprobs(
            logits, labels[rows], temperature=head.temperature, return_entropy=with_entropy, backend=head.backend
        )
        columns = logprobs if isinstance(logprobs, tuple) else (logprobs,)
        for name, part in zip(("label_logprob", "entropy"), columns):
            _write(whole, name, part, rows, hidden.shape[0], torch.float32)
        del logits
    return HiddenStates(hidden, whole["label_logprob"]), whole.get("entropy")


def unused_targets(
    kind: str, positions: int, entries: int, dtype: torch.dtype, *, vocabulary_size: int | None = None
) -> dict[str, Tensor]:
    """A valid target for each of some positions that nothing reads, such as padding, in the wire form of their kind.

    Half of the probability is that of `entries` ids, of draws all are of id 0, and logits and hidden states are 0.

    Args:
        kind: `teachers[].export`.
        entries: ids per position; of logits the columns, of hidden states their size.
        dtype: of log-probabilities, logits or hidden states.
        vocabulary_size: columns of logits from here on are padding; None: there is none.

    Returns:
        Tensors on the CPU with `positions` rows, each with memory of its own.
    """
    half = torch.full((positions,), math.log(0.5))
    if kind == "hidden":
        return {"hidden": torch.zeros(positions, entries, dtype=dtype), "label_logprob": half}
    if kind == "logits":
        logits = torch.zeros(positions, entries, dtype=dtype)
        logits[:, vocabulary_size or entries :] = -torch.inf
        return {"logits": logits, "label_logprob": half}
    if kind == "sampled":
        first = torch.arange(entries) == 0
        return {
            "ids": torch.where(first, 0, -1).to(torch.int32).repeat(positions, 1),
            "counts": first.to(torch.int16).repeat(positions, 1),
            "mean_logprob": torch.zeros(positions),
            "label_logprob": half,
        }
    return {
        "ids": torch.arange(entries, dtype=torch.int32).repeat(positions, 1),
        "logprobs": torch.full((positions, entries), math.log(0.5) - math.log(entries), dtype=dtype),
        "rest_logprob": half,
        "label_logprob": half.clone(),
    }


def _write(
    whole: dict[str, Tensor], name: str, part: Tensor, rows: slice, num_rows: int, dtype: torch.dtype | None = None
) -> None:
    """Writes `part` to `rows` of `whole[name]`, which is created with `num_rows` rows if missing.

    Concatenating parts at the end would need twice the memory.

    Args:
        dtype: of the whole tensor if it is created here; None: that of `part`.
    """
    if name not in whole:
        whole[name] = part.new_empty(num_rows, *part.shape[1:], dtype=dtype or part.dtype)
    whole[name][rows] = part


@torch.no_grad()
def score_of(
    score: str, target: Wire, entropies: Tensor | None, labels: Tensor, temperature: float, chunk: int
) -> Tensor | float:
    """Returns the sum of a teacher's score over the labelled positions of a micro-batch: −log p(label), or the entropy.

    It is an fp64 scalar on the device; the float 0 if the score is `static`.

    Args:
        score: `teachers[].score`.
        entropies: fp32 [N]; None: they follow from the target, or are not the score.
        labels: int64 [N].
        temperature, chunk: as for `entropy`.
    """
    if score == "static":
        return 0.0
    assert target.label_logprob is not None
    values = -target.label_logprob
    if entropies is not None:
        values = entropies
    elif score == "entropy":
        assert not isinstance(target, HiddenStates)
        values = entropy(target, temperature, chunk)
    return torch.where(labels != IGNORE_INDEX, values, 0).double().sum()


def entropy(target: TopKLogprobs | SampledTokens | DenseLogits, temperature: float, chunk: int) -> Tensor:
    """Returns the entropy of each row in nats, fp32 [N]; all tokens outside a top k count as one more outcome.

    Of draws it is an estimate without bias, minus their mean log-probability.

    Args:
        temperature: applied to logits; log-probabilities of the top k already have one.
        chunk: rows of logits to handle at once.
    """
    if isinstance(target, DenseLogits):
        rows = (part.float().div_(temperature).log_softmax(1) for part in target.logits.split(chunk))
        return torch.cat([_entropy_of(logprobs) for logprobs in rows])
    if isinstance(target, SampledTokens):
        assert target.mean_logprob is not None
        return -target.mean_logprob
    assert target.rest_logprob is not None
    return _entropy_of(torch.cat([target.logprobs.float(), target.rest_logprob.float()[:, None]], 1))


def _entropy_of(logprobs: Tensor) -> Tensor:
    """The entropy in nats of each row of log-probs [n, V]; -inf contributes nothing."""
    return -torch.where(logprobs == -torch.inf, 0, logprobs.exp() * logprobs).sum(1)
