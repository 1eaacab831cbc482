"""The process of one part: calls the function and writes how it went, whole or not at all.

python -m distill_rl.gpu_check.part MODULE FUNCTION RESULT.json --device cuda --limit-s 90 [--tiny] [--budget]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import json
import math
import os
import signal
import sys
import traceback
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill_rl.system.files import write_atomic

_PR_SET_PDEATHSIG = 1
_STACKS_BEFORE_END_S = 2.0
_MARGIN_S = 15.0
"""of its limit that a part with a budget does not get: for starting, and for writing its result"""
_LONGEST_REASON = 400


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs one part of the GPU check")
    parser.add_argument("module")
    parser.add_argument("function")
    parser.add_argument("result", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--budget", action="store_true", help="tell the function how many seconds it may use")
    options = parser.parse_args(argv)
    _end_with(options.parent)
    # The stacks of a part that is about to be killed say where it hangs.
    faulthandler.dump_traceback_later(max(options.limit_s - _STACKS_BEFORE_END_S, 0.1), exit=False)
    budget_s = max(options.limit_s - _MARGIN_S, 1.0) if options.budget else None
    outcome = call(options.module, options.function, options.device, options.tiny, budget_s)
    write_atomic(options.result, json.dumps(outcome, allow_nan=False))  # figures keep their order
    faulthandler.cancel_dump_traceback_later()
    return 0


def call(module: str, function: str, device: str, tiny: bool, budget_s: float | None) -> dict[str, Any]:
    """`status` (ok, failed or skipped), `reason`, `figures`, `text` and on a GPU `peak_gib` of what the function did.

    The module may bring `problems(figures)`, lines that make it a failure after all, and `report(figures)`, its text for
    the page; without that the page shows the figures.
    """
    import torch

    from distill_rl.models.determinism import start_vector_math

    status, reason, text, figures = "ok", "", "", {}
    try:
        chosen = torch.device(device)
        if chosen.type == "cuda" and torch.cuda.is_available():
            torch.cuda.set_device(chosen.index or 0)
        start_vector_math()
        arguments = (chosen, tiny) if budget_s is None else (chosen, tiny, budget_s)
        loaded = importlib.import_module(module)
        found = getattr(loaded, function)(*arguments)
        figures = plain(found)
        text = loaded.report(found) if hasattr(loaded, "report") else ""
        if problems := loaded.problems(found) if hasattr(loaded, "problems") else []:
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
    """The message; with the error's type where it is not an assertion's or a skip's."""
    text = " ".join(str(error).split())
    if not isinstance(error, AssertionError | unittest.SkipTest) or not text:
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 1]}…"


def plain(value: Any) -> Any:
    """As JSON can hold it: scalars of numpy and torch become numbers, and numbers that are not finite become text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _end_with(parent: int) -> None:
    """A part must not outlive a kit that was killed (Linux)."""
    if not parent:
        return
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
