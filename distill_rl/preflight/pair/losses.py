"""Checks the cross-tokenizer losses on chunks of the user's texts, at the size of the user's vocabularies.

Random logits take the place of models. The plain reference would need a dense matrix of both vocabularies, which is too
large for real ones. So the reference gets only the ids that the sampled chunks need and a few hundred others, while the
fast losses get all columns, with a logit for the remaining ids that makes their probability exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_rl.align import TokenAligner
from distill_rl.align.alignment import COUNTS
from distill_rl.align.projection import Projection, build_projection
from distill_rl.align.verify import PropertyCheck, check_bound
from distill_rl.losses import (
    METHODS,
    ChunkOutput,
    Chunks,
    DenseLogits,
    TopKLogprobs,
    VocabularyProjection,
    chunk_kd_loss,
    reference_chunks,
    vocab_parallel_topk,
)
from distill_rl.preflight.pair.sample import IGNORED, Sample, cut, take_chunks

BOUND = 1e-6
ROWS_OF_ITSELF = 12
"""Number of rows for the check against a teacher that equals the student"""
TOP_K = 32
ABSENT = -1e4
"""A logit whose probability is 0, even in fp64"""
AVERAGES = {"xtoken": ("mean", "chain"), "gold": ("mean", "chain"), "hkl": ("mean", "chain"), "uld": ("mean", "chain")}
"""Methods that depend on `chunk_average`, and its values"""


def check_losses(
    aligner: TokenAligner, projection: Projection, student_tokenizer: Any, texts: Sequence[str]
) -> list[PropertyCheck]:
    """Compares every method with the plain reference, and checks that KD is 0 for a teacher that equals the student.

    Returns two results per method; a failed check raises nothing. Random logits from a fixed seed take the place of
    models.

    Args:
        projection: for the aligner's two tokenizers, with a column for every id.
        texts: where the chunks are taken from; at least one must have a chunk.

    Raises:
        ValueError: no chunk in any of the texts.
    """
    draw = torch.Generator().manual_seed(0)
    columns = aligner.student.size
    sample = take_chunks([aligner.align(text) for text in texts])
    identity = build_projection(student_tokenizer, student_tokenizer, student_columns=columns, teacher_columns=columns)
    return [*_against_reference(projection, sample, draw), *_against_itself(identity, sample, draw)]


def _against_reference(projection: Projection, sample: Sample, draw: torch.Generator) -> Iterator[PropertyCheck]:
    """Yields one result per method: whether KD, CE and the gradient equal those of the plain reference, to BOUND.

    Each method is run on random logits with every export and every average of chunks that it supports.

    Args:
        projection: of the two whole vocabularies; the reference gets the part of it that the sample needs.
        draw: generator of the logits.
    """
    part = cut(projection, sample)
    student = _Side.random(part.student, part.small.num_student, part.full.num_student, sample.student_labels, draw)
    teacher = _Side.random(part.teacher, part.small.num_teacher, part.full.num_teacher, sample.teacher_labels, draw)
    reference = reference_chunks.chunk_kd_loss
    counts = ", ".join(f"{sample.kinds.count(kind)} {kind}" for kind in COUNTS if kind in sample.kinds)
    for method, exports in METHODS.items():
        errors: list[float] = []
        for export, average in product(exports, AVERAGES.get(method, ("mean",))):
            settings = {"method": method, "chunk_average": average, "top_k": TOP_K}
            fast = _run(chunk_kd_loss, student.full, teacher.full, export, sample.chunks, part.full, **settings)
            slow = _run(reference, student.small, teacher.small, export, sample.chunks, part.small, **settings)
            errors += [_error(fast.kd, slow.kd), _error(fast.ce, slow.ce)]
            errors.append(_error(fast.gradient[:, part.student], slow.gradient[:, : len(part.student)]))
        name = f"{method} equals the plain reference, value and gradient"
        yield check_bound(name, errors, BOUND, f"{counts}: off by")


def _against_itself(identity: Projection, sample: Sample, draw: torch.Generator) -> Iterator[PropertyCheck]:
    """Yields one result per method: whether KD is 0, to BOUND, for a teacher that equals the student.

    Both have one tokenization, every token a chunk, and the same logits.

    Args:
        identity: projection of the student's vocabulary onto itself.
        sample: where the first ROWS_OF_ITSELF student labels are taken from.
        draw: generator of the logits.
    """
    part = cut(identity, replace(sample, teacher_labels=sample.student_labels))
    # Of two ids with the same bytes, only one is matched with itself; the projection maps the other one to it.
    matched = identity.student_common[identity.student_common == identity.teacher_common]
    kept = np.intersect1d(part.student, matched)
    labels = sample.student_labels[:-1][:ROWS_OF_ITSELF]
    side = _Side.random(kept, len(kept), identity.num_student, labels, draw)
    count = len(labels)
    chunk_of_row = torch.arange(count)
    for method, exports in METHODS.items():
        values: list[float] = []
        for export in exports:
            shared = Chunks(chunk_of_row, chunk_of_row, count)
            output = _run(chunk_kd_loss, side.full, side.full, export, shared, part.full, method=method, top_k=TOP_K)
            values.append(float(output.kd.abs().max()))
        name = f"{method} of a teacher that equals the student is 0"
        yield check_bound(name, values, BOUND, f"{count} chunks: |KD| up to")


@dataclass(frozen=True, slots=True)
class _Rows:
    logits: Tensor
    """fp64 [N, V]"""
    labels: Tensor
    """int64 [N]: IGNORED for a row without a label"""


@dataclass(frozen=True, slots=True)
class _Side:
    """The same random rows over the kept ids and over all ids."""

    small: _Rows
    full: _Rows

    @classmethod
    def random(cls, ids: np.ndarray, width: int, columns: int, labels: Tensor, draw: torch.Generator) -> _Side:
        """The same random rows over the kept ids and over all ids; in both, all other columns have the logit ABSENT.

        Args:
            ids: int64, ascending: the kept ids, to which column i of the small rows belongs.
            width: columns of the small rows, at least the number of ids.
            columns: columns of the full rows: the size of the vocabulary.
            labels: int64 [N]: kept ids or IGNORED; renumbered in the small rows.
            draw: generator of the logits.
        """
        kept = torch.from_numpy(ids)
        small, full = (torch.full((len(labels), size), ABSENT, dtype=torch.float64) for size in (width, columns))
        small[:, : len(ids)] = 3 * torch.randn(len(labels), len(ids), dtype=torch.float64, generator=draw)
        full[:, kept] = small[:, : len(ids)]
        renumbered = torch.where(labels == IGNORED, IGNORED, torch.searchsorted(kept, labels.clamp_min(0)))
        return cls(_Rows(small, renumbered), _Rows(full, labels))


@dataclass(frozen=True, slots=True)
class _Result:
    kd: Tensor
    """[count]"""
    ce: Tensor
    """[N_s]"""
    gradient: Tensor
    """[N_s, V]: gradient of the sum of both"""


def _run(
    loss: Callable[..., ChunkOutput],
    student: _Rows,
    teacher: _Rows,
    export: str,
    chunks: Chunks,
    projection: VocabularyProjection,
    **settings: Any,
) -> _Result:
    """KD per chunk, CE per student row, and the gradient of their sum with respect to the student's logits."""
    logits = student.logits.clone().requires_grad_()
    output = loss(
        logits, _export(teacher, export), chunks, projection, labels=student.labels, reduction="none", **settings
    )
    (gradient,) = torch.autograd.grad(output.kd.sum() + output.ce.sum(), logits)
    return _Result(output.kd.detach(), output.ce.detach(), gradient)


def _export(rows: _Rows, export: str) -> TopKLogprobs | DenseLogits:
    """What a teacher with these logits exports: its TOP_K most likely ids for `topk`, otherwise all logits."""
    # A row without a label gets the log-probability of id 0, which nothing reads.
    if export == "topk":
        k = min(TOP_K, rows.logits.shape[1])
        return vocab_parallel_topk(rows.logits, k, labels=rows.labels.clamp_min(0))
    label_logprob = rows.logits.log_softmax(1).gather(1, rows.labels.clamp_min(0)[:, None])[:, 0]
    return DenseLogits(rows.logits, label_logprob=label_logprob)


def _error(fast: Tensor, slow: Tensor) -> float:
    """The largest difference of two tensors of one shape, relative where the reference (`slow`) is above 1."""
    return float(((fast - slow).abs() / slow.abs().clamp_min(1)).max())
