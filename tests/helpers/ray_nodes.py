"""A Ray cluster of several nodes on this machine, with token authentication. Only its own processes are killed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.command import environment, until
from tests.helpers.forks import fork
from tests.helpers.guard import temporary_prefix

RAY = Path(sys.executable).with_name("ray")


@contextlib.contextmanager
def ray_nodes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    nodes: int,
    cpus: int,
    mode: str = "token",
    dashboard: int | None = None,
    forks: bool = False,
) -> Iterator[str]:
    """Starts a cluster and yields its address.

    Args:
        nodes: number of nodes.
        cpus: logical CPUs of each node.
        mode: authentication mode, `token` or `disabled`. The environment is set up so that the test can join.
        dashboard: port of the dashboard on 127.0.0.1, or None for no dashboard.
        forks: whether actors run in forks of a process that has imported torch.
    """
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_urlsafe(32))
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setenv("RAY_worker_niceness", "0")
    folder = Path(tempfile.mkdtemp(prefix=temporary_prefix(os.getpid()), dir="/tmp"))
    output = tmp_path / "ray-0.log"
    started = []
    try:
        started.append(
            _start(output, "--head", "--port=0", f"--temp-dir={folder}", *_dashboard(dashboard), cpus=cpus, forks=forks)
        )
        until(lambda: _address(output) or started[0].poll() is not None, "ray start")
        address = _address(output)
        assert address, output.read_text()
        for i in range(1, nodes):
            started.append(_join(tmp_path / f"ray-{i}.log", address, cpus=cpus, forks=forks))
        yield address
    finally:
        family = [
            process for node in started if node.is_running() for process in (node, *node.children(recursive=True))
        ]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def in_use(address: str) -> str:
    """The number of named actors and of free logical CPUs of a cluster, such as `0 8.0`."""
    code = (
        "import ray\n"
        f"ray.init(address={address!r}, log_to_driver=False, logging_level='ERROR')\n"
        "print(len(ray.util.list_named_actors(all_namespaces=True)), ray.available_resources()['CPU'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment())
    return done.stdout.strip()


def _dashboard(port: int | None) -> list[str]:
    if port is None:
        return ["--include-dashboard=false"]
    host = ["--dashboard-host=127.0.0.1", f"--dashboard-port={port}"]
    return ["--include-dashboard=true", *host, f"--dashboard-agent-listen-port={free_port()}"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(output: Path, *arguments: str, cpus: int, forks: bool) -> psutil.Process:
    command = ["start", "--block", f"--num-cpus={cpus}", "--object-store-memory=200000000", *arguments]
    with output.open("w") as log:
        if forks:
            outputs = [log.fileno()] * 3
            return fork(["-m", "ray.scripts.scripts", *command], environment(), Path.cwd(), outputs, session=True)
        command = [RAY, *command]
        return psutil.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment())


def _join(output: Path, address: str, *, cpus: int, forks: bool) -> psutil.Process:
    node = _start(output, f"--address={address}", cpus=cpus, forks=forks)
    until(lambda: "Ray runtime started" in output.read_text() or node.poll() is not None, "ray start")
    assert node.poll() is None, output.read_text()
    return node


def _address(output: Path) -> str:
    match = re.search(r"--address='([^']+)'", output.read_text())
    return match.group(1) if match else ""
