"""Are the losses across two tokenizers what they say, on chunks of these texts and at the size of these vocabularies?

Random logits take the place of models. The plain reference cannot hold a matrix of two real vocabularies, so it is given
the ids that the sampled chunks need and some hundred others; the fast losses get all columns, those of the other ids
with a logit that makes their probability exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_rl.align import Alignment, TokenAligner
from distill_rl.align.alignment import COUNTS
from distill_rl.align.projection import Projection, build_projection
from distill_rl.losses import (
    METHODS,
    Bridge,
    ChunkOutput,
    Chunks,
    DenseLogits,
    TopKLogprobs,
    chunk_kd_loss,
    reference_chunks,
    vocab_parallel_topk,
)
from distill_rl.verify.check import Check, within

BOUND = 1e-6
CHUNKS_OF_A_KIND = 4
ROWS_OF_ITSELF = 12
"""rows beside a teacher that is the student"""
OTHER_IDS = 200
"""ids of either side, and pairs of both, that the reference sees besides those of the chunks"""
TOP_K = 32
ABSENT = -1e4
"""a logit whose probability is 0, also in fp64"""
IGNORED = -100
AVERAGES = {"xtoken": ("mean", "chain"), "gold": ("mean", "chain"), "uld": ("mean", "chain")}
"""methods that `chunk_average` makes a difference to"""


@dataclass(frozen=True, slots=True)
class Sample:
    """Some chunks, laid out as rows of logits: each chunk's rows, then a row that only has a label and one that has none."""

    chunks: Chunks
    student_labels: Tensor
    """int64 [N_s]"""
    teacher_labels: Tensor
    """int64 [N_t]"""
    kinds: tuple[str, ...]
    """of each chunk: 1:1, 1:n, n:1 or m:n"""


def check_losses(
    aligner: TokenAligner, student_tokenizer: Any, teacher_tokenizer: Any, texts: Sequence[str], *, seed: int = 0
) -> list[Check]:
    """Every method beside the plain reference on the user's own chunks, and beside a teacher that equals the student.

    Args:
        aligner: of the two tokenizers, in this order.
        texts: where the chunks are taken from; at least one must give a chunk.

    Raises:
        ValueError: no chunk in any of the texts.
    """
    draw = torch.Generator().manual_seed(seed)
    sizes = aligner.student.size, aligner.teacher.size
    projection = build_projection(
        student_tokenizer, teacher_tokenizer, student_columns=sizes[0], teacher_columns=sizes[1]
    )
    sample = take_chunks([aligner.align(text) for text in texts])
    identity = build_projection(
        student_tokenizer, student_tokenizer, student_columns=sizes[0], teacher_columns=sizes[0]
    )
    return [*_against_reference(projection, sample, draw), *_against_itself(identity, sample, draw)]


def take_chunks(found: Sequence[Alignment]) -> Sample:
    """Up to CHUNKS_OF_A_KIND of each kind, in the order in which they are met."""
    wanted = dict.fromkeys(COUNTS, CHUNKS_OF_A_KIND)
    kinds: list[str] = []
    ours: list[np.ndarray] = []
    theirs: list[np.ndarray] = []
    for alignment in found:
        for kind, student, teacher in _chunks_of(alignment):
            if wanted[kind]:
                wanted[kind] -= 1
                kinds.append(kind)
                ours.append(student)
                theirs.append(teacher)
        if not any(wanted.values()):
            break
    if not kinds:
        raise ValueError("the texts must have a chunk that both tokenizers share; none was found; give other texts")
    sides = []
    for tokens in (ours, theirs):
        numbers = [number for number, chunk in enumerate(tokens) for _ in chunk]
        sides.append((torch.tensor([*numbers, -1, -1]), torch.tensor([*np.concatenate(tokens), tokens[0][0], IGNORED])))
    (student_numbers, student_labels), (teacher_numbers, teacher_labels) = sides
    return Sample(
        Chunks(student_numbers, teacher_numbers, len(kinds)), student_labels.long(), teacher_labels.long(), tuple(kinds)
    )


def _chunks_of(alignment: Alignment) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(kind, student ids, teacher ids) of every chunk."""
    for number in range(alignment.num_chunks):
        student = alignment.student_ids[alignment.student_chunk == number]
        teacher = alignment.teacher_ids[alignment.teacher_chunk == number]
        one, other = len(student) == 1, len(teacher) == 1
        kind = "1:1" if one and other else "1:n" if one else "n:1" if other else "m:n"
        yield kind, student, teacher


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of two vocabularies, large enough for some chunks: as the reference sees it, and at full size."""

    student: np.ndarray
    """int64, ids kept, ascending"""
    teacher: np.ndarray
    small: Bridge
    """over the kept ids, renumbered, and as many empty ones as make both sides equal where that is possible: `gold` sorts
    no further than the shorter side goes"""
    full: Bridge
    """the same entries among all ids"""


def cut(projection: Projection, sample: Sample) -> Cut:
    """The ids of the sample, some others, and all that the projection makes of them; rows keep summing to 1."""
    labels = [side[side >= 0].numpy() for side in (sample.student_labels, sample.teacher_labels)]
    some = _spread(len(projection.student_common))
    common = projection.student_common[some], projection.teacher_common[some]
    student = np.unique(np.concatenate([labels[0], common[0], _spread(projection.num_student)])).astype(np.int64)
    lengths = np.diff(projection.indptr)[student]
    entries = np.concatenate(
        [np.arange(start, stop) for start, stop in zip(projection.indptr[student], projection.indptr[student + 1])]
    )
    columns = projection.indices[entries]
    teacher = np.unique(np.concatenate([labels[1], common[1], columns, _spread(projection.num_teacher)])).astype(
        np.int64
    )
    kept = np.isin(projection.student_common, student) & np.isin(projection.teacher_common, teacher)
    pairs = projection.student_common[kept], projection.teacher_common[kept]
    values = projection.values[entries]
    width = max(len(student), len(teacher))
    small = Bridge.from_arrays(
        _ends(lengths, np.arange(len(student)), min(width, projection.num_student)),
        np.searchsorted(teacher, columns),
        values,
        num_teacher=min(width, projection.num_teacher),
        student_common=np.searchsorted(student, pairs[0]),
        teacher_common=np.searchsorted(teacher, pairs[1]),
    )
    full = Bridge.from_arrays(
        _ends(lengths, student, projection.num_student),
        columns,
        values,
        num_teacher=projection.num_teacher,
        student_common=pairs[0],
        teacher_common=pairs[1],
    )
    return Cut(student, teacher, small, full)


def _ends(lengths: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """int64 [count + 1]: indptr of `count` rows, those named by `rows` with these lengths, the others empty."""
    whole = np.zeros(count + 1, dtype=np.int64)
    whole[rows + 1] = lengths
    return whole.cumsum()


def _against_reference(projection: Projection, sample: Sample, draw: torch.Generator) -> Iterator[Check]:
    part = cut(projection, sample)
    student, teacher = (_Side.random(*side, draw) for side in (
        (part.student, part.small.num_student, part.full.num_student, sample.student_labels),
        (part.teacher, part.small.num_teacher, part.full.num_teacher, sample.teacher_labels),
    ))  # fmt: skip
    counts = ", ".join(f"{sample.kinds.count(kind)} {kind}" for kind in COUNTS if kind in sample.kinds)
    for method, exports in METHODS.items():
        apart: list[float] = []
        for export in exports:
            for average in AVERAGES.get(method, ("mean",)):
                settings = {"method": method, "chunk_average": average, "top_k": TOP_K, "reduction": "none"}
                fast = _run(chunk_kd_loss, student.full, teacher.full, export, sample.chunks, part.full, settings)
                slow = _run(
                    reference_chunks.chunk_kd_loss,
                    student.small,
                    teacher.small,
                    export,
                    sample.chunks,
                    part.small,
                    settings,
                )
                apart += [_apart(fast.kd, slow.kd), _apart(fast.ce, slow.ce)]
        yield within(f"{method} equals the plain reference", _worst(apart), BOUND, f"{counts}: off by")


def _against_itself(identity: Projection, sample: Sample, draw: torch.Generator) -> Iterator[Check]:
    """A teacher that is the student: one tokenization, every token a chunk, the same logits."""
    part = cut(identity, replace(sample, teacher_labels=sample.student_labels))
    # Of two ids with the same bytes one is matched; the other would be sent into it, as it should between two tokenizers.
    matched = identity.student_common[identity.student_common == identity.teacher_common]
    kept = np.intersect1d(part.student, matched)
    labels = sample.student_labels[:-1][:ROWS_OF_ITSELF]
    side = _Side.random(kept, len(kept), identity.num_student, labels, draw)
    count = len(labels)
    numbers = torch.arange(count)
    for method, exports in METHODS.items():
        apart: list[float] = []
        for export in exports:
            settings = {"method": method, "top_k": TOP_K, "reduction": "none"}
            output = _run(
                chunk_kd_loss, side.full, side.full, export, Chunks(numbers, numbers, count), part.full, settings
            )
            apart.append(float(output.kd.abs().max()))
        yield within(
            f"{method} of a teacher that is the student is 0", _worst(apart), BOUND, f"{count} chunks: |KD| up to"
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    logits: Tensor
    """fp64 [N, V]"""
    labels: Tensor
    """int64 [N], IGNORED where there is none"""


@dataclass(frozen=True, slots=True)
class _Side:
    """The same random rows over the kept ids and over all."""

    small: _Rows
    full: _Rows

    @classmethod
    def random(cls, ids: np.ndarray, width: int, columns: int, labels: Tensor, draw: torch.Generator) -> _Side:
        """`width` and `columns` are how many there are in all; what is none of the ids has no probability."""
        kept = torch.from_numpy(ids)
        logits, whole = (torch.full((len(labels), size), ABSENT, dtype=torch.float64) for size in (width, columns))
        logits[:, : len(ids)] = 3 * torch.randn(len(labels), len(ids), dtype=torch.float64, generator=draw)
        whole[:, kept] = logits[:, : len(ids)]
        renumbered = torch.where(labels == IGNORED, IGNORED, torch.searchsorted(kept, labels.clamp_min(0)))
        return cls(_Rows(logits, renumbered), _Rows(whole, labels))


def _run(
    loss: Callable[..., ChunkOutput],
    student: _Rows,
    teacher: _Rows,
    export: str,
    chunks: Chunks,
    bridge: Bridge,
    settings: dict[str, Any],
) -> ChunkOutput:
    return loss(student.logits, _exported(teacher, export), chunks, bridge, labels=student.labels, **settings)


def _exported(rows: _Rows, export: str) -> TopKLogprobs | DenseLogits:
    """What a teacher would hand over."""
    if export == "topk":
        k = min(TOP_K, rows.logits.shape[1])
        return vocab_parallel_topk(rows.logits, k, labels=rows.labels.clamp_min(0))
    picked = rows.logits.log_softmax(1).gather(1, rows.labels.clamp_min(0)[:, None])[:, 0]
    return DenseLogits(rows.logits, label_logprob=picked)


def _apart(fast: Tensor, slow: Tensor) -> float:
    """The largest difference, relative where the value is above 1."""
    return float(((fast - slow).abs() / slow.abs().clamp_min(1)).max()) if len(slow) else 0.0


def _worst(values: list[float]) -> float:
    """The largest, NaN if one is."""
    return float(np.max(values))


def _spread(count: int) -> np.ndarray:
    """OTHER_IDS numbers below `count`, evenly spaced; all if there are no more."""
    return np.unique(np.linspace(0, count - 1, min(count, OTHER_IDS)).astype(np.int64))
