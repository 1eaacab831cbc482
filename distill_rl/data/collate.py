"""One global batch of documents → token rows for every data-parallel rank of the student and of each teacher."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distill_rl.config.derive import ring_plan
from distill_rl.config.facts import row_width, teacher_rows
from distill_rl.config.schema import Config
from distill_rl.data.chat import render_document
from distill_rl.data.packing import first_fit
from distill_rl.errors import DataError
from distill_rl.types import (
    IGNORE_INDEX,
    AlignmentInfo,
    BadRow,
    BatchInfo,
    ChunkRows,
    DocumentBatch,
    RankBatch,
    TokenRows,
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document's tokens, at most `max_length`.

    `label_mask[j]` says that token j is to be learnt: the position before it gets it as its label.
    """

    input_ids: np.ndarray
    """int32 [n]"""
    label_mask: np.ndarray
    """bool [n]"""
    truncated: bool

    def cut(self, length: int) -> Encoded:
        """The first `length` tokens."""
        truncated = self.truncated or len(self.input_ids) > length
        return Encoded(self.input_ids[:length], self.label_mask[:length], truncated)


class Tokenization:
    """Documents → tokens, by one tokenizer.

    Text gets the special tokens that the tokenizer adds and an end-of-text token if it has one. Chat messages are
    written by the tokenizer's chat template, which brings its own special tokens. A longer document is cut at its end.

    Args:
        tokenizer: a fast transformers tokenizer.
        format: `data.format`; "auto" takes each document as it is.
        loss_on: "all", or "assistant" to learn only what the assistant says, its end-of-turn token included.
        max_length: tokens per document.

    Raises:
        DataError: a slow tokenizer; `loss_on` "assistant" with text; a chat that cannot be written or taken apart.
    """

    def __init__(self, tokenizer: Any, *, format: str, loss_on: str, max_length: int):
        if not tokenizer.is_fast:
            rule = "a fast tokenizer (tokenizer.json), whose tokens know their place in the text"
            raise DataError("student.tokenizer", rule, type(tokenizer).__name__)
        self.tokenizer, self.max_length, self.assistant_only = tokenizer, max_length, loss_on == "assistant"
        if format == "text" and self.assistant_only:
            raise self._no_assistant("rows of text")

    def encode(self, document: Mapping[str, Any]) -> Encoded:
        """Tokens of one document, `{"row": int, "text": str}` or `{"row": int, "messages": [{role, content}]}`."""
        if "messages" in document:
            return self._encode_chat(document).cut(self.max_length)
        self.require_text_is_learnt(document)
        ids = self.tokenizer(document["text"], return_attention_mask=False, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        if end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        return _encoded(ids).cut(self.max_length)

    def _encode_chat(self, document: Mapping[str, Any]) -> Encoded:
        text, spans = render_document(
            self.tokenizer, document["messages"], document["row"], find_assistant=self.assistant_only
        )
        encoded = self.tokenizer(
            text,
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=self.assistant_only,
            verbose=False,
        )
        if not self.assistant_only:
            return _encoded(encoded["input_ids"])
        starts = np.asarray([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        return _encoded(encoded["input_ids"], starting_in(spans, starts))

    def require_text_is_learnt(self, document: Mapping[str, Any]) -> None:
        """
        Raises:
            DataError: only what an assistant says is to be learnt, and this is no chat.
        """
        if self.assistant_only:
            raise self._no_assistant(f"text in row {document['row']}")

    @staticmethod
    def _no_assistant(found: str) -> DataError:
        return DataError(
            "data.loss_on=assistant", "chat messages", found, "use data.loss_on=all or data.format=messages"
        )


def starting_in(spans: Sequence[tuple[int, int]], starts: np.ndarray) -> np.ndarray:
    """bool [n]: which tokens start inside of one of the spans; `starts` int [n] and spans count characters of one text."""
    mask = np.zeros(len(starts), dtype=bool)
    for first, stop in spans:
        mask |= (starts >= first) & (starts < stop)
    return mask


def _encoded(ids: Sequence[int], mask: np.ndarray | None = None) -> Encoded:
    kept = np.asarray(ids, dtype=np.int32)
    return Encoded(kept, np.ones(len(kept), dtype=bool) if mask is None else mask, truncated=False)


NOTHING = _encoded([])
"""A document without a token."""


@dataclass(frozen=True, slots=True)
class BatchSharding:
    """How one model's workers divide a global batch: `dp` ranks, `micro_batch_size` rows per forward of each."""

    dp: int
    micro_batch_size: int

    @property
    def rows(self) -> int:
        """The number of rows is a multiple of this."""
        return self.dp * self.micro_batch_size


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a batch must fit: the student's and the teachers' division, row length, packing, padding id, device."""

    student: BatchSharding
    teachers: tuple[BatchSharding, ...]
    max_length: int
    """tokens that a row holds at most"""
    packing: bool
    pad_id: int
    sub_batches: int = 1
    """parts of a batch that are taught and trained on in turn, where its targets do not all fit into the teachers' rings"""
    rows_per_sub_batch: int | None = None
    """a multiple of `row_multiple`; None: all rows are one sub-batch"""
    on_gpu: bool = False
    """the rows go to GPUs, which decides how wide they are (`row_width`)"""

    @classmethod
    def from_config(cls, config: Config, pad_id: int, *, padded: bool = False) -> BatchPlan:
        """padded: give every document a row of its own, as a teacher with another tokenizer needs it."""
        rings = ring_plan(config)
        return cls(
            student=BatchSharding(config.student.parallel.dp, config.train.micro_batch_size),
            teachers=tuple(BatchSharding(t.parallel.dp, teacher_rows(config, t)) for t in config.teachers),
            max_length=config.data.max_length,
            packing=config.data.packing and not padded,
            pad_id=pad_id,
            sub_batches=rings.sub_batches,
            rows_per_sub_batch=rings.rows_per_sub_batch if rings.sub_batches > 1 else None,
        )

    def for_device(self, *, on_gpu: bool) -> BatchPlan:
        """The same for rows that go to GPUs, or to CPUs: what the cluster has, which an aligner cannot see."""
        return replace(self, on_gpu=on_gpu)

    @property
    def row_multiple(self) -> int:
        """Smallest number of rows that student and teachers can all divide evenly."""
        return math.lcm(self.student.rows, *(teacher.rows for teacher in self.teachers))


def pad_id(tokenizer: Any) -> int:
    """The id to fill rows with. Padding is never learnt and comes after every token that is, so any valid id does."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(candidate for candidate in candidates if candidate is not None)


def build_batch(
    batch: DocumentBatch, tokenization: Tokenization, plan: BatchPlan, skip: Collection[int] = ()
) -> tuple[BatchInfo, list[RankBatch], list[list[RankBatch]]]:
    """Tokenise, pack or pad, and divide one global batch; deterministic.

    Args:
        skip: rows of the data that count as documents without a token.

    Returns:
        what the driver needs to know; per sub-batch the student's part for each of its data-parallel ranks; for each teacher
        the same. All parts are cut from the same rows, in contiguous runs of equal size.

    Raises:
        DataError: a document that cannot be tokenised, by its row.
    """
    began = time.perf_counter()
    encoded = [NOTHING if document["row"] in skip else tokenization.encode(document) for document in batch.documents]
    rows = lay_out(encoded, plan)
    info = describe(batch, encoded, rows, began)
    num_labels = info.num_labels
    student, *teachers = (
        divide(rows, share, plan, batch.index, num_labels) for share in (plan.student, *plan.teachers)
    )
    return info, student, teachers


def describe(
    batch: DocumentBatch,
    encoded: Sequence[Encoded],
    rows: TokenRows,
    began: float,
    alignments: tuple[AlignmentInfo, ...] = (),
    bad_rows: tuple[BadRow, ...] = (),
) -> BatchInfo:
    """What the driver needs to know; `began` is when the work did, by `time.perf_counter`."""
    return BatchInfo(
        index=batch.index,
        cursor=batch.cursor,
        num_documents=len(encoded),
        num_rows=rows.shape[0],
        num_tokens=sum(len(document.input_ids) for document in encoded),
        num_labels=int(np.count_nonzero(rows.labels != IGNORE_INDEX)),
        num_truncated=sum(document.truncated for document in encoded),
        seconds=time.perf_counter() - began,
        alignments=alignments,
        bad_rows=bad_rows,
    )


def lay_out(encoded: Sequence[Encoded], plan: BatchPlan, pad_id: int | None = None) -> TokenRows:
    """Documents → rows [R, S]: several to a row when packing (first fit), else one.

    S is `row_width` of the longest row; R a multiple of `plan.row_multiple`. What no document fills is padding
    without labels. At the end of a row it continues the last document, positions too: nothing before it sees it, and
    a row of one document is one to the model as well, which needs no mask for it. A row without a document is padding
    from position 0.

    Args:
        pad_id: where it is not that of the plan, which is the student's.
    """
    lengths = [len(document.input_ids) for document in encoded]
    members = first_fit(lengths, plan.max_length) if plan.packing else [[number] for number in range(len(encoded))]
    longest = max((sum(lengths[number] for number in row) for row in members), default=0)
    length = row_width(longest, on_gpu=plan.on_gpu)
    shape = (-(-max(len(members), 1) // plan.row_multiple) * plan.row_multiple, length)
    input_ids = np.full(shape, plan.pad_id if pad_id is None else pad_id, dtype=np.int32)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int32)
    position_ids = np.tile(np.arange(length, dtype=np.int32), (shape[0], 1))
    for row, documents in enumerate(members):
        start = 0
        # One without a token must not begin the document that the padding continues.
        for document in (encoded[number] for number in documents if len(encoded[number].input_ids)):
            stop = start + len(document.input_ids)
            input_ids[row, start:stop] = document.input_ids
            position_ids[row, start:] = np.arange(length - start)
            if stop - start > 1:
                shifted = np.where(document.label_mask[1:], document.input_ids[1:], IGNORE_INDEX)
                labels[row, start : stop - 1] = shifted
            start = stop
    return TokenRows(input_ids, labels, position_ids)


def divide(
    rows: TokenRows,
    share: BatchSharding,
    plan: BatchPlan,
    index: int,
    num_labels: int,
    chunks: Sequence[ChunkRows | None] = (),
) -> list[RankBatch]:
    """Wave by sub-batch contiguous parts of equal size, one per data-parallel rank; a sub-batch that no row is left for is empty."""
    parts = []
    total, step = rows.shape[0], plan.rows_per_sub_batch or rows.shape[0]
    for start in range(0, plan.sub_batches * step, step):
        first, stop = min(start, total), min(start + step, total)
        size = (stop - first) // share.dp
        for rank in range(share.dp):
            part = slice(first + rank * size, first + (rank + 1) * size)
            cut = tuple(each and each[part] for each in chunks)
            parts.append(RankBatch(index, part.start, rows[part], num_labels, cut))
    return parts
