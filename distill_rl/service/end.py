"""Ends the driver of a job on this machine without saving: SIGINT, as Ctrl-C; again, which leaves at once; SIGKILL."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil

from distill_rl.service import entry

_PATIENCE_S = ((signal.SIGINT, 30.0), (signal.SIGINT, 5.0), (signal.SIGKILL, 5.0))


def end(submission_id: str) -> bool:
    """Whether there was such a process."""
    found = list(drivers(submission_id))
    for number, seconds in _PATIENCE_S:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        _, alive = psutil.wait_procs(found, timeout=seconds)
        if not alive:
            break
    return bool(found)


def drivers(submission_id: str) -> Iterator[psutil.Process]:
    """Processes of this user that run `entry` for a job, which Ray names in their environment."""
    mark = f'"job_submission_id": "{submission_id}"'
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                process.uids().real == os.getuid()
                and entry.__name__ in process.cmdline()
                and mark in process.environ().get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
            ):
                yield process


if __name__ == "__main__":
    sys.exit(0 if end(sys.argv[1]) else 1)
