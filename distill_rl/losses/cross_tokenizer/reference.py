"""The cross-tokenizer losses written plainly: chunk by chunk, whole vocabularies, fp64, autograd.

The tests and `distill-rl align --verify` compare against it. It shares nothing with the fast path except types, and
nothing in it is fast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from distill_rl.losses import reference
from distill_rl.losses.cross_tokenizer.chunks import ChunkOutput, Chunks
from distill_rl.losses.cross_tokenizer.projection import RELAXED_WEIGHT, VocabularyProjection
from distill_rl.losses.targets import DenseLogits, TopKLogprobs

STRICT_TOP_K = 16


@dataclass(frozen=True)
class _Settings:
    """The settings of a call of `chunk_kd_loss`, by their names there; `chain` means a `chunk_average` of "chain"."""

    bridge: VocabularyProjection
    divergence: str
    beta: float
    temperature: float
    tail: str
    top_k: int
    chain: bool
    uncommon_top_k: int
    relaxed: bool
    tau: float

    def compare(self, p: Tensor, q: Tensor, *, balanced: bool = True) -> Tensor:
        """D, a scalar: the sum of the divergence's terms over outcomes.

        Args:
            p, q: [m], probabilities of teacher and student.
            balanced: add κ·(q − p) to every term (`Divergence.balance`).
        """
        name = reference._limit(self.divergence, self.beta)
        terms = reference.LOG_DIVERGENCES[name](p.log(), q.log(), self.beta)
        return (terms + reference.BALANCES[name](p, q, self.beta) if balanced else terms).sum()


def chunk_kd_loss(
    student_logits: Tensor,
    teacher: TopKLogprobs | DenseLogits,
    chunks: Chunks,
    bridge: VocabularyProjection,
    *,
    method: str,
    labels: Tensor,
    ignore_index: int = -100,
    reduction: str = "sum",
    temperature: float = 1.0,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    tail: str = "bucket",
    top_k: int = 64,
    chunk_average: str = "mean",
    uncommon_top_k: int = 8192,
    relaxed: bool = False,
    tau: float = 1.0,
) -> ChunkOutput:
    """`losses.chunk_kd_loss` on unsharded tensors in fp64. The masses are not computed (0).

    The arguments mean the same; those that concern speed, sharding and validation are missing.

    Raises:
        ValueError: the method needs dense targets or label log-probabilities that the teacher does not have. Nothing
            else is checked.
    """
    z = student_logits.double().reshape(-1, student_logits.shape[-1])
    flat = labels.reshape(-1)
    valid = flat != ignore_index
    picked = torch.where(valid, flat, 0).long()[:, None]
    ce = torch.where(valid, -z.log_softmax(1).gather(1, picked)[:, 0], 0)
    settings = _Settings(
        bridge, divergence, beta, temperature, tail, top_k, chunk_average == "chain", uncommon_top_k, relaxed, tau
    )
    student = (z / temperature).log_softmax(1)
    label_logprobs = student.gather(1, picked)[:, 0]
    zero = 0 * torch.where(z.isfinite(), z, 0).sum()  # keeps a batch without chunks connected to the graph
    ends = bridge.student_stops.tolist() if len(bridge.teacher_stops) else []
    values, counted = [], 0
    for number in range(chunks.count):
        of_student = (chunks.student == number).nonzero()[:, 0]
        of_teacher = (chunks.teacher == number).nonzero()[:, 0]
        sides = student[of_student], label_logprobs[of_student], _select(teacher, of_teacher)
        if len(of_student) == len(of_teacher) == 1 and int(flat[of_student[0]]) in ends:
            value: Tensor | None = _stops(method, label_logprobs[of_student[0]], sides[2], settings)
        else:
            value = _chunk(method, *sides, settings)
        counted += value is not None
        values.append(zero if value is None else temperature**2 * value)
    kd = torch.stack(values) if values else z.new_zeros(0)
    nothing = z.new_zeros(())
    kd, ce = (kd.sum() + zero, ce.sum()) if reduction == "sum" else (kd, ce)
    return ChunkOutput(kd, ce, torch.tensor(counted), nothing, nothing)


def _select(teacher: TopKLogprobs | DenseLogits, rows: Tensor) -> TopKLogprobs | DenseLogits:
    """The teacher's targets at the given rows."""
    if isinstance(teacher, TopKLogprobs):
        return teacher.select(rows)
    given = teacher.label_logprob
    return DenseLogits(teacher.logits[rows], None if given is None else given[rows])


def _chunk(
    method: str, student: Tensor, label_logprobs: Tensor, teacher: TopKLogprobs | DenseLogits, settings: _Settings
) -> Tensor | None:
    """D of one chunk without T², or None where the method skips it, from log-probabilities at T [n, V_s] and targets."""
    single = len(student) == len(teacher.ids if isinstance(teacher, TopKLogprobs) else teacher.logits) == 1
    if method == "strict":
        return _strict(student, teacher, settings) if single else None
    if method == "alm" or (method == "hybrid" and not single):
        return _coins(label_logprobs.sum(), _label_logprobs(teacher).sum(), settings, settings.tau)
    if method == "hybrid":
        return _common_top_k(student, teacher, settings)
    teacher = _dense(teacher)
    q, other_q = student.exp().mean(0), student.new_zeros(())
    if settings.chain:
        rest = label_logprobs[1:].sum().exp()
        q, other_q = student[0].exp() * rest, 1 - rest
    sides = _teacher_side(teacher, settings), _OneDistribution(q, other_q, ~student.isneginf().all(0))
    if method == "xtoken":
        return _projected(*sides, settings)
    return _uld(*sides, settings) if method == "uld" else _by_parts(*sides, settings, balanced=method == "gold")


class _OneDistribution(NamedTuple):
    """One side's distribution of a chunk."""

    prob: Tensor
    """[V]"""
    other: Tensor
    """scalar, what is missing to 1"""
    present: Tensor
    """bool [V], columns that are not masked"""


def _teacher_side(teacher: DenseLogits, settings: _Settings) -> _OneDistribution:
    """The teacher's distribution of one chunk: the geometric mean of its rows, or with `chain` the first times the others."""
    log_p = (teacher.logits.double() / settings.temperature).log_softmax(1)
    present = ~log_p.isneginf().all(0)
    if settings.chain:
        rest = _label_logprobs(teacher)[1:].sum().exp()
        return _OneDistribution(log_p[0].exp() * rest, 1 - rest, present)
    return _OneDistribution(log_p.mean(0).softmax(0), log_p.new_zeros(()), present)


def _dense(teacher: TopKLogprobs | DenseLogits) -> DenseLogits:
    """Returns the targets if they are dense logits; raises ValueError otherwise."""
    if not isinstance(teacher, DenseLogits):
        raise ValueError(f"teacher: must be DenseLogits for this method; got {type(teacher).__name__}")
    return teacher


def _label_logprobs(teacher: TopKLogprobs | DenseLogits) -> Tensor:
    """The teacher's `label_logprob` [n] in fp64; raises ValueError if it is None."""
    if teacher.label_logprob is None:
        raise ValueError("teacher.label_logprob: needed by this method; got None")
    return teacher.label_logprob.double()


def _stops(method: str, log_q: Tensor, teacher: TopKLogprobs | DenseLogits, settings: _Settings) -> Tensor:
    """D between two coins, without T²: does the text stop here?"""
    # For the teacher by any of its stop tokens, for the student by its label. `strict` is reverse KL, `uld` twice the
    # total variation; tau applies to `alm` only.
    ends = settings.bridge.teacher_stops
    if isinstance(teacher, DenseLogits):
        log_p = (teacher.logits[0].double() / settings.temperature).log_softmax(0)[ends].logsumexp(0)
    else:
        kept = [place for place, token in enumerate(teacher.ids[0].tolist()) if token in ends.tolist()]
        log_p = torch.maximum(teacher.logprobs[0, kept].double().logsumexp(0), _label_logprobs(teacher)[0])
    if method == "uld":
        return 2 * (log_q.exp() - log_p.exp()).abs()
    if method == "strict":
        settings = replace(settings, divergence="reverse_kl")
    return _coins(log_q, log_p, settings, settings.tau if method == "alm" else 1.0)


def _coins(x: Tensor, y: Tensor, settings: _Settings, tau: float) -> Tensor:
    """τ·D between two coins that show heads with probability exp(x/τ) (student) and exp(y/τ) (teacher); scalars."""
    q, p = (x / tau).exp(), (y / tau).exp()
    return tau * settings.compare(torch.stack([p, 1 - p]), torch.stack([q, 1 - q]))


def _common_top_k(student: Tensor, teacher: TopKLogprobs | DenseLogits, settings: _Settings) -> Tensor:
    """`hybrid` for a 1:1 chunk, without T²: D over the teacher's top k ids that have a counterpart, and the rest."""
    if isinstance(teacher, DenseLogits):
        log_p = (teacher.logits.double() / settings.temperature).log_softmax(1)
        top, ids = log_p.topk(min(settings.top_k, log_p.shape[1]), 1)
        teacher = TopKLogprobs(ids, top, log_p.scatter(1, ids, -torch.inf).logsumexp(1), settings.temperature)
    counterpart = dict(torch.stack([settings.bridge.teacher_common, settings.bridge.student_common], 1).tolist())
    logprobs = teacher.logprobs.double()
    rest = teacher.rest_logprob
    mass = logprobs.exp().sum()
    rest_p = rest.double().exp()[0] if rest is not None else torch.where(mass >= 1 - 1e-6, 0, 1 - mass)
    kept = [place for place, token in enumerate(teacher.ids[0].tolist()) if token in counterpart]
    lost = [place for place in range(logprobs.shape[1]) if place not in kept]
    ids = torch.tensor([[counterpart[int(teacher.ids[0, place])] for place in kept]], dtype=torch.int64)
    rest_p = rest_p + logprobs[0, lost].exp().sum()
    known = TopKLogprobs(ids, logprobs[:, kept], rest_p.log()[None], teacher.temperature)
    how = settings.divergence, settings.beta, settings.temperature, settings.tail
    value, *_ = reference._rows(student, known, *how)
    return value[0]


def _projected(teacher: _OneDistribution, student: _OneDistribution, settings: _Settings) -> Tensor:
    """`xtoken` for one chunk: D (without T²) between teacher and projected student over the top k and the rest."""
    (p, other_p, _), (q, other_q, _) = teacher, student
    bridge = settings.bridge
    rows = torch.arange(bridge.num_student).repeat_interleave(bridge.indptr.diff())
    # W as a dense matrix [V_s, V_t], differentiable in the bridge's values.
    matrix = bridge.values.new_zeros(bridge.num_student, bridge.num_teacher, dtype=torch.float64)
    matrix = matrix.index_put((rows, bridge.indices), bridge.values.double())
    projected = q @ matrix
    reachable = (matrix > 0).any(0).nonzero()[:, 0]
    top = reachable[p[reachable].topk(min(settings.top_k, len(reachable))).indices]
    outside = torch.ones_like(p, dtype=torch.bool).index_fill(0, top, False)
    if settings.tail != "bucket":
        p, q = p[top], projected[top]
        if settings.tail == "renormalize":
            return settings.compare(p / p.sum(), q / q.sum())
        return settings.compare(p, q, balanced=False)
    rest_p = p[outside].sum() + other_p
    rest_q = projected[outside].sum() + (q * (matrix.sum(1) == 0)).sum() + other_q
    needs_support = reference._limit(settings.divergence, settings.beta) == "reverse_kl"
    compared = bool(rest_q > 0) and (bool(rest_p > 0) or not needs_support)
    p, q = torch.cat([p[top], rest_p[None]]), torch.cat([projected[top], rest_q[None]])
    return settings.compare(p, q) if compared else settings.compare(p[:-1], q[:-1])


def _matches(settings: _Settings) -> tuple[list[int], list[int]]:
    """The pairs of `gold` and `hkl`, as lists of student and teacher ids, see `VocabularyProjection.matches`."""
    bridge = settings.bridge
    matches = dict(torch.stack([bridge.student_common, bridge.teacher_common], 1).tolist())
    if settings.relaxed:
        heavy = []
        for student in range(bridge.num_student):
            for place in range(int(bridge.indptr[student]), int(bridge.indptr[student + 1])):
                if float(bridge.values[place]) >= RELAXED_WEIGHT:
                    heavy.append((-float(bridge.values[place]), student, int(bridge.indices[place])))
        for _, student, teacher in sorted(heavy):
            if student not in matches and teacher not in matches.values():
                matches[student] = teacher
    return list(matches), list(matches.values())


def _by_parts(teacher: _OneDistribution, student: _OneDistribution, settings: _Settings, *, balanced: bool) -> Tensor:
    """`gold` for one chunk, or without balance `hkl`, which may be negative. A scalar without T²."""
    # Terms over the common vocabulary, and sorted L1 of the unmasked columns without a counterpart.
    of_student, of_teacher = _matches(settings)
    common = settings.compare(teacher.prob[of_teacher], student.prob[of_student], balanced=balanced)
    q, p = _unmatched(student, of_student), _unmatched(teacher, of_teacher)
    rest = _sorted_l1(q, p, min(len(q), len(p), settings.uncommon_top_k)) + (student.other - teacher.other).abs()
    return common + rest


def _unmatched(side: _OneDistribution, matched: list[int]) -> Tensor:
    """The probabilities of the unmasked columns that are not matched, in order."""
    outside = side.present.clone()
    outside[matched] = False
    return side.prob[outside]


def _uld(teacher: _OneDistribution, student: _OneDistribution, settings: _Settings) -> Tensor:
    """`uld` for one chunk: sorted L1 over all columns, plus |difference| of what the sides miss to one."""
    length = min(max(len(teacher.prob), len(student.prob)), settings.uncommon_top_k)
    return _sorted_l1(student.prob, teacher.prob, length) + (student.other - teacher.other).abs()


def _sorted_l1(q: Tensor, p: Tensor, length: int) -> Tensor:
    """Σ |q_(i) − p_(i)| over the `length` largest of either side, which is filled up with zeros."""
    q, p = (pad(side.sort(descending=True).values, (0, max(0, length - len(side))))[:length] for side in (q, p))
    return (q - p).abs().sum()


def _strict(student: Tensor, teacher: TopKLogprobs | DenseLogits, settings: _Settings) -> Tensor:
    """`strict` for one 1:1 chunk: reverse KL, both sides conditioned on the common vocabulary."""
    logits = _dense(teacher).logits
    bridge = settings.bridge
    q = student[0, bridge.student_common].softmax(0)
    p = (logits[0].double() / settings.temperature)[bridge.teacher_common].softmax(0)
    top = q.detach().topk(min(STRICT_TOP_K, len(q))).indices
    outside = torch.ones_like(q, dtype=torch.bool).index_fill(0, top, False)
    rest_p, rest_q = p[outside].sum()[None], q[outside].sum()[None]
    if not outside.any():
        rest_p = rest_q = p[:0]
    reverse_kl = replace(settings, divergence="reverse_kl")
    return reverse_kl.compare(torch.cat([p[top], rest_p]), torch.cat([q[top], rest_q]))
