"""Triton kernels of the losses, and who uses them: `backend` chooses, torch (`eager`) computes what has no kernel."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import lru_cache

import torch
from torch import Tensor

from distill_rl.losses.core.checks import Backend
from distill_rl.losses.core.rows import RowFunction, RowKernels

CHUNK_METHODS = ("hybrid", "alm")
"""Methods of `chunk_kd_loss` whose comparisons have kernels."""
MOST_ENTRIES = 64
"""The largest k for which there is a kernel that finds the k largest logits; for more, its registers would spill."""
MOST_COLUMNS = 2**19
"""The most columns on a rank, for the same reason."""


def interpreted() -> bool:
    """Whether Triton interprets the kernels, on CPU tensors, which it does if TRITON_INTERPRET=1 is set when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def uses_triton(backend: Backend | None, logits: Tensor) -> bool:
    """Whether the kernels shall work on these logits.

    Args:
        backend: None: on a GPU, if Triton works there and the logits are not fp64, whose digits the kernels do not have.

    Raises:
        ValueError: `triton` where it cannot work.
    """
    if backend == "eager":
        return False
    if backend is None:
        return logits.is_cuda and logits.dtype != torch.float64 and _installed() and _works_on(logits.device)
    if not _installed():
        raise ValueError("backend: triton is not installed; install it, or leave the choice to None")
    if logits.dtype == torch.float64:
        raise ValueError("backend: triton computes in fp32 and has no fp64; give fp32 logits, or take eager")
    if not logits.is_cuda and not interpreted():
        rule = "triton needs CUDA tensors, or TRITON_INTERPRET=1 to be interpreted"
        raise ValueError(f"backend: {rule}; got {logits.device}")
    if (defect := _defect(logits.device)) is not None:
        raise ValueError(f"backend: triton does not work here: {defect}; take eager")
    return True


def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache
def _works_on(device: torch.device) -> bool:
    """Whether Triton has no `_defect` on this device. Warns if it has one, once."""
    defect = _defect(device)
    if defect is not None:
        warnings.warn(f"Triton does not work here, so torch computes the losses: {defect}", stacklevel=2)
    return defect is None


@lru_cache
def _defect(device: torch.device) -> str | None:
    """Why a kernel cannot be compiled and started, which needs a C compiler and Python's headers; None if it can."""
    from distill_rl.losses.kernels.launch import try_out

    try:
        try_out(device)
    except torch.OutOfMemoryError:
        raise  # says nothing about Triton
    except Exception as error:
        return (str(error) or type(error).__name__).partition("\n")[0]
    return None


def choose_kernels(function: RowFunction, logits: Tensor, backend: Backend | None) -> RowKernels | None:
    """The kernels that do a row function's work on these logits; None where torch does it.

    Raises:
        ValueError: as `uses_triton`, and where `triton` is asked for and there is no kernel.
    """
    if not uses_triton(backend, logits):
        return None
    from distill_rl.losses.kernels.launch import kernels_for

    found = kernels_for(function) if _contiguous_rows(logits) else None
    if found is None and backend == "triton":
        known = "top-k targets, for forward and reverse KL on dense logits and for cross-entropy, on rows that are contiguous"
        raise ValueError(f"backend: triton has kernels for {known}; take eager, or leave the choice to None")
    return found


def kernels_take(k: int, logits: Tensor, backend: Backend | None) -> bool:
    """Whether a kernel shall find the k largest of these logits.

    Raises:
        ValueError: as `uses_triton`, or `triton` is asked for and there is no kernel.
    """
    if not uses_triton(backend, logits):
        return False
    fits = k <= MOST_ENTRIES and logits.shape[-1] <= MOST_COLUMNS and _contiguous_rows(logits)
    if not fits and backend == "triton":
        most = f"at most {MOST_ENTRIES} entries of at most {MOST_COLUMNS} columns, in rows that are contiguous"
        raise ValueError(f"backend: triton finds {most}; got {k} of {logits.shape[-1]}")
    return fits


def _contiguous_rows(logits: Tensor) -> bool:
    # Those of an empty shard count, too, so that no rank differs from the others.
    return logits.stride(-1) == 1 or not logits.shape[-1]
