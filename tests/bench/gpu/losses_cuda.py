"""Time and memory of the losses on a CUDA device, beside plain torch and Liger-Kernel, in one run.

Forward and backward of mean KD at temperature 1, once from hidden states (gradients of the hidden states and of the
output layer) and once from logits. Times are medians by CUDA events after a warm-up, memory is the allocator's peak
above what was there before, gradients included. Ratios are to plain torch, dense, on the same inputs and divergence;
top-k targets are compared with that as well. Every loss's value is kept beside its figures: who computes something else
is seen by it.

The losses run with the Triton kernels and, where these work, also with torch alone (`eager`). The bound is what the
device needs at its measured rates: from logits, to read them twice and write the gradient once, and for a dense teacher to
read its logits twice; from hidden states, the three products of the student's output layer and one of a dense teacher's.

Liger-Kernel is measured where it is installed. Its chunked losses compute a cross-entropy even at weight 0. `--device
cpu` is the same at small sizes in fp32, to see that it works; its figures say nothing and are kept only where --out
says. The part `comparison` of the GPU check calls `compare_on`, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distill_rl.losses import DenseLogits, TeacherHidden, fused_linear_kd_loss, kd_loss, vocab_parallel_topk
from distill_rl.losses.core.checks import Backend
from distill_rl.losses.kernels import uses_triton
from distill_rl.losses.targets import Teacher
from tests.bench import harness, record
from tests.bench.gpu.timing import copy_bandwidth, matmul_rate, median_seconds, peak_bytes

SIZES = {
    "cuda": {"rows": 8192, "hidden": 4096, "columns": 128_256},
    "cpu": {"rows": 256, "hidden": 64, "columns": 2048},
}
"""On CUDA the shape at which Liger-Kernel publishes the figures of its losses."""
TOP_K = 64
BETA = 0.5
DIVERGENCES = ("forward_kl", "jsd")
PLAIN, OURS, EAGER, LIGER = "plain torch", "distill_rl", "distill_rl, eager", "liger"
NOT_INSTALLED, NO_TIME = "not installed", "no time left"
_LIGER_S = 60.0
"""Seconds that a case of Liger may need: torch compiles its chunked losses first."""
Step = Callable[..., Tensor]
"""Leaves → loss."""


@dataclass(frozen=True)
class Figures:
    """One way to compute a loss, and its figures; None for what was not measured."""

    inputs: str
    """hidden or logits"""
    divergence: str
    by: str
    target: str
    """dense, or top-k"""
    status: str = "ok"
    value: float | None = None
    milliseconds: float | None = None
    peak_mib: float | None = None
    ratio: float | None = None
    """time over plain torch's"""
    bound_milliseconds: float | None = None
    """what the bytes or products alone take"""


Case = tuple[Figures, Step | None]
"""What to measure; without a step, the figures' status says why."""


Side = tuple[Tensor, Tensor]
"""Hidden states [N, H] and output layer [V, H] of a model."""


def dtype_on(device: str) -> torch.dtype:
    """The dtype of all inputs: bf16 on `cuda` and fp32 otherwise."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def draw(sizes: Mapping[str, int], device: str) -> tuple[Side, Side]:
    """Random hidden states and output layers of student and teacher, whose logits have standard deviation 2.

    Both sides have the same shapes. The dtype is bf16 on `cuda` and fp32 otherwise; the generator starts from a fixed
    seed.

    Args:
        sizes: `rows`, `hidden` and `columns`.
    """
    rows, hidden, columns = sizes["rows"], sizes["hidden"], sizes["columns"]
    generator = torch.Generator(device).manual_seed(0)
    dtype = dtype_on(device)

    def side() -> Side:
        states = torch.randn(rows, hidden, generator=generator, device=device)
        weight = torch.randn(columns, hidden, generator=generator, device=device).mul_(2 / hidden**0.5)
        return states.to(dtype), weight.to(dtype)

    return side(), side()


def plain(student: Tensor, teacher: Tensor, divergence: str) -> Tensor:
    """Mean KD per row of logits [N, V], as one writes it without a library: fp32 copies, log_softmax, kl_div.

    Args:
        divergence: `forward_kl`; anything else is the JSD with β = ½.
    """
    q, p = F.log_softmax(student.float(), -1), F.log_softmax(teacher.float(), -1)
    kl = partial(F.kl_div, reduction="batchmean", log_target=True)
    if divergence == "forward_kl":
        return kl(q, p)
    m = torch.logaddexp(p, q) + math.log(BETA)  # β is one half, so both sides weigh the same
    return BETA * kl(m, p) + (1 - BETA) * kl(m, q)


def cases(student: Side, teacher: Side) -> Iterator[tuple[Sequence[Tensor], list[Case]]]:
    """Yields three groups, (tensors, cases): from hidden states and output layer, from logits, and Liger's.

    The tensors are the student's, of which each case's step takes leaves; Liger's are hidden states and output layer.
    The logits are made when the second group is requested, so that they take no memory while the first is measured.
    Where Triton does not work, the losses have no `EAGER` cases, which would measure the same again.
    """
    hidden, weight = teacher
    logits = hidden @ weight.T
    k = min(TOP_K, logits.shape[1])
    top = vocab_parallel_topk(logits, k)
    del logits

    def plain_linear(states: Tensor, layer: Tensor, divergence: str) -> Tensor:
        return plain(states @ layer.T, hidden @ weight.T, divergence)

    backends: dict[str, Backend | None] = {OURS: None}
    if uses_triton(None, hidden):
        backends[EAGER] = "eager"

    def both(inputs: str, plainly: Step, loss: Callable[..., Any], dense: Teacher) -> Iterator[Case]:
        for divergence in DIVERGENCES:
            yield Figures(inputs, divergence, PLAIN, "dense"), partial(plainly, divergence=divergence)
            for (name, target), (by, backend) in product((("dense", dense), (f"top {k}", top)), backends.items()):
                yield Figures(inputs, divergence, by, name), partial(_ours, loss, target, divergence, backend)

    yield student, list(both("hidden", plain_linear, fused_linear_kd_loss, TeacherHidden(hidden, weight)))
    logits = hidden @ weight.T
    yield (
        [student[0] @ student[1].T],
        list(both("logits", partial(plain, teacher=logits), kd_loss, DenseLogits(logits))),
    )
    yield student, list(liger(teacher))


def _ours(
    loss: Callable[..., Any], teacher: Teacher, divergence: str, backend: Backend | None, *leaves: Tensor
) -> Tensor:
    """The scalar loss of one of this package's losses on the student's leaves, with β = `BETA`."""
    return loss(*leaves, teacher, divergence=divergence, beta=BETA, backend=backend).loss


def bound_milliseconds(
    line: Figures, sizes: Mapping[str, int], *, item: float, copied: float, multiplied: float
) -> float:
    """The least time of a loss, from the bytes or the products that it cannot do without.

    Args:
        item: bytes of a logit.
        copied, multiplied: bytes and FLOPs per second of the device.
    """
    logits, dense = sizes["rows"] * sizes["columns"], line.target == "dense"
    if line.inputs == "logits":
        return 1000 * logits * item * (5 if dense else 3) / copied
    return 1000 * 2 * logits * sizes["hidden"] * (4 if dense else 3) / multiplied


def liger(teacher: Side) -> Iterator[Case]:
    """Yields Liger's cases from hidden states, for forward KL and JSD: a chunked loss, and the fused JSD in Triton.

    Forward KL is their JSD at β = 0 where they have no class of its own. A case that cannot be measured here has no
    step.
    """
    states, weight = teacher
    labels = torch.zeros(len(states), dtype=torch.int64, device=states.device)
    # The weights choose KD alone. Compiled as by default, except on a CPU, which may have no compiler.
    settings = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "compiled": states.is_cuda}
    kl_names = ("LigerFusedLinearKLDivLoss", "LigerFusedLinearKLDiv")
    for divergence, beta in (("forward_kl", 0.0), ("jsd", BETA)):
        classes = dict.fromkeys(kl_names, settings) if divergence == "forward_kl" else {}
        classes["LigerFusedLinearJSDLoss"] = settings | {"beta": beta}
        yield _liger_case("chunked_loss", divergence, classes, (states, weight, labels, None, None))
        yield _liger_case(
            "transformers", divergence, {"LigerFusedLinearJSD": {"jsd_beta": beta}}, (states, weight, None)
        )


def _liger_case(package: str, divergence: str, classes: dict[str, dict[str, Any]], rest: tuple[Any, ...]) -> Case:
    """A case with the first of these Liger classes that the installed version has.

    If there is none, or importing or building it fails, the case has no step and its status says why; nothing is
    raised.

    Args:
        package: module of `liger_kernel` to look in.
        classes: settings of the constructor by class name, in order of preference.
        rest: arguments of the loss after the student's leaves.
    """
    name = list(classes)[-1]
    try:
        if importlib.util.find_spec("liger_kernel") is None:
            status = NOT_INSTALLED
        else:
            module = importlib.import_module(f"liger_kernel.{package}")
            present = next((name for name in classes if hasattr(module, name)), None)
            if present is not None:
                loss = getattr(module, present)(**classes[present])
                return Figures("hidden", divergence, f"{LIGER} {present}", "dense"), lambda *leaves: loss(
                    *leaves, *rest
                )
            status = "not in this version"
    except Exception as error:  # another version's interface must not cost the other figures
        status = failure(error)
    return Figures("hidden", divergence, f"{LIGER} {name}", "dense", status), None


def failure(error: Exception) -> str:
    """One short line for an error that takes a figure's place in the table."""
    return f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"


def measure(figures: Figures, step: Step | None, inputs: Sequence[Tensor], repeats: int) -> Figures:
    """`figures` with the value, median milliseconds and peak MiB of forward and backward of `step`.

    Unchanged without a step. Out of memory becomes the status, as does whatever a case of Liger raises.

    Args:
        figures: what is measured; its `by` tells Liger's cases.
        step: leaves → loss.
        inputs: tensors that become the leaves of every run.
        repeats: timed runs.

    Raises:
        Exception: whatever else a case that is not Liger's raises.
    """
    if step is None:
        return figures
    device = inputs[0].device

    def run() -> Tensor:
        # held until the end: their gradients are part of the peak
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        loss = step(*leaves)
        loss.backward()
        return loss.detach()

    try:
        seconds, peak, value = median_seconds(run, device, repeats), peak_bytes(run, device), run().item()
        peak_mib = None if peak is None else round(peak / 2**20, 1)
        figures = replace(figures, value=value, milliseconds=round(1000 * seconds, 3), peak_mib=peak_mib)
    except torch.OutOfMemoryError:
        figures = replace(figures, status="out of memory")
    except Exception as error:
        if not figures.by.startswith(LIGER):
            raise
        figures = replace(figures, status=failure(error))
    if device.type == "cuda":  # here, where the exception and its frames no longer hold tensors
        torch.cuda.empty_cache()
    return figures


def compare_on(
    device: str, sizes: Mapping[str, int], repeats: int, *, deadline: float = math.inf
) -> tuple[list[Figures], dict[str, Any]]:
    """Measures all cases on the same draw, with the ratio of each time to plain torch's, same inputs and divergence.

    Args:
        device: `cuda` or `cpu`.
        sizes: `rows`, `hidden` and `columns`.
        repeats: timed runs of each case.
        deadline: a `time.monotonic`. A case is not started, and its status is `NO_TIME`, if the slowest one so far would
            not end before it.

    Returns:
        The figures, and which Triton and Liger-Kernel they are of.

    Raises:
        torch.OutOfMemoryError: the inputs alone do not fit.
    """
    # First, so that a reason why Triton does not work is not lost: it is given once per process.
    versions = {"triton": describe_triton(device), "liger": record.package_version("liger-kernel")}
    measured: list[Figures] = []
    slowest = 0.0
    for inputs, group in cases(*draw(sizes, device)):
        for figures, step in group:
            began = time.monotonic()
            needed = max(slowest, _LIGER_S) if figures.by.startswith(LIGER) else slowest
            if step is not None and began + needed > deadline:
                figures, step = replace(figures, status=NO_TIME), None
            measured.append(measure(figures, step, inputs, repeats))
            slowest = max(slowest, time.monotonic() - began)
    base = {(line.inputs, line.divergence): line.milliseconds for line in measured if line.by == PLAIN}
    where = torch.device(device)
    rates = {"copied": copy_bandwidth(where), "multiplied": matmul_rate(where), "item": dtype_on(device).itemsize}
    compared = [with_ratio(line, base[line.inputs, line.divergence]) for line in measured]
    compared = [
        replace(line, bound_milliseconds=round(bound_milliseconds(line, sizes, **rates), 3)) for line in compared
    ]
    return compared, versions


def describe_triton(device: str) -> str:
    """Triton's version and whether the losses use it on a device, with the reason if it does not work there."""
    if importlib.util.find_spec("triton") is None:
        return NOT_INSTALLED
    version = record.package_version("triton").replace(NOT_INSTALLED, "installed")  # its package may have another name
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if uses_triton(None, torch.empty(0, device=device)):
            return f"{version}, used"
    reasons = [str(warning.message) for warning in caught]
    return f"{version}, not used; {reasons[-1]}" if reasons else f"{version}, not used on this device"


def compare(_: Path, *, device: str, sizes: Mapping[str, int], repeats: int = 7) -> dict[str, Any]:
    """Measures all cases, see `compare_on`.

    Args:
        repeats: timed runs of each case.
    """
    figures, versions = compare_on(device, sizes, repeats)
    return recorded(figures, device=device, sizes=sizes, repeats=repeats, **versions)


def with_ratio(line: Figures, base: float | None) -> Figures:
    """`line` with `ratio`: its milliseconds over `base`, also in milliseconds; unchanged if either is missing or 0."""
    return replace(line, ratio=round(line.milliseconds / base, 3)) if line.milliseconds and base else line


def recorded(figures: Sequence[Figures], *, sizes: Mapping[str, int], device: str, **settings: Any) -> dict[str, Any]:
    """The figures as `results`, beside the `settings` that gave them: sizes, device, its dtype, and further ones."""
    dtype = str(dtype_on(device)).removeprefix("torch.")
    settings = {**sizes, "device": device, "dtype": dtype, **settings}
    return {"settings": settings, "results": [asdict(line) for line in figures]}


main = harness.program("losses_cuda", compare, sizes=SIZES)

if __name__ == "__main__":
    sys.exit(main())
