"""A Ray cluster of several nodes on this machine, each started as in a Slurm job."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.harness import Refused

MOST = 10
"""Nodes that can share a machine: the ports of the eleventh are those of the first (`workers.cluster.node`)."""
_START_S, _END_S = 300.0, 60.0
_FIRST_PORT = "12000"
"""Unless RAY_PORT names another: below the ports of workers, like those of a job."""
_STORE_BYTES = 100_000_000


@contextmanager
def ray_nodes(folder: Path, count: int, cpus: int) -> Iterator[str]:
    """Starts the nodes, yields the cluster's address, and ends them with all their processes.

    Meanwhile processes that this one starts find the cluster's token.

    Args:
        folder: for token and logs.
        cpus: logical CPUs of each node.

    Raises:
        Refused: too many nodes for a machine, or one that did not start.
    """
    if count > MOST:
        raise Refused(f"--nodes: must be at most {MOST}, because they share this machine's ports; got {count}")
    shared, logs = folder / "cluster", folder / "logs"
    shared.mkdir(parents=True)
    logs.mkdir(exist_ok=True)
    token = shared / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_urlsafe(32))
    names = [f"node-{i}" for i in range(count)]
    before = dict(os.environ)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    processes = []
    try:
        for i, name in enumerate(names):
            slurm = {"SLURM_NODEID": str(i), "SLURMD_NODENAME": name, "SLURM_CPUS_ON_NODE": str(cpus)}
            ray = {"RAY_PORT": before.get("RAY_PORT", _FIRST_PORT), "RAY_OBJECT_STORE_BYTES": str(_STORE_BYTES)}
            command = [sys.executable, "-m", "distill_rl.workers.cluster.node", str(shared), str(logs)]
            processes.append(subprocess.Popen(command, env=os.environ | slurm | ray))
        _wait(shared, names)
        yield (shared / "address").read_text().strip()
    finally:
        os.environ.clear()
        os.environ |= before
        (shared / "stop").touch()
        for process in processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(shared: Path, names: list[str]) -> None:
    """Waits until all nodes run.

    Raises:
        Refused: one failed, or did not answer in time.
    """
    deadline = time.monotonic() + _START_S
    while missing := [name for name in names if not (shared / f"ready-{name}").exists()]:
        if failed := next(shared.glob("failed-*"), None):
            raise Refused(f"--nodes: {failed.name.removeprefix('failed-')} did not start: {failed.read_text().strip()}")
        if time.monotonic() > deadline:
            raise Refused(f"--nodes: not up within {_START_S:g} s: {', '.join(missing)}")
        time.sleep(0.2)
