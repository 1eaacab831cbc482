"""Are the losses across two tokenizers what they say, on chunks of these texts and at the size of these vocabularies?

Random logits take the place of models. The plain reference cannot hold a matrix of two real vocabularies, so it is given
the ids that the sampled chunks need and some hundred others; the fast losses get all columns, those of the other ids
with a logit that makes their probability exactly 0.
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
from distill_rl.verify.check import Check, within
from distill_rl.verify.sample import IGNORED, Sample, cut, take_chunks

BOUND = 1e-6
ROWS_OF_ITSELF = 12
"""rows beside a teacher that is the student"""
TOP_K = 32
ABSENT = -1e4
"""a logit whose probability is 0, also in fp64"""
AVERAGES = {"xtoken": ("mean", "chain"), "gold": ("mean", "chain"), "hkl": ("mean", "chain"), "uld": ("mean", "chain")}
"""methods that `chunk_average` makes a difference to"""


def check_losses(
    aligner: TokenAligner,
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    texts: Sequence[str],
    *,
    projection: Projection | None = None,
    seed: int = 0,
) -> list[Check]:
    """Every method beside the plain reference on the user's own chunks, and beside a teacher that equals the student.

    Args:
        aligner: of the two tokenizers, in this order.
        texts: where the chunks are taken from; at least one must give a chunk.
        projection: of the same tokenizers, with a column for every id; None: built here.

    Raises:
        ValueError: no chunk in any of the texts.
    """
    draw = torch.Generator().manual_seed(seed)
    sizes = aligner.student.size, aligner.teacher.size
    if projection is None:
        projection = build_projection(
            student_tokenizer, teacher_tokenizer, student_columns=sizes[0], teacher_columns=sizes[1]
        )
    sample = take_chunks([aligner.align(text) for text in texts])
    identity = build_projection(
        student_tokenizer, student_tokenizer, student_columns=sizes[0], teacher_columns=sizes[0]
    )
    return [*_against_reference(projection, sample, draw), *_against_itself(identity, sample, draw)]


def _against_reference(projection: Projection, sample: Sample, draw: torch.Generator) -> Iterator[Check]:
    part = cut(projection, sample)
    student, teacher = (_Side.random(*side, draw) for side in (
        (part.student, part.small.num_student, part.full.num_student, sample.student_labels),
        (part.teacher, part.small.num_teacher, part.full.num_teacher, sample.teacher_labels),
    ))  # fmt: skip
    counts = ", ".join(f"{sample.kinds.count(kind)} {kind}" for kind in COUNTS if kind in sample.kinds)
    for method, exports in METHODS.items():
        apart: list[float] = []
        for export, average in product(exports, AVERAGES.get(method, ("mean",))):
            settings = {"method": method, "chunk_average": average, "top_k": TOP_K}
            fast = _run(chunk_kd_loss, student.full, teacher.full, export, sample.chunks, part.full, **settings)
            slow = _run(
                reference_chunks.chunk_kd_loss,
                student.small,
                teacher.small,
                export,
                sample.chunks,
                part.small,
                **settings,
            )
            apart += [_apart(fast.kd, slow.kd), _apart(fast.ce, slow.ce)]
            apart.append(_apart(fast.gradient[:, part.student], slow.gradient[:, : len(part.student)]))
        name = f"{method} equals the plain reference, value and gradient"
        yield within(name, _worst(apart), BOUND, f"{counts}: off by")


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
            shared = Chunks(numbers, numbers, count)
            output = _run(chunk_kd_loss, side.full, side.full, export, shared, part.full, method=method, top_k=TOP_K)
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


@dataclass(frozen=True, slots=True)
class _Result:
    kd: Tensor
    """[count]"""
    ce: Tensor
    """[N_s]"""
    gradient: Tensor
    """[N_s, V], of their sum"""


def _run(
    loss: Callable[..., ChunkOutput],
    student: _Rows,
    teacher: _Rows,
    export: str,
    chunks: Chunks,
    bridge: VocabularyProjection,
    **settings: Any,
) -> _Result:
    logits = student.logits.clone().requires_grad_()
    output = loss(
        logits, _exported(teacher, export), chunks, bridge, labels=student.labels, reduction="none", **settings
    )
    (gradient,) = torch.autograd.grad(output.kd.sum() + output.ce.sum(), logits)
    return _Result(output.kd.detach(), output.ce.detach(), gradient)


def _exported(rows: _Rows, export: str) -> TopKLogprobs | DenseLogits:
    """What a teacher would hand over."""
    if export == "topk":
        k = min(TOP_K, rows.logits.shape[1])
        return vocab_parallel_topk(rows.logits, k, labels=rows.labels.clamp_min(0))
    picked = rows.logits.log_softmax(1).gather(1, rows.labels.clamp_min(0)[:, None])[:, 0]
    return DenseLogits(rows.logits, label_logprob=picked)


def _apart(fast: Tensor, slow: Tensor) -> float:
    """The largest difference, relative where the value is above 1."""
    return float(((fast - slow).abs() / slow.abs().clamp_min(1)).max())


def _worst(values: list[float]) -> float:
    """The largest, NaN if one is."""
    return float(np.max(values))
