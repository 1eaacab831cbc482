"""The methods `hybrid`, `alm` and `strict`, which compare a few columns per row (`TopKRows`).

    alm      every chunk: τ·T²·D(coin(Q^(1/τ)), coin(P^(1/τ))) with log Q = Σ log q(label) over the student's rows of the
             chunk and log P the same for the teacher's. A coin of probability x has the outcomes x and 1 − x
             (arXiv 2503.20083, where the factor τ is left out).
    hybrid   chunks of one token on both sides: T²·D over S and one more outcome for all else, where S are the teacher's
             top k tokens that have a counterpart in the common vocabulary. All other chunks: as alm.
    strict   chunks of one token on both sides only, within the shared vocabulary (arXiv 2610.08448): T² times reverse KL
             over S and one more outcome for the rest of it, both sides conditioned on it (all other columns are masked).
             S are the student's `STRICT_TOP_K` most likely shared tokens.

By log Q, forward KL has the slope (Q − P)/(1 − Q) at τ = 1: next to nothing for text that both sides find unlikely. For large τ the
slope of τ·D approaches log P / log Q − 1: that of cross-entropy, −1, for text that only the student finds unlikely. Without the
factor τ it would vanish as τ grows.

`hybrid` and `alm` need no dense teacher: its top k and its label log-probabilities suffice. Both come out of one `TopKRows`
over all labelled rows: rows of 1:1 chunks carry the teacher's top k, translated into the student's ids; all other rows
carry their label as the only entry, because only its log-probability is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from distill_rl.losses.core.rows import Buffers, TopKRows, chunks, floor_of, given, rest_of
from distill_rl.losses.cross_tokenizer.projection import VocabularyProjection
from distill_rl.losses.cross_tokenizer.task import Bernoulli, ChunkTask, LabelledRows, LabelLogprobRows, Terms
from distill_rl.losses.divergence import resolve
from distill_rl.losses.targets import TopKLogprobs
from distill_rl.losses.topk import Candidates, best_of_all, candidates, vocab_parallel_topk

STRICT_TOP_K = 16
"""How many of the student's columns `strict` compares one by one."""


def alm(task: ChunkTask) -> Terms:
    labelled = task.labelled_rows()
    ce, label_logprobs = cross_entropies(labelled)
    return Terms(_chunk_likelihoods(task, labelled, label_logprobs), labelled.scatter(ce), task.pairing.count)


def hybrid(task: ChunkTask) -> Terms:
    labelled, pairing = task.labelled_rows(), task.pairing
    paired = pairing.one_to_one
    teacher = common_top_k(task, pairing.teacher.first[paired])
    places = labelled.place(pairing.student.first[paired])
    kd, ce, label_logprobs, *masses = _compare(labelled, teacher, places)
    by_chunk = _chunk_likelihoods(task, labelled, label_logprobs).index_copy(0, paired, kd[places])
    return Terms(by_chunk, labelled.scatter(ce), pairing.count, *(mass[places] for mass in masses))


def cross_entropies(labelled: LabelledRows) -> tuple[Tensor, Tensor]:
    """[M] each, differentiable, of the student: the cross-entropy at T = 1, and the labels' log-probabilities at T.

    Computed as a top-k comparison with nothing to compare, for which there are kernels.
    """
    task = labelled.task
    nothing = TopKLogprobs(labelled.labels[:0, None], task.like[:, None], task.like, task.settings.temperature)
    _, ce, label_logprobs, *_ = _compare(labelled, nothing, labelled.labels[:0])
    return ce, label_logprobs


def _compare(labelled: LabelledRows, teacher: TopKLogprobs, places: Tensor) -> tuple[Tensor, ...]:
    """T²·D, cross-entropy, the label's log-probability and both masses of all labelled rows, [M] each."""
    assert teacher.rest_logprob is not None
    task, settings, labels, rest = labelled.task, labelled.task.settings, labelled.labels, teacher.rest_logprob
    # The rows at `places` have the targets [m, k], in the student's ids: T²·D and the masses count there only. Elsewhere the
    # label is the only entry, for its log-probability. Its target may be anything: these rows have no KD.
    half = -math.log(2)
    ids = teacher.ids.new_full((len(labels), teacher.ids.shape[1]), -1)
    logprobs = rest.new_full(ids.shape, floor_of(rest.dtype))
    ids[:, 0], logprobs[:, 0] = labels, half
    ids.index_copy_(0, places, teacher.ids)
    logprobs.index_copy_(0, places, teacher.logprobs)
    every_rest = rest.new_full(labels.shape, half).index_copy_(0, places, rest)
    every_row = TopKLogprobs(ids, logprobs, every_rest, teacher.temperature)
    frame = task.frame(len(labels))
    function = TopKRows(frame, every_row, settings.divergence, settings.tail, labels, with_label_logprob=True)
    return labelled.run(function)


def _chunk_likelihoods(task: ChunkTask, labelled: LabelledRows, label_logprobs: Tensor) -> Tensor:
    """[count], τ·T²·D between coins, from the student's label log-probabilities at T [M], in the order of `labelled`."""
    settings = task.settings
    student = task.pairing.student.sum(labelled.of_student_side(label_logprobs)) / settings.tau
    teacher = task.pairing.teacher.sum(task.teacher_label) / settings.tau
    return settings.tau * settings.temperature**2 * Bernoulli.apply(student, teacher, settings.divergence)


@torch.no_grad()
def common_top_k(task: ChunkTask, rows: Tensor) -> TopKLogprobs:
    """The teacher's top k of the rows with these numbers, in the student's ids (`translated`).

    Of a dense teacher the `top_k` of the settings; top-k targets keep their own k.
    """
    teacher, settings = task.teacher, task.settings
    if isinstance(teacher, TopKLogprobs):
        return translated(teacher.select(rows), task.projection, task.dtype)
    how: dict[str, Any] = {"temperature": settings.temperature, "chunk_size": task.piece}
    how["backend"] = "eager" if settings.backend == "eager" else None  # `triton` need not have a kernel for this k
    pieces, k = [*chunks(rows.shape[0], task.piece)] or [slice(0, 0)], min(settings.top_k, teacher.columns)
    parts = [vocab_parallel_topk(teacher.of(rows[piece], task.dtype), k, **how) for piece in pieces]
    ids, logprobs = torch.cat([part.ids for part in parts]), torch.cat([part.logprobs for part in parts])
    rest = torch.cat([part.rest_logprob for part in parts if part.rest_logprob is not None])
    return translated(TopKLogprobs(ids, logprobs, rest, settings.temperature), task.projection, task.dtype)


def translated(teacher: TopKLogprobs, projection: VocabularyProjection, dtype: torch.dtype) -> TopKLogprobs:
    """The teacher's top k in the student's ids, in `dtype`; those without a counterpart get −1 and join the rest."""
    floor = floor_of(dtype)
    given = teacher.ids.long()
    ids = torch.where(given < 0, -1, projection.to_student[given.clamp_min(0)])
    logprobs = teacher.logprobs.to(dtype).clamp_min(floor)
    rest = rest_of(logprobs) if teacher.rest_logprob is None else teacher.rest_logprob.to(dtype).clamp_min(floor)
    absent = ids < 0
    lost = torch.where(absent, logprobs, floor).logsumexp(1)
    rest = torch.where(absent.any(1), torch.logaddexp(rest, lost), rest)
    return TopKLogprobs(ids, torch.where(absent, floor, logprobs), rest, teacher.temperature)


class StrictRows(LabelLogprobRows):
    """Per row the cross-entropy, the label's log-probability (0) and T²·D; as constants both masses.

    D is that of `TopKRows` on masked logits. Only the first `num_first` rows have one.
    """

    def __init__(self, labelled: LabelledRows, teacher: TopKLogprobs, unshared: Tensor):
        """
        Args:
            teacher: [num_first, k], in the student's ids, conditioned on the shared vocabulary.
            unshared: local columns outside the shared vocabulary.
        """
        super().__init__(labelled)
        self.num_first, self.unshared = labelled.num_first, unshared
        frame, reverse_kl = labelled.task.frame(self.num_first), resolve("reverse_kl", 0.0)
        self.lender = self.top = TopKRows(frame, teacher, reverse_kl, "bucket", None, centre=self.centre)

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values, _ = super().outputs()
        kd, masses = self.top.outputs()
        return (*values, *kd), masses

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        self.add(rows, u, buffers)
        if rows.start < self.num_first:
            self.top.collect(rows, self._masked(u, buffers), buffers)

    def complete(self, rows: slice) -> None:
        super().complete(rows)
        self.top.complete(slice(0, self.num_first))

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        grad, gradient = given(grads, 2), None
        if grad is not None and rows.start < self.num_first:
            weights = self.top.weights(rows, [grad])
            gradient = self.top.gradient(rows, self._masked(u, buffers), weights, buffers)
        of_label = super().gradient(rows, u, grads, buffers)
        return of_label if gradient is None else of_label.add_(gradient)

    def _masked(self, u: Tensor, buffers: Buffers) -> Tensor:
        """A copy of u with the columns outside the shared vocabulary at the floor."""
        masked = buffers.buffer("masked", u.shape[0]).copy_(u)
        return masked.index_fill_(1, self.unshared, floor_of(u.dtype))


def strict(task: ChunkTask) -> Terms:
    pairing, projection = task.pairing, task.projection
    paired = pairing.one_to_one
    rows = pairing.student.first[paired]
    shared = task.shard.columns(projection.student_common)
    held = torch.zeros(task.shard.size + 1, dtype=torch.bool, device=shared.device).index_fill_(0, shared, True)
    unshared = (~held[:-1]).nonzero()[:, 0]
    labelled = task.labelled_rows(rows)
    teacher = _teacher_at(task, pairing.teacher.first[paired], _student_top(task, rows, unshared))
    ce, _, kd, *masses = labelled.run(StrictRows(labelled, teacher, unshared))
    by_chunk = kd.new_zeros(pairing.count).index_copy(0, paired, kd)
    return Terms(by_chunk, labelled.scatter(ce), len(paired), *masses)


@torch.no_grad()
def _student_top(task: ChunkTask, rows: Tensor, unshared: Tensor) -> Tensor:
    """The student's most likely shared ids in each of these rows, int64 [n, k], equal on all ranks; all, if there are fewer."""
    k = min(STRICT_TOP_K, len(task.projection.student_common))
    parts = []
    for part in [*chunks(len(rows), task.piece)] or [slice(0, 0)]:
        masked = task.student.rows(rows[part]).index_fill_(1, unshared, -torch.inf)
        parts.append(candidates(masked, task.shard, k, None, task.settings.temperature, task.piece))
    found = Candidates(*(torch.cat(part) for part in zip(*parts)))
    return found.ids if task.shard.group is None else best_of_all(task.shard, found).ids


@torch.no_grad()
def _teacher_at(task: ChunkTask, rows: Tensor, ids: Tensor) -> TopKLogprobs:
    """The teacher's log-probabilities of the student's ids [n, k] and of the rest, conditioned on the shared vocabulary."""
    projection, floor = task.projection, floor_of(task.dtype)
    dense, inverse_temperature = task.dense_teacher(), 1 / task.settings.temperature
    place = projection.student_common.new_full((projection.num_student,), -1)
    place[projection.student_common] = torch.arange(len(projection.student_common), device=place.device)
    absent = place[ids] < 0
    # Ids outside it become −1, at the floor: that of one column more.
    columns = torch.where(absent, len(projection.student_common), place[ids])
    logprobs, rest = task.like.new_empty(ids.shape), task.like.new_empty(len(ids))
    for part in chunks(len(rows), task.piece):
        shared = dense.of(rows[part], task.dtype)[:, projection.teacher_common]
        shared = pad(shared.mul_(inverse_temperature).log_softmax(1), (0, 1), value=floor).clamp_min_(floor)
        logprobs[part] = shared.gather(1, columns[part])
        rest[part] = shared.scatter_(1, columns[part], floor).logsumexp(1).clamp_min(floor)
    return TopKLogprobs(torch.where(absent, -1, ids), logprobs, rest, task.settings.temperature)
