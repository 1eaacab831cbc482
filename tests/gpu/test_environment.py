"""Facts about the machine, and whether its matrix products and copies are right."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from distill_rl.errors import GpuMemoryError
from distill_rl.system.gpu_memory import gpu_phase
from tests.bench import record
from tests.gpu.check import REQUIRED
from tests.gpu.conftest import Figures

OPTIONAL = ("triton", "flash_attn", "liger_kernel", "numba_cuda", "ray", "omegaconf", "datasets", "vllm")
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")

FP32_BOUND = 2e-6
"""Largest relative error of an fp32 product with sums of 1,024 terms: 6e-8 per rounding, over a few dozen partial sums.
TF32 keeps ten bits of its factors and would reach 3e-4."""
BF16_BOUND = 2**-8
"""Factors are exact, sums are in fp32, and the result is rounded to 8 bits: at most 2^-9 of each entry, and twice that if
the kernel adds partial results in bf16."""


def test_facts(device: torch.device, figures: Figures) -> None:
    """For the head of the page: software, CPU, environment variables, commit, and GPUs, or why there is none."""
    figures |= {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in REQUIRED},
        "optional": {name: _version(name) for name in OPTIONAL},
        "cpu": {"name": record.cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        **record.commit(),
        "cuda": torch.version.cuda,
        "gpus": [],
    }
    if device.type == "cuda" and not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        figures["why_no_gpu"] = f"torch {torch.__version__} {built} and sees no GPU"
    elif device.type == "cuda":
        figures |= {
            "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
            "driver": _driver(),
            "cudnn": _dotted(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
            "allocator": torch.cuda.get_allocator_backend(),
        }


@pytest.mark.parametrize(("dtype", "bound"), [("float32", FP32_BOUND), ("bfloat16", BF16_BOUND)])
def test_products_match_fp64(device: torch.device, tiny: bool, figures: Figures, dtype: str, bound: float) -> None:
    size, draw = 128 if tiny else 1024, torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=draw).to(getattr(torch, dtype)) for _ in range(2))
    product, truth = (a.to(device) @ b.to(device)).cpu().double(), a.double() @ b.double()
    figures.within(f"{dtype} product, relative error", float((product - truth).norm() / truth.norm()), bound)


def test_a_copy_to_the_device_and_back_changes_nothing(device: torch.device, tiny: bool) -> None:
    source = torch.randn(2**14 if tiny else 2**20, generator=torch.Generator().manual_seed(0))
    host = source.pin_memory() if device.type == "cuda" else source
    assert torch.equal(host.to(device, non_blocking=True).to("cpu", copy=True), source)


@pytest.mark.gpu
def test_an_out_of_memory_error_of_torch_gives_all_amounts() -> None:
    """tests/unit/system/test_gpu_memory.py covers how its text is used."""
    amounts = r"65536\.00 GiB asked, .+ held and .+ reserved by PyTorch, .+ free of "
    with pytest.raises(GpuMemoryError, match=amounts), gpu_phase("forward"):
        torch.empty(2**46, dtype=torch.uint8, device="cuda")


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
