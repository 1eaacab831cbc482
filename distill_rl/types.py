"""What crosses a process: frozen dataclasses of plain values and numpy arrays, never tensors.

Shape legend, used everywhere in this package
    R   rows of a batch (a row holds one document, or several when packed)
    S   positions per row
    N   tokens, R·S flattened row by row
    V   vocabulary;  Vl  a tensor-parallel rank's part of it
    k   teacher entries kept per token
    H   hidden size of the student;  Ht  of the teacher
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

IGNORE_INDEX = -100
"""The label of a position from which nothing is learnt."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far the data has been read: `position` documents of epoch `epoch` are consumed."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands: `step` optimizer steps done, `cursor` after the last batch trained on."""

    step: int = 0
    cursor: Cursor = Cursor()


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """Loader → aligner: the raw documents of one global batch, in order.

    `index` counts global batches from 0 over the whole run; batch i is trained on by step i + 1.
    `cursor` is the position after this batch, the one to resume from once it has been trained on.
    Each document is a row of the data set, reduced to its text or its messages, with the row's
    number under `"row"` for error messages.
    """

    index: int
    documents: tuple[Mapping[str, Any], ...]
    cursor: Cursor
    source: str = "train"
    """`train` or `validation`: whose rows the numbers are"""

    @property
    def row_numbers(self) -> tuple[int, ...]:
        return tuple(int(document["row"]) for document in self.documents)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Token rows for one model; all arrays are [R, S].

    A position restart (`position_ids == 0`) begins a new document, and attention never crosses it. The padding at
    the end of a row continues the last document and its positions: attention is causal, so that no token sees it, and
    its labels are ignored. A row that only fills the batch up is one document of padding.
    """

    input_ids: np.ndarray
    """int32 [R, S]"""
    labels: np.ndarray
    """int32 [R, S], already shifted: position s predicts labels[s]; IGNORE_INDEX where nothing is learnt"""
    position_ids: np.ndarray
    """int32 [R, S], from 0 in every document"""

    @property
    def shape(self) -> tuple[int, int]:
        return self.input_ids.shape  # type: ignore[return-value]

    def __getitem__(self, rows: slice) -> TokenRows:
        return TokenRows(self.input_ids[rows], self.labels[rows], self.position_ids[rows])


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """What a student and a teacher of another tokenizer compare: stretches of text, each some tokens of either side.

    A number stands where a *prediction* is made: position p of a row belongs to the chunk of the token at p + 1. Chunks
    are numbered from 0 in each row; -1 belongs to none. Every chunk has a position on both sides.
    """

    student: np.ndarray
    """int32 [R, S]"""
    teacher: np.ndarray
    """int32 [R, St], for the teacher's rows of the same documents"""
    num_chunks: int
    """over the *global* batch: the denominator of this teacher's KD"""
    num_one_to_one: int
    """of these, those of one token on either side: the denominator of a loss that compares no others"""
    num_covered: int
    """labelled student tokens inside a chunk, over the global batch"""

    def __getitem__(self, rows: slice) -> ChunkRows:
        return replace(self, student=self.student[rows], teacher=self.teacher[rows])


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One data-parallel rank's contiguous part of a global batch, as a student or a teacher reads it.

    `first_row` is the place of the part's first row in the global batch. The number of rows is a
    multiple of the rank's micro-batch size; rows added to make it so have only ignored labels.
    `num_labels` is the count over the *global* batch: the denominator of every mean.
    """

    index: int
    first_row: int
    rows: TokenRows
    num_labels: int
    chunks: tuple[ChunkRows | None, ...] = ()
    """the student's only: per running teacher, None for one that reads the student's own rows"""


@dataclass(frozen=True, slots=True)
class CrossTokenizerSpec:
    """How a student learns from a teacher of another tokenizer: by which loss, over which vocabulary projection."""

    method: str
    projection: str
    """path of the projection's file, which every worker can read"""


@dataclass(frozen=True, slots=True)
class AlignmentInfo:
    """How well one batch's rows of a student and of one teacher match; counts over the global batch."""

    teacher: str
    num_chunks: int
    num_one_to_one: int
    num_covered: int
    """labelled student tokens inside a chunk"""
    num_exact: int
    """documents whose two tokenizations spell the same bytes"""
    methods: Mapping[str, int]
    """documents by the method that aligned them; `dp` with the engine that ran, as `dp/numba`"""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A document that no aligner could work on: its row in the data, and why."""

    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Aligner → driver: what the driver needs to know of a batch that it never sees."""

    index: int
    cursor: Cursor
    num_documents: int
    num_rows: int
    num_tokens: int
    """document tokens after truncation, without padding"""
    num_labels: int
    num_truncated: int
    """documents cut at data.max_length"""
    seconds: float
    alignments: tuple[AlignmentInfo, ...] = ()
    """one per teacher of another tokenizer"""
    bad_rows: tuple[BadRow, ...] = ()
    """documents left out"""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The run directory, the only place a run writes to."""

    root: Path
    attempt: int = 1
    """Which start of the run this is, from 1: each has its own folder of logs."""

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """Of this attempt: `driver.log` and what its workers printed. `logs/latest` is a link to the newest."""
        return self.root / "logs" / f"attempt_{self.attempt}"

    @property
    def tensorboard(self) -> Path:
        """One folder for all attempts, so that a resumed run draws one curve."""
        return self.root / "logs" / "tensorboard"

    @property
    def prometheus(self) -> Path:
        """Where Prometheus finds the metrics agents of the newest attempt's Ray."""
        return self.root / "logs" / "prometheus" / "targets.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def bad_rows(self) -> Path:
        """Documents that were left out, one JSON object per line; absent where there are none."""
        return self.root / "bad_rows.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.html"
