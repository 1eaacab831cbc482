"""Ranks that are called through relays: the same results and errors as without, and the same names in them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distill_rl.config.schema import RayConfig
from distill_rl.errors import ConfigError, WorkerError
from distill_rl.workers.actors.rank import Worker
from distill_rl.workers.cluster import group as cluster_group
from distill_rl.workers.cluster.calls import Calls, Overdue
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.cluster.placement import ActorPlacement, PlacementPlan, reserve
from distill_rl.workers.cluster.relay import each
from tests.helpers.command import until

pytestmark = pytest.mark.ray

NAMES = tuple(f"rank-{i}" for i in range(5))


class Rank(Worker):
    def __init__(self, rank: int):
        self._rank, self._notes = rank, list[str]()

    def add(self, row: int, *numbers: int) -> tuple[int, int]:
        return self._rank, row + sum(numbers)

    def listed(self, _: int, *results: Any) -> list[Any]:
        return each(results)

    def slow(self) -> int:
        threading.Event().wait(1.0)
        return 0

    def note(self, row: str, *_: object) -> None:
        self._notes.append(row)

    def notes(self) -> list[str]:
        return self._notes

    def give(self, *_: object) -> tuple[int, int]:
        return self._rank, self._rank

    def fail(self, row: str, *_: object) -> str:
        """Does what its row says."""
        if row == "raise":
            raise ValueError("this row is bad")
        if row == "refuse":
            raise ConfigError("data.path", "must be better")
        if row == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if row == "hang":
            threading.Event().wait()
        return row


# Ranks of a process group (0: no relays), and the most of a relay. Two relays have one, and the last of five ranks is called by itself.
SHAPES = {
    "no relays": (0, 8),
    "two groups and a rank share a relay": (2, 8),
    "one relay": (5, 8),
    "a relay of each of two groups": (2, 2),
    "two relays of one group": (5, 2),
}
SIZES = {"no relays": 0, "two groups": 2, "one group": 3}


@pytest.fixture(scope="class", params=SHAPES.values(), ids=SHAPES)
def group(request, ray_cluster) -> Iterator[WorkerGroup]:
    """Ranks that live on after the test."""
    with ranks(5, *request.param) as group:
        yield group


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def mortal(request, ray_cluster) -> Iterator[WorkerGroup]:
    """Three ranks that die or hang in the test."""
    with ranks(3, request.param) as group:
        yield group


@contextmanager
def ranks(count: int, together: int, most: int = 8) -> Iterator[WorkerGroup]:
    calls = Calls(interrupted=lambda: None)
    names = NAMES[:count]
    placements = {name: ActorPlacement(i, 0.0) for i, name in enumerate(names)}
    plan = PlacementPlan(tuple({"CPU": 1.0} for _ in names), placements)
    with (
        reserve(lambda: plan, RayConfig(), "relays", interrupted=lambda: None) as (_, placement),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(cluster_group, "MOST_RANKS", most)
        group = WorkerGroup(Rank, names, plan, placement, calls)
        group.identify(60)
        if together:
            group.open_relays(together)
        yield group
        group.kill()


def gather(group: WorkerGroup, method: str, rows: list[Any], *more: Any, timeout_s: float = 60.0) -> list[Any]:
    calls = group.submit_each(method, rows, *more, ranks=range(len(rows)))
    return group._calls.gather(calls, what="adding", timeout_s=timeout_s)


class TestRanksThatLive:
    def test_every_rank_gets_its_row_and_results_keep_their_order(self, ray_cluster, group):
        rows = [ray_cluster.put(10 * i) for i in range(5)]
        assert gather(group, "add", rows, 1, ray_cluster.put(2)) == [(i, 10 * i + 3) for i in range(5)]
        assert gather(group, "add", [7] * 5)[3] == (3, 7)

    def test_of_two_values_the_first_ranks_have_references_of_their_own(self, ray_cluster, group):
        size = group._together or 5
        rows = {replica: ray_cluster.put(10 * replica) for replica in range(5 // size)}
        made = group.submit_replicas("add", rows, 1, size=size)
        for replica, (first, calls) in made.items():
            assert ray_cluster.get(first) == replica * size
            found = group._calls.gather(calls, what="adding", timeout_s=60)
            assert set(found) == {10 * replica + 1}
            assert [
                name for called in calls.values() for name in ([called] if isinstance(called, str) else called)
            ] == [*NAMES[replica * size : (replica + 1) * size]]
        assert list(made) == list(rows)

    def test_results_are_collected_into_one_argument_where_there_are_relays(self, ray_cluster, group):
        results = group.submit("add", 1, ranks=range(5))
        collected = group.collect(list(results))
        assert len(collected) == (1 if group._relays else 5)
        (found, *_) = gather(group, "listed", [0] * 5, *collected)
        assert found == [(i, 1) for i in range(5)]
        assert group.collect(collected[:1]) == collected[:1]

    def test_one_that_failed_among_collected_results_is_the_error(self, group):
        (good, failed) = [*group.submit("fail", "a", ranks=[1]), *group.submit("fail", "raise", ranks=[4])]
        with pytest.raises(WorkerError, match="ValueError: this row is bad"):
            gather(group, "listed", [1] * 5, *group.collect([good, failed]))
        assert gather(group, "add", [1] * 5) == [(i, 1) for i in range(5)]

    def test_an_error_in_place_of_two_values_names_its_rank(self, group):
        size = group._together or 5
        made = group.submit_replicas("fail", dict.fromkeys(range(5 // size), "raise"), size=size)
        for _, calls in made.values():
            with pytest.raises(WorkerError, match=r"rank-\d: adding failed; got ValueError: this row is bad"):
                group._calls.gather(calls, what="adding", timeout_s=60)

    def test_a_replica_that_fails_leaves_the_others_their_values(self, group):
        if group._together != 2:
            pytest.skip("one process group")
        made = group.submit_replicas("add", {0: "not a number", 1: 10}, 1, size=2)
        with pytest.raises(WorkerError, match=r"rank-[01]: adding failed; got TypeError"):
            group._calls.gather(made[0][1], what="adding", timeout_s=60)
        assert set(group._calls.gather(made[1][1], what="adding", timeout_s=60)) == {11}
        assert group._calls.gather({made[1][0]: "rank-2"}, what="adding", timeout_s=60) == [2]

    def test_an_error_that_the_user_has_to_fix_arrives_as_it_is(self, group):
        with pytest.raises(ConfigError, match=r"data\.path: must be better"):
            gather(group, "fail", ["a", "refuse", "a", "a", "a"])

    def test_a_failed_argument_is_the_error_of_the_one_who_failed(self, group):
        (failed,) = group.submit("fail", "raise", ranks=[4])
        with pytest.raises(WorkerError, match="ValueError: this row is bad"):
            gather(group, "add", [1] * 5, failed)
        assert gather(group, "add", [1] * 5) == [(i, 1) for i in range(5)]

    def test_ranks_that_were_replaced_are_called(self, group):
        before = [process.pid for _, process in group.processes]
        group.renew(range(2) if group._together == 2 else range(5), 60)
        assert gather(group, "add", [1] * 5) == [(i, 1) for i in range(5)]
        assert group.processes[0][1].pid not in before

    def test_calls_keep_their_order_though_their_arguments_arrive_in_another(self, ray_cluster, group):
        """The first call waits for an argument that is there only when the second one's is."""
        (late,) = group.submit("slow", ranks=[4])
        calls = group.submit_each("note", ["first"] * 5, late, ranks=range(5))
        calls |= group.submit_each("note", ["second"] * 5, ranks=range(5))
        group._calls.gather(calls, what="noting", timeout_s=60)
        group.settle(60)
        assert group._calls.gather(group.submit("notes"), what="notes", timeout_s=60) == [["first", "second"]] * 5


def test_the_dead_one_among_collected_results_is_named(mortal):
    (good, failed) = [*mortal.submit("fail", "a", ranks=[1]), *mortal.submit("fail", "die", ranks=[2])]
    with pytest.raises(WorkerError, match=r"rank-2: its process died"):
        gather(mortal, "listed", [1] * 3, *mortal.collect([good, failed]))


def test_the_rank_that_raises_is_named_while_others_still_work(mortal):
    with pytest.raises(WorkerError, match="rank-1: adding failed; got ValueError: this row is bad") as caught:
        gather(mortal, "fail", ["hang", "raise", "a"])
    assert "this row is bad" in "".join(caught.value.__notes__)


def test_the_rank_that_dies_is_named_while_others_hang(mortal):
    other_group = "a" if mortal._together == 2 else "hang"
    with pytest.raises(WorkerError, match=r"rank-1: its process died during adding"):
        gather(mortal, "fail", ["hang", "die", other_group])
    assert set(mortal._calls.dead()) == {"rank-1"}


def test_everybody_that_is_late_is_named(mortal):
    with pytest.raises(Overdue) as caught:
        gather(mortal, "fail", ["hang", "a", "a"], timeout_s=2.0)
    assert "rank-0" in caught.value.actors


def test_one_of_two_groups_that_share_a_relay_is_replaced_while_the_other_works(ray_cluster):
    with ranks(4, 2) as group:
        kept = [process.pid for _, process in group.processes[2:4]]
        (late,) = group.submit("slow", ranks=[2])
        made = group.submit_replicas("give", {0: "die", 1: "a"}, late, size=2)
        for rank in range(2):
            group.end(rank)
        with pytest.raises(WorkerError, match=r"rank-[01]: its process died during giving"):
            group._calls.gather(made[0][1], what="giving", timeout_s=60)
        group.renew(range(2), 60)
        assert group._calls.gather(made[1][1], what="giving", timeout_s=60) == [2]
        assert gather(group, "add", [1] * 4) == [(i, 1) for i in range(4)]
        assert [process.pid for _, process in group.processes[2:4]] == kept


def test_a_relay_that_dies_counts_as_all_of_its_ranks(ray_cluster):
    with ranks(3, 3) as group:
        relay = group._relays[0].actor
        os.kill(ray_cluster.get(relay.identify.remote()).pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="rank-0: its process died"):
            gather(group, "add", [1] * 3)
        assert set(group._calls.dead()) == set(NAMES[:3])
        group.renew(range(3), 60)
        assert gather(group, "add", [1] * 3) == [(i, 1) for i in range(3)]
        # The new relay ends with its group.
        (relay,) = set(group._relays.values())
        process = ray_cluster.get(relay.actor.identify.remote())
        group.kill()
        assert group._relays == {}
        until(lambda: not Path(f"/proc/{process.pid}").exists(), "the relay to end", 60)


def test_a_relay_of_relays_that_dies_counts_as_all_ranks(ray_cluster):
    with ranks(4, 2, 2) as group:
        top = group._relays[0]
        assert len(top.all) == 3
        os.kill(ray_cluster.get(top.actor.identify.remote()).pid, signal.SIGKILL)
        made = group.submit_replicas("add", {0: 1, 1: 1}, size=2)
        with pytest.raises(WorkerError, match="rank-0: its process died"):
            group._calls.gather(made[0][1], what="adding", timeout_s=60)
        assert set(group._calls.dead()) == set(NAMES[:4])
        for replica in range(2):
            group.renew(range(2 * replica, 2 * replica + 2), 60)
        assert gather(group, "add", [1] * 4) == [(i, 1) for i in range(4)]
        assert len(group._calls.names) == 4 + 2, "each group has a relay, and the others are gone"
