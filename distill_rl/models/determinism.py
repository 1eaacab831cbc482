"""Settings that make a run reproducible bit for bit."""

from __future__ import annotations

import hashlib
import os

import torch


def be_deterministic(enabled: bool, device: torch.device) -> None:
    """Makes the whole process use GPU kernels that sum in a fixed order; torch raises where there is none.

    Call it before the process multiplies its first matrices on a GPU. Without `enabled`, or on a CPU, it only calls
    `start_vector_math`, which is all that a CPU needs.

    Args:
        enabled: `train.deterministic`.
        device: of the model.
    """
    start_vector_math()
    if enabled and device.type == "cuda":
        # cuBLAS reads it with its first handle; without it, deterministic matrix products raise.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def seed_of(text: str) -> int:
    """A seed for torch that follows from a text, of 63 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def start_vector_math() -> None:
    """Computes the first cosine of the process on one thread.

    torch's CPU builds take cosines from MKL, which initialises itself in the first call. If several threads share that
    call, it occasionally returns wrong values, so that rotary positions, and thereby whole models, differ between
    processes. A single element is never shared among threads.
    """
    torch.zeros(1).cos()
