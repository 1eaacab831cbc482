"""Knowledge distillation from a teacher with another tokenizer: one function; the methods have files of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import logsigmoid

from distill_rl.losses.core import checks
from distill_rl.losses.core.checks import Backend, Tail
from distill_rl.losses.core.logits import DenseTeacher, Student, student_of, untraced
from distill_rl.losses.core.rows import chunks as pieces_of
from distill_rl.losses.core.rows import floor_of
from distill_rl.losses.cross_tokenizer.chunks import ChunkOutput, ChunkPairing, Chunks, ChunkSide, pair
from distill_rl.losses.cross_tokenizer.gold import by_parts, uld
from distill_rl.losses.cross_tokenizer.hybrid import alm, cross_entropies, hybrid, strict
from distill_rl.losses.cross_tokenizer.projection import VocabularyProjection
from distill_rl.losses.cross_tokenizer.task import Bernoulli, ChunkSettings, ChunkTask, LabelledRows, Terms
from distill_rl.losses.cross_tokenizer.xtoken import xtoken
from distill_rl.losses.divergence import resolve
from distill_rl.losses.targets import DenseLogits, Teacher, TeacherHidden, TopKLogprobs


@dataclass(frozen=True, slots=True)
class Method:
    """A way to compare chunks."""

    name: str
    terms: Callable[[ChunkTask], Terms]
    targets: tuple[str, ...]  # kinds of teacher targets that it accepts: topk, logits
    label_logprob: Literal["always", "chain", "never"]  # when the teacher's log-probabilities of its tokens are needed
    needs_common: bool = False  # whether the two vocabularies must have tokens in common
    needs_projection: bool = False  # whether the projection must have entries


_KNOWN = (
    Method("hybrid", hybrid, ("topk", "logits"), label_logprob="always", needs_common=True),
    Method("xtoken", xtoken, ("logits",), label_logprob="chain", needs_projection=True),
    Method("gold", partial(by_parts, balanced=True), ("logits",), label_logprob="chain", needs_common=True),
    Method("hkl", partial(by_parts, balanced=False), ("logits",), label_logprob="chain", needs_common=True),
    Method("uld", uld, ("logits",), label_logprob="chain"),
    Method("alm", alm, ("topk", "logits"), label_logprob="always"),
    Method("strict", strict, ("logits",), label_logprob="never", needs_common=True),
)
_METHODS = {method.name: method for method in _KNOWN}
METHODS: dict[str, tuple[str, ...]] = {name: method.targets for name, method in _METHODS.items()}
"""Method → the kinds of teacher targets that it accepts."""
REDUCTIONS = ("sum", "none")
CHUNK_AVERAGES = ("mean", "chain")


@untraced
def chunk_kd_loss(
    student_logits: Student,
    teacher: Teacher,
    chunks: Chunks,
    bridge: VocabularyProjection,
    *,
    method: str,
    labels: Tensor,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    tail: Tail = "bucket",
    top_k: int = 64,
    chunk_average: str = "mean",
    uncommon_top_k: int = 8192,
    relaxed: bool = False,
    tau: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "sum",
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    validate: bool | None = None,
    backend: Backend | None = None,
) -> ChunkOutput:
    """Sums of T²·D over chunks of text and of the cross-entropy over rows, each with the exact gradient on every rank.

    Both are sums, so that micro-batches and data-parallel ranks may be added up and divided once. Extra memory is the
    gradient, in the logits' dtype, and a few pieces of rows; collectives run forward only. With StudentHidden it is the
    gradients of its tensors and the pieces; backward makes the logits again, and sums the gradient of the hidden states
    over the ranks.

    Args:
        student_logits: [N_s, V] or [R, S, V], sharded as in `kd_loss`, or StudentHidden.
        teacher: DenseLogits or TeacherHidden, for `hybrid` and `alm` also TopKLogprobs; with `label_logprob` for these
            two and for `chain`, at `temperature`. Its ids and columns are the teacher's own, its rows N_t; logits or
            output layer are whole on every rank.
        chunks: which rows of both sides stand for the same text.
        bridge: from the student's vocabulary to the teacher's. If its values require a gradient, `xtoken` gives them
            one: this rank's share, complete once summed over the tensor-parallel group (see `LearnableProjection`).
        method: hybrid, xtoken, gold, hkl, uld, alm or strict.
        labels: int [N_s] or [R, S], already shifted. Every row of a chunk has one.
        divergence, beta: as in `kd_loss`; `strict` is reverse KL whatever they say, and `uld` has none.
        temperature: of both sides; D is scaled by its square. The cross-entropy is at 1.
        tail: as in `kd_loss`, of `hybrid` and `xtoken`.
        top_k: of a dense teacher's columns, for `hybrid` (per row) and `xtoken` (per chunk).
        chunk_average: what `xtoken`, `gold`, `hkl` and `uld` take for a chunk's distribution. `mean`: the arithmetic
            mean of the student's rows, the normalised geometric mean of the teacher's (NeMo-RL #2245). `chain`: that of
            the first token times the probability of the chunk's other tokens as they stand, and what is missing to 1 as
            one more outcome.
        uncommon_top_k: how many of the sorted probabilities `gold`, `hkl` and `uld` compare.
        relaxed: `gold` and `hkl` also take for common what W sends mostly into one token.
        tau: `alm`, and `hybrid` for chunks that are not 1:1, compare likelihoods to the power 1/tau, and multiply D by tau. A run's
            default is 100 (`loss.alm_tau`).
        reduction: sum, or none: one number per chunk, and per row for the cross-entropy.
        chunk_size: rows of logits worked on at once, rounded to whole chunks of text where a method needs it.
        validate: look at ids, labels and chunk numbers; None means on CPU tensors only.
        backend: as in `kd_loss`; kernels compute the top-k comparison of `hybrid` and label log-probabilities.

    Returns:
        The sums (or, with `none`, kd [count] and ce [N_s]), of which `kd` and `ce` are differentiable, and the number
        of chunks that the method compares.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    checks.one_of("method", method, tuple(_METHODS))
    checks.one_of("reduction", reduction, REDUCTIONS)
    checks.common(temperature, chunk_size, backend=backend, tail=tail)
    comparison = resolve(divergence, beta)
    checks.one_of("chunk_average", chunk_average, CHUNK_AVERAGES)
    checks.positive("tau", tau)
    checks.at_least_one("top_k", top_k)
    checks.at_least_one("uncommon_top_k", uncommon_top_k)
    settings = ChunkSettings(
        divergence=comparison, temperature=temperature, tail=tail, top_k=top_k, chain=chunk_average == "chain",
        uncommon_top_k=uncommon_top_k, relaxed=relaxed, tau=tau, chunk_size=chunk_size, backend=backend,
    )  # fmt: skip
    chosen = _METHODS[method]
    student, shard, leading = student_of(student_logits, tp_group, "student_logits", backend=backend)
    labels = checks.rows("labels", labels, leading)
    valid = labels != ignore_index
    checks.labels("labels", labels, valid, shard.total, ignore_index, validate)
    given = _checked_teacher(settings, chosen, teacher, bridge, validate)
    _check_projection(chosen, bridge, shard.total)
    num_teacher = len(given.ids) if isinstance(given, TopKLogprobs) else given.num_rows
    pairing = pair(chunks, student.num_rows, num_teacher, validate)
    columns, computed = shard.widest, False
    if isinstance(given, TopKLogprobs):
        checks.log_probabilities(given, chunks.teacher >= 0, validate)
    else:
        columns, computed = max(columns, given.columns), given.computed
    if checks.looked_at(validate, labels) and not bool(valid[pairing.student.rows].all()):
        raise ValueError("labels: every row of a chunk must have one; one is ignore_index")
    task = ChunkTask(
        student=student,
        shard=shard,
        labels=torch.where(valid, labels, -1).long(),
        label_rows=valid.nonzero()[:, 0],
        pairing=pairing,
        teacher=given,
        projection=bridge,
        settings=settings,
        # The same on every rank, however uneven the shards: some methods end each piece with a collective.
        piece=chunk_size or student.default_chunk(columns, dense=True, computed=computed),
    )
    terms = with_stops(task, chosen)
    zero = task.like.new_zeros(())
    masses = (zero if mass is None else mass.detach().sum() for mass in (terms.teacher_mass, terms.student_mass))
    num_chunks = torch.tensor(terms.num_chunks, device=zero.device)
    kd, ce = (terms.kd, terms.ce) if reduction == "none" else (terms.kd.sum(), terms.ce.sum())
    return ChunkOutput(kd, ce, num_chunks, *masses)


def _checked_teacher(
    settings: ChunkSettings, method: Method, teacher: Teacher, projection: VocabularyProjection, validate: bool | None
) -> TopKLogprobs | DenseTeacher:
    """Checks kind, shape and vocabulary of the targets, and returns them as the methods take them."""
    found: TopKLogprobs | DenseTeacher
    if isinstance(teacher, DenseLogits | TeacherHidden):
        name, tensor = ("logits", teacher.logits) if isinstance(teacher, DenseLogits) else ("hidden", teacher.hidden)
        checks.floating(f"teacher.{name}", tensor, (2,))
        found = DenseTeacher.of_all_columns(teacher)
        num_rows = found.num_rows
        if found.columns != projection.num_teacher:
            field = "logits" if name == "logits" else "lm_head_weight"
            what = f"teacher.{field}: must have the bridge's {projection.num_teacher} columns"
            raise ValueError(f"{what}; got {found.columns}")
    elif isinstance(teacher, TopKLogprobs) and "topk" in method.targets:
        found, num_rows = teacher, len(teacher.ids)
        checks.top_k(teacher, num_rows, projection.num_teacher, settings.temperature, validate)
    else:
        kinds = "DenseLogits or TeacherHidden"
        kinds = f"TopKLogprobs, {kinds}" if "topk" in method.targets else kinds
        raise ValueError(f"teacher: must be {kinds} for {method.name}; got {type(teacher).__name__}")
    label = teacher.label_logprob
    if label is None and (method.label_logprob == "always" or (method.label_logprob == "chain" and settings.chain)):
        setting = f"{method.name} with chunk_average {'chain' if settings.chain else 'mean'}"
        raise ValueError(f"teacher.label_logprob: needed for {setting}, one per row; got None")
    if label is not None and label.numel() != num_rows:
        raise ValueError(f"teacher.label_logprob: must be [N] with N = {num_rows} rows; got {list(label.shape)}")
    return found


def _check_projection(method: Method, projection: VocabularyProjection, columns: int) -> None:
    if projection.num_student != columns:
        rule = f"must have a row for each of the student's {columns} columns"
        raise ValueError(f"bridge: {rule}; got {projection.num_student}")
    if method.needs_common and not len(projection.student_common):
        raise ValueError(f"bridge: {method.name} needs a common vocabulary; got an empty one")
    if method.needs_projection and not len(projection.indices):
        raise ValueError(f"bridge: {method.name} needs a projection; got one without entries")


# Stop tokens: where an answer ends, all methods compare only whether the text stops here.
#
# A model may have several stop tokens (eos, end of turn, others in its generation config), and two models' lists do not
# correspond. Compared token by token, a teacher that stops with one token would teach the student not to stop with
# another. So at a paired stop token, a 1:1 chunk whose label is a stop token of the student, and only there,
#
#     D = D(coin(P), coin(Q))      P = Σ p over all stop tokens of the teacher,   Q = q(the student's own token here)
#
# The student's other stop tokens are not part of Q: they would be trained as much, and the student would end answers
# with a token that its template never writes (docs/decisions/0023).


def with_stops(task: ChunkTask, method: Method) -> Terms:
    """The terms of all chunks: the method's own for chunks of text, coins for stop tokens.

    Without any, or if the stop tokens of a side are unknown, these are the method's own terms. Waits for a GPU, to count
    them.
    """
    pairing, ids = task.pairing, task.projection.student_stops
    if not len(ids) or not len(task.projection.teacher_stops):
        return method.terms(task)
    single = (pairing.student.length == 1) & (pairing.teacher.length == 1)
    are_stops = single & torch.isin(task.labels[pairing.student.first], ids)
    count = int(are_stops.sum())  # a GPU is waited for
    if not count:
        return method.terms(task)
    others, stops = are_stops.sort(stable=True).indices.split([pairing.count - count, count])
    rows = pairing.student.first[stops]
    student, ends = task.student.apart(rows)
    terms = method.terms(replace(task, student=student, pairing=_without(pairing, are_stops, others)))
    _, ours = cross_entropies(LabelledRows(replace(task, student=ends, labels=task.labels[rows])))
    theirs = _teacher_stops(task, stops)
    kd = terms.kd.new_zeros(pairing.count).index_copy(0, others, terms.kd)
    kd = kd.index_copy(0, stops, task.settings.temperature**2 * _coins(task.settings, method.name, ours, theirs))
    masses = (
        None if mass is None else mass.detach().sum() + side.detach().exp().sum()
        for mass, side in ((terms.teacher_mass, theirs), (terms.student_mass, ours))
    )  # fmt: skip
    return Terms(kd, terms.ce, terms.num_chunks + len(stops), *masses)


def _without(pairing: ChunkPairing, stops: Tensor, kept: Tensor) -> ChunkPairing:
    """The pairing with only the chunks `kept`, renumbered from 0; the others, at `stops` [count], have one row a side."""
    number = kept.new_zeros(pairing.count)
    number[kept] = torch.arange(len(kept), device=kept.device)
    dropped = pairing.count - len(kept)

    def side(of: ChunkSide) -> ChunkSide:
        rows = stops[of.chunk].sort(stable=True).indices[: len(of.rows) - dropped]
        return ChunkSide(of.rows[rows], number[of.chunk[rows]], of.length[kept])

    return ChunkPairing(side(pairing.student), side(pairing.teacher), len(kept))


def _coins(settings: ChunkSettings, method: str, ours: Tensor, theirs: Tensor) -> Tensor:
    """D [n] between the two coins of each stop chunk, whose log-probabilities [n] these are, without the factor T²."""
    # In the method's own terms: `strict` is reverse KL, `uld` is L1 (twice the total variation of two coins), `alm` has τ
    # here too, `hybrid` has not.
    if method == "strict":
        return Bernoulli.apply(ours, theirs, resolve("reverse_kl", 0.0))
    if method == "uld":
        return 2 * Bernoulli.apply(ours, theirs, resolve("tvd", 0.0))
    tau = settings.tau if method == "alm" else 1.0
    return tau * Bernoulli.apply(ours / tau, theirs / tau, settings.divergence)


@torch.no_grad()
def _teacher_stops(task: ChunkTask, stops: Tensor) -> Tensor:
    """[n], log-probability at T that the teacher ends the stop chunks with these numbers, by any of its stop tokens."""
    teacher, ids, rows = task.teacher, task.projection.teacher_stops, task.pairing.teacher.first[stops]
    floor = floor_of(task.dtype)
    if isinstance(teacher, TopKLogprobs):
        assert teacher.label_logprob is not None, "checked on entry"
        # Those among its k columns, and at least its own token. A missing one is less likely than the k-th column.
        held = torch.isin(teacher.ids[rows].long(), ids)
        known = torch.where(held, teacher.logprobs[rows].to(task.dtype).clamp_min(floor), floor).logsumexp(1)
        return torch.maximum(known, teacher.label_logprob.reshape(-1)[rows].to(task.dtype))
    found = task.like.new_empty(len(rows))
    for part in pieces_of(len(rows), task.piece):
        logits = teacher.of(rows[part], task.dtype).mul_(1 / task.settings.temperature)
        inside = logits[:, ids].clamp_min(floor).logsumexp(1)
        found[part] = logsigmoid(inside - logits.index_fill_(1, ids, -torch.inf).logsumexp(1))
    return found
