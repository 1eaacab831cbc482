"""The methods `gold`, `hkl` and `uld`: whole distributions of a chunk, over both vocabularies.

With C the pairs (s, t) of the common vocabulary, Q and P the two sides' distributions of a chunk, and sorted L1 the
distance Σ_i |Q_(i) − P_(i)| of probabilities sorted by size (`SortedL1`):

    gold   D = Σ_C [f(P_t, Q_s) + κ (Q_s − P_t)] + sorted L1 over the columns outside C      κ = `Divergence.balance`
    hkl    the same without κ: H-KL as NeMo-RL #2245 and TRL's GOLD publish it. It may be negative
    uld    D = sorted L1 over all columns (arXiv 2402.12030)

`mean`: Q is the arithmetic mean of the student's rows of the chunk, P the normalised geometric mean of the teacher's.
`chain`: the first row of either side times the probability of the chunk's other tokens, and what is missing to one as
one more outcome.

Gradient: with s = ∂D/∂log Q, and ρ_n = q_n / (len · Q) the share of row n in the mean,

    ∂D/∂u_nv = s_v ρ_nv − q_nv Σ_w s_w ρ_nw

Only the sum over w is kept per row; backward computes everything else again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from distill_rl.losses.core.labels import given
from distill_rl.losses.core.row_function import Pass
from distill_rl.losses.core.streaming import Buffers
from distill_rl.losses.cross_tokenizer.chunks import segment_sum
from distill_rl.losses.cross_tokenizer.methods.sorted_l1 import SortedL1
from distill_rl.losses.cross_tokenizer.rows import LabelLogprobRows, Terms
from distill_rl.losses.cross_tokenizer.task import ChunkTask, LabelledRows
from distill_rl.losses.cross_tokenizer.teacher import TeacherDistributions, complement
from distill_rl.losses.divergence import Distribution, Divergence


class Comparison:
    """D of one chunk: terms over pairs of columns, and sorted L1 over the other columns."""

    def __init__(
        self,
        divergence: Divergence,
        columns: Tensor,
        counterparts: Tensor,
        rest: SortedL1,
        others: Tensor | None,
        *,
        balanced: bool = True,
    ):
        """
        Args:
            columns, counterparts: this rank's columns of the student that have a counterpart, and that counterpart.
            divergence: compares the pairs.
            rest: the sorted L1 distance over the student's other columns.
            others: the teacher's columns without a counterpart; None: all of its columns.
            balanced: whether every term gets κ·(q − p).
        """
        self.divergence, self.columns, self.counterparts = divergence, columns, counterparts
        self.rest, self.others, self.balanced = rest, others, balanced
        self._balance = divergence.balance if balanced else 0.0

    def value(self, log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of D for n chunks. Called by all ranks alike, because the sorted distance communicates.

        Args:
            log_q: [n, width], the student's log-probabilities of this rank's columns.
            log_p: [n, V_t], the teacher's.

        Returns:
            This rank's part of the terms over pairs [n], to be summed over the ranks; the sorted distance [n], equal on
            all ranks; and what `slope` needs as `counted`.
        """
        p, q = Distribution(log_p[:, self.counterparts]), Distribution(log_q[:, self.columns])
        paired = self.divergence.value(p, q).add_(q.prob - p.prob, alpha=self._balance).sum(1)
        left = log_p if self.others is None else log_p[:, self.others]
        sorted_, counted = self.rest.compare(log_q, left)
        return paired, sorted_, counted

    def slope(self, log_q: Tensor, log_p: Tensor, counted: Tensor) -> Tensor:
        """∂D/∂log q of this rank's columns, [n, width].

        Args:
            log_q, log_p: as in `value`.
            counted: from `value`.
        """
        p, q = Distribution(log_p[:, self.counterparts]), Distribution(log_q[:, self.columns])
        slope = torch.zeros_like(log_q)
        slope[:, self.columns] = self.divergence.slope(p, q).add_(q.prob, alpha=self._balance)
        self.rest.add_slope(slope, log_q, counted)
        return slope


class DistributionRows(LabelLogprobRows):
    """Per row cross-entropy, the label's log-probability and T²·D: a chunk's D is at its first row, 0 at the others.

    With `chain`, the probability of the chunk's other tokens is a constant here, and ∂D/∂(its logarithm) is an output.
    """

    def __init__(self, labelled: LabelledRows, teacher: TeacherDistributions, comparison: Comparison):
        task = labelled.task
        super().__init__(labelled, with_label_logprob=task.options.chain)
        self.groups = {group.start if task.options.chain else task.ends[0][group.start]: group for group in task.groups}
        task = task.bare()
        self.task, self.labelled, self.teacher, self.comparison = (
            task,
            replace(labelled, task=task),
            teacher,
            comparison,
        )
        self.lender = teacher
        side = task.pairing.student
        count = task.pairing.count
        self.starts = torch.arange(count, device=side.start.device) if task.options.chain else side.start
        self.counted: dict[int, Tensor] = {}
        self.continuation = task.like.new_zeros(count)
        self.divergence, self.shared_part = (task.like.new_empty(count) for _ in range(2))
        self.mean = task.like.new_empty(labelled.num_first)
        self.continuation_slope = task.like.new_zeros(count)
        self.mass = task.like.new_zeros(count), task.like.new_zeros(count)

    @property
    def passes(self) -> list[Pass]:
        return [(self.collect, self._complete_first), (self._collect_chunks, self._complete_chunks)]

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values, _ = super().outputs()
        kd = torch.zeros_like(values[0])
        kd[self.starts] = self.task.temperature**2 * self.divergence
        return (*values, kd), (self.continuation_slope, *self.mass)

    def _complete_first(self, rows: slice) -> None:
        """Sets cross-entropy and label log-probabilities of these rows; with `chain` also each chunk's `continuation`.

        That is the log-probability of its tokens after the first.
        """
        self.complete(rows)
        if self.task.options.chain:
            self.continuation = self.task.pairing.student.after_first(
                self.labelled.of_student_side(self.values[1])
            ).clamp_max(0)

    def _collect_chunks(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        """Second pass: stores D's parts, Σ s·ρ and both masses for the chunks that these rows belong to.

        They are this rank's parts, but for the sorted distance. Does nothing for rows in no chunk. Keeps which columns
        the sorted distance counted, so that backward counts the same.
        """
        group = self.groups.get(rows.start) if rows.start < self.labelled.num_first else None
        if group is None:
            return
        log_q, share, _ = self._student_distributions(rows, group, u, buffers.buffer("work", u.shape[0]))
        log_p = self._teacher(group)
        own, shared, counted = self.comparison.value(log_q, log_p)
        self.divergence[group], self.shared_part[group] = own, shared
        self.counted[rows.start] = counted
        slope = self._by_row(self.comparison.slope(log_q, log_p, counted), group)
        self.mean[rows] = (slope if share is None else slope.mul_(share)).sum(1)
        teacher, student = self.mass
        teacher[group] = log_p[:, self.comparison.counterparts].exp().sum(1)
        student[group] = log_q[:, self.comparison.columns].exp().sum(1)

    def _complete_chunks(self, rows: slice) -> None:
        """Sums all chunks' parts of D, Σ s·ρ and the masses over the ranks, and adds the sorted distance to D.

        With `chain` also adds the outcome "what is missing to one". Balanced D is clamped at 0.

        Args:
            rows: not used; must be all rows.
        """
        self.shard.sum_(self.divergence, self.mean, *self.mass)
        self.divergence += self.shared_part
        if self.task.options.chain:
            q, p = (side.exp() for side in (complement(self.continuation), self.teacher.complement))
            self.divergence += (q - p).abs()
            self.continuation_slope = self.mean - (q - p).sign() * self.continuation.exp()
        if self.comparison.balanced:
            self.divergence.clamp_min_(0)

    def _student_distributions(
        self, rows: slice, group: slice, u: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The student's distributions of a group of chunks over this rank's columns.

        Args:
            u: [n rows, width], the loaded logits of the group's rows.

        Returns:
            (log Q, ρ, log q). log Q [n chunks, width]: of each chunk, the mean of its rows' distributions, or with
            `chain` its first row's times the probability of the other tokens. ρ [n rows, width]: each row's part of
            that mean; None: 1 everywhere.
            log q [n rows, width]: of each row, written into `out`, which may be `u`. log Q may be the same tensor.
        """
        log_q = torch.sub(u, self.lse[rows, None], out=out)
        if self.task.options.chain:
            return log_q + self.continuation[group, None], None, log_q
        length = self.task.pairing.student.length[group]
        if length.shape[0] == log_q.shape[0]:
            return log_q, None, log_q
        largest = torch.segment_reduce(log_q, "max", lengths=length, axis=0, unsafe=True)
        share = (log_q - self._by_row(largest, group)).exp_()
        total = segment_sum(share, length)
        share /= self._by_row(total, group)
        return largest + (total / length[:, None]).log_(), share, log_q

    def _teacher(self, group: slice) -> Tensor:
        """The teacher's log-probs of the chunks of a group, [n, V_t]; with `chain`, its continuation's are added."""
        log_p = self.teacher.of(group)
        return log_p + self.teacher.continuation[group, None] if self.task.options.chain else log_p

    def _by_row(self, values: Tensor, group: slice) -> Tensor:
        """Repeats each chunk's values for every student row of the chunk: [n chunks, …] → [n rows, …].

        Unchanged with `chain`, which streams one row per chunk.
        """
        if self.task.options.chain:
            return values
        start, stop = (self.task.ends[0][number] for number in (group.start, group.stop))
        if stop - start == values.shape[0]:
            return values
        return values.repeat_interleave(self.task.pairing.student.length[group], 0, output_size=stop - start)

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        """The gradient of T²·D (module docstring) plus that of the label terms, [n, width]; u is overwritten."""
        group = self.groups.get(rows.start) if rows.start < self.labelled.num_first else None
        grad = given(grads, 2)
        if group is None or grad is None:
            return super().gradient(rows, u, grads, buffers)
        label = self.label_gradient(rows, u, grads, buffers)
        log_mean, share, log_q = self._student_distributions(rows, group, u, u)
        slope = self._by_row(self.comparison.slope(log_mean, self._teacher(group), self.counted[rows.start]), group)
        weight = self._by_row(grad[self.starts[group] - rows.start], group).to(u.dtype) * self.task.temperature
        gradient = (slope if share is None else slope.mul_(share)).mul_(weight[:, None])
        gradient.addcmul_(log_q.exp_(), (label.shared - weight * self.mean[rows])[:, None])
        return label.add_to(gradient)


def gold(task: ChunkTask) -> Terms:
    """The terms of `gold`: balanced divergence over the common vocabulary plus sorted L1 over other columns."""
    return _by_parts(task, balanced=True)


def hkl(task: ChunkTask) -> Terms:
    """The terms of `hkl`: divergence without balance over the common vocabulary plus sorted L1 over other columns."""
    return _by_parts(task, balanced=False)


def _by_parts(task: ChunkTask, *, balanced: bool) -> Terms:
    """`gold` and `hkl`: divergence over the common vocabulary plus sorted L1 over up to `uncommon_top_k` others.

    With `relaxed`, the common vocabulary includes the relaxed matches.

    Args:
        balanced: True for gold, False for hkl (module docstring).
    """
    student, teacher = task.projection.matches(task.options.relaxed)
    of_student, of_teacher = _others(student, task.shard.total), _others(teacher, task.projection.num_teacher)
    length = min(len(of_student), len(of_teacher), task.options.uncommon_top_k)
    mine = task.shard.columns(of_student)
    rest = SortedL1(task.shard, mine[mine < task.shard.size], len(of_student), length, filled=False)
    columns = task.shard.columns(student)
    held = columns < task.shard.size
    comparison = Comparison(task.divergence, columns[held], teacher[held], rest, of_teacher, balanced=balanced)
    return _compared(task, comparison)


def uld(task: ChunkTask) -> Terms:
    """The terms of `uld`: sorted L1 over the `uncommon_top_k` largest probabilities of either side."""
    length = min(max(task.shard.total, task.projection.num_teacher), task.options.uncommon_top_k)
    nothing = task.label_rows[:0]
    rest = SortedL1(task.shard, None, task.shard.total, length, filled=True)
    return _compared(task, Comparison(task.divergence, nothing, nothing, rest, None))


def _compared(task: ChunkTask, comparison: Comparison) -> Terms:
    """Runs a comparison over all chunks: T²·D per chunk, the cross-entropy per row, the masses of 1:1 chunks."""
    side = task.pairing.student
    cuts = None if task.options.chain else [task.ends[0][group.stop] for group in task.groups]
    labelled = task.labelled_rows(side.first if task.options.chain else side.rows, cuts)
    function = DistributionRows(labelled, TeacherDistributions(task), comparison)
    ce, label_logprobs, kd, slope, *masses = labelled.run(function)
    by_chunk = kd[function.starts]
    if task.options.chain:
        continuation = side.after_first(labelled.of_student_side(label_logprobs))
        # Adds 0 to the value, and the derivative with respect to the continuation.
        by_chunk = by_chunk + task.temperature**2 * slope * (continuation - continuation.detach())
    paired = task.pairing.one_to_one
    return Terms(by_chunk, labelled.scatter(ce), task.pairing.count, *(mass[paired] for mass in masses))


def _others(ids: Tensor, size: int) -> Tensor:
    """All ids below `size` that are not in `ids`, in ascending order, int64."""
    return torch.ones(size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, False).nonzero()[:, 0]
