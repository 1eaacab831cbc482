"""What `losses_cuda` compares: plain torch, these losses and Liger-Kernel's, on the same hidden states and logits."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distill_rl.losses import DenseLogits, TeacherHidden, fused_linear_kd_loss, kd_loss, vocab_parallel_topk
from distill_rl.losses.targets import Teacher

TOP_K = 64
BETA = 0.5
DIVERGENCES = ("forward_kl", "jsd")
PLAIN, OURS, LIGER = "plain torch", "distill_rl", "liger"
Step = Callable[..., Tensor]
"""Leaves → loss."""


@dataclass(frozen=True)
class Case:
    """One way to compute a loss; without a step, `status` says why."""

    inputs: str
    """hidden or logits"""
    divergence: str
    by: str
    target: str
    """dense, or top-k"""
    step: Step | None
    status: str = "ok"


@dataclass(frozen=True)
class Sides:
    """Hidden states [N, H] and output layers [V, H] of student and teacher."""

    student: tuple[Tensor, Tensor]
    teacher: tuple[Tensor, Tensor]

    @classmethod
    def draw(cls, sizes: Sequence[int], device: str) -> Sides:
        """Random, of N, H and V, with logits of standard deviation 2."""
        rows, hidden, columns = sizes
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def side() -> tuple[Tensor, Tensor]:
            states = torch.randn(rows, hidden, generator=generator, device=device)
            weight = torch.randn(columns, hidden, generator=generator, device=device).mul_(2 / hidden**0.5)
            return states.to(dtype), weight.to(dtype)

        return cls(side(), side())


def plain(student: Tensor, teacher: Tensor, divergence: str) -> Tensor:
    """What one writes without a library: fp32 copies of logits, log_softmax, kl_div."""
    q, p = F.log_softmax(student.float(), -1), F.log_softmax(teacher.float(), -1)
    kl = partial(F.kl_div, reduction="batchmean", log_target=True)
    if divergence == "forward_kl":
        return kl(q, p)
    m = torch.logaddexp(p, q) + math.log(BETA)  # β is one half, so both sides weigh the same
    return BETA * kl(m, p) + (1 - BETA) * kl(m, q)


def cases(sides: Sides) -> Iterator[tuple[Sequence[Tensor], list[Case]]]:
    """Leaves, and what is computed of them. Logits are made once the hidden states' group is done."""
    hidden, weight = sides.teacher
    logits = hidden @ weight.T
    k = min(TOP_K, logits.shape[1])
    top = vocab_parallel_topk(logits, k)
    del logits

    def plain_linear(states: Tensor, layer: Tensor, divergence: str) -> Tensor:
        return plain(states @ layer.T, hidden @ weight.T, divergence)

    def both(inputs: str, plainly: Step, loss: Callable[..., Any], dense: Teacher) -> Iterator[Case]:
        for divergence in DIVERGENCES:
            yield Case(inputs, divergence, PLAIN, "dense", partial(plainly, divergence=divergence))
            for target, teacher in (("dense", dense), (f"top {k}", top)):
                step = partial(_ours, loss, teacher, divergence)
                yield Case(inputs, divergence, OURS, target, step)

    fused = both("hidden", plain_linear, fused_linear_kd_loss, TeacherHidden(hidden, weight))
    yield sides.student, [*fused, *liger(sides)]
    student, teacher = sides.student[0] @ sides.student[1].T, hidden @ weight.T
    yield [student], list(both("logits", partial(plain, teacher=teacher), kd_loss, DenseLogits(teacher)))


def _ours(loss: Callable[..., Any], teacher: Teacher, divergence: str, *leaves: Tensor) -> Tensor:
    return loss(*leaves, teacher, divergence=divergence, beta=BETA).loss


def liger(sides: Sides) -> Iterator[Case]:
    """Its chunked losses, and its fused JSD in Triton; forward KL is their JSD at β = 0 where it has no class of its own."""
    cuda = sides.teacher[0].is_cuda
    labels = torch.zeros(len(sides.teacher[0]), dtype=torch.int64, device=sides.teacher[0].device)
    for divergence, beta in (("forward_kl", 0.0), ("jsd", BETA)):
        own = ("LigerFusedLinearKLDivLoss", "LigerFusedLinearKLDiv") if divergence == "forward_kl" else ()
        # its weights choose KD alone; compiled as it is by default, which a CPU twin has no compiler for
        settings = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "compiled": cuda}
        jsd = {**settings, "beta": beta}
        names = [(name, settings) for name in own] + [("LigerFusedLinearJSDLoss", jsd)]
        yield _liger_case("chunked_loss", divergence, names, (*sides.teacher, labels, None, None))
        yield _liger_case(
            "transformers", divergence, [("LigerFusedLinearJSD", {"jsd_beta": beta})], (*sides.teacher, None)
        )


def _liger_case(package: str, divergence: str, names: list[tuple[str, dict[str, Any]]], rest: tuple[Any, ...]) -> Case:
    """The first class of these names that the installed version has."""
    case = partial(Case, "hidden", divergence)
    if importlib.util.find_spec("liger_kernel") is None:
        return case(f"{LIGER} {names[-1][0]}", "dense", None, "not installed")
    try:
        module = importlib.import_module(f"liger_kernel.{package}")
        for name, settings in names:
            if hasattr(module, name):
                return case(f"{LIGER} {name}", "dense", _with(rest, getattr(module, name)(**settings)))
    except Exception as error:  # another version's interface must not cost the other figures
        return case(f"{LIGER} {names[-1][0]}", "dense", None, failure(error))
    return case(f"{LIGER} {names[-1][0]}", "dense", None, "not in this version")


def _with(rest: tuple[Any, ...], loss: Step) -> Step:
    return lambda *leaves: loss(*leaves, *rest)


def failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
