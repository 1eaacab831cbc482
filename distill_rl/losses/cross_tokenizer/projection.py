"""From the student's vocabulary to the teacher's: the tokens in common, and a sparse row-stochastic matrix for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from distill_rl.losses.core.rows import padded_width
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.cross_tokenizer.chunks import segment_sum

RELAXED_WEIGHT = 0.6
"""A relaxed match is an entry of W of at least this weight (NeMo-RL #2245)."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class VocabularyProjection:
    """W [V_s, V_t] in CSR format, the common vocabulary, and both sides' stop tokens.

    Row s of W distributes student token s over teacher tokens. It sums to 1, or is empty (padding). V_s and V_t count
    columns of logits, padding included.
    """

    indptr: Tensor
    """int64 [V_s + 1]"""
    indices: Tensor
    """int64 [nnz], teacher ids, distinct within a row"""
    values: Tensor
    """float [nnz], positive; may require a gradient, see `LearnableProjection`"""
    num_teacher: int
    """V_t"""
    student_common: Tensor
    """int64 [n], distinct"""
    teacher_common: Tensor
    """int64 [n], distinct: token i of one is token i of the other"""
    student_stops: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [m], distinct: tokens by which the student may end an answer; without any, stop tokens are like others"""
    teacher_stops: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [m], distinct"""
    _made: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_arrays(
        cls,
        indptr: Any,
        indices: Any,
        values: Any,
        *,
        num_teacher: int,
        student_common: Any,
        teacher_common: Any,
        student_stops: Any = (),
        teacher_stops: Any = (),
    ) -> VocabularyProjection:
        """A projection from arrays or lists in compressed-row form, copied into tensors: int64 ids, fp32 values.

        Args:
            indptr, indices, values: row s holds `values[indptr[s]:indptr[s + 1]]` at the teacher ids `indices[…]`.
            student_common, teacher_common: pairs of ids that spell the same.
            student_stops, teacher_stops: stop tokens of either side.
        """

        def ids(of: Any) -> Tensor:
            return torch.tensor(of, dtype=torch.int64)

        weights = torch.tensor(values, dtype=torch.float32)
        return cls(
            ids(indptr), ids(indices), weights, num_teacher, ids(student_common), ids(teacher_common),
            ids(student_stops), ids(teacher_stops),
        )  # fmt: skip

    @classmethod
    def from_projection(cls, projection: Any) -> VocabularyProjection:
        """Copies a `distill_rl.align.Projection` into tensors, as `from_arrays` does."""
        names = [each.name for each in fields(cls) if each.name != "_made"]
        return cls.from_arrays(**{name: getattr(projection, name) for name in names})

    @property
    def num_student(self) -> int:
        """V_s"""
        return self.indptr.shape[0] - 1

    def to(self, device: torch.device | str) -> VocabularyProjection:
        """A copy whose tensors are on `device`; derived tables are computed there again."""
        moved: dict[str, Any] = {name: each.to(device) for name, each in vars(self).items() if isinstance(each, Tensor)}
        return replace(self, **moved, _made={})

    @property
    def to_student(self) -> Tensor:
        """int64 [V_t], the common vocabulary's student id of each teacher id, −1 where there is none."""

        def make() -> Tensor:
            table = torch.full((self.num_teacher,), -1, dtype=torch.int64, device=self.indptr.device)
            return table.index_copy_(0, self.teacher_common, self.student_common)

        return self.once("to_student", make)

    def matches(self, relaxed: bool) -> tuple[Tensor, Tensor]:
        """Student ids and teacher ids, int64 [n] each: pair i is taken for one token. No id occurs twice on its side.

        They are the common vocabulary. Relaxed, there are more: a student token without a match is given the teacher
        token into which it goes with a weight of at least `RELAXED_WEIGHT`, if that has none; of several the heaviest
        gets it, of equals the lowest id.
        """
        if not relaxed:
            return self.student_common, self.teacher_common
        return self.once("relaxed", self._relaxed_matches)

    def _relaxed_matches(self) -> tuple[Tensor, Tensor]:
        # The common pairs, then pairs of at least `RELAXED_WEIGHT` of which neither id is in a common pair. They are sorted by
        # teacher id, weight and student id: of each teacher id the first stays.
        rows, values = self.entry_rows, self.values.detach()
        taken = torch.zeros(self.num_student, dtype=torch.bool, device=rows.device)
        taken[self.student_common] = True
        free = (values >= RELAXED_WEIGHT) & ~taken[rows] & (self.to_student[self.indices] < 0)
        student, teacher, weight = rows[free], self.indices[free], values[free]  # by student id
        order = weight.sort(descending=True, stable=True).indices
        order = order[teacher[order].sort(stable=True).indices]
        student, teacher = student[order], teacher[order]
        best = torch.ones_like(teacher, dtype=torch.bool)
        best[1:] = teacher[1:] != teacher[:-1]
        return torch.cat([self.student_common, student[best]]), torch.cat([self.teacher_common, teacher[best]])

    @property
    def reachable(self) -> Tensor:
        """bool [V_t], the teacher ids into which at least one student token is projected."""
        nothing = torch.zeros(self.num_teacher, dtype=torch.bool, device=self.indptr.device)
        return self.once("reachable", lambda: nothing.index_fill_(0, self.indices, True))

    @property
    def entry_rows(self) -> Tensor:
        """int64 [nnz], the student id of each entry of W."""
        numbers = torch.arange(self.num_student, device=self.indptr.device)
        return self.once("rows", lambda: numbers.repeat_interleave(self.indptr.diff()))

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """The result of `make()`, called only the first time for this `key`; later calls return the same object."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class ColumnProduct:
    """Products with this rank's rows of W and some of its columns; the other columns are summed into one, the rest.

    x stands for numbers per row of logits and local student column, [n, width] with the dummy columns
    (`core.rows.Buffers`).
    """

    def __init__(self, projection: VocabularyProjection, shard: VocabularyShard, columns: Tensor, dtype: torch.dtype):
        """
        Args:
            columns: int64 [m], distinct teacher ids.
            dtype: of the products.
        """
        ends = (shard.offset, shard.offset + shard.size)
        start, stop = projection.once(ends, lambda: projection.indptr[list(ends)].tolist())
        self.shard, self._entries, self._count = shard, slice(start, stop), projection.indices.shape[0]
        self._rows = projection.entry_rows[self._entries] - shard.offset
        self.slots = torch.full((projection.num_teacher,), -1, dtype=torch.int64, device=columns.device)
        """int64 [V_t], the place of a teacher id among the columns, −1 for the rest"""
        self.slots[columns] = torch.arange(columns.shape[0], device=columns.device)
        self._slots = self.slots[projection.indices[self._entries]]
        self._kept = (self._slots >= 0).nonzero()[:, 0]
        weights = projection.values.detach()[self._entries].to(dtype)
        rows, slots, kept = self._rows[self._kept], self._slots[self._kept], weights[self._kept]
        self.width = columns.shape[0]
        student_width = padded_width(shard.size)
        size = student_width, self.width
        self._matrix = _sparse(rows, slots, kept, size)
        order = slots.sort(stable=True).indices
        self._transposed = _sparse(slots[order], rows[order], kept[order], size[::-1])
        lengths = projection.indptr.diff()[shard.offset : shard.offset + shard.size]
        outside = segment_sum(torch.where(self._slots < 0, weights, 0), lengths)
        self.rest = torch.cat([torch.where(lengths == 0, 1, outside), weights.new_zeros(student_width - shard.size)])
        """[width], the part of each row of W outside the columns; 1 where a row is empty"""
        self._gradient = weights.new_zeros(weights.shape[0])

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x · W: its columns [n, m], and the rest [n]: all other columns, and x of the rows of W without entries."""
        return torch.sparse.mm(self._transposed, x.T).T, x @ self.rest

    def project_back(self, y: Tensor, rest: Tensor) -> Tensor:
        """The transpose of `project`, [n, width]: y [n, m] · Wᵀ plus the outer product of `rest` and `self.rest`."""
        return torch.sparse.mm(self._matrix, y.T).T.addcmul(rest[:, None], self.rest)

    def learn(self, x: Tensor, y: Tensor, rest: Tensor) -> None:
        """Adds the derivative of Σ y · (x · W) + Σ rest · (the rest of x · W) by this rank's weights to `gradient`.

        Args:
            x: [n, width].
            y: [n, m].
            rest: [n].
        """
        gradient = (rest @ x)[self._rows]
        for part in self._kept.split(_ENTRIES):
            gradient[part] = (x[:, self._rows[part]] * y[:, self._slots[part]]).sum(0)
        self._gradient += gradient

    def gradient(self) -> Tensor:
        """Returns the derivatives added by `learn`, [nnz], 0 for other ranks' rows of W, and resets them to 0."""
        whole = self._gradient.new_zeros(self._count)
        whole[self._entries], self._gradient = self._gradient, torch.zeros_like(self._gradient)
        return whole


_ENTRIES = 2**14
"""Entries of W whose derivative is taken at once; each costs a number per row of logits."""


def _sparse(rows: Tensor, columns: Tensor, values: Tensor, size: tuple[int, ...]) -> Tensor:
    """A sparse COO matrix of these entries, which must be distinct and in the order of their rows."""
    # It is marked as coalesced unchecked, because a check would wait for a GPU.
    # torch 2.11 warns of `check_invariants=False` as it does of no word at all; of the context it does not.
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(torch.stack([rows, columns]), values, size, is_coalesced=True)


class LearnableProjection(nn.Module):
    """W with weights that are learned: each row the softmax of parameters on the row's fixed support.

    Rows stay stochastic whatever the optimiser does, and start as they were. The parameters are replicated over all
    ranks; after backward each rank has its own share of their gradient: of its data-parallel part of the batch, and of
    the rows of W that belong to its part of the student's vocabulary. The sum over *all* ranks of the student, data-
    and tensor-parallel alike, is the gradient: one all-reduce a step, taken by the code that steps the optimiser.
    """

    def __init__(self, projection: VocabularyProjection):
        super().__init__()
        self._projection = projection
        self._width = int(projection.indptr.diff().max()) if len(projection.indices) else 1
        self.logits = nn.Parameter(projection.values.detach().float().clamp_min(torch.finfo(torch.float32).tiny).log())
        """[nnz]"""

    def forward(self) -> VocabularyProjection:
        """The projection with the present weights, through which gradients reach the parameters."""
        projection = self._projection
        rows = projection.entry_rows
        places = torch.arange(len(rows), device=rows.device) - projection.indptr[rows]
        logits: Tensor = self.logits
        if isinstance(logits, DTensor):  # the gradient comes back as Partial: each rank's is one summand
            logits = logits.to_local(grad_placements=[Partial()] * logits.device_mesh.ndim)
        # padded rows: a softmax of a few columns sums in one order on every device
        padded = logits.new_full((projection.num_student, self._width), -1e30).index_put((rows, places), logits)
        # Derived tables are shared, so relaxed matches stay those of the first values they were asked for.
        return replace(projection, values=padded.softmax(1)[rows, places])
