"""Checks what a run across tokenizers depends on, for a user's own pair: the losses on its chunks, and its stop tokens.

The losses are compared with the plain reference on chunks of the user's texts, at the size of the user's vocabularies.
Random logits take the place of models. The plain reference would need a dense matrix of both vocabularies, which is too
large for real ones. So the reference gets only the ids that the sampled chunks need and a few hundred others, while the
fast losses get all columns, with a logit for the remaining ids that makes their probability exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_rl import losses
from distill_rl.align import Alignment, TokenAligner
from distill_rl.align.alignment import COUNTS
from distill_rl.align.projection import Projection, build_projection
from distill_rl.align.verify import PropertyCheck, check_bound, check_each
from distill_rl.losses import METHODS, Chunks, DenseLogits, TopKLogprobs, VocabularyProjection, chunk_kd_loss

BOUND = 1e-6
ROWS_OF_ITSELF = 12
"""Number of rows for the check against a teacher that equals the student"""
TOP_K = 32
ABSENT = -1e4
"""A logit whose probability is 0, even in fp64"""
CHUNKS_OF_A_KIND = 4
OTHER_IDS = 200
"""Ids per side, and pairs in common, in addition to those of the chunks"""
IGNORED = -100
_SURE = 12.0
"""How far a confident teacher's logit of the stop token lies above all others"""
AVERAGES = {"xtoken": ("mean", "chain"), "gold": ("mean", "chain"), "hkl": ("mean", "chain"), "uld": ("mean", "chain")}
"""Methods that depend on `chunk_average`, and its values"""

StopPair = tuple[int, int]
"""Ids of the student and of the teacher."""


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
    """Yields one result per method: whether KD, CE and the gradient equal those of the plain reference, to BOUND."""
    part = cut(projection, sample)
    small, full = part.small, part.full
    student = _RandomSide.random(part.student, small.num_student, full.num_student, sample.student_labels, draw)
    teacher = _RandomSide.random(part.teacher, small.num_teacher, full.num_teacher, sample.teacher_labels, draw)
    reference = losses.reference_chunks.chunk_kd_loss
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
    """Yields one result per method: whether KD is 0, to BOUND, for a teacher that equals the student."""
    # Both have one tokenization, every token a chunk, and the same logits.
    part = cut(identity, replace(sample, teacher_labels=sample.student_labels))
    # Of two ids with the same bytes, only one is matched with itself; the projection maps the other one to it.
    matched = identity.student_common[identity.student_common == identity.teacher_common]
    kept = np.intersect1d(part.student, matched)
    labels = sample.student_labels[:-1][:ROWS_OF_ITSELF]
    side = _RandomSide.random(kept, len(kept), identity.num_student, labels, draw)
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
class _RandomRows:
    logits: Tensor
    """fp64 [N, V]"""
    labels: Tensor
    """int64 [N]: IGNORED for a row without a label"""


@dataclass(frozen=True, slots=True)
class _RandomSide:
    """The same random rows over the kept ids and over all ids."""

    small: _RandomRows
    full: _RandomRows

    @classmethod
    def random(cls, ids: np.ndarray, width: int, columns: int, labels: Tensor, draw: torch.Generator) -> _RandomSide:
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
        return cls(_RandomRows(small, renumbered), _RandomRows(full, labels))


@dataclass(frozen=True, slots=True)
class _LossResult:
    kd: Tensor
    """[count]"""
    ce: Tensor
    """[N_s]"""
    gradient: Tensor
    """[N_s, V]: gradient of the sum of both"""


def _run(
    loss: Callable[..., losses.ChunkOutput],
    student: _RandomRows,
    teacher: _RandomRows,
    export: str,
    chunks: Chunks,
    projection: VocabularyProjection,
    **settings: Any,
) -> _LossResult:
    """KD per chunk, CE per student row, and the gradient of their sum with respect to the student's logits."""
    logits = student.logits.clone().requires_grad_()
    output = loss(
        logits, _export(teacher, export), chunks, projection, labels=student.labels, reduction="none", **settings
    )
    (gradient,) = torch.autograd.grad(output.kd.sum() + output.ce.sum(), logits)
    return _LossResult(output.kd.detach(), output.ce.detach(), gradient)


def _export(rows: _RandomRows, export: str) -> TopKLogprobs | DenseLogits:
    """What a teacher with these logits exports: its TOP_K most likely ids for `topk`, otherwise all logits."""
    # A row without a label gets the log-probability of id 0, which nothing reads.
    if export == "topk":
        k = min(TOP_K, rows.logits.shape[1])
        return losses.vocab_parallel_topk(rows.logits, k, labels=rows.labels.clamp_min(0))
    label_logprob = rows.logits.log_softmax(1).gather(1, rows.labels.clamp_min(0)[:, None])[:, 0]
    return DenseLogits(rows.logits, label_logprob=label_logprob)


def _error(fast: Tensor, slow: Tensor) -> float:
    """The largest difference of two tensors of one shape, relative where the reference (`slow`) is above 1."""
    return float(((fast - slow).abs() / slow.abs().clamp_min(1)).max())


@dataclass(frozen=True, slots=True)
class Sample:
    """Some chunks, laid out as rows of logits: each chunk's rows, then a row with only a label, and one without."""

    chunks: Chunks
    student_labels: Tensor
    """int64 [N_s]"""
    teacher_labels: Tensor
    """int64 [N_t]"""
    kinds: tuple[str, ...]
    """Kind of each chunk: 1:1, 1:n, n:1 or m:n"""


def take_chunks(alignments: Sequence[Alignment]) -> Sample:
    """The first CHUNKS_OF_A_KIND chunks of each kind, laid out as rows; kinds that do not occur are left out.

    Raises:
        ValueError: no chunk in any of the alignments.
    """
    missing = dict.fromkeys(COUNTS, CHUNKS_OF_A_KIND)
    found: list[tuple[str, np.ndarray, np.ndarray]] = []
    for chunk in chain.from_iterable(map(_chunks_of, alignments)):
        if missing[chunk[0]]:
            missing[chunk[0]] -= 1
            found.append(chunk)
        if not any(missing.values()):
            break
    if not found:
        raise ValueError("the texts must have a chunk that both tokenizers share; there is none; give other texts")
    kinds, *both = zip(*found)
    sides = []
    for chunks in both:
        chunk_of_row = [i for i, tokens in enumerate(chunks) for _ in tokens]
        labels = [*np.concatenate(chunks), chunks[0][0], IGNORED]
        sides.append((torch.tensor([*chunk_of_row, -1, -1]), torch.tensor(labels).long()))
    (student_rows, student_labels), (teacher_rows, teacher_labels) = sides
    return Sample(Chunks(student_rows, teacher_rows, len(kinds)), student_labels, teacher_labels, kinds)


def _chunks_of(alignment: Alignment) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(kind, student ids, teacher ids) of every chunk of an alignment; the kind is 1:1, 1:n, n:1 or m:n."""
    for i in range(alignment.num_chunks):
        student = alignment.student_ids[alignment.student_chunk == i]
        teacher = alignment.teacher_ids[alignment.teacher_chunk == i]
        counts = ["1" if len(ids) == 1 else "n" for ids in (student, teacher)]
        yield "m:n" if counts == ["n", "n"] else ":".join(counts), student, teacher


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of two vocabularies and their projection: renumbered for the reference, and at full size."""

    student: np.ndarray
    """int64: ids kept, ascending"""
    teacher: np.ndarray
    small: VocabularyProjection
    """Over the kept ids, renumbered. The smaller side is filled with empty ids up to the size of the other, if its
    vocabulary is large enough: `gold` sorts only as many logits as the smaller side has"""
    full: VocabularyProjection
    """The same entries among all ids"""


def cut(projection: Projection, sample: Sample) -> Cut:
    """Both vocabularies, cut to the ids of the sample, some evenly spaced others, and every teacher id in their rows.

    Rows of the projection therefore keep all their entries and still sum to 1. The sample keeps its ids: look them up
    in `Cut.student` and `Cut.teacher`.

    Args:
        projection: of the two whole vocabularies.
    """
    labels = [side[side >= 0].numpy() for side in (sample.student_labels, sample.teacher_labels)]
    spread = _spread(len(projection.student_common))
    common = projection.student_common[spread], projection.teacher_common[spread]
    student = np.unique(np.concatenate([labels[0], common[0], _spread(projection.num_student)])).astype(np.int64)
    lengths = np.diff(projection.indptr)[student]
    entries = np.concatenate(
        [np.arange(start, stop) for start, stop in zip(projection.indptr[student], projection.indptr[student + 1])]
    )
    columns = projection.indices[entries]
    needed = [labels[1], common[1], columns, _spread(projection.num_teacher)]
    teacher = np.unique(np.concatenate(needed)).astype(np.int64)
    kept = np.isin(projection.student_common, student) & np.isin(projection.teacher_common, teacher)
    pairs = projection.student_common[kept], projection.teacher_common[kept]
    values = projection.values[entries]
    width = max(len(student), len(teacher))
    small = VocabularyProjection.from_arrays(
        _indptr(lengths, np.arange(len(student)), min(width, projection.num_student)),
        np.searchsorted(teacher, columns),
        values,
        num_teacher=min(width, projection.num_teacher),
        student_common=np.searchsorted(student, pairs[0]),
        teacher_common=np.searchsorted(teacher, pairs[1]),
    )
    full = VocabularyProjection.from_arrays(
        _indptr(lengths, student, projection.num_student),
        columns,
        values,
        num_teacher=projection.num_teacher,
        student_common=pairs[0],
        teacher_common=pairs[1],
    )
    return Cut(student, teacher, small, full)


def _indptr(lengths: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """int64 [count + 1]: for `count` rows, of which `rows` have these lengths and the others are empty."""
    all_lengths = np.zeros(count + 1, dtype=np.int64)
    all_lengths[rows + 1] = lengths
    return all_lengths.cumsum()


def _spread(count: int) -> np.ndarray:
    """int64, ascending: OTHER_IDS evenly spaced integers from 0 to `count` - 1, or all of them if there are fewer."""
    return np.unique(np.linspace(0, count - 1, min(count, OTHER_IDS)).astype(np.int64))


def check_stops(aligner: TokenAligner, projection: Projection, rows: Sequence[Alignment]) -> list[PropertyCheck]:
    """The results of three checks of stop tokens; an empty list for two copies of one tokenizer.

    Paired stop tokens are stops to the losses, stops are mapped to stops only, and by the gradient of every method a
    teacher that is certain to stop never makes the student less likely to. A failed check raises nothing; one that
    finds no stop tokens neither passes nor fails.

    Args:
        projection: for the aligner's two tokenizers and the same stop tokens.
        rows: alignments of rows that end like those of a run (`align_training_rows`).
    """
    if projection.student_hash == projection.teacher_hash:
        return []
    bos = aligner.student.roles.get("bos"), aligner.teacher.roles.get("bos")
    paired = [
        (int(row.student_ids[student]), int(row.teacher_ids[teacher]))
        for row in rows
        for student, teacher in row.stop_pairs
    ]
    # Leave out pairs of bos, unless a tokenizer uses the same id to end a text.
    if bos[0] not in aligner.student.stops or bos[1] not in aligner.teacher.stops:
        paired = [pair for pair in paired if pair != bos]
    distinct = sorted(set(paired))
    vocabulary_projection = VocabularyProjection.from_projection(projection)
    return [
        check_each(
            "paired stop tokens are stop tokens to the losses, too",
            (_not_a_stop(vocabulary_projection, pair) for pair in paired),
            "paired stop tokens",
        ),
        check_each(
            "the common vocabulary and the projection map stop tokens to stop tokens",
            _stops_mapped_to_others(vocabulary_projection),
            "stop tokens",
        ),
        check_each(
            "a teacher that is certain to stop never makes the student less likely to stop",
            (_pushed_down(vocabulary_projection, pair, method) for pair in distinct for method in METHODS),
            "pairs of stop tokens × methods",
        ),
    ]


def _not_a_stop(projection: VocabularyProjection, pair: StopPair) -> str | None:
    """What is wrong if an id of a pair (student, teacher) is no stop token of the projection; None if both are."""
    for side, token, stops in zip(("student", "teacher"), pair, (projection.student_stops, projection.teacher_stops)):
        if token not in stops:
            return f"the {side}'s id {token} is paired as a stop; the projection's are {stops.tolist()}"
    return None


def _stops_mapped_to_others(projection: VocabularyProjection) -> Iterator[str | None]:
    """Checks that the common vocabulary pairs stops with stops, and that the projection maps stops to stops only."""
    student_stops, teacher_stops = set(projection.student_stops.tolist()), set(projection.teacher_stops.tolist())
    for student, teacher in zip(projection.student_common.tolist(), projection.teacher_common.tolist()):
        if student in student_stops or teacher in teacher_stops:
            both = student in student_stops and teacher in teacher_stops
            yield None if both else f"the common vocabulary pairs {student} with {teacher}; one of them is no stop"
    for student in student_stops:
        pieces = projection.indices[projection.indptr[student] : projection.indptr[student + 1]].tolist()
        others = [piece for piece in pieces if piece not in teacher_stops]
        yield f"the projection maps {student} to {others}, which are no stops" if others else None


def _pushed_down(projection: VocabularyProjection, pair: StopPair, method: str) -> str | None:
    """Checks that a step down the gradient of KD does not lower the logit of the student's stop token."""
    draw = torch.Generator().manual_seed(0)
    sizes = projection.num_student, projection.num_teacher
    student, teacher = (torch.randn(1, size, generator=draw) for size in sizes)
    teacher[0, pair[1]] = teacher.max() + _SURE
    student.requires_grad_()
    chunks = Chunks(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 1)
    label = torch.tensor([pair[1]])
    target: DenseLogits | TopKLogprobs = losses.vocab_parallel_topk(
        teacher, min(TOP_K, projection.num_teacher), labels=label
    )
    if "topk" not in METHODS[method]:
        target = DenseLogits(teacher, target.label_logprob)
    output = chunk_kd_loss(student, target, chunks, projection, method=method, labels=torch.tensor([pair[0]]))
    (gradient,) = torch.autograd.grad(output.kd, student)
    push = float(gradient[0, pair[0]])
    return f"{method} moves the logit of the student's id {pair[0]} by {-push:.1e}" if push > 0 else None
