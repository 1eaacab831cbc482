"""The methods `gold`, `hkl` and `uld`: whole distributions of a chunk, over both vocabularies.

With C the pairs (s, t) of the common vocabulary, Q and P the two sides' distributions of a chunk, and sorted L1 the
distance Σ_i |Q_(i) − P_(i)| of probabilities sorted by size (`SortedL1`, arXiv 2402.12030):

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
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from distill_rl.losses.core.rows import Buffers, Pass, floor_of, given
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.cross_tokenizer.chunks import segment_sum
from distill_rl.losses.cross_tokenizer.task import (
    ChunkTask,
    LabelledRows,
    LabelLogprobRows,
    TeacherDistributions,
    Terms,
    complement,
)
from distill_rl.losses.divergence import Distribution, Divergence


class SortedL1:
    """Σ_i |q_(i) − p_(i)| over the largest `length` probabilities of either side, whatever their tokens.

    A side with fewer is filled up with zeros (`filled`), or the sum ends where the side with fewer unmasked columns does.
    Of equal probabilities the lower id comes first, so that the derivative does not depend on the sharding.
    """

    def __init__(self, shard: VocabularyShard, columns: Tensor | None, total: int, length: int, *, filled: bool):
        """
        Args:
            columns: local columns of the student that are compared, None for all; `total` of them over all ranks.
        """
        self.shard, self.columns, self.length, self.filled = shard, columns, length, filled
        self._width = min(length, total)  # how many a rank may have among the largest

    def compare(self, log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """The distance of each row's sorted probabilities, and which columns it counted. Called by all ranks alike.

        Args:
            log_q: [n, width], the student's log-probabilities of this rank's columns.
            log_p: [n, any], those of the teacher.

        Returns:
            The sum [n], the same on every rank; and `counted` for `add_slope`, int32 [n, m]: positions (from 1) of this
            rank's largest columns, with the sign of q − p, 0 for those that do not count.
        """
        # Dummy columns are never among those that are compared.
        own = log_q[:, : self.shard.size] if self.columns is None else log_q[:, self.columns]
        values, places = own.exp().sort(dim=1, descending=True, stable=True)
        values, places = values[:, : self._width], places[:, : self._width]
        held, present = values.shape[1], _present(own)
        ranked, order = values, None
        if self.shard.group is not None:  # the largest of all ranks' largest
            padded = values.new_zeros(values.shape[0], self._width + 1)
            padded[:, :held], padded[:, -1] = values, present
            parts = self.shard.gather(padded)
            present = torch.stack([part[:, -1] for part in parts]).sum(0)
            candidates = torch.cat([part[:, :-1] for part in parts], 1)
            ranked, order = candidates.sort(dim=1, descending=True, stable=True)
            ranked, order = ranked[:, : self.length], order[:, : self.length]
        difference = self._padded(ranked) - self._padded(log_p.topk(min(self.length, log_p.shape[1]), 1).values.exp())
        if not self.filled:
            places_left = torch.minimum(present, _present(log_p))
            beyond = torch.arange(self.length, device=difference.device) >= places_left[:, None]
            difference = difference.masked_fill(beyond, 0)
        sides = difference[:, : ranked.shape[1]].sign()
        if order is not None:
            first = self.shard.rank * self._width
            sides = torch.zeros_like(candidates).scatter_(1, order, sides)[:, first : first + held]
        return difference.abs().sum(1), sides.to(torch.int32) * (places + 1).to(torch.int32)

    def add_slope(self, slope: Tensor, log_q: Tensor, counted: Tensor) -> None:
        """Adds the derivative of the sum with respect to log q to `slope` [n, width], in place."""
        places = counted.abs().long() - 1
        columns = places.clamp_min(0) if self.columns is None else self.columns[places.clamp_min(0)]
        if columns.shape[1]:
            slope.scatter_add_(1, columns, counted.sign() * log_q.gather(1, columns).exp())

    def _padded(self, values: Tensor) -> Tensor:
        missing = self.length - values.shape[1]
        return pad(values, (0, missing)) if missing > 0 else values


def _present(logprobs: Tensor) -> Tensor:
    """[n], how many of a row's columns are not masked, in the dtype of the row."""
    return (logprobs > floor_of(logprobs.dtype) / 2).sum(1).to(logprobs.dtype)


@dataclass(frozen=True)
class ChunkComparison:
    """D of one chunk: terms over pairs of columns, and sorted L1 over the other columns."""

    divergence: Divergence
    columns: Tensor  # this rank's columns of the student that have a counterpart
    counterparts: Tensor  # the teacher's columns that they are compared with
    rest: SortedL1  # over the student's other columns
    others: Tensor | None  # the teacher's columns without a counterpart; None: all of its columns
    balanced: bool = True  # whether every term gets κ·(q − p)

    @property
    def _balance(self) -> float:
        return self.divergence.balance if self.balanced else 0.0

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
        return paired, *self.rest.compare(log_q, log_p if self.others is None else log_p[:, self.others])

    def slope(self, log_q: Tensor, log_p: Tensor, counted: Tensor) -> Tensor:
        """∂D/∂log q of this rank's columns, [n, width]."""
        p, q = Distribution(log_p[:, self.counterparts]), Distribution(log_q[:, self.columns])
        slope = torch.zeros_like(log_q)
        slope[:, self.columns] = self.divergence.slope(p, q).add_(q.prob, alpha=self._balance)
        self.rest.add_slope(slope, log_q, counted)
        return slope


class DistributionRows(LabelLogprobRows):
    """Per row cross-entropy, the label's log-probability and T²·D: a chunk's D is at its first row, 0 at the others.

    With `chain`, the probability of the chunk's other tokens is a constant here, and ∂D/∂(its logarithm) is an output.
    """

    def __init__(self, labelled: LabelledRows, teacher: TeacherDistributions, comparison: ChunkComparison):
        task, chain = labelled.task, labelled.task.settings.chain
        super().__init__(labelled, with_label_logprob=chain)
        self.groups = {group.start if chain else task.ends[0][group.start]: group for group in task.groups}
        self.chain, self.teacher, self.lender, self.comparison = chain, teacher, teacher.teacher, comparison
        side, count = task.pairing.student, task.pairing.count
        self.side, self.num_first = side, labelled.num_first
        if chain:
            self.starts, self.places = torch.arange(count, device=side.start.device), labelled.place(side.rows)
        else:
            self.starts, self.ends = side.start, task.ends[0]
        self.counted: dict[int, Tensor] = {}
        self.continuation, self.continuation_slope, *self.masses = (task.like.new_zeros(count) for _ in range(4))
        self.divergence, self.shared_part = (task.like.new_empty(count) for _ in range(2))
        self.mean = task.like.new_empty(labelled.num_first)

    @property
    def passes(self) -> list[Pass]:
        return [(self.collect, self._complete_first), (self._collect_chunks, self._complete_chunks)]

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values, _ = super().outputs()
        kd = torch.zeros_like(values[0])
        kd[self.starts] = self.temperature**2 * self.divergence
        return (*values, kd), (self.continuation_slope, *self.masses)

    def _complete_first(self, rows: slice) -> None:
        self.complete(rows)
        if self.chain:  # the log-probability of each chunk's tokens after the first
            self.continuation = self.side.after_first(self.values[1][self.places]).clamp_max(0)

    def _collect_chunks(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        # Second pass, over chunks of text: this rank's parts of D, of Σ s·ρ and of both masses, and the sorted distance.
        # Which columns that has counted is kept, so that backward counts the same.
        group = self._group_of(rows)
        if group is None:
            return
        log_q, share, _ = self._student_distributions(rows, group, u, buffers.buffer("work", u.shape[0]))
        log_p = self._teacher(group)
        self.divergence[group], self.shared_part[group], counted = self.comparison.value(log_q, log_p)
        self.counted[rows.start] = counted
        slope = self._by_row(self.comparison.slope(log_q, log_p, counted), group)
        self.mean[rows] = (slope if share is None else slope.mul_(share)).sum(1)
        teacher, student = self.masses
        teacher[group] = log_p[:, self.comparison.counterparts].exp().sum(1)
        student[group] = log_q[:, self.comparison.columns].exp().sum(1)

    def _complete_chunks(self, rows: slice) -> None:
        # Called once, for all rows: the chunks' parts are summed over the ranks, and the sorted distance joins D.
        self.shard.sum_(self.divergence, self.mean, *self.masses)
        self.divergence += self.shared_part
        if self.chain:  # one more outcome: what is missing to one
            q, p = (side.exp() for side in (complement(self.continuation), complement(self.teacher.continuation)))
            self.divergence += (q - p).abs()
            self.continuation_slope = self.mean - (q - p).sign() * self.continuation.exp()
        if self.comparison.balanced:
            self.divergence.clamp_min_(0)

    def _group_of(self, rows: slice) -> slice | None:
        """The chunks of text whose rows these are; None for rows in no chunk."""
        return self.groups.get(rows.start) if rows.start < self.num_first else None

    def _student_distributions(
        self, rows: slice, group: slice, u: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(log Q, ρ, log q) of a group of chunks over this rank's columns, from the logits u of its rows."""
        # log Q [n chunks, width]: of each chunk, the mean of its rows' distributions, or with `chain` its first row's times
        # the probability of the other tokens. ρ [n rows, width]: each row's part of that mean; None: 1 everywhere.
        # log q [n rows, width]: of each row, written into `out`, which may be `u`. log Q may be the same tensor.
        log_q = torch.sub(u, self.lse[rows, None], out=out)
        if self.chain:
            return log_q + self.continuation[group, None], None, log_q
        length = self.side.length[group]
        if length.shape[0] == log_q.shape[0]:
            return log_q, None, log_q
        largest = torch.segment_reduce(log_q, "max", lengths=length, axis=0, unsafe=True)
        share = (log_q - self._by_row(largest, group)).exp_()
        total = segment_sum(share, length)
        share /= self._by_row(total, group)
        return largest + (total / length[:, None]).log_(), share, log_q

    def _teacher(self, group: slice) -> Tensor:
        """The teacher's log-probabilities of the chunks of a group, [n, V_t]; with `chain`, of all their tokens."""
        log_p = self.teacher.of(group)
        return log_p + self.teacher.continuation[group, None] if self.chain else log_p

    def _by_row(self, values: Tensor, group: slice) -> Tensor:
        """Repeats each chunk's values for every row that is streamed of it: [n chunks, …] → [n rows, …]."""
        if self.chain:
            return values
        count = self.ends[group.stop] - self.ends[group.start]
        if count == values.shape[0]:
            return values
        return values.repeat_interleave(self.side.length[group], 0, output_size=count)

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        group, grad = self._group_of(rows), given(grads, 2)
        if group is None or grad is None:
            return super().gradient(rows, u, grads, buffers)
        label = self.label_gradient(rows, u, grads, buffers)
        log_mean, share, log_q = self._student_distributions(rows, group, u, u)
        slope = self._by_row(self.comparison.slope(log_mean, self._teacher(group), self.counted[rows.start]), group)
        weight = self._by_row(grad[self.starts[group] - rows.start], group).to(u.dtype) * self.temperature
        gradient = (slope if share is None else slope.mul_(share)).mul_(weight[:, None])
        gradient.addcmul_(log_q.exp_(), (label.shared - weight * self.mean[rows])[:, None])
        return label.add_to(gradient)


def by_parts(task: ChunkTask, *, balanced: bool) -> Terms:
    """`gold` if `balanced`, else `hkl`."""
    student, teacher = task.projection.matches(task.settings.relaxed)
    of_student, of_teacher = _others(student, task.shard.total), _others(teacher, task.projection.num_teacher)
    length = min(len(of_student), len(of_teacher), task.settings.uncommon_top_k)
    mine = task.shard.columns(of_student)
    rest = SortedL1(task.shard, mine[mine < task.shard.size], len(of_student), length, filled=False)
    columns = task.shard.columns(student)
    held = columns < task.shard.size
    divergence = task.settings.divergence
    comparison = ChunkComparison(divergence, columns[held], teacher[held], rest, of_teacher, balanced=balanced)
    return _compared(task, comparison)


def uld(task: ChunkTask) -> Terms:
    length = min(max(task.shard.total, task.projection.num_teacher), task.settings.uncommon_top_k)
    nothing = task.label_rows[:0]
    rest = SortedL1(task.shard, None, task.shard.total, length, filled=True)
    return _compared(task, ChunkComparison(task.settings.divergence, nothing, nothing, rest, None))


def _compared(task: ChunkTask, comparison: ChunkComparison) -> Terms:
    side, chain = task.pairing.student, task.settings.chain
    if chain:
        labelled = task.labelled_rows(side.first)
    else:
        ends = task.ends[0]
        labelled = task.labelled_rows(side.rows, [slice(ends[group.start], ends[group.stop]) for group in task.groups])
    function = DistributionRows(labelled, TeacherDistributions(task), comparison)
    ce, label_logprobs, kd, slope, *masses = labelled.run(function)
    by_chunk = kd[function.starts]
    if chain:
        continuation = side.after_first(labelled.of_student_side(label_logprobs))
        # Adds 0 to the value, and the derivative with respect to the continuation.
        by_chunk = by_chunk + task.settings.temperature**2 * slope * (continuation - continuation.detach())
    paired = task.pairing.one_to_one
    return Terms(by_chunk, labelled.scatter(ce), task.pairing.count, *(mass[paired] for mass in masses))


def _others(ids: Tensor, size: int) -> Tensor:
    """All ids below `size` that are not in `ids`, in ascending order, int64."""
    return torch.ones(size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, False).nonzero()[:, 0]
