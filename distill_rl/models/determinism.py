"""The same bits from run to run."""

from __future__ import annotations

import os

import torch


def be_deterministic(wanted: bool, device: torch.device) -> None:
    """For the whole process, from now on: kernels of a GPU that add up in one order, or an error where there is none.

    To be called before the process multiplies its first matrices on a GPU. CPUs need `start_vector_math` alone, which
    this calls.

    Args:
        wanted: `train.deterministic`.
    """
    start_vector_math()
    if wanted and device.type == "cuda":
        # Read by cuBLAS when its first handle is made; without it deterministic matrix products raise.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def start_vector_math() -> None:
    """Makes the first cosine of the process on one thread.

    torch's CPU builds take cosines from MKL, which sets itself up in the first call. Where several threads share that
    call, it now and then returns wrong values: rotary positions, so whole models, differ from process to process. One
    element is never shared among threads.
    """
    torch.zeros(1).cos()
