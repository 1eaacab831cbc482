"""Types that are sent between processes: frozen dataclasses of plain values and numpy arrays, never tensors.

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
"""The label of a position that is not trained on."""
NAME_BYTES = 16
"""Length of a document's name in a store of targets."""


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


Row = int | tuple[int, ...]
"""A document's row in the data; of a joined text (`data.concatenate`), all of its rows."""


def row_of(document: Mapping[str, Any]) -> Row:
    """The row or rows of a document of a batch."""
    return tuple(document["rows"]) if "rows" in document else int(document["row"])


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """Loader → aligner: the raw documents of one global batch, in order.

    `index` counts global batches from 0 over the whole run; batch i is trained on by step i + 1.
    `cursor` is the position after this batch, the one to resume from once it has been trained on.
    Each document is a row of the data set, reduced to its text or its chat, with the row number under `"row"`; or
    several rows whose texts are joined, with their numbers under `"rows"`, too.
    """

    index: int
    documents: tuple[Mapping[str, Any], ...]
    cursor: Cursor
    source: str = "train"
    """The data to which the row numbers refer: `train` or `validation`."""
    bad_rows: tuple[BadRow, ...] = ()
    """Rows of this batch that could not be read and are not among the documents."""

    @property
    def row_numbers(self) -> tuple[int, ...]:
        """Of all rows; a joined text (`data.concatenate`) has several."""
        return tuple(row for document in self.documents for row in document.get("rows", (int(document["row"]),)))


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Token rows for one model; all arrays are [R, S].

    A position restart (`position_ids == 0`) begins a new document, and attention never crosses it. The padding at the
    end of a row continues the last document and its positions: attention is causal, so no token attends to it, and its
    labels are ignored. A row that only fills up the batch is one document of padding.
    """

    input_ids: np.ndarray
    """int32 [R, S]."""
    labels: np.ndarray
    """int32 [R, S], already shifted: position s predicts labels[s]. IGNORE_INDEX where nothing is trained."""
    position_ids: np.ndarray
    """int32 [R, S], from 0 in every document."""
    widths: np.ndarray | None = None
    """int32 [R]: the positions of each row that a model computes; beyond them is padding only. It is the same for the
    rows of a micro-batch, of any model that reads the batch. None: all S."""
    used: np.ndarray | None = None
    """int32 [R]: the tokens of each row; the positions beyond them are padding. None: there is no padding."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.input_ids.shape  # type: ignore[return-value]

    @property
    def num_positions(self) -> int:
        """Positions that a model computes."""
        return self.input_ids.size if self.widths is None else int(self.widths.sum())

    def __getitem__(self, rows: slice | np.ndarray) -> TokenRows:
        widths, used = (None if each is None else each[rows] for each in (self.widths, self.used))
        return TokenRows(self.input_ids[rows], self.labels[rows], self.position_ids[rows], widths, used)

    def cut(self) -> TokenRows:
        """The rows of a micro-batch, without the positions that no model computes."""
        width = _common_width(self.widths)
        ids, labels, positions = (each[:, :width] for each in (self.input_ids, self.labels, self.position_ids))
        return TokenRows(ids, labels, positions, used=self.used)


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The stretches of text (chunks) over which a student is compared with a teacher that has another tokenizer.

    A chunk spans one or more tokens on each side. The arrays give the chunk number of every position. The number is
    stored where a *prediction* is made: position p of a row has the chunk of the token at p + 1. Chunks are numbered
    from 0 in each row; -1 means no chunk. Every chunk has at least one position on both sides.
    """

    student: np.ndarray
    """int32 [R, S]."""
    teacher: np.ndarray
    """int32 [R, St], for the teacher's rows of the same documents."""
    num_chunks: int
    """Over the *global* batch: the denominator of this teacher's KD."""
    num_one_to_one: int
    """Chunks of one token on both sides: the denominator of a loss that compares only those."""
    num_covered: int
    """Labelled student tokens inside a chunk, over the global batch."""
    widths: tuple[np.ndarray, np.ndarray] | None = None
    """`TokenRows.widths` of the student's and of the teacher's rows."""
    weighted: tuple[float, float] | None = None
    """For a teacher that is chosen by row: `num_chunks` and `num_one_to_one` with every chunk counted by the weight of
    its document. None: all count alike."""

    def __getitem__(self, rows: slice) -> ChunkRows:
        widths = self.widths and (self.widths[0][rows], self.widths[1][rows])
        return replace(self, student=self.student[rows], teacher=self.teacher[rows], widths=widths)

    def cut(self) -> ChunkRows:
        """The chunks of a micro-batch, without the positions that no model computes."""
        student, teacher = map(_common_width, self.widths or (None, None))
        return replace(self, student=self.student[:, :student], teacher=self.teacher[:, :teacher], widths=None)


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """What one teacher is asked about the student's rows (`teachers[].where`, `teachers[].weight_column`)."""

    of_tokens: np.ndarray
    """float32 [R, S]: at a labelled position the weight of its document for this teacher, 0 if it is not asked about
    it; 0 at all other positions."""
    total: float
    """Their sum over the *global* batch: the denominator of this teacher's KD by tokens."""
    num_labels: int
    """Labelled tokens with a weight above 0, over the global batch."""

    def __getitem__(self, rows: slice) -> TokenWeights:
        return replace(self, of_tokens=self.of_tokens[rows])

    def positions(self, part: slice) -> TokenWeights:
        """Those of some positions of every row."""
        return replace(self, of_tokens=self.of_tokens[:, part])


@dataclass(frozen=True, slots=True)
class TeacherPart:
    """What one running teacher is compared on in a student's rows."""

    chunks: ChunkRows | None = None
    """None: it reads the student's rows."""
    weights: TokenWeights | None = None
    """None: it is asked for all rows, with weight 1."""

    def __getitem__(self, rows: slice) -> TeacherPart:
        return TeacherPart(self.chunks and self.chunks[rows], self.weights and self.weights[rows])

    def of_positions(self, part: slice) -> TeacherPart:
        """That of a micro-batch: chunks without the positions that no model computes, weights of some positions of the rows."""
        return TeacherPart(self.chunks and self.chunks.cut(), self.weights and self.weights.positions(part))


def _common_width(widths: np.ndarray | None) -> int | None:
    """The width that all rows of a micro-batch have; None: that of their arrays."""
    if widths is None or not len(widths):
        return None
    assert (widths == widths[0]).all(), "rows of a micro-batch have one width"
    return int(widths[0])


@dataclass(frozen=True, slots=True)
class PieceRef:
    """What a row holds of a document, by which a store of targets finds it. Most documents are one piece."""

    name: bytes
    """Of the document (`data.batch.tokenization.name_of`)."""
    first: int
    """Tokens of the document before the piece."""
    prefix: int
    """Special tokens, such as bos, that begin a later piece and are not at this place in the document."""
    length: int
    """Tokens in the row, with the prefix."""
    whole: bool
    """Whether the piece reaches the end of the document."""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """The contiguous part of a global batch that one data-parallel rank of a student or teacher reads.

    `first_row` is the index of the part's first row in the global batch. The number of rows is a multiple of the rank's
    micro-batch size; rows added for that have only ignored labels. `num_labels` is the count over the *global* batch,
    the denominator of every mean.
    """

    index: int
    first_row: int
    rows: TokenRows
    num_labels: int
    teachers: tuple[TeacherPart, ...] = ()
    """For the student only: one per running teacher. Empty: all read its rows, and are asked for all of them."""
    by_row: bool = False
    """For the student only: whether the run chooses teachers by row."""
    pieces: tuple[tuple[PieceRef, ...], ...] = ()
    """For a teacher whose targets are read or stored: of every row, what it holds, in order."""
    asked: np.ndarray | None = None
    """For a teacher only: bool [R], the rows that it is asked for. None: all of them."""


@dataclass(frozen=True, slots=True)
class CrossTokenizerSpec:
    """How a student learns from a teacher with another tokenizer: the loss and the vocabulary projection."""

    method: str
    projection: str
    """Path of the projection's file, which every worker can read."""


@dataclass(frozen=True, slots=True)
class AlignmentInfo:
    """How well the student's and one teacher's rows of a batch match. All counts are over the global batch."""

    teacher: str
    num_chunks: int
    num_one_to_one: int
    num_covered: int
    """Labelled student tokens inside a chunk."""
    num_exact: int
    """Documents whose two tokenizations spell the same bytes."""
    methods: Mapping[str, int]
    """Number of documents by the method that aligned them; `dp` is followed by its engine, as in `dp/numba`."""
    num_labels: int | None = None
    """Labelled student tokens of the documents that the teacher is asked for; None: of all documents."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A document that could not be read or aligned: its row in the data, and the reason."""

    row: Row
    reason: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A part of chats that a chat template does not write, in the documents of one batch."""

    what: str
    documents: int
    row: Row
    """One of the documents' rows, as an example."""


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Aligner → driver: a summary of a batch whose rows the driver never receives."""

    index: int
    cursor: Cursor
    num_documents: int
    num_rows: int
    num_tokens: int
    """Document tokens after truncation, without padding."""
    num_labels: int
    num_truncated: int
    """Documents of which tokens are left out because a row is shorter."""
    seconds: float
    alignments: tuple[AlignmentInfo, ...] = ()
    """One per teacher with another tokenizer."""
    bad_rows: tuple[BadRow, ...] = ()
    """Documents that could not be aligned, and were not known to be bad."""
    num_left_out: int = 0
    """Documents without which the batch was made: these, and those known to be bad."""
    num_not_stored: int = 0
    """Documents left out because a store of targets does not have them."""
    left_out: tuple[LeftOut, ...] = ()
    """Parts of chats that chat templates left out."""
    num_incomplete: int = 0
    """Documents of which a chat template left something out."""
    peak_gib: float = 0.0
    """The most memory that the aligner has held so far."""
    num_split: int = 0
    """Documents that became several pieces because they are longer than a row."""
    num_unlabelled: int = 0
    """Documents without a label, those left out not counted."""
    num_positions: int = 0
    """Positions that the student computes, padding included."""


QUEUE = "queue.json"
"""Name of `RunPaths.queue`."""


class RunPaths:
    """The run directory, the only place to which a run writes.

    Args:
        attempt: number of this start of the run, from 1. Every start has its own folder of logs.
    """

    def __init__(self, root: Path, attempt: int = 1):
        self.root, self.attempt = root, attempt
        self.config = root / "config.yaml"
        self.metrics = root / "metrics.jsonl"
        self.queue = root / QUEUE
        """The place in the queue of a run that waits for others on its cluster; there is no file otherwise."""
        self.evals = root / "evals"
        """The results of evaluations, in one folder per model."""
        self.scores = root / "scores.json"
        """What was measured at each step; decides which checkpoints are kept."""
        self.samples = root / "samples.jsonl"
        """What the models answer to a few items at every evaluation (`evals.results`); absent without suites."""
        self.logs = root / "logs" / f"attempt_{attempt}"
        """The logs of this attempt: `driver.log` and its workers' output. `logs/latest` links to the newest attempt."""
        self.environment = self.logs / "environment.json"
        """Commit, packages and machines of this attempt."""
        self.tensorboard = root / "logs" / "tensorboard"
        """One folder for all attempts, so that a resumed run draws one curve."""
        self.prometheus = root / "logs" / "prometheus" / "targets.json"
        """Addresses of the metrics agents of the newest attempt, for Prometheus."""
        self.checkpoints = root / "checkpoints"
        self.export = root / "export"
        self.bad_rows = root / "bad_rows.jsonl"
        """Documents that were left out, one JSON object per line; absent if there are none."""
        self.report = root / "report.html"
