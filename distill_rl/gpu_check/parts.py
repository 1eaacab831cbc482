"""The parts of the kit, in the order in which they run: correctness first, then what is measured."""

from __future__ import annotations

import sys
from dataclasses import dataclass

HERE = "distill_rl.gpu_check.checks"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the kit.

    A part is a function, `module`.`function`, called in a Python process of its own; or, with `command`, a program that
    succeeds with exit code 0. In a command `{device}` and `{out}` stand for the device and the kit's folder.
    """

    name: str
    title: str
    module: str = ""
    function: str = "check"
    limit_s: float = 90.0
    """the part is killed after so many seconds"""
    reserve_s: float = 0.0
    """seconds of the kit's budget that earlier parts must leave to it"""
    takes_budget: bool = False
    """the function has a third argument, the seconds that it may use"""
    command: tuple[str, ...] = ()
    figures_file: str = ""
    """where a command leaves its figures, JSON under `results`"""
    needs: tuple[str, ...] = ()
    """packages without which the part is skipped"""
    gpu_only: bool = False
    """skipped on a CPU"""


def _check(name: str, title: str, limit_s: float = 90.0) -> Part:
    return Part(name, title, f"{HERE}.{name}", limit_s=limit_s)


PARTS = (
    _check("environment", "matrix products against fp64, and what the machine has"),
    _check("losses", "losses against the fp64 oracle"),
    _check("attention", "every attention path gives the same logits and gradients"),
    _check("student", "loss and gradient of StudentEngine against fp64 on the CPU", 120),
    _check("teacher", "targets of TeacherEngine against fp64 on the CPU"),
    _check("step", "one training step: fused optimizer, gradient accumulation, no needless synchronisation"),
    _check("resume", "the same bits from run to run, and after a checkpoint", 120),
    _check("transport", "targets from process to process"),
    _check("dp", "alignment's dynamic programme"),
    Part("kernels", "kernels against what bandwidth and FLOP/s allow", f"{HERE}.kernels", "measure", 90, 30),
    Part(
        "throughput",
        "teacher and student with real shapes, beside the cost model",
        f"{HERE}.throughput",
        "measure",
        limit_s=240,
        reserve_s=200,
        takes_budget=True,
    ),
)

RAY_PARTS = (
    Part(
        "gpu-tests",
        "tests/gpu, with CUDA IPC between processes and whole runs",
        limit_s=420,
        command=(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"),
        needs=("pytest", "ray", "omegaconf"),
        gpu_only=True,
    ),
    Part(
        "pipeline",
        "`distill-rl train` with real shapes, student and teacher on one GPU",
        limit_s=300,
        command=(
            *(sys.executable, "-m", "distill_rl.bench.gpu.train_cuda", "--steps", "12"),
            *("--device", "{device}", "--out", "{out}/train_cuda.json"),
        ),
        figures_file="{out}/train_cuda.json",
        needs=("ray", "omegaconf"),
    ),
)
"""What `--ray` adds."""


def named(names: list[str], parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts of these names, in the kit's order.

    Raises:
        ValueError: a name that no part has.
    """
    known = [part.name for part in parts]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"must be among {', '.join(known)}; got {unknown[0]!r}")
    return tuple(part for part in parts if part.name in names)
