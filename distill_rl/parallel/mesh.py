"""Process groups: this file creates and ends them; no other file does.

A world is dp × sp × tp ranks, `rank = (dp_rank * sp + sp_rank) * tp + tp_rank`: the ranks of one tensor-parallel group
are neighbours, because they communicate most, and so are those that divide the positions of the same rows.

Parameters know two dimensions only, because sequence-parallel ranks see other tokens, as data-parallel ranks do: the
mesh has dp · sp ranks in its data dimension, over which parameters are sharded and gradients are summed, and tp in the
other. With `replicas` > 1 the data dimension is `replicas` groups of neighbours: parameters are sharded within a group and
equal in all groups, so only gradients that have been reduced within a group travel between groups.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distill_rl.errors import ConfigError, DistillError, first_line

DP, TP = "dp", "tp"
REPLICA, SHARD = "replica", "shard"
"""The two dimensions that make up DP in a mesh with replicas."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class World:
    """One rank's view of its dp × sp × tp ranks.

    `mesh` has the dimensions (dp · sp, tp), or (replica, shard, tp) if parameters are replicated as well as sharded.
    `owned` is true if `open_world` created the default process group, so that closing ends it.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    dp_rank: int
    tp_rank: int
    owned: bool = True
    sp_rank: int = 0
    sp_group: dist.ProcessGroup | None = None
    """The ranks that divide the positions of the same rows, and hold the same tensor-parallel part; None if sp is 1."""

    @property
    def dp(self) -> int:
        return self.world_size // (self.sp * self.tp)

    @property
    def sp(self) -> int:
        return 1 if self.sp_group is None else self.sp_group.size()

    @property
    def data_rank(self) -> int:
        """The rank in the data dimension of the mesh, dp_rank · sp + sp_rank: ranks that differ in it see other tokens."""
        return self.dp_rank * self.sp + self.sp_rank

    @property
    def reports(self) -> bool:
        """Whether this is the first of the sp × tp ranks that work on the same rows, which speaks for them."""
        return self.sp_rank == 0 and self.tp_rank == 0

    @property
    def tp(self) -> int:
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def parameter_mesh(self) -> DeviceMesh:
        """The mesh of every trained parameter of several ranks: all of `mesh`, or without tensor parallelism its data-parallel part."""
        return self.mesh if self.tp > 1 else data_mesh(self.mesh)

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks that hold the parts of one copy of the model and see the same tokens."""
        return self.mesh.get_group(TP)

    def all_agree(self, able: bool) -> bool:
        """Returns, on every rank, whether `able` is true on all of them. Collective."""
        if self.world_size == 1:
            return able
        num_unable = torch.tensor(float(not able), device=self.device)
        dist.all_reduce(num_unable)
        return num_unable.item() == 0


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh over which FSDP2 distributes parameters: ("dp",), or with replicas ("replica", "shard")."""
    return mesh[REPLICA, SHARD] if REPLICA in (mesh.mesh_dim_names or ()) else mesh[DP]


def serve_store(host: str, world_size: int) -> dist.TCPStore:
    """Starts rank 0's rendezvous store on a free port of `host`, and returns it without waiting for the other ranks.

    Its attribute `port` holds the port, which the other ranks need for `join_store`. It serves whoever reaches it, so it
    listens on the address `host` only, not on all interfaces as torch would.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
    port, descriptor = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(host, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def join_store(host: str, port: int, world_size: int, timeout_s: float = 60.0) -> dist.TCPStore:
    """Connects another rank to the store of `serve_store`, and returns it; blocks until rank 0 serves it.

    Raises:
        DistillError: rank 0 does not answer at that address within `timeout_s` seconds.
    """
    try:
        return dist.TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        what, rule = f"rendezvous at {host}:{port}", f"rank 0 must answer within {timeout_s:g} s"
        remedy = "see whether rank 0 died, or a firewall separates the nodes"
        raise DistillError(what, rule, first_line(error), remedy) from error


def listen_on_loopback() -> None:
    """Makes process groups of this process listen on the loopback interface only, unless a variable names another.

    They admit whoever reaches them. Only before `open_world`, and if all ranks are on this node.
    """
    import psutil  # not at the top: the GPU check runs without it

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == LOOPBACK for entry in entries):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def open_world(
    *,
    rank: int,
    dp: int,
    tp: int,
    sp: int = 1,
    replicas: int = 1,
    device: str | torch.device = "cpu",
    store: dist.Store | None = None,
    timeout_s: float = 600.0,
) -> World:
    """Joins this rank to the process group of dp·sp·tp ranks, creating it if there is none, and returns its `World`.

    Collective over all ranks. A process group of as many ranks that exists already (torchrun, a test, a second
    engine in one process) is used as it is. CPUs use gloo; GPUs use NCCL, and gloo for tensors on the CPU. A GPU
    becomes the current device.

    Args:
        sp: number of ranks that divide the positions of every row among themselves.
        replicas: number of groups of data-parallel ranks that each hold the whole model, sharded over dp / replicas · sp
            ranks.
        device: `cuda` without an index means the GPU of the local rank.
        store: the rendezvous from which a new group is made; a single rank needs none.
        timeout_s: seconds that a collective of a new group waits for the other ranks.

    Raises:
        ConfigError: the existing group has another size; `rank` or the sizes are invalid, `replicas` not dividing `dp`
            among them; or a new group of several ranks has no store.
    """
    world_size = dp * sp * tp
    if min(dp, sp, tp) < 1 or not 0 <= rank < world_size:
        rule = "0 <= rank < dp * sp * tp with dp, sp, tp >= 1"
        raise ConfigError("parallel", rule, f"rank={rank}, dp={dp}, tp={tp}, sp={sp}")
    if replicas < 1 or dp % replicas:
        raise ConfigError("parallel.replicas", f"must divide dp = {dp}", replicas)
    device = _own_device(torch.device(device), rank)
    owned = not dist.is_initialized()
    if owned:
        if store is None and world_size > 1:
            raise ConfigError("open_world", f"{world_size} ranks need a store")
        backend, gpu = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
        store, timeout = store or dist.HashStore(), timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=gpu)
    elif dist.get_world_size() != world_size:
        rule = f"dp * sp * tp must be the size of the running process group ({dist.get_world_size()})"
        raise ConfigError("parallel", rule, f"{dp} * {sp} * {tp} = {world_size}")
    mesh = _mesh(device, dp * sp, tp, replicas)
    group = _sequence_group(dp, sp, tp, timeout_s) if sp > 1 else None
    data_rank, tp_rank = divmod(rank, tp)
    return World(rank, world_size, device, mesh, data_rank // sp, tp_rank, owned, data_rank % sp, group)


def open_group_beside(world: World, timeout_s: float) -> dist.ProcessGroup:
    """Returns a new gloo group of all ranks, for a thread that communicates while the world's own groups are in use.

    Collective. A communication waits `timeout_s` seconds for the other ranks. The group ends with the default process
    group.
    """
    return dist.new_group(range(world.world_size), backend="gloo", timeout=timedelta(seconds=timeout_s))


def broadcast_from_first(world: World, message: Any = None) -> Any:
    """Returns the first rank's message, any object that can be pickled, on every rank. Collective, on the CPU.

    Args:
        message: of the first rank; ignored on the others.
    """
    messages = [message if world.rank == 0 else None]
    dist.broadcast_object_list(messages, src=0, device=torch.device("cpu"))
    return messages[0]


def close_world(world: World) -> None:
    """Waits for the other ranks, then ends all process groups that this process has.

    Does nothing if the default group existed before `open_world`, or in a second call. Collective. Without the wait, a
    rank that is still inside a collective would abort its process.
    """
    if not world.owned or not dist.is_initialized():
        return
    dist.barrier()
    dist.destroy_process_group()


def _sequence_group(dp: int, sp: int, tp: int, timeout_s: float) -> dist.ProcessGroup:
    """Returns this rank's group of the sp ranks with its dp_rank and tp_rank, in the order of sp_rank. Collective."""
    groups = torch.arange(dp * sp * tp).view(dp, sp, tp).transpose(1, 2).reshape(-1, sp).tolist()
    group, _ = dist.new_subgroups_by_enumeration(groups, timeout=timedelta(seconds=timeout_s))
    return group


def _mesh(device: torch.device, dp: int, tp: int, replicas: int) -> DeviceMesh:
    """Returns the mesh (dp, tp), or with replicas (replica, shard, tp), over all ranks. Collective."""
    if replicas == 1:
        mesh = init_device_mesh(device.type, (dp, tp), mesh_dim_names=(DP, TP))
        if tp > 1:
            mesh._flatten()
        return mesh
    mesh = init_device_mesh(device.type, (replicas, dp // replicas, tp), mesh_dim_names=(REPLICA, SHARD, TP))
    mesh[REPLICA, SHARD]._flatten(DP)
    if tp > 1:
        mesh[SHARD, TP]._flatten()
    return mesh


def _own_device(device: torch.device, rank: int) -> torch.device:
    """Returns the device with its index, and makes a GPU the current one."""
    if device.type != "cuda":
        return device
    if device.index is None:
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        device = torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))
    torch.cuda.set_device(device)
    return device
