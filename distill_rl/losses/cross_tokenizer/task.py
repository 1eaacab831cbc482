"""The checked arguments of a cross-tokenizer loss, and the order in which its rows are streamed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from distill_rl.losses.core import checks
from distill_rl.losses.core.logits.given import GivenLogits
from distill_rl.losses.core.logits.head import TeacherLogits
from distill_rl.losses.core.row_function import RowFunction, StudentLogits
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.core.streaming import RowPlan, chunks
from distill_rl.losses.cross_tokenizer.chunks import Chunks, Pairing, pair
from distill_rl.losses.cross_tokenizer.projection import VocabularyProjection
from distill_rl.losses.divergence import Divergence
from distill_rl.losses.options import CrossTokenizerOptions
from distill_rl.losses.targets import DenseLogits, Teacher, TeacherHidden, TopKLogprobs


@dataclass(frozen=True)
class ChunkTask:
    """One call of `chunk_kd_loss`, checked."""

    student: StudentLogits
    shard: VocabularyShard
    labels: Tensor
    """int64 [N_s], −1 for ignored rows."""
    label_rows: Tensor
    """int64 [M], the numbers of the rows that have a label."""
    pairing: Pairing
    teacher: TopKLogprobs | TeacherLogits
    projection: VocabularyProjection
    options: CrossTokenizerOptions
    piece: int
    """Rows of logits, of the student's vocabulary or the teacher's, to work on at once."""

    @property
    def temperature(self) -> float:
        return self.options.temperature

    @cached_property
    def divergence(self) -> Divergence:
        return self.options.resolved()

    @property
    def dtype(self) -> torch.dtype:
        return self.student.like.dtype

    @property
    def like(self) -> Tensor:
        """An empty tensor with the device and dtype of the arithmetic."""
        return self.student.like

    @cached_property
    def teacher_label(self) -> Tensor:
        """[n], the teacher's log-probabilities of its own tokens at T, in the order of its side of the chunks."""
        given = self.teacher.label_logprob
        assert given is not None, "checked on entry"
        return given.reshape(-1)[self.pairing.teacher.rows].to(self.dtype)

    @cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """For student and teacher, count + 1 positions in `Side.rows`: where each chunk begins, then the total.

        Computed on first use, which waits for a GPU.
        """
        sides = torch.stack([self.pairing.student.length, self.pairing.teacher.length]).cumsum(1).tolist()
        return [0, *sides[0]], [0, *sides[1]]

    @cached_property
    def groups(self) -> list[slice]:
        """Slices of consecutive chunk numbers that tile all chunks.

        Each has at most `piece` rows on either side, or is one larger chunk. With `chain`, which streams a chunk's
        first row only, each has at most `piece` chunks.
        """
        count = self.pairing.count
        if self.options.chain:
            return list(chunks(count, self.piece))
        groups, start = [], 0
        while start < count:
            limits = [side[start] + self.piece for side in self.ends]
            stop = min(bisect_right(side, limit) for side, limit in zip(self.ends, limits)) - 1
            groups.append(slice(start, max(stop, start + 1)))
            start = groups[-1].stop
        return groups

    def bare(self) -> ChunkTask:
        """A copy with empty logits and teacher, for objects that live until backward; `groups` is computed before."""
        nothing = self.like.new_empty(0, 0)
        bare = replace(self, student=GivenLogits(nothing), teacher=TeacherLogits(DenseLogits(nothing)))
        bare.__dict__["groups"] = self.groups
        if not self.options.chain:
            bare.__dict__["ends"] = self.ends  # computed once: it waits for a GPU
        return bare

    def dense_teacher(self) -> TeacherLogits:
        """The teacher's targets, asserted to be over its whole vocabulary."""
        assert isinstance(self.teacher, TeacherLogits), "checked on entry"
        return self.teacher

    def labelled_rows(self, first: Tensor | None = None, cuts: list[int] | None = None) -> LabelledRows:
        """The labelled rows of the student in the order of streaming: the rows `first`, then the others.

        Args:
            first: int64, distinct numbers of labelled rows; None: no row comes first.
            cuts: where pieces within `first` end. None: pieces of `piece` rows.
        """
        count = self.label_rows.shape[0]
        if first is None:
            whole = count == self.student.num_rows
            return LabelledRows(self, None if whole else self.label_rows)
        waiting = torch.zeros(self.student.num_rows, dtype=torch.bool, device=first.device)
        waiting[self.label_rows] = True
        order = torch.cat([first, waiting.index_fill_(0, first, False).nonzero()[:, 0]])
        num_first = first.shape[0]
        ends = cuts if cuts is not None else [rows.stop for rows in chunks(num_first, self.piece)]
        pieces = [slice(start, stop) for start, stop in zip([0, *ends], ends)]
        pieces += [
            slice(num_first + rows.start, num_first + rows.stop) for rows in chunks(count - num_first, self.piece)
        ]
        return LabelledRows(self, order, tuple(pieces), num_first)


@dataclass(frozen=True)
class LabelledRows:
    """The M labelled rows in the order in which they are streamed."""

    task: ChunkTask
    order: Tensor | None = None
    """int64 [M]; None: all rows as they stand"""
    pieces: tuple[slice, ...] | None = None
    """Chunks in which the rows are streamed. None: as suits the row function that is run, which compares few columns per row"""
    num_first: int = 0
    """How many rows belong to compared chunks. They come before those that only have a cross-entropy."""

    @cached_property
    def labels(self) -> Tensor:
        """int64 [M]"""
        return self.task.labels if self.order is None else self.task.labels[self.order]

    @cached_property
    def _place(self) -> Tensor:
        """int64 [N_s], a row's position in the order; 0 for rows that are not in it."""
        assert self.order is not None
        numbers = torch.arange(self.order.shape[0], device=self.order.device)
        return torch.zeros_like(self.task.labels).index_copy_(0, self.order, numbers)

    def place(self, rows: Tensor) -> Tensor:
        """The positions in the order of the rows with these numbers, which must be labelled."""
        return rows if self.order is None else self._place[rows]

    def run(self, function: RowFunction, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Streams the rows through a row function; returns its values and then its constants, as the function has them.

        Values per row, [M], are in the order of streaming.

        Args:
            parameters: of the function.
        """
        task, pieces = self.task, self.pieces
        if pieces is None:
            size = task.options.chunk_size or task.student.default_chunk(
                task.shard.widest, dense=False, function=function
            )
            pieces = tuple(chunks(len(self.labels), size))
        return task.student.stream(function, RowPlan(pieces, self.order), *parameters)

    def of_student_side(self, values: Tensor) -> Tensor:
        """Selects from values [M] in the order those of the student's rows of all chunks, chunk by chunk, [n]."""
        return values[self.place(self.task.pairing.student.rows)]

    def scatter(self, values: Tensor) -> Tensor:
        """Values [M] in the order → [N_s] by row number, 0 for ignored rows."""
        if self.order is None:
            return values
        whole = values.new_zeros(self.task.labels.shape[0]).index_copy(0, self.order, values)
        return torch.where(self.task.labels >= 0, whole, 0)


@dataclass(frozen=True, slots=True)
class Method:
    """A way to compare chunks."""

    terms: Callable[[ChunkTask], Any]
    """Computes its `Terms`."""
    targets: tuple[str, ...]
    """Kinds of teacher targets that it accepts: topk, logits."""
    label_logprob: Literal["always", "chain", "never"]
    """When the teacher's log-probabilities of its own tokens are needed."""
    needs_common: bool = False
    """Whether the two vocabularies must have tokens in common."""
    needs_projection: bool = False
    """Whether the projection must have entries."""


def make_task(
    options: CrossTokenizerOptions,
    method: Method,
    student: StudentLogits,
    shard: VocabularyShard,
    leading: torch.Size,
    teacher: Teacher,
    numbers: Chunks,
    projection: VocabularyProjection,
    labels: Tensor,
) -> ChunkTask:
    """Checks the arguments of `chunk_kd_loss` against each other and returns them as a task.

    Args:
        method: what `options.method` requires.
        shard: the columns of the student's logits.
        leading: the dimensions of the student's rows, [N_s] or [R, S].
        numbers: `chunks` of `chunk_kd_loss`.
        projection: `bridge` of `chunk_kd_loss`.

    Raises:
        ValueError: naming the argument as `chunk_kd_loss` calls it, the rule and the value. Values of GPU tensors are
            looked at only with `options.validate`.
    """
    validate = options.validate
    labels = checks.rows("labels", labels, leading)
    valid = labels != options.ignore_index
    checks.labels("labels", labels, valid, shard.total, options.ignore_index, validate)
    given = _checked_teacher(options, method, teacher, projection)
    _check_projection(options, method, projection, shard.total)
    num_teacher = len(given.ids) if isinstance(given, TopKLogprobs) else given.num_rows
    pairing = pair(numbers, student.num_rows, num_teacher, validate)
    if isinstance(given, TopKLogprobs):
        checks.log_probabilities(given, numbers.teacher >= 0, validate)
    if checks.looked_at(validate, labels) and not bool(valid[pairing.student.rows].all()):
        raise ValueError("labels: every row of a chunk must have one; one is ignore_index")
    columns, computed = shard.widest, False
    if isinstance(given, TeacherLogits):
        columns, computed = max(columns, given.columns), given.computed
    return ChunkTask(
        student=student,
        shard=shard,
        labels=torch.where(valid, labels, -1).long(),
        label_rows=valid.nonzero()[:, 0],
        pairing=pairing,
        teacher=given,
        projection=projection,
        options=options,
        # The same on every rank, however uneven the shards: some methods end each piece with a collective.
        piece=options.chunk_size or student.default_chunk(columns, dense=True, computed=computed),
    )


def _checked_teacher(
    options: CrossTokenizerOptions, method: Method, teacher: Teacher, projection: VocabularyProjection
) -> TopKLogprobs | TeacherLogits:
    """Checks kind, shape and vocabulary of the targets, and returns them as the methods take them.

    Raises:
        ValueError: in one line that names the field.
    """
    found: TopKLogprobs | TeacherLogits
    if isinstance(teacher, DenseLogits | TeacherHidden):
        name, tensor = ("logits", teacher.logits) if isinstance(teacher, DenseLogits) else ("hidden", teacher.hidden)
        checks.floating(f"teacher.{name}", tensor, (2,))
        found = TeacherLogits(teacher)
        num_rows = found.num_rows
        if found.columns != projection.num_teacher:
            field = "logits" if name == "logits" else "lm_head_weight"
            what = f"teacher.{field}: must have the bridge's {projection.num_teacher} columns"
            raise ValueError(f"{what}; got {found.columns}")
    elif isinstance(teacher, TopKLogprobs) and "topk" in method.targets:
        found, num_rows = teacher, len(teacher.ids)
        checks.top_k(teacher, num_rows, projection.num_teacher, options.temperature, options.validate)
    else:
        kinds = "DenseLogits or TeacherHidden"
        kinds = f"TopKLogprobs, {kinds}" if "topk" in method.targets else kinds
        raise ValueError(f"teacher: must be {kinds} for {options.method}; got {type(teacher).__name__}")
    label = teacher.label_logprob
    if label is None and (method.label_logprob == "always" or (method.label_logprob == "chain" and options.chain)):
        raise ValueError(
            f"teacher.label_logprob: needed for {options.method} with chunk_average {options.chunk_average}, one per row; "
            "got None"
        )
    if label is not None and label.numel() != num_rows:
        raise ValueError(f"teacher.label_logprob: must be [N] with N = {num_rows} rows; got {list(label.shape)}")
    return found


def _check_projection(
    options: CrossTokenizerOptions, method: Method, projection: VocabularyProjection, columns: int
) -> None:
    """Requires a projection with a row per student column, and with the pairs or entries that the method needs.

    Raises:
        ValueError: in one line, under the public name of the argument (`bridge`).
    """
    if projection.num_student != columns:
        raise ValueError(
            f"bridge: must have a row for each of the student's {columns} columns; got {projection.num_student}"
        )
    if method.needs_common and not len(projection.student_common):
        raise ValueError(f"bridge: {options.method} needs a common vocabulary; got an empty one")
    if method.needs_projection and not len(projection.indices):
        raise ValueError(f"bridge: {options.method} needs a projection; got one without entries")
