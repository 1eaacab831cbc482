"""Facts about the machine, and whether its matrix products and copies are right."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from distill_rl.errors import GpuMemoryError
from distill_rl.system.gpu_memory import gpu_phase
from tests.bench import record

PACKAGES = ("torch", "transformers", "numpy", "safetensors")
OPTIONAL = ("triton", "flash_attn", "liger_kernel", "numba_cuda", "ray", "omegaconf", "pytest", "datasets", "vllm")
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")

FP32_BOUND = 2e-6
"""Largest relative error of an fp32 product with sums of 1,024 terms: 6e-8 per rounding, over a few dozen partial sums.
TF32 keeps ten bits of its factors and would reach 3e-4."""
BF16_BOUND = 2**-8
"""Factors are exact, sums are in fp32, and the result is rounded to 8 bits: at most 2^-9 of each entry, and twice that if
the kernel adds partial results in bf16."""


def facts(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Facts for the head of the page, as JSON types: software, CPU, environment variables, commit, and GPUs on CUDA.

    For a CPU device `gpus` is empty. If torch sees no GPU for a CUDA device, `gpus` is empty and `why_no_gpu` gives the
    reason. `tiny` is not used.

    Raises:
        PackageNotFoundError: a package of PACKAGES is not installed.
    """
    machine: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "optional": {name: _version(name) for name in OPTIONAL},
        "cpu": {"name": record.cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        **record.commit(),
        "cuda": torch.version.cuda,
        "gpus": [],
    }
    if device.type != "cuda":
        return machine
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        return machine | {"why_no_gpu": f"torch {torch.__version__} {built} and sees no GPU"}
    return machine | {
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "driver": _driver(),
        "cudnn": _dotted(torch.backends.cudnn.version()),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "allocator": torch.cuda.get_allocator_backend(),
    }


def check(device: torch.device, tiny: bool) -> dict[str, float]:
    """Checks matrix products against fp64, copies to the device and back, and on a GPU the error of lack of memory.

    Args:
        tiny: smaller matrices.

    Returns:
        The relative errors of an fp32 and of a bf16 product.

    Raises:
        AssertionError: a product is worse than its dtype allows (fp32: also if TF32 is on), a copy changes its content,
            or the out-of-memory error does not give all amounts.
    """
    size = 128 if tiny else 1024
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=draw) for _ in range(2))
    figures = {}
    for name, dtype, bound in (("fp32", torch.float32, FP32_BOUND), ("bf16", torch.bfloat16, BF16_BOUND)):
        a, b = left.to(dtype), right.to(dtype)
        product, truth = (a.to(device) @ b.to(device)).cpu().double(), a.double() @ b.double()
        error = float((product - truth).norm() / truth.norm())
        assert error <= bound, f"a product of {name} matrices is off by {error:.1e}, more than {bound:.1e}"
        figures[f"{name} product, relative error"] = error
    host = left.pin_memory() if device.type == "cuda" else left
    back = host.to(device, non_blocking=True).to("cpu", copy=True)
    assert torch.equal(back, left), "a copy to the device and back changed its content"
    if device.type == "cuda":
        _run_out_of_memory(device)
    return figures


def _run_out_of_memory(device: torch.device) -> None:
    """Requires that an allocation of 64 TiB ends in a GpuMemoryError that gives all amounts.

    Raises:
        AssertionError: the memory was granted, or the error lacks an amount.
    """
    message = "no error: 64 TiB were granted"
    try:
        with gpu_phase("forward"):
            torch.empty(2**46, dtype=torch.uint8, device=device)
    except GpuMemoryError as error:
        message = str(error)
    amounts = r"65536\.00 GiB asked, .+ held and .+ reserved by PyTorch, .+ free of "
    assert re.search(amounts, message), f"an out-of-memory error must give all amounts; got {message}"


def _gpu(index: int) -> dict[str, Any]:
    """Name, memory, number of multiprocessors, compute capability and L2 cache of the GPU with this index."""
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": properties.name,
        "gib": round(total / 2**30, 1),
        "free_gib": round(free / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20),
    }


def _driver() -> str | None:
    """The driver's version, from nvidia-smi or, if that fails, from the kernel module; None if neither gives it."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return result.stdout.split("\n", 1)[0].strip()
    with suppress(OSError, IndexError):
        return Path("/proc/driver/nvidia/version").read_text().split("Kernel Module")[1].split()[0]
    return None


def _dotted(number: int | None) -> str | None:
    """cuDNN's version number as text, such as 9.10.2 for 91002; None for None. For cuDNN 9 and later."""
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _version(package: str) -> str | None:
    """A package's version; `installed` if it has no metadata under this name; None if it cannot be found.

    Args:
        package: the name by which it is imported.
    """
    if importlib.util.find_spec(package) is None:
        return None
    with suppress(PackageNotFoundError):
        return version(package)
    return "installed"
