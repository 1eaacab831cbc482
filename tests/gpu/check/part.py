"""The process of one part: calls its function and writes the result atomically.

python -m tests.gpu.check.part ARGUMENTS, the keywords of `main` as JSON; `process.run_part` starts it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import math
import sys
import traceback
import unittest
from collections.abc import Mapping
from typing import Any

from distill_rl.system.files import write_atomic
from distill_rl.system.processes.parent import end_with

_STACKS_BEFORE_END_S = 2.0
_MARGIN_S = 15.0
"""Seconds of its limit that are kept from a part's budget, for starting up and writing the result."""
_LONGEST_REASON = 400


def main(
    *,
    module: str,
    function: str,
    device: str,
    tiny: bool,
    result: str,
    limit_s: float,
    takes_budget: bool,
    parent: int,
) -> None:
    """Calls a part's function and writes the outcome that `call` returns, as JSON, to a file.

    On Linux this process is killed when its parent dies. Shortly before the limit the stacks of all threads are written
    to stderr; stopping the process at the limit is left to the parent.

    Args:
        result: the file to write.
        limit_s: seconds after which the parent kills this process.
        takes_budget: passes the function the seconds it may use, the limit less a margin.
        parent: process id of the parent; the process exits with 1 if that is no longer its parent.
    """
    end_with(parent)
    # If the part is about to be killed, its stacks show where it hangs.
    faulthandler.dump_traceback_later(max(limit_s - _STACKS_BEFORE_END_S, 0.1), exit=False)
    budget_s = max(limit_s - _MARGIN_S, 1.0) if takes_budget else None
    outcome = call(module, function, device, tiny, budget_s)
    write_atomic(result, json.dumps(outcome, allow_nan=False))  # figures keep their order
    faulthandler.cancel_dump_traceback_later()


def call(module: str, function: str, device: str, tiny: bool, budget_s: float | None) -> dict[str, Any]:
    """Calls `module`.`function` and returns its outcome as fields of `process.Outcome`.

    The function gets the device, `tiny`, and `budget_s` unless that is None. Its module may define `problems(figures)`,
    which returns lines that turn the result into a failure, and `report(figures)`, which returns text that the page
    shows instead of the figures.

    Returns:
        `status` (ok, failed or skipped), `reason`, `text`, `figures` as JSON types, and `peak_gib` if CUDA was used. An
        exception, also from importing the module, becomes a failure, and its traceback goes to stderr;
        `unittest.SkipTest` becomes `skipped`.
    """
    import torch

    from distill_rl.models.determinism import start_vector_math

    status, reason, text, figures = "ok", "", "", {}
    try:
        torch_device = torch.device(device)
        if torch_device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.set_device(torch_device.index or 0)
        start_vector_math()
        arguments = (torch_device, tiny) if budget_s is None else (torch_device, tiny, budget_s)
        loaded = importlib.import_module(module)
        raw_figures = getattr(loaded, function)(*arguments)
        figures = plain(raw_figures)
        if hasattr(loaded, "report"):
            text = loaded.report(raw_figures)
        if hasattr(loaded, "problems") and (problems := loaded.problems(raw_figures)):
            status, reason = "failed", "; ".join(problems)
    except unittest.SkipTest as skipped:
        status, reason = "skipped", one_line(skipped)
    except Exception as error:
        traceback.print_exc()
        status, reason = "failed", one_line(error)
    outcome: dict[str, Any] = {"status": status, "reason": reason, "text": text, "figures": figures}
    if torch.cuda.is_initialized():
        outcome["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    return outcome


def one_line(error: BaseException) -> str:
    """The message on one line, cut to _LONGEST_REASON characters.

    The type of the error comes first, unless it is an assertion or a skip that has a message.
    """
    text = " ".join(str(error).split())
    if not isinstance(error, AssertionError | unittest.SkipTest) or not text:
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 1]}…"


def plain(value: Any) -> Any:
    """The value as JSON types, at any depth.

    Keys become text, tuples lists, numpy and torch scalars floats, and numbers that are not finite text, such as `nan`.
    Anything else goes through `float`, whose errors are passed on.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
