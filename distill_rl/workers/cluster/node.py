"""One node of a Ray cluster, for as long as this process lives. `launch/ray_cluster.sh` runs one per node.

    python -m distill_rl.workers.cluster.node SHARED LOGS

SHARED is a private folder that all nodes can see; it holds the token. A node reports its progress there by files:

    here-NODE     this process runs
    free-NODE     first ports of the ranges that are free on it, if RAY_PORT is not set
    dashboard     port of Ray's dashboard on the head, if there is one
    address       the head accepts connections (host:port)
    ready-NODE    Ray runs
    failed-NODE   Ray did not start, or ended by itself; the file holds the error
    told-NODE     SIGTERM arrived: Slurm sends it to the steps of a preempted job when its grace time begins, and to
                  the batch script only when that is over

SIGUSR2 or a file `stop` ends the node. No other signal does, because a scheduler signals every process of a job while
the driver still has to save. Ray's processes inherit the blocked signals. They all remain descendants of this process,
which is their subreaper, so that at the end it can kill all of them and nothing else. (`ray stop` would end every Ray
of this user on the machine, including that of another job.)
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from distill_rl.errors import DistillError, WorkerError
from distill_rl.system.files import TMP, OwnedFolder, remove_abandoned, write_atomic
from distill_rl.system.memory import total_bytes
from distill_rl.system.redact import allowed_variables
from distill_rl.workers.cluster.reaper import end, with_descendants

_BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
_POLL_S = 0.2
_END_S = 30.0
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): orphaned descendants become children of this process."""
_KEPT_BYTES = 200_000
FOLDERS = "dr[0-9]*-*-*"
"""Folders in /tmp for the files of a node's Ray processes: drINDEX-PID-..."""
_STARTED, _SLOW = "Ray runtime started", "timed out during startup"
"""Parts of what `ray start` prints."""
_PORTS = (
    "port", "node-manager-port", "object-manager-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
    "runtime-env-agent-port", "metrics-export-port", "dashboard-port", "ray-client-server-port",
)  # fmt: skip
_RANGES = range(10000, 16000, 100)
"""First ports of the ranges from which jobs choose: below those of the workers. Nodes of a job have ten ports each."""
_HEAD_ONLY = {"port", "dashboard-port", "ray-client-server-port"}
_WORKER_PORTS = (16000, 2000, 8)
"""First port, ports per node, and number of port ranges. All are below the kernel's ephemeral ports (from 32768)."""


class Stopped(Exception):
    """The node was asked to end before Ray was up."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """One node of a Ray cluster, as the process that runs it knows it."""

    shared: Path
    logs: Path
    name: str
    index: int
    """0 is the head."""
    first_port: int
    """First of the head's ten ports. Every node has ten ports. 0: the nodes agree on it (`_agreed`)."""
    deadline_s: float
    nodes: tuple[str, ...] = ()
    """Names of all nodes of the job, its own included; empty for one that is alone."""
    peer: str = ""
    """Address of another node; empty if there is none, or it is not known."""

    @classmethod
    def of_job(cls, shared: Path, logs: Path) -> RayNode:
        """Returns the node that this process is to run, from environment variables.

        Slurm sets the node's name and index; without them it is the head, named after the host. RAY_PORT is the first
        port (default: the nodes agree on one), RAY_START_TIMEOUT the deadline in seconds (default 300), RAY_NODES the names of
        the job's nodes, RAY_PEER the address of the second one.
        """
        get = os.environ.get
        return cls(
            shared,
            logs,
            get("SLURMD_NODENAME") or socket.gethostname(),
            int(get("SLURM_NODEID", "0")),
            int(get("RAY_PORT") or 0),
            float(get("RAY_START_TIMEOUT", "300")),
            tuple(get("RAY_NODES", "").split()),
            get("RAY_PEER", ""),
        )

    @property
    def ports(self) -> dict[str, int]:
        """Returns the ports of Ray's services on this node, by name of the `ray start` option.

        The head has nine, other nodes lack those of `_HEAD_ONLY`. Nodes whose indices differ modulo 10 have
        different ports, so that they can share a machine.
        """
        start = self.first_port + 10 * (self.index % 10)
        return {name: start + i for i, name in enumerate(_PORTS) if self.is_head or name not in _HEAD_ONLY}

    @property
    def is_head(self) -> bool:
        return self.index == 0

    @property
    def log(self) -> Path:
        return self.logs / f"ray-{self.name}.log"

    def say(self, what: str, text: str = "") -> None:
        """Writes `text` atomically to the file `WHAT-NODE` in the shared folder, for other nodes and the launcher."""
        write_atomic(self.shared / f"{what}-{self.name}", f"{text}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one node of a Ray cluster until it is asked to end, then kills its processes and keeps the end of the logs.

    Blocks signals in this process, makes it a subreaper, and reports progress by files as described at the top.
    Processes that cannot be ended are listed on stderr.

    Args:
        arguments: the shared folder and the log folder; None: those of the command line.

    Returns:
        The exit code: 0 if the node was asked to end and none of its processes is left, else 1.
    """
    shared, logs = map(Path, sys.argv[1:] if arguments is None else arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    node = RayNode.of_job(shared, logs)
    node.say("here")
    code = 0
    folder: Path | None = None
    try:
        remove_abandoned(TMP, FOLDERS)
        folder = OwnedFolder(TMP, f"dr{node.index}-{os.getpid()}-").path  # sockets in it must stay under 107 bytes
        _serve(node, folder)
    except Stopped:
        pass
    except (DistillError, OSError) as error:
        node.say("failed", str(error))
        code = 1
    finally:
        left = end_descendants()
        if folder is not None:
            _keep_logs(folder, node)
            shutil.rmtree(folder, ignore_errors=True)
    if left:
        print(f"ray_node: error: {node.name}: still alive: {', '.join(left)}", file=sys.stderr)
        return 1
    return code


def _serve(node: RayNode, folder: Path) -> None:
    """Starts Ray with its files in `folder`, reports that it runs, and blocks until the node is asked to end."""
    # A node other than the head first waits for the head's address. Ray still runs on return; the caller ends it.
    deadline = time.monotonic() + node.deadline_s
    address = node.shared / "address"
    if not node.first_port:
        node = _agreed(node, deadline)
    if not node.is_head:
        _wait(node, address.exists, deadline, "the head must be up")
    head = "" if node.is_head else address.read_text().strip()
    ip = address_of_this_machine(head.rpartition(":")[0] or node.peer, os.environ.get("RAY_INTERFACE", ""))
    require_free_ports(node)
    ray = _start(node, _command(node, ip, head, folder), deadline)
    if node.is_head:
        write_atomic(node.shared / "dashboard", f"{node.ports['dashboard-port']}\n")
        write_atomic(address, f"{ip}:{node.ports['port']}\n")
    node.say("ready")
    while not _asked_to_end(node):
        if ray.poll() is not None:
            raise WorkerError("Ray", "must run until the job ends", f"exit code {ray.returncode}", f"see {node.log}")


def _agreed(node: RayNode, deadline: float) -> RayNode:
    # The node with the ports on which all nodes of the job agree: of the first range, from that of the job's id on, that is free on each.
    # Jobs with consecutive ids, requeued ones too, so have ranges of their own; a range that another process uses is passed over.
    free = [first for first in _RANGES if all(map(_is_free, replace(node, first_port=first).ports.values()))]
    node.say("free", " ".join(map(str, free)))
    files = [node.shared / f"free-{name}" for name in node.nodes or (node.name,)]
    _wait(node, lambda: all(file.exists() for file in files), deadline, "all nodes must tell which ports are free")
    common = set.intersection(*(set(map(int, file.read_text().split())) for file in files))
    own = int(os.environ.get("SLURM_JOB_ID", "0")) % len(_RANGES)
    for first in (*_RANGES[own:], *_RANGES[:own]):
        if first in common:
            return replace(node, first_port=first)
    rule = f"a range of ports from {_RANGES.start} to {_RANGES.stop - 1} must be free on all nodes"
    raise WorkerError("RAY_PORT", rule, "none is", "set RAY_PORT to the first of 100 free ports")


def _start(node: RayNode, command: Sequence[str], deadline: float) -> subprocess.Popen[bytes]:
    """Runs `command` (`ray start`) until Ray is up, and returns its process. Its output is appended to the node's log."""
    # Repeats it until `deadline` (of `time.monotonic`) if Ray ended only because it was too slow: it allows a node 30 s. All descendants of
    # this process are then killed first.
    while True:
        log_start = node.log.stat().st_size if node.log.exists() else 0
        with node.log.open("ab") as output:
            ray = subprocess.Popen(command, stdout=output, stderr=output, env=_environment(node))

        def printed(text: str) -> bool:
            return text in node.log.read_bytes()[log_start:].decode(errors="replace")  # noqa: B023

        _wait(node, lambda: printed(_STARTED) or ray.poll() is not None, deadline, "ray start must succeed")  # noqa: B023
        if ray.poll() is None:
            return ray
        if not printed(_SLOW) or time.monotonic() > deadline:
            raise WorkerError("ray start", "must start a node", f"exit code {ray.returncode}", f"see {node.log}")
        end_descendants()


def _wait(node: RayNode, condition: Callable[[], bool], deadline: float, rule: str) -> None:
    """Waits until `condition` is true, checking it about five times a second."""
    while not condition():
        if _asked_to_end(node):
            raise Stopped
        if time.monotonic() > deadline:
            limit = f"nothing after {node.deadline_s:g} s"
            raise WorkerError("Ray", rule, limit, f"see {node.log}, or raise RAY_START_TIMEOUT")


def _asked_to_end(node: RayNode) -> bool:
    """Returns whether SIGUSR2 or the file `stop` asks this node to end, after waiting up to 0.2 s for a signal."""
    # Takes one blocked signal at most. A SIGTERM is recorded as `told-NODE`; it and all others are otherwise ignored.
    received = signal.sigtimedwait(_BLOCKED_SIGNALS, _POLL_S)
    number = received.si_signo if received else None
    if number == signal.SIGTERM and node.shared.exists():
        node.say("told")
    return number == signal.SIGUSR2 or (node.shared / "stop").exists()


def _command(node: RayNode, ip: str, head: str, folder: Path) -> list[str]:
    """Returns the `ray start` command line for this node."""
    # It follows from the node's ports and from SLURM_CPUS_ON_NODE, SLURM_GPUS_ON_NODE, RAY_OBJECT_STORE_BYTES and RAY_DASHBOARD, as far as
    # they are set. Of less memory than the machine has (`total_bytes`), Ray gets 30 % for its objects, as it would of a machine, and the
    # rest for its workers; of the GPUs those that CUDA_VISIBLE_DEVICES names.
    # Jobs and nodes that share a machine get different ranges of worker ports.
    # Jobs on one machine differ in RAY_PORT, its nodes in their index: both choose the range of the workers' ports.
    start, per_node, num_ranges = _WORKER_PORTS
    first = start + per_node * ((node.first_port // 100 + node.index) % num_ranges)
    memory, machine = total_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    store = os.environ.get("RAY_OBJECT_STORE_BYTES") or (f"{memory * 3 // 10}" if memory < machine else "")
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):  # indices, or UUIDs of GPUs or MIG instances
        count = len(visible.split(","))
        gpus = str(min(count, int(gpus)) if gpus.isdecimal() else count)
    settings = {
        "node-ip-address": ip,
        "temp-dir": folder,
        "min-worker-port": first,
        "max-worker-port": first + per_node - 1,
        "num-cpus": os.environ.get("SLURM_CPUS_ON_NODE"),
        "num-gpus": gpus,
        "object-store-memory": store,
        "memory": max(memory - int(store), 1 << 20) if memory < machine and store.isdecimal() else None,
        **node.ports,
    }
    if node.is_head:
        settings |= {"include-dashboard": os.environ.get("RAY_DASHBOARD") or "false", "dashboard-host": "127.0.0.1"}
        if importlib.util.find_spec("grpc") is None:  # needed only by Ray's client server, which is not used here
            del settings["ray-client-server-port"]
    else:
        settings["address"] = head
    options = [f"--{name}={value}" for name, value in settings.items() if value not in (None, "")]
    role = ["--head"] if node.is_head else []
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *role, *options]


def _environment(node: RayNode) -> dict[str, str]:
    """Returns the environment of Ray's processes: what `allowed_variables` keeps, and the token's file."""
    # Tokens are in use; the token itself is in the file `token` of the shared folder. Python's output is unbuffered.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(node.shared / "token")}
    return allowed_variables(os.environ) | token | {"PYTHONUNBUFFERED": "1"}


def address_of_this_machine(towards: str = "", interface: str = "") -> str:
    """Returns this machine's IPv4 address: that of `interface`, or else the one used to reach the host `towards`.

    Sends nothing. Without `towards`, or if that is this machine, it is the one used to reach any other network, or 127.0.0.1
    without a route there.

    Raises:
        WorkerError: there is no such interface, or it has no IPv4 address; or there is no route to `towards`.
    """
    if interface:
        for entry in psutil.net_if_addrs().get(interface, ()):
            if entry.family == socket.AF_INET:
                return entry.address
        raise WorkerError("RAY_INTERFACE", "must be an interface with an IPv4 address on every node", interface)
    found = _source_address(towards) if towards else None
    if found and not found.startswith("127."):
        return found
    elsewhere = _source_address("192.0.2.1")  # an address of documentation, which is nobody's
    if towards and not found and not elsewhere:
        rule = "names the interface between the nodes, and must be set, because this node knows no route to another"
        raise WorkerError("RAY_INTERFACE", rule, towards, "set it to a name that `ip address` lists")
    return elsewhere or "127.0.0.1"


def _source_address(towards: str) -> str | None:
    """The address from which this machine reaches a host; None without a route, or if its name is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return None


def require_free_ports(node: RayNode) -> None:
    """Checks that no process listens on any of the ports that Ray gets on this node.

    Raises:
        WorkerError: some are taken; the message lists them.
    """
    if taken := [port for port in node.ports.values() if not _is_free(port)]:
        listed = ", ".join(map(str, taken))
        raise WorkerError("RAY_PORT", "the ports that Ray gets must be free", f"{listed} taken", "set another RAY_PORT")


def _is_free(port: int) -> bool:
    """Returns whether a TCP port can be bound on all interfaces of this machine."""
    with socket.socket() as probe:
        # A port in TIME_WAIT, left by an ended job, is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def end_descendants() -> list[str]:
    """Kills and reaps all descendants of this process, including those that start meanwhile, for 30 s at most.

    This process must be a subreaper: a process whose parent is killed first then becomes its child, and the search,
    which begins here again and again, finds it.

    Returns:
        `PID NAME` of each process that did not end in time.
    """
    family, deadline = with_descendants(psutil.Process().children()), math.inf
    while family and time.monotonic() < deadline:
        end(family, _POLL_S)
        deadline = min(deadline, time.monotonic() + _END_S)
        family = with_descendants(psutil.Process().children())
    return [f"{process.pid} {process.name()}" for process in family if process.is_running()]


def _keep_logs(folder: Path, node: RayNode) -> None:
    """Copies the last 200 kB of each log that Ray has left in `folder` to the folder `ray-NODE` of the run's logs."""
    # Logs are the non-empty .out, .err and .log files of Ray's last session.
    kept = node.logs / f"ray-{node.name}"
    for file in folder.glob("session_latest/logs/*.*"):
        if file.suffix in (".out", ".err", ".log") and file.is_file() and (size := file.stat().st_size):
            kept.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as source:
                source.seek(max(0, size - _KEPT_BYTES))
                (kept / file.name).write_bytes(source.read())


if __name__ == "__main__":
    sys.exit(main())
