"""The child process of `grader.Grader`: judges one completion after another, in its main thread.

    python -m distill_rl.evals.grading.judge PARENT DEADLINE_S MEMORY_BYTES

It reads requests from stdin and writes replies to the original stdout, one JSON object per line. It answers a request
with two lines: `{"begun": n}` when the suite is loaded, then `{"done": n, "score": …, "extracted": …}` or
`{"done": n, "error": …}`. If the suite cannot be loaded, it answers `{"broken": …}`. `"last": true` means that the
process exits after this reply.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from distill_rl.evals.suites.base import Item, Suite
from distill_rl.evals.suites.registry import find
from distill_rl.system.processes.parent import end_with

MAX_ERROR_CHARACTERS = 300
LOAD_S = 60.0
"""Processor time to load a suite, in seconds, after which SIGPROF kills this process."""


def main() -> None:
    """Judges requests from stdin until it is closed or a judgement makes this process unfit for another one, then exits
    at once.

    Takes the parent's process id, the deadline in seconds of processor time and the memory limit in bytes from the
    command line.
    """
    parent, deadline_s, memory_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    end_with(parent)
    requests, replies = _take_over_streams()
    with contextlib.suppress(OSError):  # make the kernel's out-of-memory killer pick this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    suites: dict[str, Suite] = {}
    start = _address_space()
    for line in requests:
        request = json.loads(line)
        request_id, name = request["number"], request["suite"]
        if name not in suites:
            _limit_address_space(None)
            signal.setitimer(signal.ITIMER_PROF, LOAD_S)
            try:
                suites[name] = find(name)
            except BaseException as error:
                _send(replies, {"broken": _described(error)})
                continue
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            start = _address_space()
        _send(replies, {"begun": request_id})
        _limit_address_space(start + memory_bytes)
        reply = _judge(suites[name], _item(request["item"]), request["completion"], deadline_s)
        # Exit before memory that earlier items leaked can affect a later one.
        last = reply.pop("last", False) or _address_space() > start + memory_bytes // 4
        _send(replies, {"done": request_id, **reply, "last": last})
        if last:
            break
    replies.flush()
    os._exit(0)  # without waiting for threads that a judge left behind


def _judge(suite: Suite, item: Item, completion: str, deadline_s: float) -> dict[str, Any]:
    """Judges a completion; returns the fields of the reply: `score` and `extracted`, or, if the judge raised or its
    verdict is invalid, `error` and `last`. `last` asks for a new process: after MemoryError and exceptions such as
    SystemExit.

    SIGPROF kills this process if the judgement takes more than `deadline_s` seconds of processor time.
    """
    signal.setitimer(signal.ITIMER_PROF, deadline_s)
    try:
        verdict = suite.judge(item, completion)
        score, extracted = float(verdict.score), verdict.extracted
        if not 0 <= score <= 1:
            raise ValueError(f"a score must be from 0 to 1; got {score}")
        if not isinstance(extracted, str | None):
            raise TypeError(f"`extracted` must be a text or None; got {type(extracted).__name__}")
        return {"score": score, "extracted": extracted}
    except BaseException as error:  # SystemExit is not a subclass of Exception
        return {"error": _described(error), "last": not isinstance(error, Exception) or isinstance(error, MemoryError)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _item(fields: Mapping[str, Any]) -> Item:
    """The item of a request; turns the lists that JSON made of prompt and choices back into tuples."""
    prompt = fields["prompt"] if isinstance(fields["prompt"], str) else tuple(fields["prompt"])
    return Item(**{**fields, "prompt": prompt, "choices": tuple(fields["choices"])})


def _described(error: BaseException) -> str:
    """Type and message of an error in at most MAX_ERROR_CHARACTERS; the type alone if the message cannot be made."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
    except BaseException:
        return type(error).__name__


def _send(replies: BinaryIO, reply: Mapping[str, Any]) -> None:
    """Writes a reply as one JSON line, at once."""
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _take_over_streams() -> tuple[BinaryIO, BinaryIO]:
    """(requests, replies), moved away from stdin and stdout, which become /dev/null, so that libraries cannot read from
    or print to them."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(devnull, stream)
    os.close(devnull)
    return requests, replies


def _address_space() -> int:
    """Address space of this process in bytes; 0 if it cannot be read."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _limit_address_space(size: int | None) -> None:
    """Limits the address space of this process to `size` bytes, or to the hard limit if that is lower; None: to the
    hard limit. Does nothing where the system does not support it."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if size is None or (hard != resource.RLIM_INFINITY and size > hard):
        size = hard
    with contextlib.suppress(ValueError, OSError):  # the system does not support this limit
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))


if __name__ == "__main__":
    main()
