"""Child processes: those that end with their parent, a function, the command line, and what others wrote under limits."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import resource_tracker, spawn
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import IO, Any, BinaryIO, TypeVar

from distill_rl.errors import WorkerError
from distill_rl.system.fork_server import LAUNCHER, end_with, launcher
from distill_rl.system.signals import requests, signals_blocked

# A function called in a process of its own, with a deadline.

Result = TypeVar("Result")

_END_S = 10.0
_KILLED = "Linux ends a process in this way when memory runs out: use less of it"


def call_in_child(what: str, function: Callable[..., Result], *arguments: Any, deadline_s: float) -> Result:
    """Calls a function in a new Python process, which has ended when this returns or raises.

    Args:
        what: what the function is about, for the error.
        function: of a module that the new process can import.
        arguments: can be pickled, like the function's result and what it raises.
        deadline_s: seconds until the answer, including the start of Python and the function's imports.

    Raises:
        WorkerError: the process died or took too long.
        Exception: what the function raised.
    """
    context, blocked = multiprocessing.get_context("spawn"), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()  # the start of the first process would start it, and unblock signals
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, os.getpid(), blocked, function, arguments), daemon=True)
    with receiver:
        try:
            # A signal while it starts would end both sides in the midst of it, and the child would print where it was.
            # The sender is closed here once the child has its own, so that the child's death ends the wait.
            with signals_blocked(signal.SIGINT), sender:
                executable = spawn.get_executable()
                try:
                    spawn.set_executable(launcher())
                    process.start()
                finally:
                    spawn.set_executable(executable)
            if not receiver.poll(deadline_s):
                rule = f"its process must answer within {deadline_s:g} s"
                raise WorkerError(what, rule, "no answer", "try again when the machine and its disks are less busy")
            result, error = receiver.recv()
            process.join(_END_S)  # with what it holds, such as a GPU's memory
        except EOFError:
            process.join()
            found = f"exit code {process.exitcode} without an answer"
            remedy = _KILLED if process.exitcode == -signal.SIGKILL else ""
            raise WorkerError(what, "its process must end well", found, remedy) from None
        finally:
            if process.pid is not None:
                process.kill()
                process.join()
    if error is not None:
        raise error
    return result


def _answer(
    sender: Connection, parent: int, blocked: set[int], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """The new process: sends the function's result and None, or None and what it raised."""
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the parent ends this one
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        answer: tuple[Any, Exception | None] = function(*arguments), None
    except Exception as error:
        answer = None, error
    sender.send(answer)
    os._exit(0)  # the parent waits


# Runs the real command line in child processes and forwards signals to them.


class OwnCommands:
    """Children that run `distill-rl`. While entered, SIGINT and requests to stop (`signals.PREEMPT`) go to all of them instead.

    Enter it and start children in the main thread. Every child has its own process group, so that Ctrl-C reaches it once,
    through this process: a second SIGINT would end it before it has stopped the processes that it started. If this process
    is killed, the children get SIGTERM (on Linux). Leaving the block ends no child.
    """

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._received: list[tuple[int, int]] = []
        """Signals, and how many children there were at each."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> OwnCommands:
        """Installs the handlers."""
        self._previous = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, *requests())}
        return self

    def __exit__(self, *exc: object) -> None:
        """Restores the handlers from before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def signalled(self) -> bool:
        """Whether a signal has arrived."""
        return bool(self._received)

    def start(
        self, arguments: Sequence[str], variables: Mapping[str, str] | None = None, output: IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts `distill-rl`, and sends it the signals that have arrived before.

        Args:
            arguments: those of the command line, without the program's name.
            variables: environment variables of the child, where this process's environment does not have them.
            output: for stdout and stderr; None: those of this process.
        """
        child = subprocess.Popen(
            [launcher(), "-m", "distill_rl", *arguments],
            stdout=output,
            stderr=output,
            env={**(variables or {}), **os.environ, LAUNCHER: launcher()},
            process_group=0,
            preexec_fn=partial(end_with, os.getpid(), signal.SIGTERM),
        )
        self._children.append(child)
        # A signal that arrives from here on finds the child in the list.
        for number, children in self._received:
            if children < len(self._children):
                child.send_signal(number)
        return child

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._received.append((number, len(self._children)))
        for child in self._children:
            child.send_signal(number)


def exit_code(code: int) -> int:
    """The exit code that a shell gives for a child: 128 + n if signal n ended it."""
    return code if code >= 0 else 128 - code


# A process of limited processor time and memory for what others wrote: JSON lines to it and from it, waiting only while it works.
#
# `Child` is the parent's side. The process runs a module of this package, which calls `enter`, and for each request `limit_memory`
# and `limit_time`.

MAX_REPLY_BYTES = 1 << 26
REAP_S = 10.0
"""Seconds to wait for a killed process. One that the kernel holds longer, for instance on a dead disk, is abandoned."""
LEAST_SHARE = 0.01
"""A process that uses less of a processor, and does not wait for one either, hangs."""

_INHERITED_VARIABLES = (
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "PYTHONPYCACHEPREFIX",
)  # fmt: skip


_SOON_S = 0.5
"""Seconds in which most answers come."""


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
        import psutil

        arguments = map(str, (os.getpid(), deadline_s, memory_bytes))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
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
        return reply if isinstance(reply, dict) and reply.get("done", self._request_id) == self._request_id else {}

    def _wait(self, descriptor: int, event: int, hang_s: float) -> None:
        """Waits until a poll event occurs on a file descriptor, or it is closed or fails."""
        poll = select.poll()
        poll.register(descriptor, event)
        if poll.poll(min(hang_s, _SOON_S) * 1000):
            return
        begin, (used, _) = time.monotonic(), self._activity()
        while not poll.poll(hang_s * 1000):
            now, is_runnable = self._activity()
            if (now - used) / (time.monotonic() - begin) < LEAST_SHARE and not is_runnable:
                raise ChildHangs

    def _activity(self) -> tuple[float, bool]:
        # Processor time that the process has used, in seconds, and whether it computes or waits for a processor, and not for anything else;
        # 0 and False if it is gone.
        import psutil

        try:
            times = self._usage.cpu_times()
            return times.user + times.system, self._usage.status() == psutil.STATUS_RUNNING
        except psutil.NoSuchProcess:
            return 0.0, False

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
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(REAP_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return code


def _environment() -> dict[str, str]:
    """Variables without secrets, the package's path, no GPU and no hub, and a fixed hash seed."""
    inherited = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    root = Path(__file__).resolve().parents[2]
    if root != Path(sysconfig.get_paths()["purelib"]).resolve():
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, (inherited.get("PYTHONPATH"), str(root))))
    fixed = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    return inherited | fixed | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


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
