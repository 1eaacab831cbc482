"""What student and teacher ranks have in common: a process, a rendezvous, a world, a transport."""

from __future__ import annotations

import faulthandler
import os
import random
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil
import ray

from distill_rl.config.schema import Config, ParallelConfig

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from distill_rl.parallel.mesh import World
    from distill_rl.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Process:
    """A worker's process, known well enough never to end another one that got its number."""

    pid: int
    created: float
    node_id: str

    def kill(self) -> None:
        """SIGKILL, if it is still this process; on its own node only."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if process.create_time() == self.created:
                process.kill()


def identify() -> Process:
    """The process that calls this."""
    return Process(os.getpid(), psutil.Process().create_time(), ray.get_runtime_context().get_node_id())


class RankWorker:
    """One rank of a process group, before its engine is built.

    Args:
        config: the run's settings.
        transport: name of the transport that this run uses.
        threads: torch threads of this process.
    """

    def __init__(self, config: Config, transport: str, threads: int):
        self._config, self._transport_name, self._threads = config, transport, threads
        self._store: TCPStore | None = None

    def identify(self) -> Process:
        return identify()

    def serve_store(self, world_size: int) -> tuple[str, int]:
        """Makes this rank the meeting point of `world_size` ranks; its host and port."""
        from distill_rl.parallel.mesh import serve_store

        host = ray.util.get_node_ip_address()
        self._store = serve_store(host, world_size)
        return host, self._store.port

    def stop(self) -> None:
        """Leaves the process group together with the other ranks."""
        from distill_rl.parallel.mesh import close_world

        self._transport.close()
        close_world(self._world)

    def _join(self, rank: int, parallel: ParallelConfig, host: str, port: int) -> World:
        """Meets the other ranks at `host:port`; sets up this process's generators, threads and transport."""
        from distill_rl.parallel.mesh import join_store, open_world
        from distill_rl.transport.choose import make

        _prepare_process(self._config.run.seed, self._threads)
        deadline_s = self._config.ray.step_timeout_s
        store = self._store or join_store(host, port, parallel.dp * parallel.tp)
        device = "cuda" if ray.get_gpu_ids() else "cpu"
        self._world = open_world(
            rank=rank, dp=parallel.dp, tp=parallel.tp, device=device, store=store, timeout_s=deadline_s
        )
        self._transport: Transport = make(self._transport_name, deadline_s=deadline_s)
        return self._world


def _prepare_process(seed: int, threads: int) -> None:
    """Threads are set explicitly because OMP_NUM_THREADS is fixed when Ray starts a worker."""
    import torch

    faulthandler.enable()
    torch.set_num_threads(threads)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
