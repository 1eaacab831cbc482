from __future__ import annotations

import socket

import psutil
import pytest
import torch.distributed as dist

from distill_rl.errors import ConfigError, DistillError
from distill_rl.parallel.mesh import close_world, join_store, listen_on_loopback, open_world, serve_store


def test_one_rank_needs_no_rendezvous_and_can_reopen() -> None:
    for _ in range(2):
        world = open_world(rank=0, dp=1, tp=1)
        assert (world.world_size, world.dp_rank, world.tp_rank) == (1, 0, 0)
        assert world.mesh.mesh_dim_names == ("dp", "tp")
        close_world(world)
        assert not dist.is_initialized()


def test_second_world_shares_the_group_of_the_first() -> None:
    first = open_world(rank=0, dp=1, tp=1)
    second = open_world(rank=0, dp=1, tp=1)
    close_world(second)
    assert dist.is_initialized()
    close_world(first)
    close_world(first)


def test_world_unlike_the_running_group_is_refused() -> None:
    world = open_world(rank=0, dp=1, tp=1)
    try:
        with pytest.raises(ConfigError, match=r"running process group \(1\); got 2 \* 1 \* 1 = 2"):
            open_world(rank=0, dp=2, tp=1)
    finally:
        close_world(world)


@pytest.mark.parametrize(("rank", "dp", "tp"), [(2, 1, 2), (-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_rank_outside_the_world_is_refused(rank: int, dp: int, tp: int) -> None:
    with pytest.raises(ConfigError, match=rf"rank={rank}, dp={dp}, tp={tp}"):
        open_world(rank=rank, dp=dp, tp=tp)


def test_several_ranks_need_a_rendezvous() -> None:
    with pytest.raises(ConfigError, match="2 ranks need a store"):
        open_world(rank=0, dp=2, tp=1)


def listening() -> set[tuple[str, int]]:
    sockets = psutil.Process().net_connections("tcp")
    return {tuple(socket.laddr) for socket in sockets if socket.status == psutil.CONN_LISTEN}


def test_store_serves_on_a_free_port_of_its_host_alone() -> None:
    before = listening()
    served = serve_store("127.0.0.1", 2)
    assert listening() - before == {("127.0.0.1", served.port)}
    joined = join_store("127.0.0.1", served.port, 2)
    joined.set("key", "value")
    assert served.get("key") == b"value"


def addresses_of_a_group(local: bool, **variables: str) -> set[str]:
    """The addresses on which the only rank of a group listens."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            patch.setenv(name, variables[name]) if name in variables else patch.delenv(name, raising=False)
        if local:
            listen_on_loopback()
        before = listening()
        world = open_world(rank=0, dp=1, tp=1)
        found = {ip for ip, _ in listening() - before}
        close_world(world)
    return found


def test_groups_of_one_node_listen_on_loopback_unless_a_variable_names_an_interface() -> None:
    assert addresses_of_a_group(local=True) == {"127.0.0.1"}
    other = next(
        (
            (name, entry.address)
            for name, entries in psutil.net_if_addrs().items()
            for entry in entries
            if entry.family == socket.AF_INET and not entry.address.startswith("127.")
        ),
        None,
    )
    if other is not None:
        assert addresses_of_a_group(local=True, GLOO_SOCKET_IFNAME=other[0]) == {other[1]}


def test_unserved_rendezvous_is_named() -> None:
    served = serve_store("127.0.0.1", 2)
    port = served.port
    del served
    with pytest.raises(DistillError, match=rf"rendezvous at 127\.0\.0\.1:{port}: rank 0 must answer"):
        join_store("127.0.0.1", port, 2, timeout_s=1.0)
