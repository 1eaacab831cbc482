"""Knowledge distillation from a teacher with another tokenizer: one function; each method has a file of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distill_rl.losses.core import checks
from distill_rl.losses.core.autograd import untraced
from distill_rl.losses.core.logits.student import Student, student_of
from distill_rl.losses.cross_tokenizer.chunks import ChunkOutput, Chunks
from distill_rl.losses.cross_tokenizer.methods.gold import gold, hkl, uld
from distill_rl.losses.cross_tokenizer.methods.hybrid import alm, hybrid
from distill_rl.losses.cross_tokenizer.methods.strict import strict
from distill_rl.losses.cross_tokenizer.methods.xtoken import xtoken
from distill_rl.losses.cross_tokenizer.projection import VocabularyProjection
from distill_rl.losses.cross_tokenizer.stops import with_stops
from distill_rl.losses.cross_tokenizer.task import Method, make_task
from distill_rl.losses.kernels import kernels_of
from distill_rl.losses.options import Backend, CrossTokenizerOptions, Tail
from distill_rl.losses.targets import Teacher

_METHODS: dict[str, Method] = {
    "hybrid": Method(hybrid, ("topk", "logits"), label_logprob="always", needs_common=True),
    "xtoken": Method(xtoken, ("logits",), label_logprob="chain", needs_projection=True),
    "gold": Method(gold, ("logits",), label_logprob="chain", needs_common=True),
    "hkl": Method(hkl, ("logits",), label_logprob="chain", needs_common=True),
    "uld": Method(uld, ("logits",), label_logprob="chain"),
    "alm": Method(alm, ("topk", "logits"), label_logprob="always"),
    "strict": Method(strict, ("logits",), label_logprob="never", needs_common=True),
}
METHODS: dict[str, tuple[str, ...]] = {name: method.targets for name, method in _METHODS.items()}
"""Method → the kinds of teacher targets that it accepts."""
REDUCTIONS = ("sum", "none")


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
    options = CrossTokenizerOptions.of(locals())
    student, shard, leading = student_of(student_logits, tp_group, "student_logits", kernels=kernels_of(backend))
    task = make_task(options, _METHODS[method], student, shard, leading, teacher, chunks, bridge, labels)
    terms = with_stops(task, method, _METHODS[method].terms)
    zero = task.like.new_zeros(())
    masses = (zero if mass is None else mass.detach().sum() for mass in (terms.teacher_mass, terms.student_mass))
    whole = reduction == "sum"
    return ChunkOutput(
        terms.kd.sum() if whole else terms.kd,
        terms.ce.sum() if whole else terms.ce,
        torch.tensor(terms.num_chunks, device=zero.device),
        *masses,
    )
