"""The teacher's distribution over its own vocabulary for each chunk, a group of chunks at a time."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property

import torch
from torch import Tensor

from distill_rl.losses.core.streaming import floor_of
from distill_rl.losses.cross_tokenizer.chunks import segment_sum
from distill_rl.losses.cross_tokenizer.rows import log1mexp
from distill_rl.losses.cross_tokenizer.task import ChunkTask


class TeacherDistributions:
    """The teacher's distribution of each chunk.

    `mean`: the normalised geometric mean of the chunk's rows. `chain`: its first row, with the other tokens in
    `continuation`.
    """

    def __init__(self, task: ChunkTask):
        self._teacher = copy(task.dense_teacher())
        self._side = task.pairing.teacher
        self.continuation = (
            self._side.after_first(task.teacher_label).clamp_max(0)
            if task.options.chain
            else task.like.new_zeros(task.pairing.count)
        )
        """[count], log-probability of a chunk's tokens after the first; 0 with `mean`."""
        self._task = task.bare()

    def to_save(self) -> tuple[Tensor, ...]:
        """Returns the teacher's tensors and drops them until `restore`; see `RowFunction.to_save`."""
        return self._teacher.to_save()

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """See `RowFunction.restore`."""
        self._teacher.restore(tensors)

    def of(self, group: slice) -> Tensor:
        """The teacher's log-probabilities of each chunk of a group, [n, V_t], at least the floor (class docstring).

        With `chain` `continuation` is not added.

        Args:
            group: consecutive chunk numbers.
        """
        floor = floor_of(self._task.dtype)
        if self._task.options.chain:
            return self._rows(self._side.first[group]).clamp_min(floor)
        start = self._starts[group.start]
        rows = self._rows(self._side.rows[start : self._starts[group.stop]])
        length = self._side.length[group]
        if rows.shape[0] != length.shape[0]:
            share = length.to(rows.dtype).repeat_interleave(length, output_size=rows.shape[0])
            rows = segment_sum(rows.clamp_min(floor).div_(share[:, None]), length).log_softmax(1)
        return rows.clamp_min(floor)

    def _rows(self, rows: Tensor) -> Tensor:
        """The teacher's log-probabilities at T of the rows with these numbers, [len(rows), V_t]."""
        return self._teacher.of(rows, self._task.dtype).mul_(1 / self._task.temperature).log_softmax(1)

    @property
    def _starts(self) -> list[int]:
        """For each chunk, where its teacher rows begin in `Side.rows`; then the total."""
        return self._task.ends[1]

    @cached_property
    def complement(self) -> Tensor:
        """[count], log(1 − exp(continuation)): the chunk's later tokens do not follow; the floor with `mean`."""
        return complement(self.continuation)


def complement(logprob: Tensor) -> Tensor:
    """log(1 − exp(logprob)) elementwise; the floor where `logprob` is not below 0."""
    some = logprob < 0
    return torch.where(some, log1mexp(torch.where(some, logprob, -1)), floor_of(logprob.dtype))
