"""A function called in a process of its own, with a deadline."""

from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from distill_rl.errors import WorkerError

Result = TypeVar("Result")

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
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments), daemon=True)
    with receiver:
        try:
            with sender:  # closed here once the child has its own, so that the child's death ends the wait
                process.start()
            if not receiver.poll(deadline_s):
                rule = f"its process must answer within {deadline_s:g} s"
                raise WorkerError(what, rule, "no answer", "try again when the machine and its disks are less busy")
            result, error = receiver.recv()
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


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The new process: sends the function's result and None, or None and what it raised."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the parent ends this one
    try:
        answer: tuple[Any, Exception | None] = function(*arguments), None
    except Exception as error:
        answer = None, error
    sender.send(answer)
