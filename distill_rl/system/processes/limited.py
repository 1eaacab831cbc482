"""A process of limited processor time and memory for what others wrote: JSON lines to it and from it, waiting only while it works.

`Child` is the parent's side. The process runs a module of this package, which calls `enter`, and for each request `limit_memory`
and `limit_time`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from distill_rl.system.processes.parent import end_with

MAX_REPLY_BYTES = 1 << 26
REAP_S = 10.0
"""Seconds to wait for a killed process. One that the kernel holds longer, for instance on a dead disk, is abandoned."""
LEAST_SHARE = 0.01
"""A process that uses less of a processor, and does not wait for one either, hangs."""

_INHERITED_VARIABLES = (
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
    """The process has ended, or its streams are closed."""


class ChildHangs(Exception):
    """The process neither answers nor computes."""


class Child:
    """A limited process, in a process group of its own.

    One thread starts it, exchanges messages with it and calls `reap`. Any other thread may call `kill`, but not while
    `reap` runs. The process dies with the thread that started it.
    """

    def __init__(self, module: str, deadline_s: float, memory_bytes: int):
        """Starts the process, without waiting until it is ready.

        Its environment holds no secrets, and its stderr is dropped. `reap` must be called in the end.

        Args:
            module: what it runs, by its full name, with the parent's process id and the other arguments on its command line.
            deadline_s: processor time of one item in seconds, after which SIGPROF kills the process.
            memory_bytes: address space that it may allocate in addition to what it has when it begins with an item.
        """
        arguments = os.getpid(), deadline_s, memory_bytes
        command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            process_group=0,
        )
        self._usage = psutil.Process(self._process.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._requests, False)
        self._request_id = 0
        self._buffer = bytearray()

    def send(self, request: str, hang_s: float) -> int:
        """Sends a JSON object, with an id added as `number`; returns the id, which counts up from 1.

        Args:
            request: a JSON object with at least one entry, on one line.
            hang_s: as in `read`.

        Raises:
            ChildHangs: it has not taken all of it.
            ChildEnded: it closed its stdin or has ended.
        """
        self._request_id += 1
        unsent = memoryview(f'{{"number": {self._request_id}, {request[1:]}\n'.encode())
        while unsent:
            self._wait(self._requests, select.POLLOUT, hang_s)
            try:
                unsent = unsent[os.write(self._requests, unsent) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise ChildEnded from error
        return self._request_id

    def read(self, hang_s: float) -> dict[str, Any]:
        """Waits for the next line from the process and returns it as a JSON object; empty if it is no JSON object, too
        long (MAX_REPLY_BYTES), or the `done` of another request than the last one.

        This waits as long as the process computes or has to wait for a processor, which its own limit of processor time
        ends, so that a busy machine changes nothing.

        Args:
            hang_s: seconds without a sign of life, after which a process hangs that did not compute meanwhile.

        Raises:
            ChildHangs: no complete line, and the process hangs.
            ChildEnded: the process closed its stdout or has ended.
        """
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > MAX_REPLY_BYTES:
                return {}
            self._wait(self._replies, select.POLLIN, hang_s)
            more = os.read(self._replies, 1 << 16)
            if not more:
                raise ChildEnded
            self._buffer += more
        line, self._buffer = bytes(self._buffer[:end]), self._buffer[end + 1 :]
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        if not isinstance(reply, dict) or reply.get("done", self._request_id) != self._request_id:
            return {}
        return reply

    def _wait(self, descriptor: int, event: int, hang_s: float) -> None:
        """Waits until a poll event occurs on a file descriptor, or it is closed or fails.

        Raises:
            ChildHangs: nothing happened for `hang_s` seconds, in which the process had less than LEAST_SHARE of a
                processor although it was not waiting for one.
        """
        poll = select.poll()
        poll.register(descriptor, event)
        begin, used = time.monotonic(), self._processor_s()
        while not poll.poll(hang_s * 1000):
            share = (self._processor_s() - used) / (time.monotonic() - begin)
            if share < LEAST_SHARE and not self._is_runnable():
                raise ChildHangs

    def _processor_s(self) -> float:
        """Processor time that the process has used, in seconds; 0 if it is gone."""
        try:
            times = self._usage.cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return times.user + times.system

    def _is_runnable(self) -> bool:
        """Whether the process computes or waits for a processor, and not for anything else."""
        try:
            return self._usage.status() == psutil.STATUS_RUNNING
        except psutil.NoSuchProcess:
            return False

    def kill(self) -> None:
        """Sends SIGKILL to the process group, without waiting. A child that is already exiting keeps its exit code;
        nothing happens if it has been reaped."""
        if self._process.returncode is not None:  # the process is reaped, so its id may belong to another one
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self) -> int | None:
        """Waits for the killed process and closes its streams; returns its exit code (negative: the signal), or None if
        it still exists after `REAP_S` seconds."""
        try:
            code = self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            code = None
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return code


def _environment() -> dict[str, str]:
    """The environment of a child: of this process only variables without secrets (_INHERITED_VARIABLES), with this
    package on PYTHONPATH if it is not installed; no GPU, no hub access, and a fixed hash seed for reproducible results.
    """
    inherited = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    root = Path(__file__).resolve().parents[3]
    if root != Path(sysconfig.get_paths()["purelib"]).resolve():
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, (inherited.get("PYTHONPATH"), str(root))))
    fixed = {
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    return inherited | fixed


def enter(parent: int) -> tuple[BinaryIO, BinaryIO]:
    """Prepares this process to be a `Child`; returns requests and replies, moved away from stdin and stdout.

    Those become /dev/null, so that libraries cannot read from or print to them. The process ends with its parent, and SIGPROF
    ends it.

    Args:
        parent: its process id.
    """
    end_with(parent)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(devnull, stream)
    os.close(devnull)
    with contextlib.suppress(OSError):  # make the kernel's out-of-memory killer pick this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    return requests, replies


def send(replies: BinaryIO, reply: Mapping[str, Any]) -> None:
    """Writes a reply as one JSON line, at once."""
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def limit_time(seconds: float) -> None:
    """Has SIGPROF end this process after so many seconds of processor time; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def address_space() -> int:
    """Address space of this process in bytes; 0 if it cannot be read."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def limit_memory(size: int | None) -> None:
    """Limits the address space of this process to `size` bytes, or to the hard limit if that is lower; None: to the
    hard limit. Does nothing where the system does not support it."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if size is None or (hard != resource.RLIM_INFINITY and size > hard):
        size = hard
    with contextlib.suppress(ValueError, OSError):  # the system does not support this limit
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))
