"""Starting and ending Ray on this machine: authenticated while it runs, and nothing left afterwards.

Drivers that are killed: tests/faults/test_sessions.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.command import environment, survivors

pytestmark = pytest.mark.ray

PROGRAM = """
import json, os, stat, sys
import psutil
from distill_rl.config.schema import RayConfig
from distill_rl.workers.cluster.session import ray, ray_session
from tests.helpers.command import command_lines

with ray_session(RayConfig(), num_cpus=5):
    token = os.environ["RAY_AUTH_TOKEN_PATH"]
    facts = {
        "pid": os.getpid(),
        "started": [process.pid for process in psutil.Process().children(recursive=True)],
        "mode": os.environ["RAY_AUTH_MODE"],
        "token_bits": oct(stat.S_IMODE(os.stat(token).st_mode)),
        "in_arguments": any(open(token).read() in line for line in command_lines()),
        "secret_seen": ray.get(ray.remote(lambda: "MY_API_KEY" in os.environ).remote()),
        "cpus": ray.cluster_resources()["CPU"],
    }
    print(json.dumps(facts), flush=True)
    if sys.argv[1:] == ["die inside"]:
        os.kill(os.getpid(), 9)
if sys.argv[1:] == ["die after"]:
    os.kill(os.getpid(), 9)
"""


def session(*arguments: str) -> dict:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment() | {"MY_API_KEY": "hunter2"},
    )
    return json.loads(ended.stdout.splitlines()[-1])


def folders(pid: int) -> list[Path]:
    return list(Path("/tmp").glob(f"drl-{pid}-*"))


def test_a_session_is_authenticated_and_leaves_nothing_behind():
    facts = session()
    assert facts["mode"] == "token"
    assert facts["token_bits"] == "0o600"
    assert not facts["in_arguments"]
    assert not facts["secret_seen"]
    assert facts["cpus"] >= max(5, os.cpu_count() or 1)
    assert facts["started"]
    assert not survivors([psutil.Process(pid) for pid in facts["started"] if psutil.pid_exists(pid)])
    assert not folders(facts["pid"])
