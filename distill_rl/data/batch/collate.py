"""Documents' tokens → the documents of every row, these → token rows, and rows → the part of every data-parallel rank of the student and of each teacher."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from distill_rl.config.derive import ring_plan
from distill_rl.config.facts import row_width
from distill_rl.config.schema import Config
from distill_rl.data.batch.tokenization import Encoded, KnownIds
from distill_rl.types import IGNORE_INDEX, PieceRef, RankBatch, TeacherPart, TokenRows

_BLOCK = 256


@dataclass(frozen=True, slots=True)
class BatchSharding:
    """How one model's workers divide a global batch: `dp` ranks, each with `micro_batch_size` rows per forward pass."""

    dp: int
    micro_batch_size: int

    @property
    def rows(self) -> int:
        """Rows per forward pass of all ranks together; the number of rows of a batch is a multiple of this."""
        return self.dp * self.micro_batch_size


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How rows are made from documents, and how they are divided among the student's and the teachers' ranks."""

    student: BatchSharding
    teachers: tuple[BatchSharding, ...]
    max_length: int
    """Most document tokens in a row of the student, and of a teacher that reads the student's rows."""
    packing: bool
    pad_id: int
    rows_per_sub_batch: int | None = None
    """Most rows that are processed at once, because their targets must fit into the teachers' rings: a batch with more
    is processed in several sub-batches. A multiple of `row_multiple`; None: all rows are one sub-batch."""
    known_ids: tuple[KnownIds, ...] = ()
    """Of the models that read the student's rows and do not know all ids in them."""
    teacher_lengths: tuple[int, ...] = ()
    """Most document tokens in a row of each teacher that has its own tokenizer; empty: `max_length` for all."""
    split: bool = False
    """Whether documents that are too long for a row become several pieces; otherwise they are cut."""
    on_gpu: bool = False
    """Whether the rows go to GPUs; decides how wide they are (`row_width`)."""
    width_divisor: int = 1
    """What divides the width of every row, because positions are divided over ranks (`Config.width_divisor`)."""

    @classmethod
    def from_config(
        cls, config: Config, pad_id: int, *, known_ids: Sequence[KnownIds] = (), split: bool = False
    ) -> BatchPlan:
        """The plan for a run, with sub-batches if its targets do not all fit into the teachers' rings.

        `on_gpu` is False until `for_device` sets it.

        Args:
            pad_id: see `pad_id`.
            known_ids, split: see the fields.
        """
        teachers = config.running_teachers
        return cls(
            student=BatchSharding(config.student.parallel.dp, config.train.micro_batch_size),
            teachers=tuple(BatchSharding(t.parallel.dp, config.rows_of(t)) for t in teachers),
            max_length=config.data.max_length,
            packing=config.data.packing,
            pad_id=pad_id,
            known_ids=tuple(known_ids),
            rows_per_sub_batch=ring_plan(config).rows_per_sub_batch,
            teacher_lengths=tuple(config.length_of(teacher) for teacher in teachers),
            split=split,
            width_divisor=config.width_divisor,
        )

    def for_device(self, *, on_gpu: bool) -> BatchPlan:
        """This plan for GPUs or for CPUs. The driver decides: an aligner cannot see what the cluster has."""
        return replace(self, on_gpu=on_gpu)

    @property
    def num_ids(self) -> int | None:
        """Ids from here on are unknown to some model that reads the student's rows; None: all are known."""
        return min((known.count for known in self.known_ids), default=None)

    def length_of(self, teacher: int) -> int:
        """Most document tokens in a row of a teacher that has its own tokenizer, by its index."""
        return self.teacher_lengths[teacher] if self.teacher_lengths else self.max_length

    def width(self, longest: int) -> int:
        """Positions per row, if the longest row has `longest` tokens."""
        return row_width(longest, on_gpu=self.on_gpu, divisor=self.width_divisor)

    @property
    def row_multiple(self) -> int:
        """The smallest number of rows that the student and all teachers can divide evenly."""
        return math.lcm(self.student.rows, *(teacher.rows for teacher in self.teachers))

    @property
    def rows_per_width(self) -> int:
        """Rows that share a width, counted from row 0: whole micro-batches of the student and of every teacher.

        So targets have the width of the rows that they are for, whoever's micro-batch these are in.
        """
        return math.lcm(*(sharding.micro_batch_size for sharding in (self.student, *self.teachers)))


def pad_id(tokenizer: Any, num_ids: int | None = None) -> int:
    """The id to fill rows with: the tokenizer's padding token, otherwise eos, otherwise 0.

    Any valid id will do: padding has no labels, and no labelled token attends to it.

    Args:
        num_ids: ids from here on are not valid; None: all of the tokenizer's are.
    """
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(id for id in candidates if id is not None and (num_ids is None or id < num_ids))


def arrange(
    sides: Sequence[Sequence[Encoded]],
    capacities: Sequence[int],
    plan: BatchPlan,
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Which documents each row holds: their indices, in order. All sides lay out the same rows.

    With packing, first fit over the lengths on all sides at once. Otherwise a row holds one document, and rows of like
    length are put together (`deal_by_length`), sub-batch by sub-batch. The number of rows is a multiple of
    `plan.row_multiple`, at least that for no documents; rows that only fill the batch are empty.

    Args:
        sides: the same documents as each tokenizer reads them; empty ones are allowed.
        capacities: most tokens per row, for each side.
        kinds: one per document; only documents of the same kind share a row. None: all are of one kind.

    Raises:
        ValueError: with packing, a document that is too long.
    """
    lengths = np.array([[len(document.input_ids) for document in side] for side in sides], dtype=np.int64).T
    return arrange_lengths(lengths, capacities, plan, kinds)


def arrange_lengths(
    lengths: np.ndarray, capacities: ArrayLike, plan: BatchPlan, kinds: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """As `arrange`, for documents of which only the lengths are known, int64 [documents, sides]."""
    rows = [[i] for i in range(len(lengths))]
    if plan.packing:
        members: dict[Hashable, list[int]] = {}
        for i in range(len(lengths)):
            members.setdefault(kinds[i] if kinds else None, []).append(i)
        rows = [[same[i] for i in row] for same in members.values() for row in first_fit(lengths[same], capacities)]
        rows.sort()  # by their first documents: rows of all kinds are spread over the batch, and no rank has most of one
    num_rows = -(-max(len(rows), 1) // plan.row_multiple) * plan.row_multiple
    rows += [[] for _ in range(num_rows - len(rows))]
    if plan.packing:
        return rows
    fill = (lengths / np.asarray(capacities)).max(axis=1, initial=0)
    of_rows = [fill[row[0]] if row else -1 for row in rows]  # those that only fill the batch come last
    order = deal_by_length(of_rows, plan.rows_per_width, plan.student.dp, plan.rows_per_sub_batch)
    return [rows[i] for i in order]


def lay_out(
    encoded: Sequence[Encoded], plan: BatchPlan, members: Sequence[Sequence[int]], pad_id: int | None = None
) -> TokenRows:
    """Lays documents out as rows [R, S].

    S is the plan's width of the fullest row. The label of a position is the next token, if that belongs to the same document
    and is trained on.

    The rest of a row is padding without labels. It continues the last document, positions too: causal attention hides
    it from the tokens before it, and a row with one document is then plainly causal for the model, with no mask. A row
    without a document is padding from position 0.

    Args:
        encoded: the documents; empty ones are allowed.
        members: the documents of each row, from `arrange`.
        pad_id: None: the plan's, which is the student's.
    """
    lengths = [len(document.input_ids) for document in encoded]
    fill = [sum(lengths[i] for i in row) for row in members]
    width = plan.width(max(fill))
    shape = (len(members), width)
    input_ids = np.full(shape, plan.pad_id if pad_id is None else pad_id, dtype=np.int32)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int32)
    position_ids = np.tile(np.arange(width, dtype=np.int32), (shape[0], 1))
    for row, document_indices in enumerate(members):
        start = 0
        for i in document_indices:
            if not lengths[i]:
                continue  # an empty document must not restart the positions that the padding continues
            document = encoded[i]
            stop = start + lengths[i]
            input_ids[row, start:stop] = document.input_ids
            position_ids[row, start:] = np.arange(width - start)
            # Position p predicts token p + 1; a document's last position predicts nothing.
            labels[row, start : stop - 1] = np.where(document.label_mask[1:], document.input_ids[1:], IGNORE_INDEX)
            start = stop
    used = np.array(fill, dtype=np.int32)
    return TokenRows(input_ids, labels, position_ids, widths(fill, plan), used)


def widths(fill: Sequence[int], plan: BatchPlan) -> np.ndarray:
    """`TokenRows.widths` of rows with so many tokens: as wide as the fullest row of `plan.rows_per_width` needs."""
    rows, step = len(fill), plan.rows_per_width
    of_groups = [plan.width(max(fill[first : first + step])) for first in range(0, rows, step)]
    return np.repeat(np.array(of_groups, dtype=np.int32), step)[:rows]


def divide(
    rows: TokenRows,
    sharding: BatchSharding,
    plan: BatchPlan,
    index: int,
    num_labels: int,
    *,
    teachers: Sequence[TeacherPart] = (),
    by_row: bool = False,
    pieces: Sequence[tuple[PieceRef, ...]] = (),
    asked: np.ndarray | None = None,
) -> list[list[RankBatch]]:
    """Cuts rows into sub-batches and each of these into contiguous parts of equal size, one per data-parallel rank.

    Args:
        rows: a multiple of `plan.row_multiple`.
        sharding: of the model whose parts these are.
        index: of the batch; each part carries it.
        num_labels: in the whole batch; each part carries it.
        teachers, by_row: of a student; cut like the rows.
        pieces: what every row holds, cut like the rows; empty: the parts do not say.
        asked: bool [R], the rows that a teacher is asked for, cut like the rows; None: all.

    Returns:
        For each rank its parts, one per sub-batch.
    """
    total = rows.shape[0]
    step = plan.rows_per_sub_batch or total
    parts: list[list[RankBatch]] = [[] for _ in range(sharding.dp)]
    for first in range(0, total, step):
        size = (min(first + step, total) - first) // sharding.dp
        for rank, of_rank in enumerate(parts):
            part = slice(first + rank * size, first + (rank + 1) * size)
            of_teachers, held = tuple(teacher[part] for teacher in teachers), tuple(pieces[part])
            is_asked = None if asked is None else asked[part]
            of_rank.append(RankBatch(index, part.start, rows[part], num_labels, of_teachers, by_row, held, is_asked))
    return parts


def first_fit(lengths: ArrayLike, capacity: ArrayLike) -> list[list[int]]:
    """Puts each document, in order, into the first row that has room for it; opens a new row if none has.

    A document may have several lengths, one for each tokenizer that reads it. It then needs room on every side, and the
    rows of all sides hold the same documents in the same order. With one side, this takes at most 1.7 times as many
    rows as the best packing, plus one.

    Args:
        lengths: int [n] or [n, sides]: tokens of each document, none above `capacity`; an empty document takes no room,
            but opens a row if it is first.
        capacity: tokens per row, the same for all sides or one number per side.

    Returns:
        The indices of each row's documents, in the order of `lengths`; rows in the order in which they were opened.

    Raises:
        ValueError: a document longer than a row, or of negative length.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.ndim == 1:
        sizes = sizes[:, None]
    if not len(sizes):
        return []
    limits = np.broadcast_to(np.asarray(capacity, dtype=np.int64), sizes.shape[1:])
    wrong = np.argwhere((sizes < 0) | (sizes > limits))
    if len(wrong):
        document, side = wrong[0].tolist()
        raise ValueError(f"document {document} has {sizes[document, side]} tokens, a row holds {limits[side]}")
    rows: list[list[int]] = []
    # Of every row that may be opened, on each side; below 0 for those that are not open. `most` is the largest of every
    # block of rows: blocks that are full are passed over at once.
    room = np.full((len(limits), -(-len(sizes) // _BLOCK), _BLOCK), -1, dtype=np.int64)
    most = room.max(axis=2)
    for i, size in enumerate(sizes):
        row = len(rows)
        for candidate in np.flatnonzero((most >= size[:, None]).all(axis=0)).tolist():
            fits = (room[:, candidate] >= size[:, None]).all(axis=0)
            if fits.any():
                row = candidate * _BLOCK + int(fits.argmax())
                break
        block, place = divmod(row, _BLOCK)
        if row == len(rows):
            rows.append([])
            room[:, block, place] = limits
        rows[row].append(i)
        room[:, block, place] -= size
        most[:, block] = room[:, block].max(axis=1)
    return rows


def deal_by_length(lengths: Sequence[float], group: int, ranks: int, per_sub_batch: int | None = None) -> list[int]:
    """An order of documents, longest first, in which groups of like length alternate between the ranks.

    Of every sub-batch, rank r of `ranks` gets the r-th of as many equal parts. Its groups, of `group` documents each,
    have about the lengths of the other ranks' groups at the same place, so no rank waits for another. The longest come
    first, so that a lack of memory shows at once. Documents of equal length keep their order.

    Args:
        lengths: in any unit.
        group: documents of a group. A sub-batch that does not consist of `ranks` times as many whole groups is not
            dealt out, only sorted.
        per_sub_batch: documents of a sub-batch; None: all.

    Returns:
        The indices of the documents.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    step, dealt = per_sub_batch or max(len(order), 1), []
    for first in range(0, len(order), step):
        part = order[first : first + step]
        if len(part) % (group * ranks) == 0:
            groups = [part[start : start + group] for start in range(0, len(part), group)]
            part = [i for rank in range(ranks) for each in groups[rank::ranks] for i in each]
        dealt += part
    return dealt
