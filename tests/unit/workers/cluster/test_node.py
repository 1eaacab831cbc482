"""The keeper of a Ray node: which address and ports it takes, and that nothing below it survives."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from distill_rl.errors import WorkerError
from distill_rl.workers.cluster import node as ray_node
from distill_rl.workers.cluster.node import Node, own_address, require_free
from distill_rl.workers.cluster.session import sweep
from tests.helpers.command import until

EPHEMERAL = 32768
"""the first port that Linux gives out by itself"""


def node(tmp_path, number=0, first_port=10000):
    return Node(tmp_path, tmp_path, f"n{number}", number, first_port, 10.0)


def option(command, name):
    return next(part.partition("=")[2] for part in command if part.startswith(f"--{name}="))


def test_the_nodes_of_a_job_have_ports_of_their_own_below_those_that_the_kernel_gives_out(tmp_path):
    nodes = [node(tmp_path, number, 15900) for number in range(8)]
    ports = [port for each in nodes for port in each.ports.values()]
    assert len(set(ports)) == len(ports)
    assert nodes[0].ports["port"] == 15900
    ranges = []
    for each in nodes:
        command = ray_node._command(each, "10.0.0.1", "10.0.0.9:15900", tmp_path)
        ranges.append(range(int(option(command, "min-worker-port")), int(option(command, "max-worker-port")) + 1))
    assert max(ports) < min(each.start for each in ranges)
    assert max(each.stop for each in ranges) <= EPHEMERAL
    taken = [port for each in ranges for port in each]
    assert len(set(taken)) == len(taken)


def test_cpus_and_gpus_are_those_that_slurm_gave_and_the_token_is_no_argument(tmp_path, monkeypatch):
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


def test_a_taken_port_is_named_with_the_setting(tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = node(tmp_path, first_port=other.getsockname()[1])
        with pytest.raises(WorkerError, match=rf"RAY_PORT: .* got {taken.first_port}[ ,].*taken; set another RAY_PORT"):
            require_free(taken)


def test_what_a_killed_keeper_left_is_swept_and_what_a_living_one_has_is_not():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = Path(tempfile.mkdtemp(prefix=f"dr0-{ended.pid}-", dir="/tmp"))
    used = Path(tempfile.mkdtemp(prefix=f"dr0-{os.getpid()}-", dir="/tmp"))
    try:
        sweep(ray_node.FOLDERS)
        assert not left.exists()
        assert used.exists()
    finally:
        shutil.rmtree(left, ignore_errors=True)
        used.rmdir()


def test_an_interface_says_the_address_and_one_that_is_not_there_is_named():
    assert own_address("192.0.2.1", "lo") == "127.0.0.1"
    assert own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(WorkerError, match=r"RAY_INTERFACE: .*got no0"):
        own_address("192.0.2.1", "no0")


DAEMONS = """\
import ctypes, os, signal, subprocess, sys, time
from distill_rl.workers.cluster import node as ray_node
signal.pthread_sigmask(signal.SIG_BLOCK, ray_node._HELD_BACK)
ctypes.CDLL(None).prctl(ray_node._SUBREAPER, 1, 0, 0, 0)
script = "import os, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\nprint(os.getpid(), flush=True)\\nos.close(1)\\ntime.sleep(600)"
child = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
os.kill(int(child.stdout), signal.SIGTERM)
print(child.stdout.strip(), ray_node.end_descendants(), flush=True)
"""


def test_even_a_daemon_that_ignores_requests_to_end_is_ended_with_the_node():
    done = subprocess.run([sys.executable, "-c", DAEMONS], capture_output=True, text=True, timeout=60)
    pid, left = done.stdout.split(maxsplit=1)
    assert left.strip() == "[]", done.stderr
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_scheduler_s_signal_does_not_end_a_node_and_the_request_of_its_job_does(tmp_path, number):
    """A node that waits for its head; Ray is not started."""
    made = os.environ | {"SLURM_NODEID": "1", "SLURMD_NODENAME": "n2", "RAY_START_TIMEOUT": "60"}
    command = [sys.executable, "-m", "distill_rl.workers.cluster.node", str(tmp_path), str(tmp_path)]
    waiting = subprocess.Popen(command, env=made, stderr=subprocess.PIPE)
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
from distill_rl.workers.cluster import node as ray_node
folder = pathlib.Path(sys.argv[1])
node = ray_node.Node(folder, folder, "n1", 0, 10000, 60.0)
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


def test_a_start_that_was_only_too_slow_is_tried_again_and_another_failure_is_not(tmp_path):
    """A program stands for `ray start`, which cannot be made slow; in a process of its own, which ends all below it."""
    command = [sys.executable, "-c", STARTS, str(tmp_path), RAY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    third, fourth = done.stdout.splitlines()
    assert third == "None xxx", done.stderr
    assert fourth.startswith("ray start: must start a node; got exit code 1")
    assert (tmp_path / "tries").read_text() == "xxxx"


def test_a_head_that_does_not_come_is_told_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_node, "_asked_to_end", lambda node: False)
    late = Node(tmp_path, tmp_path, "n2", 1, 10000, 0.0)
    with pytest.raises(WorkerError, match="the head must be up; got nothing after 0 s"):
        ray_node._serve(late, tmp_path)
