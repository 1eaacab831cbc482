"""Checks that the GPUs have enough free memory for vLLM, before its engine starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from distill_rl.errors import ConfigError, GpuMemoryError
from distill_rl.system.gpu_memory import gib

_QUERY = "import json, sys, torch\nprint(json.dumps([torch.cuda.mem_get_info(i) for i in range(int(sys.argv[1]))]))"
_QUERY_TIMEOUT_S = 120.0


def free_memory(gpus: int) -> list[tuple[int, int]]:
    """(free, total) bytes of the first `gpus` GPUs that this process sees.

    A child process queries CUDA, because a query creates a CUDA context, which takes some hundred MB on each GPU, and
    because this process must not use CUDA before vLLM's processes do. Takes seconds.

    Raises:
        ConfigError: CUDA fails, has fewer GPUs, or does not answer within two minutes.
    """
    command = [sys.executable, "-c", _QUERY, str(gpus)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
        return [(int(free), int(total)) for free, total in json.loads(done.stdout.splitlines()[-1])]
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        rule = f"the free memory of {gpus} GPUs must be readable"
        remedy = "see nvidia-smi, or take the backend hf"
        raise ConfigError("backend vllm", rule, lines[-1] if lines else "nothing", remedy) from error


def require_room(share: float, memory: Sequence[tuple[int, int]], remedy: str) -> None:
    """Checks, as vLLM will at its start, that `share` of each GPU's total memory is free.

    Args:
        share: vLLM's `gpu_memory_utilization`, a fraction.
        memory: (free, total) bytes of each GPU.
        remedy: which setting to lower, for the message.

    Raises:
        GpuMemoryError: a GPU has less free memory; the first one is named.
    """
    for index, (free, total) in enumerate(memory):
        if free < share * total:
            raise GpuMemoryError(
                f"backend vllm, GPU {index}", f"{gib(share * total)} of its {gib(total)} must be free",
                f"{gib(free)} free", f"{remedy}, end other processes on that GPU, or take the backend hf",
            )  # fmt: skip
