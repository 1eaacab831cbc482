"""A process that judges (`judge`), as seen from outside: JSON lines to it and from it, each within a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

LONGEST_REPLY = 1 << 26
"""bytes"""
GONE_S = 10.0
"""for a process that was killed to be gone; one that the kernel holds, on a dead disk for instance, is left behind"""

_PASSED_ON = (
    "PATH",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "PYTHONPYCACHEPREFIX",
)


class ChildEnded(Exception):
    """The process is gone, or its streams are closed."""


class ChildTimeout(Exception):
    """Nothing came in time."""


class Child:
    """One process, in a group of its own, with its streams. One thread talks to it, and calls `gone`; another one may
    call `kill`, but not while `gone` runs. It ends when the thread that started it does."""

    def __init__(self, deadline_s: float, memory_bytes: int):
        command = [
            sys.executable,
            "-P",
            "-m",
            "distill_rl.evals.grading.judge",
            str(os.getpid()),
            str(deadline_s),
            str(memory_bytes),
        ]
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._requests, False)
        self._asked = 0
        self._read = bytearray()

    def ask(self, request: str, timeout_s: float) -> int:
        """Sends a JSON object, and returns the number that it was given."""
        self._asked += 1
        left = memoryview(f'{{"number": {self._asked}, {request[1:]}\n'.encode())
        until = time.monotonic() + timeout_s
        while left:
            _wait(self._requests, select.POLLOUT, until)
            try:
                left = left[os.write(self._requests, left) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise ChildEnded from error
        return self._asked

    def read(self, timeout_s: float) -> dict[str, Any]:
        """The next reply; one that is no JSON object is empty."""
        until = time.monotonic() + timeout_s
        looked_at = 0
        while (end := self._read.find(b"\n", looked_at)) < 0:
            looked_at = len(self._read)
            if looked_at > LONGEST_REPLY:
                return {}
            _wait(self._replies, select.POLLIN, until)
            more = os.read(self._replies, 1 << 16)
            if not more:
                raise ChildEnded
            self._read += more
        line, self._read = bytes(self._read[:end]), self._read[end + 1 :]
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        if not isinstance(reply, dict) or reply.get("done", self._asked) != self._asked:
            return {}
        return reply

    def kill(self) -> None:
        """SIGKILL for its group. A child that is ending of itself keeps its exit code: the signal comes too late."""
        if self._process.returncode is not None:  # the id may be another's by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def gone(self) -> int | None:
        """Waits for the end of what was killed; its exit code, or None if it is still there after `GONE_S`."""
        try:
            code = self._process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            code = None
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return code


def _wait(descriptor: int, event: int, until: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise ChildTimeout


def _environment() -> dict[str, str]:
    """Of a child: no secrets, no GPU, no network, and the same order of sets every time."""
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    root = Path(__file__).resolve().parents[3]
    if root != Path(sysconfig.get_paths()["purelib"]).resolve():
        passed["PYTHONPATH"] = os.pathsep.join(filter(None, (passed.get("PYTHONPATH"), str(root))))
    fixed = {
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    return passed | fixed
