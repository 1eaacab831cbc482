"""The parts of the GPU check in the order in which they run: correctness first, then measurements."""

from __future__ import annotations

import sys
from dataclasses import dataclass

HERE = "tests.gpu.check.checks"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the GPU check.

    A part is a function, `module`.`function`, which is called in its own Python process; or, with `command`, a program
    that succeeds with exit code 0. In a command, `{device}` and `{out}` stand for the device and the output folder.
    """

    name: str
    title: str
    module: str = ""
    function: str = "check"
    limit_s: float = 90.0
    """Seconds after which the part is killed."""
    reserve_s: float = 0.0
    """Seconds of the total budget that earlier parts must leave for this one."""
    takes_budget: bool = False
    """Whether the function has a third argument, the number of seconds that it may use."""
    command: tuple[str, ...] = ()
    figures_file: str = ""
    """The JSON file to which a command writes its figures, under `results`."""
    needs: tuple[str, ...] = ()
    """The part is skipped if one of these packages is missing."""
    gpu_only: bool = False
    """Skipped on a CPU."""


def _check(name: str, title: str, module: str = "", limit_s: float = 90.0) -> Part:
    """A part whose function is `check` in its own module, or `check_NAME` in a module that it shares.

    Args:
        module: the shared module of `checks/`; empty: the part has its own, called `name`.
        limit_s: seconds after which the part is killed.
    """
    return Part(name, title, f"{HERE}.{module or name}", f"check_{name}" if module else "check", limit_s)


PARTS = (
    _check("environment", "matrix products against fp64, and what the machine has"),
    _check("losses", "losses against the fp64 oracle"),
    _check("attention", "every attention path gives the same logits and gradients"),
    _check("student", "loss and gradient of StudentEngine against fp64 on the CPU", "engines", 120),
    _check("teacher", "targets of TeacherEngine against fp64 on the CPU", "engines"),
    _check(
        "step", "one training step: fused optimizer, gradient accumulation, no needless synchronisation", "training"
    ),
    _check("resume", "the same bits from run to run, and after a checkpoint", "training", 120),
    _check("transport", "targets from one process to another"),
    _check("dp", "the dynamic programme of the alignment"),
    Part("kernels", "kernels against the limits of bandwidth and FLOP/s", f"{HERE}.kernels", "measure", 110, 30),
    Part(
        "comparison",
        "losses beside plain torch and Liger-Kernel, at the shape of Liger's figures",
        f"{HERE}.comparison",
        "measure",
        limit_s=150,
        reserve_s=40,
        takes_budget=True,
    ),
    Part(
        "throughput",
        "teacher and student with real shapes, beside the cost model",
        "tests.bench.gpu.engine_throughput",
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
            *(sys.executable, "-m", "tests.bench.gpu.train_cuda", "--steps", "12"),
            *("--device", "{device}", "--out", "{out}/train_cuda.json"),
        ),
        figures_file="{out}/train_cuda.json",
        needs=("ray", "omegaconf"),
    ),
)
"""Added by `--ray`."""


def named(names: list[str], parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts with these names, each once, in the order of `parts`.

    Raises:
        ValueError: an unknown name; the message, meant for the user of `--only`, lists the known ones.
    """
    known = [part.name for part in parts]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only: must be among {', '.join(known)}; got {unknown[0]!r}")
    return tuple(part for part in parts if part.name in names)
