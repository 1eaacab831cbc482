"""The teacher's side of random sampling KD (arXiv 2503.16870): draws from logits that are whole or sharded.

The n draws of a row are systematic: one uniform number r in [0, 1) places n points (r + i)/n on the cumulative
distribution function, and every point draws the id in whose step it falls. An id of probability p is drawn ⌊np⌋ or ⌈np⌉
times, np in expectation. Independent draws would have the same expectation and a larger variance.

All of this is done in integers. With c the row's largest logit and b as many bits as fit,

    mass_v = round(2^b · exp((z_v − c)/T)),   S = Σ mass_v,   R = ⌊r · S⌋,   point i = ⌊(R + i·S)/n⌋

and point i draws the first id whose cumulative mass exceeds it. Sums of integers do not depend on their order, so any
sharding of equal logits draws the same ids; and for R uniform in [0, S) the expectation is n · mass_v / S exactly, however
small a mass is beside the sum that it is added to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distill_rl.losses.core import checks
from distill_rl.losses.core.logits import untraced
from distill_rl.losses.core.rows import accumulator, chunks, default_chunk
from distill_rl.losses.core.shards import VocabularyShard, split
from distill_rl.losses.targets import SampledTokens

MOST_DRAWS = 2**15 - 1
"""More would not fit into the counts as they are sent, int16."""
_INTEGER_BITS = 62
_MANTISSA = 53
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of splitmix64 (Steele, Lea and Flood, 2014, doi 10.1145/2660193.2660195)."""


@untraced
@torch.no_grad()
def vocab_parallel_sample(
    logits: Tensor,
    n: int,
    *,
    keys: Tensor,
    labels: Tensor | None = None,
    temperature: float = 1.0,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> SampledTokens:
    """n systematic draws per row from the softmax of the logits at `temperature`; equal ids become one entry.

    Every rank receives the same answer. No gradient flows. An id that is less likely than the most likely one by a factor
    of about 2^62 / (V · n), 10^11 at V = 131,072 and n = 100, counts as impossible. Three collectives. Always computed by torch.

    Args:
        logits: [N, V] or [B, S, V], sharded as in `kd_loss`; columns at −inf are never drawn.
        n: draws per row.
        keys: int64 [N] or [B, S], what the uniform numbers are made of: equal logits with equal keys draw the same ids.
            See `context_keys`.
        labels: int [N] or [B, S]. The log-probability of a label outside the vocabulary (such as −100) is meaningless.
        temperature: of the softmax.
        tp_group: as in `kd_loss`.
        chunk_size: rows worked on at once; None: a default that suits the device.

    Returns:
        int64 ids and counts [N, m], m = min(n, V), N = B·S for [B, S, V]: drawn ids in ascending order, then absent
        entries; `mean_logprob` [N], and `label_logprob` [N] (None without `labels`), fp32 (fp64 for fp64 logits).
        Rows with a NaN or without a finite logit have no draws, and NaN in both.

    Raises:
        ValueError: n outside [1, MOST_DRAWS], temperature not positive, chunk_size below 1, keys, logits or labels of
            another shape or dtype, or shards that do not fit (`split`).
    """
    checks.floating("logits", logits, (2, 3))
    checks.common(temperature, chunk_size)
    if not 1 <= n <= MOST_DRAWS:
        raise ValueError(f"n: must lie in [1, {MOST_DRAWS}]; got {n}")
    if keys.dtype != torch.int64:
        raise ValueError(f"keys: must be int64; got {keys.dtype}")
    local, shard = split(logits, tp_group, dim=-1, name="logits")
    flat_keys = checks.rows("keys", keys, local.shape[:-1])
    flat_labels = None if labels is None else checks.rows("labels", labels, local.shape[:-1])
    flat = local.reshape(local.shape[:-1].numel(), shard.size)
    # A chunk's integers take twice the bytes of fp32, for which the default is made.
    size = chunk_size or max(1, default_chunk(shard.size, flat.device) // 2)
    drawn, mean, label = _Draws(flat, shard, n, flat_keys, temperature, size).make(flat_labels)
    ids, counts = _merged(drawn, min(n, shard.total))
    dtype, bad = accumulator(flat.dtype), mean.isnan()[:, None]
    return SampledTokens(
        ids=ids.masked_fill_(bad, -1),
        counts=counts.masked_fill_(bad, 0),
        mean_logprob=mean.to(dtype),
        temperature=temperature,
        label_logprob=None if labels is None else label.to(dtype),
    )


def context_keys(input_ids: Tensor, position_ids: Tensor, seed: int) -> Tensor:
    """A key per position, which depends on the seed and on the tokens of its document up to the position, nothing else.

    So a position has the same draws whatever rows, micro-batches or ranks its document is in; and in every epoch.

    The key is the sum, modulo 2^64, of a hash of every token with its position.

    Args:
        input_ids: int [R, S].
        position_ids: int [R, S], from 0 in every document; a document is a stretch in which they rise by one.
        seed: of the run.

    Returns:
        int64 [R, S].
    """
    position_ids = position_ids.long()
    of_seed = _splitmix(torch.full((), seed, dtype=torch.int64, device=input_ids.device))
    hashed = _splitmix((input_ids.long() << 32) ^ position_ids ^ of_seed)
    sums = hashed.cumsum(1)
    starts = (torch.arange(sums.shape[1], device=sums.device) - position_ids).clamp_min(0)
    return sums - sums.gather(1, starts) + hashed.gather(1, starts)


class _Draws:
    """The draws of some rows. Legend: M rows, n draws, Vl this rank's columns."""

    def __init__(self, logits: Tensor, shard: VocabularyShard, n: int, keys: Tensor, temperature: float, chunk: int):
        self.logits, self.shard, self.n, self.temperature = logits, shard, n, temperature
        self.pieces = list(chunks(len(logits), chunk))
        # V masses of at most 2^bits each, times n, fit into 62 bits.
        self.bits = _INTEGER_BITS - (shard.total * n).bit_length()
        self.uniform = uniform(keys)
        # The largest logit of each row over all ranks; NaN where it is no finite number.
        self.centre = logits.new_empty(len(logits), dtype=accumulator(logits.dtype))
        for rows in self.pieces:
            self.centre[rows] = logits[rows].amax(1) if shard.size else -torch.inf
        # The maximum over the ranks may drop a NaN, but not an infinity.
        self.centre.masked_fill_(self.centre.isnan(), torch.inf)
        shard.max_(self.centre)
        self.centre.masked_fill_(self.centre.isinf(), torch.nan)

    def make(self, labels: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        # Returns int64 ids [M, n] in ascending order; Σ log p / n over them, NaN in rows that cannot be drawn from; and the
        # label's log-probability, without `labels` that of nothing. fp64 [M] each, the same on all ranks.
        total, before = self._totals()
        nothing = self.centre.double() * 0
        ids = torch.zeros(len(self.logits), self.n, dtype=torch.int64, device=self.logits.device)
        steps = torch.arange(self.n, device=ids.device)
        mean, label = nothing.clone(), nothing.clone()
        for rows in self.pieces if self.shard.size else []:
            cumulative = self._masses(rows).cumsum_(1)
            if self.shard.group is None:
                total[rows] = cumulative[:, -1]
            # The n points of each row on the cumulative masses of all ranks, ascending, and then of this rank.
            first = (self.uniform[rows] * total[rows].double()).long().minimum(total[rows] - 1)
            points = (first[:, None] + steps * total[rows, None]) // self.n - before[rows, None]
            held = (points >= 0) & (points < cumulative[:, -1:])
            columns = torch.searchsorted(cumulative, points, right=True).clamp_(max=self.shard.size - 1)
            ids[rows] = torch.where(held, columns + self.shard.offset, 0)
            mean[rows] += torch.where(held, self._u(rows, columns), 0).sum(1) / self.n
            if labels is not None:
                own = self.shard.columns(labels[rows])[:, None]
                u = self._u(rows, own.clamp_max(self.shard.size - 1))
                label[rows] += torch.where(own < self.shard.size, u, 0)[:, 0]
        # Every draw is one rank's, so sums are what the ranks have found. Ids are exact in fp64.
        found = ids.double()
        self.shard.sum_(found, mean, label)
        lse = total.double().log() - self.bits * math.log(2)
        return found.long(), mean - lse, label - lse

    def _totals(self) -> tuple[Tensor, Tensor]:
        """S of each row, int64 [M], and the part of it that belongs to the columns before this rank's."""
        own = torch.zeros(len(self.logits), dtype=torch.int64, device=self.logits.device)
        if self.shard.group is None:  # S is where the cumulative masses end, without another pass
            return own, own.clone()
        for rows in self.pieces:
            own[rows] = self._masses(rows).sum(1)
        parts = torch.stack(self.shard.gather(own), 1)
        return parts.sum(1), parts[:, : self.shard.rank].sum(1)

    def _masses(self, rows: slice) -> Tensor:
        """int64 [n, Vl]; 0 in rows without a centre, and in columns at −inf."""
        exponentials = (self.logits[rows] - self.centre[rows, None]).mul_(1 / self.temperature).exp_()
        return exponentials.mul_(2.0**self.bits).round_().nan_to_num_(0.0).long()

    def _u(self, rows: slice, columns: Tensor) -> Tensor:
        """(z − c)/T at these columns, fp64 of columns' shape."""
        logits = self.logits[rows].gather(1, columns).to(self.centre.dtype)
        return (logits - self.centre[rows, None]).double() / self.temperature


def _merged(drawn: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Ascending ids [M, n] as distinct ids and how often each occurs, [M, m] each, with absent entries at the end."""
    new = torch.ones_like(drawn)
    new[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    places = new.cumsum(1) - 1
    ids = drawn.new_full((len(drawn), m), -1).scatter_(1, places, drawn)
    return ids, torch.zeros_like(ids).scatter_add_(1, places, torch.ones_like(drawn))


def uniform(keys: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) with 53 random bits, fp64, one for each int64 key."""
    return _shifted(_splitmix(keys), 64 - _MANTISSA).double() * 2.0**-_MANTISSA


def _splitmix(state: Tensor) -> Tensor:
    """splitmix64's output for each state, int64 standing for unsigned 64 bits: products wrap around."""
    state = state + _signed(_GAMMA)
    state = (state ^ _shifted(state, 30)) * _signed(_FIRST)
    state = (state ^ _shifted(state, 27)) * _signed(_SECOND)
    return state ^ _shifted(state, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift to the right that fills up with zeros; that of int64 repeats the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    """The int64 with these 64 bits."""
    return bits - (bits >> 63 << 64)
