"""Runs one part in its own process, under a time limit, and kills everything it started.

The steps of `run_part`:

1. Start the part in a new session, with its output in the log and its result in a temporary file.
2. Wait until the limit. A command that overruns it first gets SIGTERM and `_GRACE_S`, to stop what it has started.
3. SIGKILL the part and its descendants. Descendants whose parent has died become children of this process
   (`adopt_orphans`), so any child that was not there before the part is one of them.
4. Remove the shared-memory files that killed processes leave behind.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any

from tests.gpu.check.parts import Part

ROOT = Path(__file__).parents[3]
OK, FAILED, TIMED_OUT, SKIPPED, NOT_RUN = "ok", "failed", "timed out", "skipped", "not run"
"""The status of a part. NOT_RUN: there was no time left for it."""

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 20.0
"""For a command to stop what it has started, such as a Ray cluster, before it is killed."""
_DEATH_S = 10.0
"""For processes to disappear after SIGKILL."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one part."""

    status: str
    reason: str = ""
    """One line; empty if the part is ok and has nothing to say."""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    """Shown on the page instead of the figures, if the part returns it."""
    peak_gib: float | None = None
    """Peak GPU memory held by torch's allocator in the part's own process."""


@dataclass(frozen=True, slots=True)
class Call:
    """The options of the GPU check that parts depend on."""

    device: str
    tiny: bool
    out: Path
    log: Path
    """Gets the output of the parts."""


def run_part(part: Part, call: Call, limit_s: float) -> Outcome:
    """Runs one part under a time limit and returns its outcome; a part that fails raises nothing here.

    A part is skipped without being started if a package that it needs is missing, or if it needs a GPU and the device
    is the CPU. Its output is appended to `call.log`. When this returns, none of its processes is left, except for those
    that even SIGKILL does not end in time (`_end`).

    Args:
        limit_s: seconds until it is killed, or, if it is a command, until it is asked to stop.
    """
    if missing := [name for name in part.needs if importlib.util.find_spec(name) is None]:
        return Outcome(SKIPPED, f"needs {', '.join(missing)}, not installed here")
    if part.gpu_only and call.device != "cuda":
        return Outcome(SKIPPED, "needs a GPU")
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder, call.log.open("a+b") as log:
        result = Path(folder) / "result.json"
        log.write(f"\n== {part.name}, limit {limit_s:.0f} s\n".encode())
        log.flush()
        start, began = log.tell(), monotonic()
        code = _run(_command(part, call, result, limit_s), _environment(part, call, folder), log, limit_s, part)
        seconds = round(monotonic() - began, 2)
        if code is None:
            where = "" if part.command else f"; its stacks are in {call.log.name}"
            return Outcome(TIMED_OUT, f"not done after {limit_s:.0f} s{where}", seconds)
        last = _last_line(log, start)
        if code != 0 or not (part.command or result.exists()):
            return Outcome(FAILED, _death(code, last), seconds)
        if part.command:
            return Outcome(OK, last, seconds, _figures_of(part, call))
        return Outcome(seconds=seconds, **json.loads(result.read_text("utf-8")))


def adopt_orphans() -> None:
    """Makes this process the parent of its orphaned descendants, so that `run_part` finds them (only on Linux)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _command(part: Part, call: Call, result: Path, limit_s: float) -> list[str]:
    """The command line of a part: its own command with `{device}` and `{out}` filled in, or a call of `gpu_check.part`.

    The latter gets one argument, the keywords of `gpu_check.part.main` as JSON.

    Args:
        result: file in which the part leaves its result; a command does not use it.
        limit_s: seconds that the part may take; a command is not told.
    """
    if part.command:
        return [word.format(device=call.device, out=call.out) for word in part.command]
    arguments = {
        "module": part.module,
        "function": part.function,
        "device": call.device,
        "tiny": call.tiny,
        "result": str(result),
        "limit_s": limit_s,
        "takes_budget": part.takes_budget,
        "parent": os.getpid(),
    }
    return [sys.executable, "-m", "tests.gpu.check.part", json.dumps(arguments)]


def _environment(part: Part, call: Call, folder: str) -> dict[str, str]:
    """The environment of a part: this process's, with some defaults and overrides.

    Unless set already, the Hugging Face Hub is offline, and process groups use the loopback interface: without a
    network, the machine's own name may not resolve. Always, this repository comes first in PYTHONPATH, output is
    unbuffered, Python's fault handler is on, and on a CPU no GPU is visible.

    Args:
        folder: for temporary files, unless the part is a command.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    defaults = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    overrides = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if call.device == "cpu":
        overrides["CUDA_VISIBLE_DEVICES"] = ""
    if not part.command:  # not for commands: the paths of Ray's sockets must be short
        overrides["TMPDIR"] = folder
    return defaults | os.environ | overrides


def _run(command: list[str], environment: dict[str, str], log: IO[bytes], limit_s: float, part: Part) -> int | None:
    """Runs a command with its output in `log`, and returns its exit code, or None if it did not end within `limit_s`.

    A negative code is the number of the signal that killed it. What is left of its processes is killed in any case; see
    `_end`.

    Args:
        part: if it has a command of its own, the process gets SIGTERM at the limit and is killed `_GRACE_S` later.
    """
    before, process = _children(), None
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        if part.command and process is not None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        return None
    finally:
        _end(process, before)


def _end(process: subprocess.Popen[bytes] | None, before: set[int]) -> None:
    """Kills what is left of a part: its process, its descendants, and orphans that this process has adopted.

    Then removes the shared-memory files of torch that the killed processes leave behind. A process that the kernel
    cannot kill (stuck in a driver call) is given up after `_DEATH_S`.

    Args:
        process: None if it is unknown whether the part was started.
        before: the children of this process before the part was started.
    """
    own = set() if process is None else {process.pid}
    killed = own | _kill(own if process is not None and process.poll() is None else set())
    if process is not None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_DEATH_S)
    deadline = monotonic() + _DEATH_S
    while (orphans := _children() - before - own) and monotonic() < deadline:
        killed |= _kill(orphans)
        for pid in orphans:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        sleep(0.01)
    for pid in killed:  # torch's reference counters of shared GPU memory, which a killed process leaves behind
        for file in Path("/dev/shm").glob(f"torch_{pid}_*"):
            with suppress(OSError):
                file.unlink()


def _kill(pids: set[int]) -> set[int]:
    """Sends SIGKILL to these processes and all their descendants, and returns the pids of all of them.

    Processes that are gone or may not be killed are passed over, but their pids are returned too.
    """
    parents = _parents()
    family = generation = pids
    while generation := {pid for pid, parent in parents.items() if parent in generation} - family:
        family = family | generation
    for pid in family:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return family


def _children() -> set[int]:
    """The pids of this process's children."""
    own = os.getpid()
    return {pid for pid, parent in _parents().items() if parent == own}


def _parents() -> dict[int, int]:
    """The parent's pid by pid, for all processes visible in /proc; empty where there is no /proc."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    return parents


def _figures_of(part: Part, call: Call) -> Mapping[str, Any]:
    """The `results` in the JSON file of a command's figures; empty if the part names no file or did not write it."""
    if not part.figures_file:
        return {}
    path = Path(part.figures_file.format(out=call.out))
    return json.loads(path.read_text("utf-8"))["results"] if path.exists() else {}


def _last_line(log: IO[bytes], start: int) -> str:
    """The last line with text that was written to the log since the byte `start`, cut to 300 characters; "" if none."""
    log.seek(0, os.SEEK_END)
    log.seek(max(start, log.tell() - 8192))
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _death(code: int, last: str) -> str:
    """How a process ended that left no result: the signal's name or the exit code, then its last output if any.

    Args:
        code: exit code; negative: the number of the signal that killed it.
        last: its last line of output, or "".
    """
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}; {last}" if last else how
