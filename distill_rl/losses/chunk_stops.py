"""Ends of answers across tokenizers: at a paired stop token both sides are asked one thing, whether the text stops here.

A model may stop by any of several tokens (eos, end of turn, others that its generation config names), and two models'
lists have little to do with each other. Compared token by token, a teacher that stops by one would teach a student not
to stop by another. Here, and only here, all stop tokens of a side are one outcome, and everything else is the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from distill_rl.losses.autograd import first_derivative
from distill_rl.losses.chunk_rows import Bernoulli, Terms
from distill_rl.losses.chunk_task import ChunkTask
from distill_rl.losses.chunks import Pairing, Side
from distill_rl.losses.divergence import resolve
from distill_rl.losses.labels import weight_of
from distill_rl.losses.shards import VocabularyShard
from distill_rl.losses.sweep import (
    Centre, LogSums, RowFunction, RowPlan, Scratch, StreamedRows, Sweep, chunks, combine, floor_of,
)  # fmt: skip
from distill_rl.losses.targets import DenseLogits


def with_stops(task: ChunkTask, method: str, terms_of: Callable[[ChunkTask], Terms]) -> Terms:
    """The method's terms of all chunks that are text, and those of the stop tokens.

    A stop token is a chunk of one token on both sides whose label is one of the student's stops.
    """
    stops, others = _split(task)
    if stops is None:
        return terms_of(task)
    rows = task.pairing.student.first[stops]
    logits, ends = RowsApart.apply(task.logits, rows)
    text = replace(task, logits=logits, pairing=_without(task.pairing, others))
    terms = terms_of(text)
    (ours,) = StreamedRows.apply(ends, SetRows(len(rows), task), RowPlan.of(len(rows), task.piece), False)
    theirs = _teacher_stops(task, stops)
    kd = terms.kd.new_zeros(task.pairing.count).index_copy(0, others, terms.kd)
    kd = kd.index_copy(0, stops, task.temperature**2 * _coins(task, method, ours, theirs))
    masses = (
        None if mass is None else mass.detach().sum() + side.detach().exp().sum()
        for mass, side in ((terms.teacher_mass, theirs), (terms.student_mass, ours))
    )  # fmt: skip
    return Terms(kd, terms.ce, terms.num_chunks + len(stops), *masses)


def _split(task: ChunkTask) -> tuple[Tensor | None, Tensor]:
    """int64, the numbers of the chunks that are stop tokens (None: no stop token is known or met), and of all others."""
    pairing, stops = task.pairing, task.bridge.student_stops
    if not len(stops) or not len(task.bridge.teacher_stops):
        return None, stops
    single = pairing.one_to_one
    found = single[torch.isin(task.labels[pairing.student.first[single]], stops)]
    if not len(found):
        return None, found
    rest = torch.ones(pairing.count, dtype=torch.bool, device=found.device).index_fill_(0, found, False)
    return found, rest.nonzero()[:, 0]


def _without(pairing: Pairing, kept: Tensor) -> Pairing:
    """These chunks only, renumbered."""
    number = kept.new_full((pairing.count,), -1)
    number[kept] = torch.arange(len(kept), device=kept.device)

    def side(of: Side) -> Side:
        inside = number[of.chunk] >= 0
        return Side(of.rows[inside], number[of.chunk[inside]], of.length[kept])

    return Pairing(side(pairing.student), side(pairing.teacher), len(kept))


def _coins(task: ChunkTask, method: str, ours: Tensor, theirs: Tensor) -> Tensor:
    """[n], D between the probabilities to stop, in the terms of the method: `strict` has its own divergence, `uld` is an
    L1 distance (that of two coins is twice the total variation), and `alm`, and with it `hybrid`, has τ."""
    if method == "strict":
        return Bernoulli.apply(ours, theirs, resolve("reverse_kl", 0.0))
    if method == "uld":
        return 2 * Bernoulli.apply(ours, theirs, resolve("tvd", 0.0))
    tau = task.tau if method in ("alm", "hybrid") else 1.0
    return Bernoulli.apply(ours / tau, theirs / tau, task.divergence)


@torch.no_grad()
def _teacher_stops(task: ChunkTask, stops: Tensor) -> Tensor:
    """[n], log-probability at T that the teacher stops.

    Of a teacher that is known in k columns: what these hold of its stop tokens, and not less than its own token has. What
    is missed has less than the k-th column each.
    """
    teacher, ids, rows = task.teacher, task.bridge.teacher_stops, task.pairing.teacher.first[stops]
    floor = floor_of(task.dtype)
    if not isinstance(teacher, DenseLogits):
        assert teacher.label_logprob is not None, "checked on entry"
        held = torch.isin(teacher.ids[rows].long(), ids)
        known = torch.where(held, teacher.logprobs[rows].to(task.dtype).clamp_min(floor), floor).logsumexp(1)
        return torch.maximum(known, teacher.label_logprob.reshape(-1)[rows].to(task.dtype))
    found = task.like.new_empty(len(rows))
    for part in chunks(len(rows), task.piece):
        logits = teacher.logits.index_select(0, rows[part]).to(task.dtype).mul_(1 / task.temperature)
        inside = logits[:, ids].clamp_min(floor).logsumexp(1)
        found[part] = logsigmoid(inside - logits.index_fill_(1, ids, -torch.inf).logsumexp(1))
    return found


class RowsApart(torch.autograd.Function):
    """Logits [N, Vl] as they are, and a copy of the rows with these numbers, whose gradient is added to that of the whole
    in place: a second consumer would otherwise cost a second gradient of the size of the logits."""

    @staticmethod
    def forward(ctx, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, logits)
        ctx.set_materialize_grads(False)
        return logits.view_as(logits), logits.index_select(0, rows)

    @staticmethod
    @first_derivative
    def backward(ctx, whole: Tensor | None, apart: Tensor | None):
        rows, logits = ctx.saved_tensors
        if whole is None:
            whole = torch.zeros_like(logits)
        if apart is not None:
            whole.index_add_(0, rows, apart)
        return whole, None


class SetRows(RowFunction):
    """Per row the log-probability at T that the next token is one of the student's stops.

    S are the stops, R the other columns. ∂ log q_S/∂u_v = exp(u_v − lse_S)·q_R for v in S, else −q_v. Both q_S and q_R
    are taken from lse_S − lse_R, so either keeps its digits next to zero.
    """

    def __init__(self, num_rows: int, task: ChunkTask):
        like, self.shard, self.temperature = task.like, task.shard, task.temperature
        self.columns = self.shard.columns(task.bridge.student_stops)
        self.centre = Centre(num_rows, like, self.shard, 1 / self.temperature)
        self.inside, self.outside = (LogSums(num_rows, (1.0,), self.centre, whole=False) for _ in range(2))
        self.apart = like.new_empty(num_rows)
        """[N], lse_S − lse_R"""

    @property
    def sweeps(self) -> list[Sweep]:
        return [(self._collect, self._complete)]

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return (logsigmoid(self.apart),), ()

    def _collect(self, rows: slice, u: Tensor, scratch: Scratch) -> None:
        work, stops = scratch.buffer("work", u.shape[0]), u.index_select(1, self.columns)
        self.inside.add(rows, stops, torch.empty_like(stops))
        self.outside.add(rows, u.index_fill_(1, self.columns, floor_of(u.dtype)), work)
        u.index_copy_(1, self.columns, stops)

    def _complete(self, rows: slice) -> None:
        combine(self.shard, rows, [self.inside, self.outside], [])
        self.apart[rows] = self.inside.log(rows) - self.outside.log(rows)

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], scratch: Scratch) -> Tensor:
        weight = weight_of(grads, 0, u) / self.temperature
        inside, apart = self.inside.log(rows), self.apart[rows]
        stops = u.index_select(1, self.columns)
        share = (stops - inside[:, None]).exp_().masked_fill_(stops <= floor_of(u.dtype), 0)
        gradient = u.sub_((inside - logsigmoid(apart))[:, None]).exp_().mul_(-weight[:, None])
        return gradient.index_copy_(1, self.columns, share.mul_((weight * (-apart).sigmoid())[:, None]))
