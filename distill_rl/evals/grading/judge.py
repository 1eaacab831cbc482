"""A child of `grader.Grader`: judges one completion after another, in its main thread.

    python -m distill_rl.evals.grading.judge PARENT DEADLINE_S MEMORY_BYTES

Requests come on stdin and replies leave on what was stdout, one JSON object per line. A request gets two lines:
`{"begun": n}` when the suite is there, then `{"done": n, "score": …, "extracted": …}` or `{"done": n, "error": …}`. A
suite that cannot be loaded gets `{"broken": …}`. `"last": true` says that the process ends of itself after this reply.
"""

from __future__ import annotations

import contextlib
import ctypes
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

LONGEST_ERROR = 300
"""characters"""

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, deadline_s, memory_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    _die_with(parent)
    requests, replies = _take_over_streams()
    with contextlib.suppress(OSError):  # before any other process of this machine where memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    suites: dict[str, Suite] = {}
    start = _address_space()
    for line in requests:
        request = json.loads(line)
        number, name = request["number"], request["suite"]
        if name not in suites:
            _limit_address_space(None)
            try:
                suites[name] = find(name)
            except BaseException as error:
                _say(replies, {"broken": _described(error)})
                continue
            start = _address_space()
        _say(replies, {"begun": number})
        _limit_address_space(start + memory_bytes)
        reply = _judged(suites[name], _item(request["item"]), request["completion"], deadline_s)
        # What earlier answers left in memory must not decide on a later one.
        last = reply.pop("last", False) or _address_space() > start + memory_bytes // 4
        _say(replies, {"done": number, **reply, "last": last})
        if last:
            break
    replies.flush()
    os._exit(0)  # threads that a judge left behind are not waited for


def _judged(suite: Suite, item: Item, completion: str, deadline_s: float) -> dict[str, Any]:
    """The verdict; a judge that computes for longer than the deadline ends this process by SIGPROF."""
    signal.setitimer(signal.ITIMER_PROF, deadline_s)
    try:
        verdict = suite.judge(item, completion)
        score, extracted = float(verdict.score), verdict.extracted
        if not 0 <= score <= 1:
            raise ValueError(f"a score must be from 0 to 1; got {score}")
        if not isinstance(extracted, str | None):
            raise TypeError(f"`extracted` must be a text or None; got {type(extracted).__name__}")
        return {"score": score, "extracted": extracted}
    except BaseException as error:  # math-verify's and SystemExit are no Exceptions
        return {"error": _described(error), "last": not isinstance(error, Exception) or isinstance(error, MemoryError)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _item(fields: Mapping[str, Any]) -> Item:
    prompt = fields["prompt"] if isinstance(fields["prompt"], str) else tuple(fields["prompt"])
    return Item(**{**fields, "prompt": prompt, "choices": tuple(fields["choices"])})


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
    except BaseException:
        return type(error).__name__


def _say(replies: BinaryIO, reply: Mapping[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _take_over_streams() -> tuple[BinaryIO, BinaryIO]:
    """(requests, replies); a library that prints or reads stdin cannot meet them."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nothing, stream)
    os.close(nothing)
    return requests, replies


def _die_with(parent: int) -> None:
    """SIGKILL for this process when the thread that started it ends, however it ends (Linux; elsewhere stdin ends)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _address_space() -> int:
    """Bytes of this process, or 0 where that cannot be told."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _limit_address_space(size: int | None) -> None:
    """Sets the limit of memory in bytes; None: as much as there may be."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if size is None or (hard != resource.RLIM_INFINITY and size > hard):
        size = hard
    with contextlib.suppress(ValueError, OSError):  # systems that know no such limit
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))


if __name__ == "__main__":
    main()
