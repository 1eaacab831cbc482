"""Whether a GPU has the room that vLLM will take, asked before its engine starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from distill_rl.errors import ConfigError, GpuMemoryError
from distill_rl.system.gpu_memory import gib

_ASK = (
    "import json, sys, torch\nprint(json.dumps([torch.cuda.mem_get_info(index) for index in range(int(sys.argv[1]))]))"
)
_ASK_TIMEOUT_S = 120.0


def free_memory(gpus: int) -> list[tuple[int, int]]:
    """(free, total) bytes of the first GPUs that this process sees.

    A process of its own asks: asking makes a CUDA context, some hundred MB on each of them, and vLLM's own processes
    want to be the first here that use CUDA.

    Raises:
        ConfigError: CUDA does not answer.
    """
    command = [sys.executable, "-c", _ASK, str(gpus)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True)
        return [(int(free), int(total)) for free, total in json.loads(done.stdout.splitlines()[-1])]
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise ConfigError(
            "backend vllm", f"{gpus} GPUs must tell how much of their memory is free", said[-1] if said else "nothing",
            "see nvidia-smi, or take the backend hf",
        ) from error  # fmt: skip


def require_room(share: float, memory: Sequence[tuple[int, int]]) -> None:
    """As vLLM will: it takes `share` of each GPU's whole memory, or refuses where less than that is free.

    Args:
        share: vLLM's `gpu_memory_utilization`.
        memory: (free, total) bytes of each GPU.

    Raises:
        GpuMemoryError: a GPU has less.
    """
    for index, (free, total) in enumerate(memory):
        if free < share * total:
            raise GpuMemoryError(
                f"backend vllm, GPU {index}", f"{gib(share * total)} of its {gib(total)} must be free",
                f"{gib(free)} free",
                "lower evaluate.gpu_share (of `distill-rl eval`: raise --gpus-per-shard, or lower --shards), end what else "
                "runs on that GPU, or take the backend hf",
            )  # fmt: skip
