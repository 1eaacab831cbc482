"""The teacher's side: the top k of logits that are whole or sharded over the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distill_rl.losses.core import checks
from distill_rl.losses.core.checks import Backend
from distill_rl.losses.core.logits import untraced
from distill_rl.losses.core.rows import Buffers, Centre, LogSums, accumulator, chunks, default_chunk, floor_of
from distill_rl.losses.core.shards import VocabularyShard, split
from distill_rl.losses.kernels import kernels_take
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
    backend: Backend | None = None,
) -> TopKLogprobs:
    """The k most likely tokens with log-probabilities over the whole vocabulary, and the exact log of the rest's mass.

    The rest is summed over the columns outside the k, never taken as 1 − Σ. Every rank receives the same answer. No
    gradient flows.

    Args:
        logits: [N, V] or [B, S, V], sharded as in `kd_loss`; columns at −inf get probability 0.
        k: entries per row.
        labels: int [N] or [B, S]. The log-probability of a label outside the vocabulary (such as −100) is meaningless.
        temperature: of the softmax.
        tp_group: as in `kd_loss`.
        chunk_size: rows worked on at once by torch; None: a default that suits the device.
        backend: as in `kd_loss`; the kernel takes k up to 64.

    Returns:
        int64 ids and fp32 (fp64 for fp64 logits) log-probabilities [N, k], most likely first, N = B·S for [B, S, V];
        `rest_logprob` [N]; `label_logprob` [N], None without `labels`.

    Raises:
        ValueError: k outside [1, V], temperature not positive, chunk_size below 1, logits or labels of another shape,
            or shards that do not fit (`split`).
    """
    checks.floating("logits", logits, (2, 3))
    checks.common(temperature, chunk_size, backend=backend)
    local, shard = split(logits, tp_group, dim=-1, name="logits")
    if not 1 <= k <= shard.total:
        raise ValueError(f"k: must lie in [1, {shard.total}], the vocabulary; got {k}")
    flat_labels = None if labels is None else checks.rows("labels", labels, local.shape[:-1])
    flat = local.reshape(-1, shard.size) if shard.size else local.reshape(local.shape[:-1].numel(), 0)
    chunk = chunk_size or default_chunk(shard.size, flat.device)
    if kernels_take(k, flat, backend):
        found = _candidates_by_kernel(flat, shard, k, flat_labels, temperature)
    else:
        found = candidates(flat, shard, k, flat_labels, temperature, chunk)
    if shard.group is not None:
        found = best_of_all(shard, found)
    lse = torch.cat([found.logits, found.rest[:, None]], 1).logsumexp(1)
    return TopKLogprobs(
        ids=found.ids,
        logprobs=_log(found.logits - lse[:, None]),
        rest_logprob=_log(found.rest - lse),
        temperature=temperature,
        label_logprob=None if labels is None else found.label - lse,
    )


class Candidates(NamedTuple):
    """The best k columns of each row, and what is left of the row. All logits are centred and divided by T.

    With fewer than k columns, entries at the floor fill up the k; their ids mean nothing.
    """

    ids: Tensor  # int64 [N, k], global
    logits: Tensor  # [N, k]
    rest: Tensor  # [N], the logsumexp of the other columns
    label: Tensor  # [N], the label's logit; the floor if another rank has it, or without labels
    centre: Tensor  # [N], divided by T


def candidates(
    logits: Tensor, shard: VocabularyShard, k: int, labels: Tensor | None, temperature: float, chunk: int
) -> Candidates:
    """Of this rank's columns, logits [N, Vl], a chunk of rows at a time. Labels are global ids [N]."""
    num_rows, dtype = logits.shape[0], accumulator(logits.dtype)
    floor = floor_of(dtype)
    like = logits.new_empty(0, dtype=dtype)
    ids = torch.full((num_rows, k), shard.offset, dtype=torch.int64, device=logits.device)
    top = like.new_full((num_rows, k), floor)
    label = like.new_full((num_rows,), floor)
    centre = Centre(num_rows, like, shard, 1 / temperature)
    rest = LogSums(centre, whole=False)
    held = min(k, shard.size)
    buffers = Buffers(min(chunk, num_rows), shard.size, dtype, logits.device)
    for rows in chunks(num_rows, chunk):
        u = buffers.load("student", logits[rows], centre, rows, first=True)
        if labels is not None:
            label[rows] = u.gather(1, shard.columns(labels[rows])[:, None])[:, 0]
        values, columns = u[:, : shard.size].topk(held, dim=1)
        ids[rows, :held], top[rows, :held] = columns + shard.offset, values
        rest.add(rows, u.scatter_(1, columns, floor), buffers.buffer("work", u.shape[0]))
    rest_lse = torch.where(rest.max <= floor, floor, rest.log(slice(0, num_rows)))
    return Candidates(ids, top, rest_lse, label, centre.local * centre.scale)


def _candidates_by_kernel(
    logits: Tensor, shard: VocabularyShard, k: int, labels: Tensor | None, temperature: float
) -> Candidates:
    """`candidates` by a kernel that reads the logits once."""
    from distill_rl.losses.kernels import launch

    num_rows, floor = logits.shape[0], floor_of(torch.float32)
    ids = torch.full((num_rows, k), shard.offset, dtype=torch.int64, device=logits.device)
    top = torch.full((num_rows, k), floor, dtype=torch.float32, device=logits.device)
    label = top.new_full((num_rows,), floor)
    held = min(k, shard.size)
    if held == 0:
        return Candidates(ids, top, label, label.clone(), label.new_full((num_rows,), Centre.NOTHING / temperature))
    columns, top[:, :held], rest, centre = launch.best(logits, held, temperature)
    ids[:, :held] = columns + shard.offset
    if labels is not None:
        place = shard.columns(labels)
        z = logits.gather(1, torch.where(place < shard.size, place, 0)[:, None])[:, 0].float()
        label = torch.where(place < shard.size, ((z - centre) / temperature).clamp_min(floor), floor)
    return Candidates(ids, top, rest, label, centre / temperature)


def best_of_all(shard: VocabularyShard, own: Candidates) -> Candidates:
    """The best k of all ranks' candidates, the same on every rank, around a common centre. Two collectives.

    Losing candidates join the rest.

    Raises:
        ValueError: shards were assumed to be equally wide and are not.
    """
    k, numbers = own.ids.shape[1], (own.rest, own.label, own.centre, own.rest.new_full(own.rest.shape, shard.size))
    packed = torch.cat([own.logits, torch.stack(numbers, 1)], 1)
    parts = torch.stack(shard.gather(packed))  # [ranks, N, k + 4]
    if shard.assumed and packed.shape[0]:
        sizes = parts[:, 0, -1]
        shard.require_equal(torch.stack([sizes.amax(), -sizes.amin()]))
    centres = parts[..., k + 2]
    centre = centres.amax(0)
    moved = parts[..., : k + 2] + (centres - centre)[..., None]
    everyone = moved[..., :k].transpose(0, 1).flatten(1)  # [N, ranks · k]
    ids = torch.cat(shard.gather(own.ids), 1)
    best, places = everyone.topk(k, dim=1)
    losers = everyone.scatter(1, places, floor_of(best.dtype))
    rest = torch.cat([losers, moved[..., k].T], 1).logsumexp(1)
    return Candidates(ids.gather(1, places), best, rest, moved[..., k + 1].amax(0), centre)


def _log(values: Tensor) -> Tensor:
    # The floor, or anything near it, becomes −inf. NaN is kept.
    return torch.where(values <= floor_of(values.dtype) / 2, -torch.inf, values)
