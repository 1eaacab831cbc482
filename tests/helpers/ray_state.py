"""The living actors of a running Ray, from the state that `ray list actors` shows, without needing a dashboard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

_LIST_ACTORS = """\
import json, sys
from ray._private.state import GlobalState
from ray._raylet import GcsClientOptions
state = GlobalState()
state._initialize_global_state(
    GcsClientOptions.create(sys.argv[1], None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True))
actors = state.actor_table(None, None, None).values()
print(json.dumps({a["Name"]: a["Pid"] for a in actors if a["State"] == "ALIVE" and a["Pid"]}))
"""


def actors(driver: int) -> dict[str, int]:
    """Process ids by name of the living actors of the Ray that a driver has started.

    Ray reads its token once per process and every driver has its own token, so a child process does the query.
    """
    token = next(Path("/tmp").glob(f"drl-{driver}-*/token"))
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    command = [sys.executable, "-c", _LIST_ACTORS, _gcs_address(driver)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _gcs_address(driver: int) -> str:
    for process in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.Error):
            for argument in process.cmdline():
                if argument.startswith("--gcs-address="):
                    return argument.partition("=")[2]
    raise AssertionError(f"process {driver} has started no raylet")
