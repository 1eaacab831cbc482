"""The same losses written plainly: whole vocabulary, fp64, autograd. The tests compare against it.

It shares nothing with the fast path except types, and nothing in it is fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from distill_rl.losses.kd import KDOutput
from distill_rl.losses.targets import DenseLogits, SampledTokens, Teacher, TeacherHidden, TopKLogprobs


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """The terms a·log(a/b), elementwise from log a and log b; 0 where a is 0."""
    # In log space, because probabilities may be too small for fp64.
    nothing = log_a == -torch.inf
    safe = torch.where(nothing, 0, log_a)
    return torch.where(nothing, 0, safe.exp() * (safe - torch.where(nothing, 0, log_b)))


def _mixture(log_a: Tensor, log_b: Tensor, share: float) -> Tensor:
    """log(share·a + (1 − share)·b) from log a and log b, for 0 < share < 1; −inf where a and b are both 0."""
    nothing = (log_a == -torch.inf) & (log_b == -torch.inf)
    a, b = (torch.where(nothing, 0, each) for each in (log_a, log_b))
    return torch.where(nothing, -torch.inf, torch.logaddexp(a + math.log(share), b + math.log1p(-share)))


LOG_DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "forward_kl": lambda p, q, _: _kl(p, q),
    "reverse_kl": lambda p, q, _: _kl(q, p),
    "jsd": lambda p, q, b: b * _kl(p, _mixture(p, q, b)) + (1 - b) * _kl(q, _mixture(p, q, b)),
    "skewed_forward_kl": lambda p, q, a: _kl(p, _mixture(p, q, a)),
    "skewed_reverse_kl": lambda p, q, a: _kl(q, _mixture(q, p, a)),
    "tvd": lambda p, q, _: (p.exp() - q.exp()).abs() / 2,
}
"""Terms of a divergence between log-probabilities of the teacher p and the student q."""


# κ·(q − p), which makes every term non-negative even if the probabilities do not sum to one.
BALANCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "forward_kl": lambda p, q, _: q - p,
    "reverse_kl": lambda p, q, _: p - q,
    "jsd": lambda p, q, _: 0 * q,
    "skewed_forward_kl": lambda p, q, a: (1 - a) * (q - p),
    "skewed_reverse_kl": lambda p, q, a: (1 - a) * (p - q),
    "tvd": lambda p, q, _: 0 * q,
}


def kd_loss(
    student_logits: Tensor,
    teacher: Teacher | None,
    *,
    labels: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    tail: str = "bucket",
    kd_ratio: float = 1.0,
    reduction: str = "mean",
    num_items_in_batch: int | float | Tensor | None = None,
) -> KDOutput:
    """`losses.kd_loss` on unsharded tensors in fp64; the loss is differentiable any number of times.

    The arguments mean the same; those that concern speed, sharding and validation are missing. Nothing is checked.
    """
    z = student_logits.double().reshape(-1, student_logits.shape[-1])
    valid = torch.ones_like(z[:, 0], dtype=torch.bool) if labels is None else labels.reshape(-1) != ignore_index
    kd, teacher_mass, student_mass = _rows(z / temperature, teacher, divergence, beta, temperature, tail)
    kd = temperature**2 * kd
    ce = None
    if labels is not None:
        picked = torch.where(valid, labels.reshape(-1), 0).long()
        ce = -z.log_softmax(1).gather(1, picked[:, None])[:, 0]

    def reduced(rows: Tensor, weights: Tensor | None = None) -> Tensor:
        rows = torch.where(valid, rows if weights is None else rows * weights.double().reshape(-1), 0)
        if reduction == "none":
            return rows
        if reduction == "sum":
            return rows.sum()
        return rows.sum() / max(float(valid.sum() if num_items_in_batch is None else num_items_in_batch), 1)

    kd_loss, ce_loss = reduced(kd, token_weights), None if ce is None else reduced(ce, token_weights)
    loss = kd_loss if ce_loss is None else kd_ratio * kd_loss + (1 - kd_ratio) * ce_loss
    return KDOutput(
        loss=loss,
        kd_loss=kd_loss.detach(),
        ce_loss=None if ce_loss is None else ce_loss.detach(),
        num_tokens=valid.sum(),
        teacher_mass=reduced(teacher_mass).detach(),
        student_mass=reduced(student_mass).detach(),
    )


def _rows(
    u: Tensor, teacher: Teacher | None, divergence: str, beta: float, temperature: float, tail: str
) -> tuple[Tensor, Tensor, Tensor]:
    """D without T², and the teacher's and the student's mass in the compared columns, [N] each, from u = z/T [N, V]."""
    if teacher is None:
        nothing = u.new_zeros(len(u))
        return nothing, nothing, nothing
    if isinstance(teacher, SampledTokens):
        kl = _sampled_kl(u, teacher)
        return kl, torch.ones_like(kl), torch.ones_like(kl)
    name = _limit(divergence, beta)
    f = LOG_DIVERGENCES[name]
    if not isinstance(teacher, TopKLogprobs):
        p, q = (teacher_logits(teacher) / temperature).log_softmax(1), u.log_softmax(1)
        return f(p, q, beta).sum(1), p.exp().sum(1), q.exp().sum(1)
    ids = teacher.ids.long()
    p, q = teacher.logprobs.double(), u.log_softmax(1).gather(1, ids)
    masses = p.exp().sum(1), q.exp().sum(1)
    if tail == "truncate":
        return f(p, q, beta).sum(1), *masses
    if tail == "renormalize":
        return f(p.log_softmax(1), u.gather(1, ids).log_softmax(1), beta).sum(1), *masses
    rest_u = u.scatter(1, ids, -torch.inf)
    empty = (rest_u == -torch.inf).all(1)
    rest_lse = torch.where(empty[:, None], 0, rest_u).logsumexp(1)
    rest_q = torch.where(empty, -torch.inf, rest_lse - u.logsumexp(1))
    if teacher.rest_logprob is not None:
        rest_p = teacher.rest_logprob.double()
    else:
        rest_p = torch.where(masses[0] >= 1 - 1e-6, 0, 1 - masses[0]).log()
    kept = ~empty & ((rest_p > -torch.inf) | (name != "reverse_kl"))
    p = torch.cat([p, torch.where(kept, rest_p, -torch.inf)[:, None]], 1)
    q = torch.cat([q, torch.where(kept, rest_q, -torch.inf)[:, None]], 1)
    return (f(p, q, beta) + BALANCES[name](p.exp(), q.exp(), beta)).sum(1), *masses


def _sampled_kl(u: Tensor, teacher: SampledTokens) -> Tensor:
    """The mean of log p − log q over each row's draws, [N]; −log q alone without `mean_logprob`. 0 without draws."""
    counts, ids = teacher.counts.double(), teacher.ids.long()
    drawn = counts.sum(1)
    log_q = u.log_softmax(1).gather(1, ids.clamp_min(0))
    mean = -(counts * log_q).sum(1) / drawn.clamp_min(1)
    return mean if teacher.mean_logprob is None else mean + (drawn > 0) * teacher.mean_logprob.double()


def token_agreement(
    student_logits: Tensor,
    teacher: DenseLogits | TopKLogprobs | TeacherHidden,
    *,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
) -> tuple[Tensor, ...]:
    """`losses.token_agreement` on unsharded tensors in fp64, [N] each, 0 for ignored rows: `top1`, `acceptance`,
    `acceptance_low`, `student_entropy`, `teacher_entropy_low` and `teacher_entropy_high`."""
    z = student_logits.double().reshape(-1, student_logits.shape[-1])
    q = (z / temperature).log_softmax(1).exp()
    if isinstance(teacher, TopKLogprobs):
        ids, p = teacher.ids.long(), teacher.logprobs.double().exp()
        outside = torch.ones_like(q, dtype=torch.bool).scatter(1, ids, False)
        rest_p = 1 - p.sum(1) if teacher.rest_logprob is None else teacher.rest_logprob.double().exp()
        rest_p = rest_p.clamp_min(0)
        low = torch.minimum(p, q.gather(1, ids)).sum(1)
        acceptance = low + torch.minimum(rest_p, (q * outside).sum(1))
        least = -torch.special.xlogy(p, p).sum(1) - torch.special.xlogy(rest_p, rest_p)
        most = least + rest_p * math.log(max(q.shape[1] - ids.shape[1], 1))
        top = ids[:, 0]
    else:
        w = teacher_logits(teacher)
        p = (w / temperature).log_softmax(1).exp()
        low = acceptance = torch.minimum(p, q).sum(1)
        least = most = -torch.special.xlogy(p, p).sum(1)
        top = w.argmax(1)
    found = (z.argmax(1) == top).double(), acceptance, low, -torch.special.xlogy(q, q).sum(1), least, most
    if labels is None:
        return found
    ignored = labels.reshape(-1) == ignore_index
    return tuple(each.masked_fill(ignored, 0) for each in found)


def _limit(divergence: str, beta: float) -> str:
    """The name of the plain KL that `divergence` becomes at a `beta` of 0 or 1; otherwise its own name."""
    if beta == 0 and divergence in ("jsd", "skewed_forward_kl"):
        return "forward_kl"
    if (beta == 0 and divergence == "skewed_reverse_kl") or (beta == 1 and divergence == "jsd"):
        return "reverse_kl"
    return divergence


def teacher_logits(teacher: DenseLogits | TeacherHidden) -> Tensor:
    """The teacher's logits before any temperature, [N, V] in fp64; from hidden states for a `TeacherHidden`."""
    if isinstance(teacher, DenseLogits):
        return teacher.logits.double().reshape(-1, teacher.logits.shape[-1])
    logits = teacher.hidden.double().reshape(-1, teacher.hidden.shape[-1]) @ teacher.lm_head_weight.double().T
    logits = logits * teacher.logit_scale
    if teacher.bias is not None:
        logits = logits + teacher.bias
    return logits if teacher.softcap is None else teacher.softcap * (logits / teacher.softcap).tanh()
