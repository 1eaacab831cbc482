"""Ends of answers across tokenizers: at a paired stop token only one thing is compared, whether the text stops here.

A model may stop by any of several tokens (eos, end of turn, others that its generation config names), and two models'
lists have little to do with each other. Compared token by token, a teacher that stops by one would teach a student not
to stop by another. Here, and only here, all stop tokens of the teacher are one outcome and everything else is the other;
what the student compares with the first is its own token at this place. Its other stop tokens get nothing: added up with
it they would learn as fast, and the student would end answers by a token that its template does not write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from distill_rl.losses.core.autograd import first_derivative
from distill_rl.losses.core.streaming import RowPlan, chunks, floor_of
from distill_rl.losses.cross_tokenizer.chunks import Pairing, Side
from distill_rl.losses.cross_tokenizer.rows import Bernoulli, LabelLogprobRows, Terms
from distill_rl.losses.cross_tokenizer.task import ChunkTask, LabelledRows
from distill_rl.losses.divergence import resolve
from distill_rl.losses.targets import DenseLogits


def with_stops(task: ChunkTask, method: str, terms_of: Callable[[ChunkTask], Terms]) -> Terms:
    """The method's terms of all chunks that are text, and those of the stop tokens: chunks of one token on both sides
    whose label is one of the student's stops."""
    are_stops = _are_stops(task)
    count = 0 if are_stops is None else int(are_stops.sum())  # a GPU is waited for
    if are_stops is None or not count:
        return terms_of(task)
    others, stops = are_stops.sort(stable=True).indices.split([task.pairing.count - count, count])
    rows = task.pairing.student.first[stops]
    logits, ends = RowsApart.apply(task.logits, rows)
    text = replace(task, logits=logits, pairing=_without(task.pairing, are_stops, others))
    terms = terms_of(text)
    ours = _own_tokens(replace(task, logits=ends, labels=task.labels[rows]))
    theirs = _teacher_stops(task, stops)
    kd = terms.kd.new_zeros(task.pairing.count).index_copy(0, others, terms.kd)
    kd = kd.index_copy(0, stops, task.temperature**2 * _coins(task, method, ours, theirs))
    masses = (
        None if mass is None else mass.detach().sum() + side.detach().exp().sum()
        for mass, side in ((terms.teacher_mass, theirs), (terms.student_mass, ours))
    )  # fmt: skip
    return Terms(kd, terms.ce, terms.num_chunks + len(stops), *masses)


def _are_stops(task: ChunkTask) -> Tensor | None:
    """bool [count]; None where a side has no stop tokens that are known."""
    pairing, stops = task.pairing, task.bridge.student_stops
    if not len(stops) or not len(task.bridge.teacher_stops):
        return None
    single = (pairing.student.length == 1) & (pairing.teacher.length == 1)
    return single & torch.isin(task.labels[pairing.student.first], stops)


def _without(pairing: Pairing, stops: Tensor, kept: Tensor) -> Pairing:
    """The chunks with the numbers `kept`, renumbered; `stops`: bool [count], the others, each of one row on either side."""
    number = kept.new_zeros(pairing.count)
    number[kept] = torch.arange(len(kept), device=kept.device)
    dropped = pairing.count - len(kept)

    def side(of: Side) -> Side:
        rows = stops[of.chunk].sort(stable=True).indices[: len(of.rows) - dropped]
        return Side(of.rows[rows], number[of.chunk[rows]], of.length[kept])

    return Pairing(side(pairing.student), side(pairing.teacher), len(kept))


def _own_tokens(task: ChunkTask) -> Tensor:
    """[n], log-probabilities at T of the labels; every row of the task has one."""
    labelled = LabelledRows(task, None, RowPlan.of(len(task.labels), task.piece).pieces, 0)
    _, label_logprobs = labelled.run(LabelLogprobRows(labelled, with_label_logprob=True))
    return label_logprobs


def _coins(task: ChunkTask, method: str, ours: Tensor, theirs: Tensor) -> Tensor:
    """[n], D between the probabilities to stop, in the terms of the method: `strict` has its own divergence, `uld` is an
    L1 distance (that of two coins is twice the total variation), and `alm` has τ."""
    if method == "strict":
        return Bernoulli.apply(ours, theirs, resolve("reverse_kl", 0.0))
    if method == "uld":
        return 2 * Bernoulli.apply(ours, theirs, resolve("tvd", 0.0))
    tau = task.options.tau if method == "alm" else 1.0
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
