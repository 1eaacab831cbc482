"""Joining a Ray cluster takes its token, and nobody joins a cluster without authentication by accident."""

import os
import subprocess
import sys

import pytest

from tests.helpers.command import environment
from tests.helpers.ray_nodes import ray_nodes

pytestmark = pytest.mark.ray

PROGRAM = """
import sys
from distill_rl.config.schema import RayConfig
from distill_rl.errors import ConfigError
from distill_rl.workers.cluster.session import ray_session

try:
    with ray_session(RayConfig(address=sys.argv[1]), num_cpus=1):
        print("joined")
except ConfigError as error:
    print(error)
"""


def join(address: str, **changed: str | None) -> str:
    """The last line that the joining process prints, with environment variables changed, or removed where None."""
    variables = environment() | {name: value for name, value in changed.items() if value is not None}
    variables = {name: value for name, value in variables.items() if changed.get(name, "") is not None}
    command = [sys.executable, "-c", PROGRAM, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)
    return done.stdout.splitlines()[-1]


def test_joining_a_cluster_needs_its_token(tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text("not the token of this cluster")
    home = os.fspath(tmp_path)
    with ray_nodes(tmp_path, monkeypatch, nodes=1, cpus=1) as address:
        assert join(address) == "joined"
        none = join(address, RAY_AUTH_TOKEN_PATH=None, HOME=home)
        wrong = join(address, RAY_AUTH_TOKEN_PATH=os.fspath(other))
        other.chmod(0o644)
        readable = join(address, RAY_AUTH_TOKEN_PATH=os.fspath(other))
        disabled = join(address, RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN_PATH=None, HOME=home)
    assert none.startswith("the token of the Ray cluster: must be a file that you can read")
    assert f"the Ray cluster at {address}: must take your token; it refuses it" in wrong
    assert "only you may read the token" in readable
    assert f"chmod 600 {other}" in readable
    assert "do not set RAY_AUTH_MODE=disabled" in disabled
    assert "not the token of this cluster" not in none + wrong + readable + disabled


def test_joining_an_open_cluster_needs_an_explicit_request(tmp_path, monkeypatch):
    with ray_nodes(tmp_path, monkeypatch, nodes=1, cpus=1, mode="disabled") as address:
        refused = join(address, RAY_AUTH_MODE=None)
        wanted = join(address)
    assert "must ask for a token" in refused
    assert "RAY_AUTH_MODE=disabled" in refused
    assert wanted == "joined"
