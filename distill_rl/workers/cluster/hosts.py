"""Watches what hosts the workers: the daemons of a Ray that was started here, or the head and the nodes of a cluster.

Without its raylet a node starts no worker, and a process that uses the object store there ends without a word. Without the GCS
nothing is started, and Ray's library ends the driver after a minute. So no wait goes on after such a loss, but for a step that
the student is in and a save, within `_FINISH_S`. The bundles of another node that is lost are moved to one that has room.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from distill_rl.errors import ConfigError, WorkerError
from distill_rl.system.memory import ENLARGE_SHM, SHM
from distill_rl.workers.cluster.placement import PlacementPlan

_FINISH_S = 40.0
"""Most time after a loss for the end of a step and a save."""
_LOOK_EVERY_S, _ASK_EVERY_S = 0.5, 3.0
"""Between two looks at processes of this machine, and two attempts to reach those of a cluster."""
_SILENT_S = 6.0
"""What accepts no connection for so long is lost."""
NODE_KNOWN_WITHIN_S = 25.0
"""Most time for a wait on Ray to notice the death of a node, which takes it some 15 s."""
_POLL_S = 0.25
_LEAST_SHM = 1 << 20

Address = tuple[str, int]

log = logging.getLogger(__name__)


class HostLost(WorkerError):
    """What hosts workers is gone, and nothing else has room for them."""


@dataclass
class Hosts:
    """What hosts the workers of one run; watches nothing until it is told what."""

    daemons: dict[str, psutil.Process] = field(default_factory=dict)
    """Of a Ray that was started here, by name."""
    addresses: dict[str, Address] = field(default_factory=dict)
    """Of a cluster that was joined: where its head and this node's raylet listen, by name."""
    lost: HostLost | None = None
    _lost_at: float = 0.0
    _looked_at: float = 0.0
    _silent_since: dict[str, float] = field(default_factory=dict)
    _is_finishing: bool = False
    _moved: dict[int, tuple[PlacementGroup, int]] = field(default_factory=dict)
    """Where bundles are that the first placement group has lost."""

    def watch(self, processes: Collection[psutil.Process]) -> None:
        """Watches the daemons among the processes of a Ray that was started here, and reserves the pages of its object store.

        Raises:
            ConfigError: /dev/shm has too little room.
        """
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                self.daemons[process.name()] = process
        self.daemons = {name: self.daemons[name] for name in ("gcs_server", "raylet")}
        _reserve_object_store(self.daemons["raylet"])

    def watch_cluster(self) -> None:
        """Watches the head of the cluster that this process has joined, and the raylet of this machine."""
        context = ray.get_runtime_context()
        host, _, port = context.gcs_address.rpartition(":")
        (here,) = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
        self.addresses = {"GCS": (host.strip("[]"), int(port)), "raylet": _raylet(here)}
        log.info("the driver is on node %s of Ray", here["NodeID"])

    def update(self) -> None:
        """Looks at what hosts the workers, unless the last look was a moment ago.

        Raises:
            HostLost: it is gone. While something is finished, only once that takes too long.
        """
        if time.monotonic() - self._looked_at >= (_ASK_EVERY_S if self.addresses else _LOOK_EVERY_S):
            self._look()
        if self.lost and not (self._is_finishing and time.monotonic() - self._lost_at < _FINISH_S):
            raise self.lost

    def require(self) -> None:
        """Looks at what hosts the workers, before something is done that cannot succeed without it.

        Raises:
            HostLost: it is gone.
        """
        self._look()
        if self.lost:
            raise self.lost

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """While the block runs, a loss does not end waits at once."""
        before, self._is_finishing = self._is_finishing, True
        try:
            yield
        finally:
            self._is_finishing = before

    def strategy(self, group: PlacementGroup, bundle: int) -> PlacementGroupSchedulingStrategy:
        """Where actors of a bundle are placed, which is in `group` or has been moved."""
        group, index = self._moved.get(bundle, (group, bundle))
        return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)

    def move(
        self, plan: PlacementPlan, first: PlacementGroup, bundles: Collection[int], poll: Callable[[], None]
    ) -> None:
        """Waits until those of the bundles that were on a lost node have another one.

        Ray moves a bundle by itself, unless it is pinned to its node: then it is reserved anew.

        Args:
            first: the placement group of the plan.
            poll: called while it waits; may raise.

        Raises:
            HostLost: no node has room for them.
        """
        self.require()
        deadline, asked = time.monotonic() + NODE_KNOWN_WITHIN_S, None
        while self.addresses and (gone := self._homeless(first, bundles)):
            lost = sorted(bundle for bundle, node in gone.items() if not node)
            if lost and asked is None and (plan.nodes or any(bundle in self._moved for bundle in lost)):
                asked = placement_group([dict(plan.bundles[bundle]) for bundle in lost], strategy="PACK")
                waits_for = lost
            if asked is not None and asked.wait(_POLL_S):
                self._moved |= {bundle: (asked, index) for index, bundle in enumerate(waits_for)}
                asked = None
            elif time.monotonic() > deadline:
                needed = [f"{amount:g} {kind}" for bundle in gone for kind, amount in plan.bundles[bundle].items()]
                nodes = sorted({node["NodeManagerAddress"] for node in ray.nodes() if not _lives(node)})
                rule = f"is lost, and another node must take over its workers within {NODE_KNOWN_WITHIN_S:g} s"
                raise HostLost(f"Ray on node {', '.join(nodes)}", rule, f"none with {', '.join(needed)} free")
            else:
                time.sleep(_POLL_S)
            poll()

    def _homeless(self, first: PlacementGroup, bundles: Collection[int]) -> dict[int, str]:
        """Those of the bundles that have no live node, with the id of a dead one that Ray still believes alive; else empty."""
        dead = {node["NodeID"] for node in ray.nodes() if not _lives(node)}
        found = {}
        for bundle in bundles:
            group, index = self._moved.get(bundle, (first, bundle))
            found[bundle] = placement_group_table(group)["bundles_to_node_id"].get(index, "")
        return {bundle: node for bundle, node in found.items() if not node or node in dead}

    def _look(self) -> None:
        self._looked_at = now = time.monotonic()
        if self.lost is not None:
            return
        for name, process in self.daemons.items():
            if (end := _end_of(process)) is not None:
                self._lose(name, end, "this machine")
        for name, address in self.addresses.items():
            if _accepts(address):
                self._silent_since.pop(name, None)
            elif now - self._silent_since.setdefault(name, now) >= _SILENT_S:
                self._lose(name, "no connection", ":".join(map(str, address)))

    def _lose(self, name: str, found: str, where: str) -> None:
        remedy = ""
        if name == "raylet" and shutil.disk_usage(SHM).free < _LEAST_SHM:
            remedy = f"{SHM} is full: {ENLARGE_SHM}"
        rule = f"its {name} on {where} must run until the end"
        self.lost = self.lost or HostLost(f"Ray on node {platform.node()}", rule, found, remedy)
        self._lost_at = self._looked_at


def _end_of(process: psutil.Process) -> str | None:
    """How a child of this process has ended; None if it runs. It stays a zombie for Ray, which waits for it, too."""
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "it has ended"
    if ended is None:
        return None
    if ended.si_code == os.CLD_EXITED:
        return f"exit code {ended.si_status}"
    return f"killed by {signal.Signals(ended.si_status).name}"


def _raylet(node: dict) -> Address:
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def _lives(node: dict) -> bool:
    return node["Alive"] and _accepts(_raylet(node))


def _accepts(address: Address) -> bool:
    """Whether somebody listens there; the kernel accepts for a process that is busy or stopped."""
    try:
        socket.create_connection(address, timeout=1.0).close()
    except OSError:
        return False
    return True


def _reserve_object_store(raylet: psutil.Process) -> None:
    """Reserves all pages of a raylet's object store, or another program that fills /dev/shm would end the raylet later."""
    for link in Path(f"/proc/{raylet.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if not str(link.readlink()).startswith(f"{SHM}/"):
                continue
            with link.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                try:
                    os.posix_fallocate(file.fileno(), 0, max(size, 1))
                except OSError as error:
                    rule = f"Ray's object store needs {size >> 20} MiB of it"
                    raise ConfigError(str(SHM), rule, error.strerror, f"free some, or {ENLARGE_SHM}") from None
