"""The method `strict`: reverse KL on 1:1 chunks only, within the shared vocabulary (arXiv 2610.08448).

Both sides are conditioned on the shared vocabulary (all other columns are masked). S are the student's `TOP_K` most
likely shared tokens:

    D = Σ_{v∈S} q_v log(q_v/p_v) + q_R log(q_R/p_R)      with R the rest of the shared vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from distill_rl.losses.core.labels import given
from distill_rl.losses.core.sparse import TopKRows
from distill_rl.losses.core.streaming import Buffers, chunks, floor_of
from distill_rl.losses.cross_tokenizer.rows import LabelLogprobRows, Terms
from distill_rl.losses.cross_tokenizer.task import ChunkTask, LabelledRows
from distill_rl.losses.divergence import resolve
from distill_rl.losses.targets import TopKLogprobs
from distill_rl.losses.topk import best_of_all, candidates

TOP_K = 16
"""How many of the student's columns are compared one by one."""


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
        task = labelled.task
        super().__init__(labelled)
        self.num_first, self.unshared = labelled.num_first, unshared
        self.top = TopKRows(
            teacher, task.shard, resolve("reverse_kl", 0.0), task.temperature, "bucket", None, task.like,
            centre=self.centre,
        )  # fmt: skip
        self.lender = self.top

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values, _ = super().outputs()
        kd, masses = self.top.outputs()
        return (*values, *kd), masses

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        """Stores this rank's sums of these rows for the labels and, in 1:1 chunks, for the top-k comparison."""
        self.add(rows, u, buffers)
        if rows.start < self.num_first:
            self.top.collect(rows, self._masked(u, buffers), buffers)

    def complete(self, rows: slice) -> None:
        super().complete(rows)
        self.top.complete(slice(0, self.num_first))

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        grad, gradient = given(grads, 2), None
        if grad is not None and rows.start < self.num_first:
            gradient = self.top.gradient(rows, self._masked(u, buffers), [grad], buffers)
        of_label = super().gradient(rows, u, grads, buffers)
        return of_label if gradient is None else of_label.add_(gradient)

    def _masked(self, u: Tensor, buffers: Buffers) -> Tensor:
        """A copy of u, in the buffer `masked`, with the columns outside the shared vocabulary at the floor."""
        masked = buffers.buffer("masked", u.shape[0]).copy_(u)
        return masked.index_fill_(1, self.unshared, floor_of(u.dtype))


def strict(task: ChunkTask) -> Terms:
    """The terms of `strict`: T² · reverse KL per 1:1 chunk, 0 for other chunks; the cross-entropy per row; the masses.

    Both sides are conditioned on the common vocabulary. The sum is over the student's TOP_K most likely columns of the
    common vocabulary and the rest of it.
    """
    pairing, projection = task.pairing, task.projection
    paired = pairing.one_to_one
    rows = pairing.student.first[paired]
    shared = task.shard.columns(projection.student_common)
    held = torch.zeros(task.shard.size + 1, dtype=torch.bool, device=shared.device).index_fill_(0, shared, True)
    unshared = (~held[:-1]).nonzero()[:, 0]
    labelled = task.labelled_rows(rows)
    ids = _student_top(task, rows, unshared)
    teacher = _teacher_at(task, pairing.teacher.first[paired], ids)
    ce, _, kd, *masses = labelled.run(StrictRows(labelled, teacher, unshared))
    by_chunk = kd.new_zeros(pairing.count).index_copy(0, paired, kd)
    return Terms(by_chunk, labelled.scatter(ce), len(paired), *masses)


@torch.no_grad()
def _student_top(task: ChunkTask, rows: Tensor, unshared: Tensor) -> Tensor:
    """The student's TOP_K most likely common ids in each of these rows, int64 [n, k], equal on all ranks.

    All of them, if there are fewer.

    Args:
        unshared: this rank's columns without a counterpart.
    """
    k = min(TOP_K, len(task.projection.student_common))
    parts = []
    for part in [*chunks(len(rows), task.piece)] or [slice(0, 0)]:
        masked = task.student.rows(rows[part]).index_fill_(1, unshared, -torch.inf)
        parts.append(candidates(masked, task.shard, k, None, task.temperature, task.piece))
    ids, *others = (torch.cat(part) for part in zip(*parts))
    return ids if task.shard.group is None else best_of_all(task.shard, k, ids, *others)[0]


@torch.no_grad()
def _teacher_at(task: ChunkTask, rows: Tensor, ids: Tensor) -> TopKLogprobs:
    """The teacher's log-probabilities of the student's ids and of the rest, conditioned on the common vocabulary.

    Args:
        rows: rows of the teacher.
        ids: int64 [n, k], student ids; those without a counterpart are returned as −1, at the floor.
    """
    projection, floor = task.projection, floor_of(task.dtype)
    place = projection.student_common.new_full((projection.num_student,), -1)
    place[projection.student_common] = torch.arange(len(projection.student_common), device=place.device)
    absent = place[ids] < 0
    columns = torch.where(absent, len(projection.student_common), place[ids])  # one column more, at the floor
    logprobs, rest = task.like.new_empty(ids.shape), task.like.new_empty(len(ids))
    for part in chunks(len(rows), task.piece):
        shared = task.dense_teacher().of(rows[part], task.dtype)[:, projection.teacher_common]
        shared = pad(shared.mul_(1 / task.temperature).log_softmax(1), (0, 1), value=floor).clamp_min_(floor)
        logprobs[part] = shared.gather(1, columns[part])
        rest[part] = shared.scatter_(1, columns[part], floor).logsumexp(1).clamp_min(floor)
    return TopKLogprobs(torch.where(absent, -1, ids), logprobs, rest, task.temperature)
