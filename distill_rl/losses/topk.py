"""The teacher's side: the top k of logits that are whole or sharded over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distill_rl.losses.core import checks
from distill_rl.losses.core.autograd import untraced
from distill_rl.losses.core.shards import VocabularyShard, split
from distill_rl.losses.core.streaming import Buffers, Centre, LogSums, accumulator, chunks, default_chunk, floor_of
from distill_rl.losses.targets import TopKLogprobs


@untraced
@torch.no_grad()
def vocab_parallel_topk(
    logits: Tensor,
    k: int,
    *,
    labels: Tensor | None = None,
    temperature: float = 1.0,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> TopKLogprobs:
    """The k most likely tokens with log-probabilities over the whole vocabulary, and the exact log of the rest.

    The rest is summed over the columns outside the k, never taken as 1 − Σ. Every rank receives the same answer.

    Args:
        logits: [N, V] or [B, S, V], sharded as in `kd_loss`; columns at −inf get probability 0.
        k: entries per row.
        labels: int [N] or [B, S]. The log-probability of a label outside the vocabulary (such as −100) is meaningless.
        temperature: of the softmax.

    Returns:
        int64 ids and fp32 (fp64 for fp64 logits) log-probabilities of N rows, most likely first.

    Raises:
        ValueError: k outside [1, V], temperature not positive, labels of another shape.
    """
    checks.floating("logits", logits, (2, 3))
    checks.positive("temperature", temperature)
    checks.chunk_size(chunk_size)
    local, shard = split(logits, tp_group, dim=-1, name="logits")
    if not 1 <= k <= shard.total:
        raise ValueError(f"k: must lie in [1, {shard.total}], the vocabulary; got {k}")
    flat_labels = None if labels is None else checks.rows("labels", labels, local.shape[:-1])
    flat = local.reshape(-1, shard.size) if shard.size else local.reshape(local.shape[:-1].numel(), 0)
    chunk = chunk_size or default_chunk(shard.size, flat.device)
    ids, top, rest, label, centre = candidates(flat, shard, k, flat_labels, temperature, chunk)
    if shard.group is not None:
        ids, top, rest, label = best_of_all(shard, k, ids, top, rest, label, centre)
    lse = torch.cat([top, rest[:, None]], 1).logsumexp(1)
    return TopKLogprobs(
        ids=ids,
        logprobs=_log(top - lse[:, None]),
        rest_logprob=_log(rest - lse),
        temperature=temperature,
        label_logprob=None if labels is None else label - lse,
    )


def candidates(
    logits: Tensor, shard: VocabularyShard, k: int, labels: Tensor | None, temperature: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of this rank's columns: the best k (ids and centred logits/T), the logsumexp of the others, the label's logit (the
    floor if another rank has it), and the centre, in units of logits/T.

    A shard with fewer than k columns is filled up with its dummy column, at the floor.
    """
    num_rows, dtype = logits.shape[0], accumulator(logits.dtype)
    floor = floor_of(dtype)
    like = logits.new_empty(0, dtype=dtype)
    ids = torch.full((num_rows, k), shard.offset, dtype=torch.int64, device=logits.device)
    top = like.new_full((num_rows, k), floor)
    label = like.new_full((num_rows,), floor)
    centre = Centre(num_rows, like, shard, 1 / temperature)
    rest = LogSums(num_rows, (1.0,), centre, whole=False)
    held = min(k, shard.size)
    buffers = Buffers(min(chunk, num_rows), shard.size, dtype, logits.device)
    for rows in chunks(num_rows, chunk):
        u = buffers.load("student", logits[rows], centre, rows, first=True)
        if labels is not None:
            label[rows] = u.gather(1, shard.columns(labels[rows])[:, None])[:, 0]
        values, columns = u[:, : shard.size].topk(held, dim=1)
        ids[rows, :held], top[rows, :held] = columns + shard.offset, values
        rest.add(rows, u.scatter_(1, columns, floor), buffers.buffer("work", u.shape[0]))
    everything = slice(0, num_rows)
    rest_lse = torch.where(rest.max <= floor, floor, rest.log(everything))
    return ids, top, rest_lse, label, centre.local * centre.scale


def best_of_all(
    shard: VocabularyShard, k: int, ids: Tensor, top: Tensor, rest: Tensor, label: Tensor, centre: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best k of all ranks' candidates. The others join the rest. Two collectives."""
    sizes = top.new_full((len(top), 1), shard.size)
    parts = shard.gather(torch.cat([top, rest[:, None], label[:, None], centre[:, None], sizes], 1))
    if shard.assumed and len(top):
        found = torch.stack([part[0, -1] for part in parts])
        shard.require_equal(torch.stack([found.amax(), -found.amin()]))
    centres = torch.stack([part[:, k + 2] for part in parts])
    for part, moved in zip(parts, centres - centres.amax(0)):
        part[:, : k + 2] += moved[:, None]
    candidates = torch.cat([part[:, :k] for part in parts], 1)
    candidate_ids = torch.cat(shard.gather(ids), 1)
    best, places = candidates.topk(k, dim=1)
    losers = candidates.scatter(1, places, floor_of(top.dtype))
    rests = torch.stack([part[:, k] for part in parts], 1)
    rest = torch.cat([losers, rests], 1).logsumexp(1)
    label = torch.stack([part[:, k + 1] for part in parts], 1).amax(1)
    return candidate_ids.gather(1, places), best, rest, label


def _log(values: Tensor) -> Tensor:
    """Replaces the floor by −inf. NaN is kept."""
    return torch.where(values <= floor_of(values.dtype) / 2, -torch.inf, values)
