"""The methods `hybrid` and `alm`: what a teacher's top-k rows and its log-probabilities of its own tokens suffice for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distill_rl.losses.core.labels import LabelTerm
from distill_rl.losses.core.sparse import TopKRows, rest_of
from distill_rl.losses.core.streaming import chunks, floor_of
from distill_rl.losses.cross_tokenizer.projection import VocabularyProjection
from distill_rl.losses.cross_tokenizer.rows import Bernoulli, Terms
from distill_rl.losses.cross_tokenizer.task import ChunkTask, LabelledRows
from distill_rl.losses.targets import DenseLogits, TopKLogprobs
from distill_rl.losses.topk import vocab_parallel_topk


def alm(task: ChunkTask) -> Terms:
    """Every chunk: D between the probabilities that either side gives the chunk's text (arXiv 2503.20083)."""
    labelled = task.labelled_rows()
    nothing = TopKLogprobs(labelled.labels[:0, None], task.like[:, None], task.like, task.temperature)
    _, ce, label_logprobs, *_ = labelled.run(_rows(task, labelled, nothing, labelled.labels[:0]))
    return Terms(_chunk_likelihoods(task, labelled, label_logprobs), labelled.scatter(ce), task.pairing.count)


def hybrid(task: ChunkTask) -> Terms:
    """Chunks of one token on both sides: D over the teacher's top k in the common vocabulary and the rest. Others: alm."""
    labelled, pairing = task.labelled_rows(), task.pairing
    paired = pairing.one_to_one
    teacher = common_top_k(task, pairing.teacher.first[paired])
    places = labelled.place(pairing.student.first[paired])
    kd, ce, label_logprobs, *masses = labelled.run(_rows(task, labelled, teacher, places))
    by_chunk = _chunk_likelihoods(task, labelled, label_logprobs).index_copy(0, paired, kd[places])
    return Terms(by_chunk, labelled.scatter(ce), pairing.count, *(mass[places] for mass in masses))


def _rows(task: ChunkTask, labelled: LabelledRows, teacher: TopKLogprobs, places: Tensor) -> TopKRows:
    label = LabelTerm(labelled.labels, task.shard, task.like, task.temperature)
    spread = _spread(teacher, places, labelled.labels)
    return TopKRows(
        spread, task.shard, task.divergence, task.temperature, task.options.tail, label, task.like, with_label_logprob=True
    )  # fmt: skip


def _chunk_likelihoods(task: ChunkTask, labelled: LabelledRows, label_logprobs: Tensor) -> Tensor:
    """[count], T²·D between the chunks' label_logprobs probabilities to the power 1/τ."""
    student = task.pairing.student.sum(labelled.of_student_side(label_logprobs)) / task.options.tau
    teacher = task.pairing.teacher.sum(task.teacher_label) / task.options.tau
    return task.temperature**2 * Bernoulli.apply(student, teacher, task.divergence)


@torch.no_grad()
def common_top_k(task: ChunkTask, rows: Tensor) -> TopKLogprobs:
    """The teacher's top k of its rows with these numbers, in the student's ids.

    An entry without a counterpart becomes −1, and its mass part of the rest.
    """
    teacher, dtype = task.teacher, task.dtype
    top = _top_k_of(teacher, rows, task) if isinstance(teacher, DenseLogits) else teacher.select(rows)
    return translated(top, task.bridge, dtype)


def _top_k_of(teacher: DenseLogits, rows: Tensor, task: ChunkTask) -> TopKLogprobs:
    logits = teacher.logits
    k = min(task.options.top_k, logits.shape[1])
    parts = [
        vocab_parallel_topk(logits[rows[part]], k, temperature=task.temperature, chunk_size=task.piece)
        for part in chunks(rows.shape[0], task.piece)
    ]
    if not parts:
        parts = [vocab_parallel_topk(logits[:0], k, temperature=task.temperature, chunk_size=1)]
    rest = torch.cat([part.rest_logprob for part in parts if part.rest_logprob is not None])
    ids, logprobs = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "logprobs"))
    return TopKLogprobs(ids, logprobs, rest, task.temperature)


def translated(teacher: TopKLogprobs, bridge: VocabularyProjection, dtype: torch.dtype) -> TopKLogprobs:
    """Ids of the teacher's vocabulary → of the student's, log-probabilities in `dtype`."""
    floor = floor_of(dtype)
    ids = bridge.to_student[teacher.ids.long()]
    logprobs = teacher.logprobs.to(dtype).clamp_min(floor)
    rest = rest_of(logprobs) if teacher.rest_logprob is None else teacher.rest_logprob.to(dtype).clamp_min(floor)
    absent = ids < 0
    lost = torch.where(absent, logprobs, floor).logsumexp(1)
    rest = torch.where(absent.any(1), torch.logaddexp(rest, lost), rest)
    return TopKLogprobs(ids, torch.where(absent, floor, logprobs), rest, teacher.temperature)


def _spread(teacher: TopKLogprobs, places: Tensor, labels: Tensor) -> TopKLogprobs:
    """The rows at these places among [M]. The others have their label as the only entry: its log-probability is wanted."""
    assert teacher.rest_logprob is not None
    rest = teacher.rest_logprob
    half = -math.log(2)  # of either outcome, for nobody looks at it
    ids = teacher.ids.new_full((len(labels), teacher.ids.shape[1]), -1)
    logprobs = rest.new_full(ids.shape, floor_of(rest.dtype))
    ids[:, 0], logprobs[:, 0] = labels, half
    return TopKLogprobs(
        ids.index_copy_(0, places, teacher.ids),
        logprobs.index_copy_(0, places, teacher.logprobs),
        rest.new_full(labels.shape, half).index_copy_(0, places, rest),
        teacher.temperature,
    )
