"""What student and teacher ranks have in common: a process, a rendezvous, a world, a transport."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import ray

from distill_rl.config.schema import Config, ParallelConfig

_STDERR = 2

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from distill_rl.parallel.mesh import World
    from distill_rl.transport.base import Ring, Transport
    from distill_rl.transport.place import Place
    from distill_rl.transport.segment import Backing


@dataclass(frozen=True, slots=True)
class Process:
    """A worker's process, known well enough never to end another one that got its number."""

    pid: int
    created: float
    node_id: str
    worker_id: str = ""
    """Ray's"""
    host: str = ""
    logs: tuple[str, ...] = ()
    """files of the node that its stdout and stderr go to, the latter last"""

    def kill(self) -> None:
        """SIGKILL, if it is still this process; on its own node only."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if process.create_time() == self.created:
                process.kill()


def identify() -> Process:
    """The process that calls this. From now on it writes its stacks to stderr when it gets SIGUSR2."""
    faulthandler.register(signal.SIGUSR2, file=_STDERR, all_threads=True)
    context = ray.get_runtime_context()
    outputs = (Path(f"/proc/self/fd/{number}").readlink() for number in (1, _STDERR))
    return Process(
        os.getpid(),
        psutil.Process().create_time(),
        context.get_node_id(),
        context.get_worker_id(),
        ray.util.get_node_ip_address(),
        tuple(str(path) for path in outputs if path.is_file()),
    )


class RankWorker:
    """One rank of a process group, before its engine is built.

    Args:
        config: the run's settings.
        threads: torch threads of this process.
    """

    def __init__(self, config: Config, threads: int):
        self._config, self._threads = config, threads
        self._store: TCPStore | None = None
        self._transports: dict[str, Transport] = {}
        """by name"""

    def identify(self) -> Process:
        return identify()

    def serve_store(self, world_size: int) -> tuple[str, int]:
        """Makes this rank the meeting point of `world_size` ranks; its host and port."""
        from distill_rl.parallel.mesh import serve_store

        host = ray.util.get_node_ip_address()
        self._store = serve_store(host, world_size)
        return host, self._store.port

    def place(self) -> Place:
        """Where this rank's tensors are, for the choice of a transport."""
        from distill_rl.transport.place import place_of

        return place_of(self._world.device, ray.get_runtime_context().get_node_id())

    def close_others(self, names: Sequence[str]) -> None:
        """Closes this process's transports but those of these names."""
        for name in set(self._transports) - set(names):
            self._transports.pop(name).close()

    def stop(self) -> None:
        """Leaves the process group together with the other ranks."""
        from distill_rl.parallel.mesh import close_world

        self.close_others(())
        close_world(self._world)

    def _open_transport(
        self, name: str, ring: Ring | None = None, source: str = "", backing: Backing = "memfd"
    ) -> Transport:
        """This process's side of a transport."""
        from distill_rl.transport.choose import make

        self._transports[name] = make(
            name,
            deadline_s=self._config.ray.step_timeout_s,
            node_id=ray.get_runtime_context().get_node_id(),
            ring=ring,
            source=source,
            device=str(self._world.device),
            backing=backing,
        )
        return self._transports[name]

    def _join(self, rank: int, parallel: ParallelConfig, host: str, port: int, gpu_memory: float = 1.0) -> World:
        """Meets the other ranks at `host:port`; sets up this process's generators and threads."""
        from distill_rl.parallel.mesh import join_store, open_world

        _prepare_process(self._config.run.seed, self._threads)
        deadline_s = self._config.ray.step_timeout_s
        store = self._store or join_store(host, port, parallel.dp * parallel.tp)
        device = f"cuda:{gpu_index()}" if ray.get_gpu_ids() else "cpu"
        if device != "cpu" and gpu_memory < 1:
            hold_to(gpu_memory, gpu_index())
        self._world = open_world(
            rank=rank,
            dp=parallel.dp,
            tp=parallel.tp,
            replicas=parallel.replicas,
            device=device,
            store=store,
            timeout_s=deadline_s,
        )
        return self._world


def gpu_index() -> int:
    """Among the GPUs that this process sees, the one that Ray gave it: it may see others, to map their memory."""
    given, visible = str(ray.get_gpu_ids()[0]), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")]
    return names.index(given) if given in names else int(given) if given.isdigit() and not visible else 0


CONTEXT_BYTES = 2**30
"""What a process takes of a GPU beside torch's allocator: CUDA context, kernels, workspaces of cuBLAS and NCCL."""


def hold_to(share: float, index: int) -> None:
    """Lets this process take no more than that share of a GPU's memory, all in all; beyond it torch is out of memory."""
    import torch

    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(max(share - CONTEXT_BYTES / total, 0.0), index)


def _prepare_process(seed: int, threads: int) -> None:
    """Threads are set explicitly because OMP_NUM_THREADS is fixed when Ray starts a worker."""
    import torch

    faulthandler.enable()
    torch.set_num_threads(threads)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
