"""Stop tokens across tokenizers: where an answer ends, all methods compare only whether the text stops here.

A model may have several stop tokens (eos, end of turn, others in its generation config), and two models' lists do not
correspond. Compared token by token, a teacher that stops with one token would teach the student not to stop with
another. So at a paired stop token, and only there,

    D = D(coin(P), coin(Q))      P = Σ p over all stop tokens of the teacher,   Q = q(the student's own token here)

The student's other stop tokens are not part of Q: they would be trained as much, and the student would end answers with
a token that its template never writes (docs/decisions/0023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from distill_rl.losses.core.streaming import chunks, floor_of
from distill_rl.losses.cross_tokenizer.chunks import Pairing, Side
from distill_rl.losses.cross_tokenizer.methods.hybrid import cross_entropies
from distill_rl.losses.cross_tokenizer.rows import Bernoulli, Terms
from distill_rl.losses.cross_tokenizer.task import ChunkTask, LabelledRows
from distill_rl.losses.divergence import resolve
from distill_rl.losses.targets import TopKLogprobs


def with_stops(task: ChunkTask, method: str, terms_of: Callable[[ChunkTask], Terms]) -> Terms:
    """The terms of all chunks: the method's own for chunks of text, coins for stop tokens (does the text stop here?).

    A stop token is a 1:1 chunk whose label is a stop token of the student. Without any, or if the stop tokens of a side
    are unknown, these are the method's own terms. Waits for a GPU, to count them.

    Args:
        method: its name; the coins are compared in its terms.
        terms_of: computes the method's terms of a task; called once, on the task without the stop chunks.
    """
    are_stops = _are_stops(task)
    count = 0 if are_stops is None else int(are_stops.sum())  # a GPU is waited for
    if are_stops is None or not count:
        return terms_of(task)
    others, stops = are_stops.sort(stable=True).indices.split([task.pairing.count - count, count])
    rows = task.pairing.student.first[stops]
    student, ends = task.student.apart(rows)
    text = replace(task, student=student, pairing=_without(task.pairing, are_stops, others))
    terms = terms_of(text)
    ours = _own_tokens(replace(task, student=ends, labels=task.labels[rows]))
    theirs = _teacher_stops(task, stops)
    kd = terms.kd.new_zeros(task.pairing.count).index_copy(0, others, terms.kd)
    kd = kd.index_copy(0, stops, task.temperature**2 * _coins(task, method, ours, theirs))
    masses = (
        None if mass is None else mass.detach().sum() + side.detach().exp().sum()
        for mass, side in ((terms.teacher_mass, theirs), (terms.student_mass, ours))
    )  # fmt: skip
    return Terms(kd, terms.ce, terms.num_chunks + len(stops), *masses)


def _are_stops(task: ChunkTask) -> Tensor | None:
    """bool [count]: 1:1 chunks whose label is a stop token of the student; None if a side's stop tokens are unknown."""
    pairing, stops = task.pairing, task.projection.student_stops
    if not len(stops) or not len(task.projection.teacher_stops):
        return None
    single = (pairing.student.length == 1) & (pairing.teacher.length == 1)
    return single & torch.isin(task.labels[pairing.student.first], stops)


def _without(pairing: Pairing, stops: Tensor, kept: Tensor) -> Pairing:
    """The pairing with only the chunks `kept`, renumbered from 0.

    Args:
        stops: bool [count], the other chunks, which have one row on either side.
        kept: int64, the numbers of the chunks that stay.
    """
    number = kept.new_zeros(pairing.count)
    number[kept] = torch.arange(len(kept), device=kept.device)
    dropped = pairing.count - len(kept)

    def side(of: Side) -> Side:
        rows = stops[of.chunk].sort(stable=True).indices[: len(of.rows) - dropped]
        return Side(of.rows[rows], number[of.chunk[rows]], of.length[kept])

    return Pairing(side(pairing.student), side(pairing.teacher), len(kept))


def _own_tokens(task: ChunkTask) -> Tensor:
    """[n], the student's log-probabilities at T of the labels, differentiable.

    Args:
        task: one whose logits and labels are those of the stop chunks' rows.
    """
    labelled = LabelledRows(task)
    return cross_entropies(labelled)[1]


def _coins(task: ChunkTask, method: str, ours: Tensor, theirs: Tensor) -> Tensor:
    """D between the two coins of each stop chunk, [n], in the method's own terms, without the factor T².

    `strict` is reverse KL, `uld` is L1 (twice the total variation of two coins), `alm` has τ here too, `hybrid` has not.

    Args:
        ours, theirs: [n], log-probabilities at T that student and teacher stop.
    """
    if method == "strict":
        return Bernoulli.apply(ours, theirs, resolve("reverse_kl", 0.0))
    if method == "uld":
        return 2 * Bernoulli.apply(ours, theirs, resolve("tvd", 0.0))
    tau = task.options.tau if method == "alm" else 1.0
    return tau * Bernoulli.apply(ours / tau, theirs / tau, task.divergence)


@torch.no_grad()
def _teacher_stops(task: ChunkTask, stops: Tensor) -> Tensor:
    """[n], log-probability at T that the teacher ends with any of its stop tokens.

    A top-k teacher's is the sum over the stop tokens among its k columns, at least that of its own token. Each missing
    stop token is less likely than the k-th column.

    Args:
        stops: int64 [n], numbers of the stop chunks.
    """
    teacher, ids, rows = task.teacher, task.projection.teacher_stops, task.pairing.teacher.first[stops]
    floor = floor_of(task.dtype)
    if isinstance(teacher, TopKLogprobs):
        assert teacher.label_logprob is not None, "checked on entry"
        held = torch.isin(teacher.ids[rows].long(), ids)
        known = torch.where(held, teacher.logprobs[rows].to(task.dtype).clamp_min(floor), floor).logsumexp(1)
        return torch.maximum(known, teacher.label_logprob.reshape(-1)[rows].to(task.dtype))
    found = task.like.new_empty(len(rows))
    for part in chunks(len(rows), task.piece):
        logits = teacher.of(rows[part], task.dtype).mul_(1 / task.temperature)
        inside = logits[:, ids].clamp_min(floor).logsumexp(1)
        found[part] = logsigmoid(inside - logits.index_fill_(1, ids, -torch.inf).logsumexp(1))
    return found
