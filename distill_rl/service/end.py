"""Ends the driver of a job on this machine without saving.

It gets SIGINT, like Ctrl-C; then a second SIGINT, which skips its orderly shutdown; then SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil

from distill_rl.service import entry

_STEPS = ((signal.SIGINT, 30.0), (signal.SIGINT, 5.0), (signal.SIGKILL, 5.0))
"""Signals, and the seconds to wait for the end of the process after each."""


def end(submission_id: str) -> bool:
    """Ends the driver of a job on this machine without saving, and waits for its end; returns whether there was one.

    Sends SIGINT; if it still lives after 30 seconds, a second SIGINT; after another 5, SIGKILL, and waits 5 more. True
    does not say that it has ended.
    """
    processes = list(drivers(submission_id))
    for signal_number, seconds in _STEPS:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal_number)
        _, alive = psutil.wait_procs(processes, timeout=seconds)
        if not alive:
            break
    return bool(processes)


def drivers(submission_id: str) -> Iterator[psutil.Process]:
    """Yields the processes of this user on this machine that run `entry` for a job, found by their environment.

    Processes that cannot be inspected are left out.
    """
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
