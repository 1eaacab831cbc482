"""Chat templates are programs that others wrote: they render under limits of processor time and memory.

A template's first renderings in a process are tried in a limited process first (`python -m distill_rl.system.template_budget
PARENT SECONDS BYTES`), which the kernel ends whatever the template does. The process then compiles and renders the template
itself, at full speed. A thread watches how long a rendering takes, and what it allocates is limited, so a template that goes wrong
later, on another chat, fails as well; only one operation of Python that computes for ever in little memory would not.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from distill_rl.errors import DataError, WorkerError
from distill_rl.system import processes

LIMIT_S = 10.0
"""Processor time of a rendering, in seconds."""
LIMIT_BYTES = 1 << 30
"""What a rendering may allocate."""
TRIED = 256
"""Renderings of a template that are tried in a limited process first."""
FIXED_DATE = datetime(2024, 7, 26).strftime
"""What templates that print today's date get."""
_POLL_S = 0.2
_HANG_S = 120.0
_STARTS = 3
_EXCERPT = 60
_TOO_LONG, _TOO_LARGE = "more processor time", "more memory"
T = TypeVar("T")


class _OverTime(Exception):
    """Raised by the watching thread in the one that renders."""


@dataclass
class _Known:
    """What is known of a template."""

    renderings: int = 0
    excess: str = ""
    """The limit that it has broken."""


_KNOWN: dict[str, _Known] = {}


def within_budget(tokenizer: Any, messages: Sequence[Any], options: Mapping[str, Any], render: Callable[[], T]) -> T:
    """What `render` returns: a chat that the tokenizer's template renders, within LIMIT_S and LIMIT_BYTES.

    A template that has broken a limit is not rendered again.

    Args:
        messages, options: what the template gets.

    Raises:
        DataError: the template breaks a limit.
        WorkerError: the limited process does not start.
        Exception: what `render` raises.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):
        template = tokenizer.get_chat_template(tools=options.get("tools"))
    known = _KNOWN.get(template) or _KNOWN.setdefault(template, _Known())
    with LIMITED:
        if not known.excess and known.renderings < TRIED:
            known.renderings += 1
            variables = {**getattr(tokenizer, "special_tokens_map", {}), **options}
            request = {"template": template, "messages": messages, "variables": variables}
            known.excess = _TRIAL.excess(json.dumps(request, default=str))
            if known.renderings == TRIED:
                _TRIAL.end()
        if not known.excess:
            try:
                LIMITED.begin()
                return render()
            except _OverTime:
                known.excess = _TOO_LONG
            except MemoryError:
                known.excess = _TOO_LARGE
            finally:
                LIMITED.rendering = 0
                if LIMITED.late:
                    LIMITED.settle()
    name, excerpt = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__, " ".join(template.split())
    what = f"the chat template of {name} ({excerpt[:_EXCERPT]}{'…' * (len(excerpt) > _EXCERPT)})"
    rule = f"it must render a chat within {LIMIT_S:g} s of processor time and {LIMIT_BYTES >> 20} MiB of memory"
    raise DataError(what, rule, known.excess, "correct the template, or use another tokenizer")


class _Trial:
    """Tries renderings in a limited process, which is started when there is one to try."""

    def __init__(self) -> None:
        self._child: processes.Child | None = None
        self._owner = 0
        atexit.register(self.end)

    def excess(self, request: str) -> str:
        """The limit that a rendering breaks; empty if none, also if the template fails.

        Raises:
            WorkerError: the process does not start, or is ended by something else.
        """
        reason = ""
        for _ in range(_STARTS):
            if self._child is None or self._owner != os.getpid():  # a fork has the parent's
                self._child, self._owner = processes.Child(__name__, LIMIT_S, LIMIT_BYTES), os.getpid()
            begun = False
            try:
                self._child.send(request, _HANG_S)
                begun = "begun" in self._child.read(_HANG_S)
                reply = self._child.read(_HANG_S)
                if "excess" in reply:
                    return str(reply["excess"])
                reason = "no valid reply"
                self.end()
            except (processes.ChildEnded, processes.ChildHangs) as error:
                code = self.end()
                if begun and code in (-signal.SIGPROF, -signal.SIGSEGV):
                    return _TOO_LONG if code == -signal.SIGPROF else "a crash of Python"
                reason = f"exit code {code}" if isinstance(error, processes.ChildEnded) else "no sign of life"
        rule = f"a limited process must try chat templates (python -m {__name__}); tried {_STARTS} times"
        raise WorkerError("chat template", rule, reason)

    def end(self) -> int | None:
        """Ends the process, if there is one; returns its exit code."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return None
        child.kill()
        return child.reap()


class _Limits(contextlib.ContextDecorator):
    """Limits for the thread that renders chats, as a context that can be entered again inside itself.

    Memory is limited inside the context, processor time while `rendering` is not 0.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Begins anew in this process, which has no watching thread yet."""
        self.rendering = self.count = self.late = 0
        """Numbers of the present rendering, of the last one, and of one that took too long; 0: none."""
        self._depth = self._thread = self._clock = 0
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        self._limits, self._measured = self._before, -math.inf
        self._is_watched = False
        self._awake = threading.Event()
        self._lock, self._raising = threading.RLock(), threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth > 1:
            return
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        if time.monotonic() - self._measured > 2 * _POLL_S:
            self._measure()
        resource.setrlimit(resource.RLIMIT_DATA, self._limits)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            resource.setrlimit(resource.RLIMIT_DATA, self._before)
        self._lock.release()

    def begin(self) -> None:
        """Begins a rendering, for which the thread watches until `rendering` is 0."""
        self.count += 1
        self.rendering = self.count
        if not self._awake.is_set():
            self._awake.set()
            if not self._is_watched:
                threading.Thread(target=self._watch, name="chat-templates", daemon=True).start()
                self._is_watched = True

    def _measure(self) -> None:
        """Sets the limit of memory to what the process has now, and LIMIT_BYTES more."""
        self._measured = time.monotonic()
        soft, hard = self._before
        size = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + LIMIT_BYTES
        self._limits = (size if soft == resource.RLIM_INFINITY else min(size, soft), hard)

    def settle(self) -> None:
        """After a rendering that took too long: nothing is raised any more."""
        with self._raising:
            self.late = 0
            _raise_in(self._thread, None)

    def _watch(self) -> None:
        """The watching thread: looks every _POLL_S, and sleeps while nothing is rendered."""
        seen = last = 0
        begin = 0.0
        while True:
            time.sleep(_POLL_S)
            current, count = self.rendering, self.count
            if current:
                with self._raising, contextlib.suppress(OSError):  # the thread has ended
                    used = time.clock_gettime(self._clock)
                    if current != seen:
                        seen, begin = current, used
                    elif used - begin > LIMIT_S:
                        self.late = current
                        if self.rendering == current:  # one that ends now sees `late`, and waits in `settle`
                            _raise_in(self._thread, _OverTime)
            elif count == last:
                self._awake.clear()
                if self.count == count:
                    self._awake.wait()
            else:
                self._measure()
            last = count


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    """Has an exception raised in another thread; None: none, although one was to be."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


_TRIAL, LIMITED = _Trial(), _Limits()
"""LIMITED is for those who render a chat several times, which costs less inside of one context."""


def main() -> None:
    """The limited process: renders what stdin asks for until it is closed, and replies which limit that breaks."""
    parent, limit_s, limit_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    requests, replies = processes.enter(parent)
    start = processes.address_space()
    for line in requests:
        request = json.loads(line)
        variables = {"tools": None, "documents": None, "add_generation_prompt": False, **request["variables"]}
        variables |= {"messages": request["messages"], "strftime_now": FIXED_DATE}
        processes.send(replies, {"begun": request["number"]})
        processes.limit_memory(start + limit_bytes)
        processes.limit_time(limit_s)
        excess = ""
        try:
            _compiled(request["template"]).render(variables)
        except MemoryError:
            excess = _TOO_LARGE
        except Exception:  # a chat that the template refuses is not a matter of limits
            pass
        finally:
            processes.limit_time(0)
            processes.limit_memory(None)
        processes.send(replies, {"excess": excess})
    os._exit(0)


@lru_cache(maxsize=4)
def _compiled(text: str) -> Any:
    """The template in the sandbox of Transformers' `apply_chat_template`, but without its import, which takes a second."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    extensions = [Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    return environment.from_string(text)


if __name__ == "__main__":
    main()
