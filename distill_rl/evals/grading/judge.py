"""The child process of `grader.Grader`: judges one completion after another, in its main thread.

    python -m distill_rl.evals.grading.judge PARENT DEADLINE_S MEMORY_BYTES

It reads requests from stdin and writes replies to the original stdout, one JSON object per line. It answers a request
with two lines: `{"begun": n}` when the suite is loaded, then `{"done": n, "score": …, "extracted": …}` or
`{"done": n, "error": …}`. If the suite cannot be loaded, it answers `{"broken": …}`. `"last": true` means that the
process exits after this reply.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from distill_rl.evals.suites.base import Item, Suite
from distill_rl.evals.suites.registry import find
from distill_rl.system.processes import address_space, enter, limit_memory, limit_time, send

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
    requests, replies = enter(parent)
    suites: dict[str, Suite] = {}
    start = address_space()
    for line in requests:
        request = json.loads(line)
        request_id, name = request["number"], request["suite"]
        if name not in suites:
            limit_memory(None)
            limit_time(LOAD_S)
            try:
                suites[name] = find(name)
            except BaseException as error:
                send(replies, {"broken": _described(error)})
                continue
            finally:
                limit_time(0)
            start = address_space()
        send(replies, {"begun": request_id})
        limit_memory(start + memory_bytes)
        reply = _judge(suites[name], _item(request["item"]), request["completion"], deadline_s)
        # Exit before memory that earlier items leaked can affect a later one.
        last = reply.pop("last", False) or address_space() > start + memory_bytes // 4
        send(replies, {"done": request_id, **reply, "last": last})
        if last:
            break
    replies.flush()
    os._exit(0)  # without waiting for threads that a judge left behind


def _judge(suite: Suite, item: Item, completion: str, deadline_s: float) -> dict[str, Any]:
    # Judges a completion; returns the fields of the reply: `score` and `extracted`, or, if the judge raised or its verdict is invalid,
    # `error` and `last`. `last` asks for a new process: after MemoryError and exceptions such as SystemExit.
    # SIGPROF kills this process if the judgement takes more than `deadline_s` seconds of processor time.
    limit_time(deadline_s)
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
        limit_time(0)


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


if __name__ == "__main__":
    main()
