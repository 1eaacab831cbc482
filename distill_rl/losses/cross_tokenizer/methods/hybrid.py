"""The methods `hybrid` and `alm`, which need no dense teacher: its top k and its label log-probabilities suffice.

    alm      every chunk: τ·T²·D(coin(Q^(1/τ)), coin(P^(1/τ))) with log Q = Σ log q(label) over the student's rows of the
             chunk and log P the same for the teacher's. A coin of probability x has the outcomes x and 1 − x
             (arXiv 2503.20083, where the factor τ is left out).
    hybrid   chunks of one token on both sides: T²·D over S and one more outcome for all else, where S are the teacher's
             top k tokens that have a counterpart in the common vocabulary. All other chunks: as alm.

By log Q, forward KL has the slope (Q − P)/(1 − Q) at τ = 1: next to nothing for text that both sides find unlikely. For large τ the
slope of τ·D approaches log P / log Q − 1: that of cross-entropy, −1, for text that only the student finds unlikely. Without the
factor τ it would vanish as τ grows.

Both come out of one `TopKRows` over all labelled rows: rows of 1:1 chunks carry the teacher's top k, translated into
the student's ids; all other rows carry their label as the only entry, because only its log-probability is needed.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from distill_rl.losses.core.labels import LabelTerm
from distill_rl.losses.core.logits.head import TeacherLogits
from distill_rl.losses.core.sparse import TopKRows, rest_of
from distill_rl.losses.core.streaming import chunks, floor_of
from distill_rl.losses.cross_tokenizer.projection import VocabularyProjection
from distill_rl.losses.cross_tokenizer.rows import Bernoulli, Terms
from distill_rl.losses.cross_tokenizer.task import ChunkTask, LabelledRows
from distill_rl.losses.targets import TopKLogprobs
from distill_rl.losses.topk import vocab_parallel_topk


def alm(task: ChunkTask) -> Terms:
    """The terms of `alm`: per chunk τ·T²·D between coins, and the cross-entropy per row. No masses.

    A coin has the probability that a side gives to the chunk's text, to the power 1/τ.
    """
    labelled = task.labelled_rows()
    ce, label_logprobs = cross_entropies(labelled)
    return Terms(_chunk_likelihoods(task, labelled, label_logprobs), labelled.scatter(ce), task.pairing.count)


def cross_entropies(labelled: LabelledRows) -> tuple[Tensor, Tensor]:
    """[M] each, differentiable, of the student: the cross-entropy at T = 1, and the labels' log-probabilities at T.

    Computed as a top-k comparison with nothing to compare, for which there are kernels.
    """
    task = labelled.task
    nothing = TopKLogprobs(labelled.labels[:0, None], task.like[:, None], task.like, task.temperature)
    _, ce, label_logprobs, *_ = labelled.run(_rows(task, labelled, nothing, labelled.labels[:0]))
    return ce, label_logprobs


def hybrid(task: ChunkTask) -> Terms:
    """The terms of `hybrid`: a value per chunk and the cross-entropy per row.

    1:1 chunks: T²·D over the teacher's top k tokens of the common vocabulary and a bucket. Other chunks: as `alm`.
    """
    labelled, pairing = task.labelled_rows(), task.pairing
    paired = pairing.one_to_one
    teacher = common_top_k(task, pairing.teacher.first[paired])
    places = labelled.place(pairing.student.first[paired])
    kd, ce, label_logprobs, *masses = labelled.run(_rows(task, labelled, teacher, places))
    by_chunk = _chunk_likelihoods(task, labelled, label_logprobs).index_copy(0, paired, kd[places])
    return Terms(by_chunk, labelled.scatter(ce), pairing.count, *(mass[places] for mass in masses))


def _rows(task: ChunkTask, labelled: LabelledRows, teacher: TopKLogprobs, places: Tensor) -> TopKRows:
    """The row function of all labelled rows: `teacher` at `places`, the label as the only entry at the others.

    Its T²·D counts at `places` only, its label log-probability at the others.

    Args:
        teacher: [m, k], in the student's ids.
        places: int64 [m], positions in the order of `labelled`.
    """
    label = LabelTerm(labelled.labels, task.shard, task.like, task.temperature)
    spread = _spread(teacher, places, labelled.labels)
    return TopKRows(
        spread, task.shard, task.divergence, task.temperature, task.options.tail, label, task.like, with_label_logprob=True
    )  # fmt: skip


def _chunk_likelihoods(task: ChunkTask, labelled: LabelledRows, label_logprobs: Tensor) -> Tensor:
    """[count], τ·T²·D between coins: the probabilities that either side gives to a chunk's text, to the power 1/τ.

    Args:
        label_logprobs: [M], the student's at T, in the order of `labelled`.
    """
    tau = task.options.tau
    student = task.pairing.student.sum(labelled.of_student_side(label_logprobs)) / tau
    teacher = task.pairing.teacher.sum(task.teacher_label) / tau
    return tau * task.temperature**2 * Bernoulli.apply(student, teacher, task.divergence)


@torch.no_grad()
def common_top_k(task: ChunkTask, rows: Tensor) -> TopKLogprobs:
    """The teacher's top k of these rows in the student's ids; −1 for entries without one, whose mass joins the rest.

    Of a dense teacher the `top_k` of the options; top-k targets keep their own k.

    Args:
        rows: int64, numbers of teacher rows.
    """
    teacher, dtype = task.teacher, task.dtype
    top = _top_k_of(teacher, rows, task) if isinstance(teacher, TeacherLogits) else teacher.select(rows)
    return translated(top, task.projection, dtype)


def _top_k_of(teacher: TeacherLogits, rows: Tensor, task: ChunkTask) -> TopKLogprobs:
    """The top k log-probabilities at T, with the rest, of these rows of dense teacher logits; [0, k] for no rows."""
    k = min(task.options.top_k, teacher.columns)
    find = partial(
        vocab_parallel_topk,
        k=k,
        temperature=task.temperature,
        chunk_size=task.piece,
        backend="eager" if task.options.backend == "eager" else None,  # `triton` need not have a kernel for this k
    )
    pieces = [*chunks(rows.shape[0], task.piece)] or [slice(0, 0)]
    parts = [find(teacher.of(rows[piece], task.dtype)) for piece in pieces]
    rest = torch.cat([part.rest_logprob for part in parts if part.rest_logprob is not None])
    ids, logprobs = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "logprobs"))
    return TopKLogprobs(ids, logprobs, rest, task.temperature)


def translated(teacher: TopKLogprobs, projection: VocabularyProjection, dtype: torch.dtype) -> TopKLogprobs:
    """The teacher's top k in the student's ids; those without a counterpart get −1 and the floor, and join the rest.

    Args:
        dtype: of the returned log-probabilities.
    """
    floor = floor_of(dtype)
    given = teacher.ids.long()
    ids = torch.where(given < 0, -1, projection.to_student[given.clamp_min(0)])
    logprobs = teacher.logprobs.to(dtype).clamp_min(floor)
    rest = rest_of(logprobs) if teacher.rest_logprob is None else teacher.rest_logprob.to(dtype).clamp_min(floor)
    absent = ids < 0
    lost = torch.where(absent, logprobs, floor).logsumexp(1)
    rest = torch.where(absent.any(1), torch.logaddexp(rest, lost), rest)
    return TopKLogprobs(ids, torch.where(absent, floor, logprobs), rest, teacher.temperature)


def _spread(teacher: TopKLogprobs, places: Tensor, labels: Tensor) -> TopKLogprobs:
    """Targets for all M labelled rows: those of `teacher` at the rows `places`, elsewhere the label as the only entry.

    The latter rows then yield the label's log-probability (`TopKRows`).

    Args:
        teacher: [m, k].
        places: int64 [m].
        labels: int64 [M].
    """
    assert teacher.rest_logprob is not None
    rest = teacher.rest_logprob
    half = -math.log(2)  # any value will do: these rows have no KD
    ids = teacher.ids.new_full((len(labels), teacher.ids.shape[1]), -1)
    logprobs = rest.new_full(ids.shape, floor_of(rest.dtype))
    ids[:, 0], logprobs[:, 0] = labels, half
    return TopKLogprobs(
        ids.index_copy_(0, places, teacher.ids),
        logprobs.index_copy_(0, places, teacher.logprobs),
        rest.new_full(labels.shape, half).index_copy_(0, places, rest),
        teacher.temperature,
    )
