"""The kernels, compiled for GPUs that need not be here: nothing spills, and the logits are read and written in vectors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

CAPABILITIES = ("80", "90")
READ_LOGITS = {"row_sums", "row_gradient", "pair_sums", "pair_gradient", "group_sums"}
"""Kernels that read every logit. The others read single columns, or groups of them."""
WRITE_GRADIENTS = {"row_gradient", "pair_gradient"}


@pytest.fixture(scope="module", params=CAPABILITIES)
def compiled(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What became of every variant of every kernel; in another process, because this one interprets kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.triton.compile_kernels", request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_is_compiled(compiled: list[dict[str, Any]]):
    assert {kernel["kernel"] for kernel in compiled} == READ_LOGITS | {"put_entries", "best_columns"}


def test_no_kernel_spills_registers(compiled: list[dict[str, Any]]):
    assert [kernel for kernel in compiled if kernel["spill_bytes"]] == []


def test_logits_are_read_and_gradients_written_in_vectors(compiled: list[dict[str, Any]]):
    for kernel in compiled:
        assert kernel["vector_loads"] or kernel["kernel"] not in READ_LOGITS, kernel
        assert kernel["vector_stores"] or kernel["kernel"] not in WRITE_GRADIENTS, kernel


def test_bf16_gradients_are_rounded_to_the_nearest(compiled: list[dict[str, Any]]):
    written = [kernel for kernel in compiled if kernel["kernel"] in WRITE_GRADIENTS and kernel["dtype"] == "bf16"]
    assert written
    assert all(kernel["rounds_to_nearest"] for kernel in written)
