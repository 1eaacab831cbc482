"""What student and teacher ranks have in common: a process, a rendezvous, a process group and transports."""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import ray

from distill_rl.config.schema import Config, ParallelConfig
from distill_rl.errors import TransportError, first_line
from distill_rl.observe.log import log_to_stderr
from distill_rl.transport.base import Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import TCPStore

    from distill_rl.parallel.mesh import World
    from distill_rl.transport.base import Place, Ring, Transport
    from distill_rl.transport.segment import Backing

log = logging.getLogger(__name__)
_STDERR = 2
"""File descriptor."""


def this_node() -> str:
    """The id of the machine of this process in the cluster."""
    return ray.get_runtime_context().get_node_id()


@dataclass(frozen=True, slots=True)
class Process:
    """A worker's process. Its creation time tells it apart from a later process with the same pid."""

    pid: int
    created: float
    node_id: str
    worker_id: str = ""
    """Ray's id of the worker."""
    host: str = ""
    logs: tuple[str, ...] = ()
    """Files on its node that receive its stdout and stderr, in this order."""

    def kill(self) -> None:
        """Sends SIGKILL to the process if it still exists and is not a later one with the same pid.

        Works on the process's own node only.
        """
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if process.create_time() == self.created:
                process.kill()


class Worker:
    """The base of all actors."""

    def identify(self) -> Process:
        """Returns the pid, creation time, node, host, Ray worker id and log files of this actor's process.

        From now on that process writes the stacks of all its threads to stderr on SIGUSR2, and the messages of this package.
        """
        log_to_stderr()
        faulthandler.register(signal.SIGUSR2, file=_STDERR, all_threads=True)
        context = ray.get_runtime_context()
        outputs = (Path(f"/proc/self/fd/{descriptor}").readlink() for descriptor in (1, _STDERR))
        return Process(
            os.getpid(),
            psutil.Process().create_time(),
            context.get_node_id(),
            context.get_worker_id(),
            ray.util.get_node_ip_address(),
            tuple(str(path) for path in outputs if path.is_file()),
        )


class GroupMember(Worker):
    """An actor that may be a rank of a process group."""

    _store: TCPStore | None = None
    """The store through which the ranks find each other, on the first of them."""

    def serve_store(self, world_size: int, one_node: bool) -> tuple[str, int]:
        """Opens on this node the store through which `world_size` ranks find each other, without waiting for them.

        This rank, the first of its group, uses it itself when it joins.

        Args:
            one_node: whether all ranks are on this node; the store is then not reached from others.

        Returns:
            The store's host and port.
        """
        from distill_rl.parallel.mesh import LOOPBACK, serve_store

        host = LOOPBACK if one_node else ray.util.get_node_ip_address()
        self._store = serve_store(host, world_size)
        return host, self._store.port

    def _meet(self, host: str, port: int, world_size: int) -> TCPStore | None:
        """The store through which the ranks of a group find each other; None for a single one."""
        # If they are all on this node, their process groups will listen on its loopback interface only.
        from distill_rl.parallel.mesh import LOOPBACK, join_store, listen_on_loopback

        if world_size == 1 or host == LOOPBACK:
            listen_on_loopback()
        return None if world_size == 1 else self._store or join_store(host, port, world_size)


class RankWorker(GroupMember):
    """One rank of a process group, before its engine is built.

    Args:
        config: the run's settings.
        threads: number of torch threads of this process.
    """

    def __init__(self, config: Config, threads: int):
        self._config, self._threads = config, threads
        self._transports: dict[str, Transport] = {}
        """By name."""

    def place(self) -> Place:
        """Returns where this rank's tensors are (node and device), by which a transport is chosen.

        Only after `start`.
        """
        from distill_rl.transport.base import place_of

        return place_of(self._world.device, this_node())

    def close_others(self, names: Sequence[str]) -> None:
        """Closes and forgets all transports of this process except those named in `names`."""
        for name in set(self._transports) - set(names):
            self._transports.pop(name).close()

    def stop(self) -> None:
        """Closes the transports, then leaves the process group together with its other ranks, for which it waits."""
        from distill_rl.parallel.mesh import close_world

        self.close_others(())
        close_world(self._world)

    def _open_transport(
        self, name: str, ring: Ring | None = None, source: str = "", backing: Backing = "memfd"
    ) -> Transport:
        """Creates this process's side of a transport in place of an earlier one of that name, keeps it, and returns it."""
        from distill_rl.transport.choose import make

        self._transports[name] = make(
            name,
            deadline_s=self._config.ray.step_timeout_s,
            node_id=this_node(),
            ring=ring,
            source=source,
            device=str(self._world.device),
            backing=backing,
            earlier=self._transports.pop(name, None),
        )
        return self._transports[name]

    def _join(
        self, rank: int, parallel: ParallelConfig, host: str, port: int, gpu_memory: float, on_host: bool = False
    ) -> World:
        """Joins the dp × sp × tp ranks of a group, and stores and returns the World."""
        # Also sets this process's random seeds and number of torch threads.
        # Blocks until all ranks of the group have called it, `ray.step_timeout_s` at most. The device is the GPU that
        # Ray assigned, otherwise the CPU.
        import torch

        from distill_rl.parallel.mesh import open_world

        # OMP_NUM_THREADS would not do for the threads: it is fixed when Ray starts a worker.
        seed = self._config.run.seed
        faulthandler.enable()  # prints stacks if this process crashes
        torch.set_num_threads(self._threads)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        store = self._meet(host, port, parallel.dp * parallel.ranks_per_row)
        device = f"cuda:{gpu_index()}" if ray.get_gpu_ids() and not on_host else "cpu"
        if device != "cpu" and gpu_memory < 1:
            limit_gpu_memory(gpu_memory, gpu_index())
        self._world = open_world(
            rank=rank,
            dp=parallel.dp,
            tp=parallel.tp,
            sp=parallel.sp,
            replicas=parallel.replicas,
            device=device,
            store=store,
            timeout_s=self._config.ray.step_timeout_s,
        )
        log.info("rank %d of %d, on %s", rank, self._world.world_size, device)
        return self._world


class Problem(str):
    """Why a transport does not work for one rank. Returned, not raised, so that another can be tried."""


PROBE_LAYOUT = Layout(0, 1, 256)
"""Of the probe: 1 KiB of known content that every teacher sends to every student rank before the first step."""


def probe_tensors(device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Returns the known content of a probe: int32 0, 1, 2, … in `PROBE_LAYOUT`'s one row, under the name `probe`."""
    import torch

    return {"probe": torch.arange(PROBE_LAYOUT.tokens_per_row, dtype=torch.int32, device=device)}


def reporting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a method so that it returns its TransportErrors and RuntimeErrors as a `Problem`.

    The Problem is the first line of the error's message.

    The decorated method takes positional arguments only. Other exceptions pass through.
    """

    @wraps(method)
    def reported(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except (TransportError, RuntimeError) as error:
            return Problem(first_line(error))

    return reported


def gpu_index() -> int:
    """Returns the torch index, among the GPUs that this process sees, of the one that Ray assigned to it.

    The process may see all GPUs of its node, to map their memory (`session`). Ray's id is a name in
    CUDA_VISIBLE_DEVICES, which may be a subset of the node's GPUs or UUIDs; if that is unset, the id is the index.
    Returns 0 if the id is not in the list. Only in an actor that has a GPU.
    """
    gpu_id, visible = str(ray.get_gpu_ids()[0]), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")]
    if gpu_id in names:
        return names.index(gpu_id)
    return int(gpu_id) if gpu_id.isdigit() and not visible else 0


def see_assigned_gpus() -> None:
    """Hides all GPUs from this process but those that Ray assigned to its actor. Only before CUDA is in use."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ray.get_gpu_ids()))


CONTEXT_BYTES = 2**30
"""GPU memory of a process outside torch's allocator: CUDA context, kernels, workspaces of cuBLAS and NCCL."""


def limit_gpu_memory(share: float, index: int) -> None:
    """Makes torch raise an out-of-memory error when this process would use more than `share` of GPU `index`'s memory.

    The share, from 0 to 1, includes about 1 GiB for the CUDA context and libraries, which torch does not count.
    """
    import torch

    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(max(share - CONTEXT_BYTES / total, 0.0), index)
