"""`tests.helpers.ranks`, which runs functions on gloo ranks."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.helpers import ranks
from tests.helpers.ranks import RankError, gloo_group, run_ranks

pytestmark = pytest.mark.ranks


def _sum_of_ranks(start: int) -> tuple[int, int, int]:
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def _process_id() -> int:
    return os.getpid()


def _fail_on(bad: int) -> None:
    if dist.get_rank() == bad:
        raise ValueError("no luck")
    dist.barrier()


def _die_on(bad: int) -> None:
    if dist.get_rank() == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _nested_group() -> tuple[bool, bool]:
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=ranks.store(), rank=ranks.rank(), world_size=ranks.world_size())
    with gloo_group():
        inside = dist.is_initialized()
    outside = dist.is_initialized()
    dist.barrier()
    dist.destroy_process_group()
    return inside, outside


def test_values_come_back_in_rank_order_for_every_world_size() -> None:
    for size in (1, 2, 4):
        expected = sum(range(size)) + 5 * size
        assert run_ranks(size, _sum_of_ranks, 5) == [(rank, size, expected) for rank in range(size)]


def test_workers_stay_alive_between_calls() -> None:
    assert run_ranks(2, _process_id) == run_ranks(2, _process_id)


def test_the_first_failed_rank_is_named_and_workers_survive() -> None:
    before = run_ranks(2, _process_id)
    with pytest.raises(RankError, match=r"rank 1: ValueError: no luck") as caught:
        run_ranks(2, _fail_on, 1)
    assert isinstance(caught.value.cause, ValueError)
    assert run_ranks(2, _process_id) == before


def test_a_killed_rank_is_named_and_replaced() -> None:
    with pytest.raises(RankError, match=r"rank 1: the process died \(exit code -9\)"):
        run_ranks(2, _die_on, 1)
    assert run_ranks(2, _sum_of_ranks, 0) == [(0, 2, 1), (1, 2, 1)]


def test_an_open_group_is_left_open() -> None:
    assert run_ranks(2, _nested_group, group=False) == [(True, True), (True, True)]
