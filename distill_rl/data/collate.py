"""Documents → token rows, and rows → the part of every data-parallel rank of the student and of each teacher."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from distill_rl.align.chat import CharSpan
from distill_rl.config.derive import ring_plan
from distill_rl.config.facts import row_width, running_teachers, teacher_length, teacher_rows
from distill_rl.config.schema import Config, DataConfig
from distill_rl.data.chat import render_document, roles_to_train_on
from distill_rl.data.packing import deal_by_length, first_fit
from distill_rl.data.unrendered import TemplateCoverage
from distill_rl.errors import DataError
from distill_rl.types import IGNORE_INDEX, ChunkRows, RankBatch, TokenRows


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document's tokens."""

    input_ids: np.ndarray
    """int32 [n]"""
    label_mask: np.ndarray
    """bool [n]; True if token j is trained on, as the label of position j - 1"""
    truncated: bool = False
    """Whether tokens were cut off at the end."""
    left_out: tuple[str, ...] = ()
    """Words for the parts of a chat that a chat template does not write."""

    @property
    def has_labels(self) -> bool:
        """Whether any token but the first, which nothing predicts, is trained on."""
        return bool(self.label_mask[1:].any())

    def cut(self, length: int) -> Encoded:
        """The first `length` tokens; `truncated` if any were cut off, now or before."""
        truncated = self.truncated or len(self.input_ids) > length
        return replace(
            self, input_ids=self.input_ids[:length], label_mask=self.label_mask[:length], truncated=truncated
        )


class Tokenization:
    """Turns documents into tokens with one tokenizer.

    Text gets the special tokens that the tokenizer adds, and an end-of-text token if the tokenizer has one. Chat
    messages are rendered by the tokenizer's chat template, which writes its own special tokens. Documents longer than
    `max_length` are cut at the end.

    Args:
        tokenizer: a fast transformers tokenizer.
        format: `data.format`. Only "text" matters here, which does not go with `loss_on` "assistant"; each document is
            then read by what it holds.
        loss_on: "all", or "assistant" to train only on the assistant's turns, including their end-of-turn tokens.
        max_length: tokens per document.
        loss_roles: roles to train on in place of `loss_on`; empty: `loss_on` decides.
        unrendered: `data.unrendered`.

    Raises:
        DataError: a slow tokenizer; turns to train on with `format` "text".
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        format: str,
        loss_on: str,
        max_length: int,
        loss_roles: Sequence[str] = (),
        unrendered: Literal["fail", "warn"] = "fail",
    ):
        if not tokenizer.is_fast:
            rule = "a fast tokenizer (tokenizer.json), which reports the offsets of its tokens"
            raise DataError("student.tokenizer", rule, type(tokenizer).__name__)
        self.tokenizer, self.max_length, self.unrendered = tokenizer, max_length, unrendered
        self.roles = roles_to_train_on(loss_on, loss_roles)
        """The roles whose turns are trained on; empty: all tokens are."""
        self._coverage = TemplateCoverage(tokenizer, "the student's tokenizer")
        if format == "text" and self.roles:
            raise self._no_turns("rows of text")

    @classmethod
    def of(cls, tokenizer: Any, data: DataConfig, *, format: str) -> Tokenization:
        """The tokenisation of a run's documents.

        Args:
            format: what the rows hold; `data.format` may leave that open.
        """
        return cls(
            tokenizer,
            format=format,
            loss_on=data.loss_on,
            max_length=data.max_length,
            loss_roles=data.loss_roles,
            unrendered=data.unrendered,
        )

    def encode(self, document: Mapping[str, Any]) -> Encoded:
        """Tokenises one document: `{"row": int, "text": str}`, or a chat (`Layout.document`).

        Text gets eos unless it ends in it already or there is none. Cut at `max_length` tokens; `label_mask` is True
        for all tokens or, if only some turns are trained on, for theirs.

        Raises:
            DataError: text although only some turns are trained on; a chat that cannot be rendered in full, or whose
                turns cannot be found; names the document's row.
        """
        if "messages" in document:
            return self._encode_chat(document).cut(self.max_length)
        self.require_text_allowed(document)
        ids = self.tokenizer(document["text"], return_attention_mask=False, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        if end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        return _encoded(ids).cut(self.max_length)

    def _encode_chat(self, document: Mapping[str, Any]) -> Encoded:
        """All tokens of a chat, not cut to `max_length`, with the mask of those to train on.

        Raises:
            DataError: a chat that cannot be rendered, or whose assistant turns cannot be found; names the row.
        """
        text, spans, left_out = self.render(document)
        encoded = self.tokenizer(
            text,
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=bool(self.roles),
            verbose=False,
        )
        mask = None
        if self.roles:
            starts = np.asarray([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
            mask = starts_within(spans, starts)
        return replace(_encoded(encoded["input_ids"], mask), left_out=left_out)

    def render(self, document: Mapping[str, Any]) -> tuple[str, list[CharSpan], tuple[str, ...]]:
        """A chat's text, the character spans of the turns that are trained on, and what the template leaves out.

        Without `roles`, all tokens are trained on and there are no spans.

        Raises:
            DataError: as for `encode`.
        """
        text, spans = render_document(self.tokenizer, document, roles=self.roles)
        return text, spans, self._coverage.check(document, text, self.unrendered)

    def require_text_allowed(self, document: Mapping[str, Any]) -> None:
        """Raises DataError, naming the row, for a document of text if only some turns are trained on."""
        if self.roles:
            raise self._no_turns(f"text in row {document['row']}")

    def _no_turns(self, found: str) -> DataError:
        """The error for rows without turns to train on, for the caller to raise.

        Args:
            found: what there is in place of chat messages.
        """
        setting = "data.loss_on=assistant" if self.roles == ("assistant",) else "data.loss_roles"
        return DataError(setting, "chat messages", found, "use data.loss_on=all or data.format=messages")


def starts_within(spans: Sequence[tuple[int, int]], starts: np.ndarray) -> np.ndarray:
    """bool [n]: which tokens start inside one of the spans.

    Args:
        spans: (first, stop), in characters of the text, `stop` excluded.
        starts: int [n], each token's first character.
    """
    mask = np.zeros(len(starts), dtype=bool)
    for first, stop in spans:
        mask |= (starts >= first) & (starts < stop)
    return mask


def _encoded(ids: Sequence[int], mask: np.ndarray | None = None) -> Encoded:
    """A document of these ids; without a mask, all of its tokens are trained on."""
    if mask is None:
        mask = np.ones(len(ids), dtype=bool)
    return Encoded(np.asarray(ids, dtype=np.int32), mask)


NO_TOKENS = _encoded([])
"""An empty document; keeps the place of one that is left out."""


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
    num_ids: int | None = None
    """Ids from here on are not known to some teacher that reads the student's rows; None: all are."""
    teacher_lengths: tuple[int, ...] = ()
    """Most document tokens in a row of each teacher that has its own tokenizer; empty: `max_length` for all."""
    on_gpu: bool = False
    """Whether the rows go to GPUs; decides how wide they are (`row_width`)."""

    @classmethod
    def from_config(cls, config: Config, pad_id: int, *, num_ids: int | None = None) -> BatchPlan:
        """The plan for a run, with sub-batches if its targets do not all fit into the teachers' rings.

        `on_gpu` is False until `for_device` sets it.

        Args:
            pad_id: see `pad_id`.
            num_ids: see the field.
        """
        teachers = running_teachers(config)
        return cls(
            student=BatchSharding(config.student.parallel.dp, config.train.micro_batch_size),
            teachers=tuple(BatchSharding(t.parallel.dp, teacher_rows(config, t)) for t in teachers),
            max_length=config.data.max_length,
            packing=config.data.packing,
            pad_id=pad_id,
            num_ids=num_ids,
            rows_per_sub_batch=ring_plan(config).rows_per_sub_batch,
            teacher_lengths=tuple(teacher_length(config, teacher) for teacher in teachers),
        )

    def for_device(self, *, on_gpu: bool) -> BatchPlan:
        """This plan for GPUs or for CPUs. The driver decides: an aligner cannot see what the cluster has."""
        return replace(self, on_gpu=on_gpu)

    def length_of(self, teacher: int) -> int:
        """Most document tokens in a row of a teacher that has its own tokenizer, by its index."""
        return self.teacher_lengths[teacher] if self.teacher_lengths else self.max_length

    @property
    def row_multiple(self) -> int:
        """The smallest number of rows that the student and all teachers can divide evenly."""
        return math.lcm(self.student.rows, *(teacher.rows for teacher in self.teachers))

    @property
    def rows_per_width(self) -> int:
        """Rows that share a width, counted from row 0: whole micro-batches of the student and of every teacher.

        So targets have the width of the rows that they are for, whoever's micro-batch these are in.
        """
        sizes = (sharding.micro_batch_size for sharding in (self.student, *self.teachers))
        return math.lcm(*sizes)


def pad_id(tokenizer: Any, num_ids: int | None = None) -> int:
    """The id to fill rows with: the tokenizer's padding token, otherwise eos, otherwise 0.

    Any valid id will do: padding has no labels, and no labelled token attends to it.

    Args:
        num_ids: ids from here on are not valid; None: all of the tokenizer's are.
    """
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(id for id in candidates if id is not None and (num_ids is None or id < num_ids))


def arrange(sides: Sequence[Sequence[Encoded]], capacities: Sequence[int], plan: BatchPlan) -> list[list[int]]:
    """Which documents each row holds: their indices, in order. All sides lay out the same rows.

    With packing, first fit over the lengths on all sides at once. Otherwise a row holds one document, and rows of like
    length are put together (`deal_by_length`), sub-batch by sub-batch. The number of rows is a multiple of
    `plan.row_multiple`, at least that for no documents; rows that only fill the batch are empty.

    Args:
        sides: the same documents as each tokenizer reads them; empty ones are allowed.
        capacities: most tokens per row, for each side.

    Raises:
        ValueError: with packing, a document that is too long.
    """
    lengths = np.array([[len(document.input_ids) for document in side] for side in sides], dtype=np.int64).T
    rows = _in_order(lengths, capacities, plan)
    if plan.packing:
        return rows
    fill = (lengths / np.asarray(capacities)).max(axis=1, initial=0)
    arranged: list[list[int]] = []
    step = plan.rows_per_sub_batch or len(rows)
    by_length = sorted(rows, key=lambda row: -max((fill[i] for i in row), default=-1))
    for first in range(0, len(rows), step):
        part = by_length[first : first + step]
        order = deal_by_length([fill[row[0]] if row else -1 for row in part], plan.rows_per_width, plan.student.dp)
        arranged += [part[i] for i in order]
    return arranged


def _in_order(lengths: np.ndarray, capacities: Sequence[int], plan: BatchPlan) -> list[list[int]]:
    """`arrange` without changing the order of rows that hold one document.

    Args:
        lengths: int [documents, sides].
    """
    rows = first_fit(lengths, capacities) if plan.packing else [[i] for i in range(len(lengths))]
    num_rows = -(-max(len(rows), 1) // plan.row_multiple) * plan.row_multiple
    return rows + [[] for _ in range(num_rows - len(rows))]


def lay_out(
    encoded: Sequence[Encoded],
    plan: BatchPlan,
    members: Sequence[Sequence[int]] | None = None,
    pad_id: int | None = None,
) -> TokenRows:
    """Lays documents out as rows [R, S].

    S is `row_width` of the fullest row. The label of a position is the next token, if that belongs to the same document
    and is trained on.

    The rest of a row is padding without labels. It continues the last document, positions too: causal attention hides
    it from the tokens before it, and a row with one document is then plainly causal for the model, with no mask. A row
    without a document is padding from position 0.

    Args:
        encoded: the documents; empty ones are allowed.
        members: the documents of each row, from `arrange`; None: as `arrange` would for this side alone, but in the
            order of the documents, and all rows have one width.
        pad_id: None: the plan's, which is the student's.

    Raises:
        ValueError: without `members` but with packing, a document longer than `plan.max_length`.
    """
    lengths = [len(document.input_ids) for document in encoded]
    one_width = members is None
    if members is None:
        members = _in_order(np.array(lengths, dtype=np.int64)[:, None], [plan.max_length], plan)
    fill = [sum(lengths[i] for i in row) for row in members]
    width = row_width(max(fill), on_gpu=plan.on_gpu)
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
    return TokenRows(input_ids, labels, position_ids, None if one_width else _widths(fill, plan))


def _widths(fill: Sequence[int], plan: BatchPlan) -> np.ndarray:
    """`TokenRows.widths` of rows with so many tokens: as wide as the fullest row of `plan.rows_per_width` needs."""
    rows, step = len(fill), plan.rows_per_width
    widths = [row_width(max(fill[first : first + step]), on_gpu=plan.on_gpu) for first in range(0, rows, step)]
    return np.repeat(np.array(widths, dtype=np.int32), step)[:rows]


def divide(
    rows: TokenRows,
    sharding: BatchSharding,
    plan: BatchPlan,
    index: int,
    num_labels: int,
    chunks: Sequence[ChunkRows | None] = (),
) -> list[list[RankBatch]]:
    """Cuts rows into sub-batches and each of these into contiguous parts of equal size, one per data-parallel rank.

    Args:
        rows: a multiple of `plan.row_multiple`.
        sharding: of the model whose parts these are.
        index: of the batch; each part carries it.
        num_labels: in the whole batch; each part carries it.
        chunks: one entry per teacher, cut like the rows; None for a teacher without chunks.

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
            part_chunks = tuple(None if chunk_rows is None else chunk_rows[part] for chunk_rows in chunks)
            of_rank.append(RankBatch(index, part.start, rows[part], num_labels, part_chunks))
    return parts
