"""One Ray node of a job: its address, its ports, and that none of its processes survives it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from distill_rl.errors import WorkerError
from distill_rl.system.files import OwnedFolder, remove_abandoned
from distill_rl.workers.cluster import node as ray_node
from distill_rl.workers.cluster.node import RayNode, address_of_this_machine, require_free_ports
from tests.helpers.command import ended, until

EPHEMERAL = 32768
"""The first of the ports that Linux assigns by itself."""


def node(tmp_path, index=0, first_port=10000):
    return RayNode(tmp_path, tmp_path, f"n{index}", index, first_port, 10.0)


def option(command, name):
    return next(part.partition("=")[2] for part in command if part.startswith(f"--{name}="))


def test_nodes_of_a_job_have_distinct_non_ephemeral_ports(tmp_path):
    nodes = [node(tmp_path, index, 15900) for index in range(8)]
    ports = [port for member in nodes for port in member.ports.values()]
    assert len(set(ports)) == len(ports)
    assert nodes[0].ports["port"] == 15900
    ranges = []
    for member in nodes:
        command = ray_node._command(member, "10.0.0.1", "10.0.0.9:15900", tmp_path)
        ranges.append(range(int(option(command, "min-worker-port")), int(option(command, "max-worker-port")) + 1))
    assert max(ports) < min(ports_of_workers.start for ports_of_workers in ranges)
    assert max(ports_of_workers.stop for ports_of_workers in ranges) <= EPHEMERAL
    taken = [port for ports_of_workers in ranges for port in ports_of_workers]
    assert len(set(taken)) == len(taken)


def test_command_uses_slurm_resources_and_hides_the_token(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "96")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-secret")
    (tmp_path / "token").write_text("another-secret")
    head = ray_node._command(node(tmp_path), "10.0.0.1", "", tmp_path)
    assert ("--head" in head, option(head, "num-cpus"), option(head, "num-gpus")) == (True, "96", "8")
    assert (option(head, "include-dashboard"), option(head, "dashboard-host")) == ("false", "127.0.0.1")
    other = ray_node._command(node(tmp_path, 1), "10.0.0.2", "10.0.0.1:10000", tmp_path)
    assert ("--head" in other, option(other, "address")) == (False, "10.0.0.1:10000")
    assert not any("secret" in part for part in head + other)
    seen = ray_node._environment(node(tmp_path))
    assert seen["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")
    assert not {"SLURM_CPUS_ON_NODE", "RAY_AUTH_TOKEN"} & set(seen)


@pytest.mark.parametrize(
    ("variables", "memory", "store", "gpus"),
    [
        ({"SLURM_MEM_PER_NODE": "3000"}, 2100 << 20, 900 << 20, None),
        ({"SLURM_MEM_PER_CPU": "500", "SLURM_CPUS_ON_NODE": "4"}, 1400 << 20, 600 << 20, None),
        ({"SLURM_MEM_PER_NODE": "3000", "RAY_OBJECT_STORE_BYTES": "100000000"}, (3000 << 20) - 100000000, 100000000, None),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "MIG-aa-1,GPU-bb"}, None, None, "2"),
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "4,5"}, None, None, "2"),
    ],
)  # fmt: skip
def test_ray_gets_what_the_job_has(tmp_path, monkeypatch, variables, memory, store, gpus):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = ray_node._command(node(tmp_path), "10.0.0.1", "", tmp_path)
    found = dict(part.removeprefix("--").partition("=")[::2] for part in command if part.startswith("--"))
    assert found.get("memory") == (None if memory is None else f"{memory}")
    assert found.get("object-store-memory") == (None if store is None else f"{store}")
    assert found.get("num-gpus") == gpus


def test_taken_port_is_named_with_the_setting(tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = node(tmp_path, first_port=other.getsockname()[1])
        with pytest.raises(WorkerError, match=rf"RAY_PORT: .* got {taken.first_port}[ ,].*taken; set another RAY_PORT"):
            require_free_ports(taken)


def test_folders_of_dead_processes_only_are_removed():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = Path(tempfile.mkdtemp(prefix=f"dr0-{ended.pid}-", dir="/tmp"))
    owned = OwnedFolder(Path("/tmp"), f"dr0-{os.getpid()}-")
    used = owned.path
    try:
        remove_abandoned(Path("/tmp"), ray_node.FOLDERS)
        assert not left.exists()
        assert used.exists()
    finally:
        shutil.rmtree(left, ignore_errors=True)
        owned.remove()


def test_interface_gives_the_address_or_an_error():
    assert address_of_this_machine("192.0.2.1", "lo") == "127.0.0.1"
    with pytest.raises(WorkerError, match=r"RAY_INTERFACE: .*got no0"):
        address_of_this_machine("192.0.2.1", "no0")


def test_the_address_is_that_of_the_route_to_another_node(monkeypatch):
    """In a network namespace with one interface between the nodes and no default route."""
    script = (
        "ip link set lo up && ip link add eth7 type veth peer name eth8 && ip link set eth8 up && ip addr add 10.77.0.5/24 dev eth7 && ip link set eth7 up && "
        f"exec {sys.executable} -c 'from distill_rl.workers.cluster.node import address_of_this_machine as find\n"
        'for towards in ("10.77.0.6", "", "127.0.0.1", "10.88.0.1"):\n'
        "    try: print(find(towards))\n"
        "    except Exception as error: print(error)'"
    )
    done = subprocess.run(["unshare", "--net", "bash", "-c", script], capture_output=True, text=True, timeout=60)
    if "Operation not permitted" in done.stderr or "not found" in done.stderr or "Unknown device" in done.stderr:
        pytest.skip(f"no network namespace can be made: {done.stderr}")
    *found, refused = done.stdout.splitlines()
    assert found == ["10.77.0.5", "127.0.0.1", "127.0.0.1"], done.stderr
    assert refused.startswith("RAY_INTERFACE: names the interface between the nodes, and must be set")


def agreed(folder: Path, index: int, job: int, taken: list[int]) -> int:
    """The first port on which node `index` of two agrees with the other, which finds all but `taken` free."""
    other = " ".join(str(first) for first in range(10000, 16000, 100) if first not in taken)
    (folder / f"free-n{1 - index}").write_text(other)
    alone = RayNode(folder, folder, f"n{index}", index, 0, 10.0, ("n0", "n1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", str(job))
        return ray_node._agreed(alone, time.monotonic() + 10).first_port


def test_the_nodes_of_a_job_take_the_first_range_that_is_free_on_all_of_them(tmp_path):
    assert agreed(tmp_path, 0, 23, []) == 12300
    assert agreed(tmp_path, 1, 24, []) == 12400, "a requeued job 23 does not take what the next one has"
    assert agreed(tmp_path, 0, 23, [12300, 12400]) == 12500
    assert agreed(tmp_path, 0, 59, [15900]) < 15900, "from the beginning again"
    with socket.socket() as other:  # the second port of the other node's ten
        other.bind(("", 12311))
        other.listen()
        assert agreed(tmp_path, 1, 23, []) == 12400
    with pytest.raises(WorkerError, match="RAY_PORT: a range of ports from 10000 to 15999 must be free on all nodes"):
        agreed(tmp_path, 0, 23, list(range(10000, 16000, 100)))


DAEMONS = """\
import ctypes, os, signal, subprocess, sys, time
from distill_rl.system.files import OwnedFolder, remove_abandoned
from distill_rl.workers.cluster import node as ray_node
signal.pthread_sigmask(signal.SIG_BLOCK, ray_node._BLOCKED_SIGNALS)
ctypes.CDLL(None).prctl(ray_node._SUBREAPER, 1, 0, 0, 0)
script = "import os, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\nprint(os.getpid(), flush=True)\\nos.close(1)\\ntime.sleep(600)"
child = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
os.kill(int(child.stdout), signal.SIGTERM)
print(child.stdout.strip(), ray_node.end_descendants(), flush=True)
"""


def test_daemon_that_blocks_signals_ends_with_the_node():
    done = subprocess.run([sys.executable, "-c", DAEMONS], capture_output=True, text=True, timeout=60)
    pid, left = done.stdout.split(maxsplit=1)
    assert left.strip() == "[]", done.stderr
    assert ended(int(pid))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_node_ends_on_request_but_not_on_scheduler_signal(tmp_path, number):
    """The node waits for its head, so that Ray is not started."""
    environment = os.environ | {"SLURM_NODEID": "1", "SLURMD_NODENAME": "n2", "RAY_START_TIMEOUT": "60"}
    command = [sys.executable, "-m", "distill_rl.workers.cluster.node", str(tmp_path), str(tmp_path)]
    waiting = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    try:
        until((tmp_path / "here-n2").exists, "the node")
        waiting.send_signal(number)
        (tmp_path / "stop").touch()
        assert waiting.wait(timeout=60) == 0, [path.read_text() for path in tmp_path.glob("failed-*")]
        assert (tmp_path / "told-n2").exists() == (number == signal.SIGTERM)
    finally:
        waiting.kill()
        waiting.wait()


STARTS = """\
import pathlib, sys, time
from distill_rl.errors import WorkerError
from distill_rl.system.files import OwnedFolder, remove_abandoned
from distill_rl.workers.cluster import node as ray_node
folder = pathlib.Path(sys.argv[1])
node = ray_node.RayNode(folder, folder, "n1", 0, 10000, 60.0)
for _ in range(2):
    try:
        started = ray_node._start(node, [sys.executable, "-c", sys.argv[2], str(folder / "tries")], time.monotonic() + 60)
        print(started.poll(), (folder / "tries").read_text())
    except WorkerError as error:
        print(error)
ray_node.end_descendants()
"""
RAY = """\
import pathlib, sys, time
with open(sys.argv[1], "a") as file: file.write("x")
tries = len(pathlib.Path(sys.argv[1]).read_text())
if tries < 3: sys.exit("Exception: The current node timed out during startup. This could happen")
if tries == 4: sys.exit("another reason")
print("Ray runtime started.", flush=True)
time.sleep(600)
"""


def test_only_a_slow_ray_start_is_retried(tmp_path):
    """A program stands in for `ray start`, which cannot be made slow. It runs in a child process, because `_start`
    kills all descendants."""
    command = [sys.executable, "-c", STARTS, str(tmp_path), RAY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    third, fourth = done.stdout.splitlines()
    assert third == "None xxx", done.stderr
    assert fourth.startswith("ray start: must start a node; got exit code 1")
    assert (tmp_path / "tries").read_text() == "xxxx"


def test_missing_head_is_an_error_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_node, "_asked_to_end", lambda node: False)
    late = RayNode(tmp_path, tmp_path, "n2", 1, 10000, 0.0)
    with pytest.raises(WorkerError, match="the head must be up; got nothing after 0 s"):
        ray_node._serve(late, tmp_path)
