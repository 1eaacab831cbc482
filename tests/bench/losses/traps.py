"""What implementations of forward KL return where they may be silently wrong: this one, plain torch, TRL, Liger, Automodel.

Each case is small and has a known truth, in fp64. TRL and Liger are asked as installed, and are left out where they are
not (TRL: its published formula stands in); without a GPU Liger's kernels need `TRITON_INTERPRET=1`. Automodel is its
published formula. The figures are numbers, not times: they are the same on every machine but for the last digit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill_rl.errors import first_line
from distill_rl.losses import DenseLogits, kd_loss
from tests.bench import harness
from tests.bench.losses.peers import Loss, automodel, liger, plain_torch, trl

ROWS, COLUMNS = 6, 200
IGNORED = [1, 4]
Case = Callable[[Loss], str]
"""What a loss returns, in a few words."""


def ours(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """This package's forward KL."""
    return kd_loss(student, DenseLogits(teacher), labels=labels).loss


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """fp32 logits [N, V] of student and teacher, and labels [N], some -100. New tensors, always the same values."""
    draw = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(ROWS, COLUMNS, generator=draw) for _ in range(2))
    labels = torch.randint(0, COLUMNS, (ROWS,), generator=draw)
    labels[IGNORED] = -100
    return student, teacher, labels


def truth(student: Tensor, teacher: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The forward KL and its gradient [N, V] for the student's logits in fp64; the gradient is 0 where nothing counts.

    Only rows whose label is not -100 count, and only columns that are not −inf in all rows of the student.
    """
    rows, columns = labels != -100, ~student.isneginf().all(0)
    leaf = student[rows][:, columns].double().requires_grad_()
    p, q = teacher[rows][:, columns].double().log_softmax(-1), leaf.log_softmax(-1)
    value = (p.exp() * (p - q)).sum() / rows.sum()
    value.backward()
    gradient = torch.zeros_like(student, dtype=torch.float64)
    assert leaf.grad is not None
    gradient[rows.nonzero(), columns.nonzero()[:, 0]] = leaf.grad
    return value.detach(), gradient


def gradient_of(loss: Loss, student: Tensor, teacher: Tensor, labels: Tensor) -> str:
    """The error of a loss's gradient on these inputs, as text; the loss's value comes first if it is not finite."""
    leaf = student.clone().requires_grad_()
    value = loss(leaf * 1, teacher, labels)
    value.backward()
    assert leaf.grad is not None
    prefix = "" if value.isfinite() else f"loss {value.item()}, "
    return prefix + _describe(leaf.grad, truth(student, teacher, labels)[1])


def _describe(gradient: Tensor, expected: Tensor) -> str:
    """The gradient's error relative to the norm of the expected one, as text.

    Says instead in how many rows the gradient is not finite, if there are any, or "gradient 0" if the expected one is
    0.
    """
    broken = int((~gradient.isfinite()).any(1).sum())
    if broken:
        return f"gradient NaN in {broken} of {len(gradient)} rows"
    norm = expected.norm()
    return f"gradient off by {(gradient.double() - expected).norm() / norm:.0e}" if norm else "gradient 0"


def spoilt(side: int) -> Case:
    """The trap "an ignored row holds NaN": a case that returns the error of a loss's gradient, as text.

    Args:
        side: which input gets the NaN: 0 the student's logits, 1 the teacher's.
    """

    def run(loss: Loss) -> str:
        given = list(inputs())
        clean = [each.clone() for each in given]
        given[side][IGNORED] = torch.nan
        leaf = given[0].clone().requires_grad_()
        loss(leaf * 1, given[1], given[2]).backward()
        assert leaf.grad is not None
        return _describe(leaf.grad, truth(*clean)[1])

    return run


def no_rows(loss: Loss) -> str:
    """The trap "no row counts": the value and the gradient of a loss whose labels are all ignored, as text."""
    student, teacher, labels = inputs()
    leaf = student.clone().requires_grad_()
    value = loss(leaf * 1, teacher, torch.full_like(labels, -100))
    if not value.requires_grad:
        return f"loss {value.item():.0f}, not connected to the graph"
    value.backward()
    assert leaf.grad is not None
    gradient = "NaN" if leaf.grad.isnan().any() else f"{leaf.grad.abs().max():.0f}"
    return f"loss {value.item():.0f}, gradient {gradient}"


def changed(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Case:
    """A case that returns the error of a loss's gradient on changed logits, as text.

    Args:
        change: takes and returns the logits of student and teacher.
    """

    def run(loss: Loss) -> str:
        student, teacher, labels = inputs()
        return gradient_of(loss, *change(student, teacher), labels)

    return run


def mask_columns(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Sets the last 8 columns of both to −inf, in place, as for padded vocabularies; returns both."""
    student[:, -8:] = teacher[:, -8:] = -torch.inf
    return student, teacher


def overwritten(loss: Loss) -> str:
    """The trap "the teacher's logits change between forward and backward": the error of the gradient, as text."""
    student, teacher, labels = inputs()
    _, right = truth(student, teacher, labels)
    leaf = student.clone().requires_grad_()
    value = loss(leaf * 1, teacher, labels)
    teacher.mul_(-1)
    value.backward()
    assert leaf.grad is not None
    return _describe(leaf.grad, right)


def second_derivative(loss: Loss) -> str:
    """The trap "a gradient is differentiated again": the error of the derivative of |gradient|², as text.

    It is "0" if the derivative is all zero, which is wrong.
    """
    student, teacher, labels = inputs()

    def penalty(function: Loss, given: Tensor) -> Tensor:
        leaf = given.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf * 1, teacher.to(given.dtype), labels), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        return second

    def in_double(leaf: Tensor, target: Tensor, ids: Tensor) -> Tensor:
        rows = ids != -100
        p, q = target[rows].log_softmax(-1), leaf[rows].log_softmax(-1)
        return (p.exp() * (p - q)).sum() / rows.sum()

    found, right = penalty(loss, student), penalty(in_double, student.double())
    if not found.any():
        return "0"
    return f"off by {(found.double() - right).norm() / right.norm():.0e}"


def autocast(loss: Loss) -> str:
    """The error of the gradient of a loss that is called under autocast in bfloat16, as text."""
    student, teacher, labels = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return gradient_of(loss, student, teacher, labels)


CASES: dict[str, Case] = {
    "NaN in an ignored row of the student": spoilt(0),
    "NaN in an ignored row of the teacher": spoilt(1),
    "no row counts": no_rows,
    "columns masked on both sides": changed(mask_columns),
    "teacher overwritten before backward": overwritten,
    "gradient penalty": second_derivative,
    "logits around ±300, fp32": changed(lambda student, teacher: (student + 300, teacher - 300)),
    # a hundred times as large
    "temperature 0.01": changed(lambda student, teacher: (100 * student, 100 * teacher)),
    "inside bf16 autocast": autocast,
}


def contenders() -> dict[str, Loss]:
    """This package, plain torch, and the peers that are installed, by name."""
    found: dict[str, Loss] = {"distill_rl": ours, "plain torch": plain_torch()}
    for peer in (trl(), liger(), automodel()):
        if peer is not None:
            found[peer[0]] = peer[1]
    return found


def answer(case: Case, loss: Loss) -> str:
    """What a loss returns in a case, or "refused: " and the start of its error message. The error is not raised."""
    try:
        return case(loss)
    except Exception as error:  # whatever a foreign loss raises is its answer
        return f"refused: {first_line(error)[:60]}"


def measure(_: Path) -> dict[str, Any]:
    """The answers as text of all contenders in all cases: by case, then by contender."""
    losses = contenders()
    return {"cases": {name: {by: answer(case, loss) for by, loss in losses.items()} for name, case in CASES.items()}}


main = harness.program("traps", measure)

if __name__ == "__main__":
    sys.exit(main())
