"""Runs the parts one after the other, says each result as it comes, and keeps the record."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from types import FrameType

from distill_rl.gpu_check.page import headline
from distill_rl.gpu_check.parts import PARTS, RAY_PARTS, Part, named
from distill_rl.gpu_check.process import NOT_RUN, OK, Call, Outcome, adopt_orphans, run_part
from distill_rl.gpu_check.record import JSON, LOG, TEXT, Record

REQUIRED = ("torch", "transformers", "numpy", "safetensors")
BUDGET_S = 570.0
"""under ten minutes, what is needed to write the record included"""
MACHINE = Part("machine", "what this machine is", "distill_rl.gpu_check.checks.environment", "facts", limit_s=120)
_LEAST_S = 5.0
"""A part with less time than this is not started."""


class Stopped(Exception):
    """A signal asks the kit to end."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def main(argv: Sequence[str] | None = None) -> int:
    """0: all parts are well; 1: a part failed, or there was no time for it; 2: bad input; 130 or 143: stopped."""
    options = _parser().parse_args(argv)
    try:
        parts = _chosen(options)
        out = _writable(options.out)
    except ValueError as error:
        return _refuse(str(error))
    if missing := [name for name in REQUIRED if find_spec(name) is None]:
        return _refuse(
            f"{sys.executable}: must have {', '.join(REQUIRED)}; {', '.join(missing)} not found; "
            "set DISTILL_RL_PYTHON to another Python"
        )
    adopt_orphans()
    call = Call(options.device, options.tiny, out, out / LOG)
    call.log.write_bytes(b"")
    shown = {"device": options.device, "tiny": options.tiny, "ray": options.ray, "budget": f"{options.budget_s:g} s"}
    record = Record(out, shown, parts)
    began = monotonic()
    with _signals():
        try:
            machine = run_part(MACHINE, call, MACHINE.limit_s)
            record.machine = machine.figures
            if machine.status == OK and options.device == "cuda" and not machine.figures.get("gpus"):
                call.log.unlink()
                return _refuse(f"--device cuda: needs a GPU; {machine.figures['why_no_gpu']}; see --device cpu --tiny")
            if machine.status != OK:
                record.parts, record.outcomes = (MACHINE, *parts), {MACHINE.name: machine}
                print(f"machine: {machine.status}: {machine.reason}", flush=True)
            run_parts(record, call, began, options.budget_s)
            record.state = "done"
            code = 1 if record.failures else 0
        except Stopped as stopped:
            record.state, code = f"stopped by {stopped}", stopped.exit_code
    record.seconds = monotonic() - began
    record.write()
    print(f"\n{headline(record.as_json())}\n{out / TEXT}, {JSON} and {LOG} beside it", flush=True)
    return code


def run_parts(record: Record, call: Call, began: float, budget_s: float) -> None:
    """Runs the parts of a record that have no outcome yet, and writes it after each.

    Args:
        began: when the kit did, by `time.monotonic`.
        budget_s: seconds that all may take. A part gets its own limit, or less where the rest of the budget, without what
            is kept for later parts, is less.
    """
    waiting = [part for part in record.parts if part.name not in record.outcomes]
    width = max((len(part.name) for part in record.parts), default=0)
    for number, part in enumerate(waiting):
        kept = sum(later.reserve_s for later in waiting[number + 1 :])
        left = began + budget_s - monotonic() - kept
        print(f"[{monotonic() - began:4.0f} s] {part.name:<{width}}  ", end="", flush=True)
        if left < _LEAST_S:
            outcome = Outcome(NOT_RUN, f"the budget of {budget_s:.0f} s is spent")
        else:
            outcome = run_part(part, call, min(part.limit_s, left))
        line = f"{outcome.status:<9} {outcome.seconds:6.1f} s"
        print(f"{line}  {outcome.reason}" if outcome.reason else line, flush=True)
        record.outcomes[part.name] = outcome
        record.seconds = monotonic() - began
        record.write()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description="Shows what works on this GPU and how fast it is; writes one page into a folder"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that the kit works")
    parser.add_argument("--ray", action="store_true", help="also what needs Ray, OmegaConf and pytest")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--only", metavar="PART,…", help="these parts alone, of those that --help lists below")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, metavar="S", help="for all parts; default: %(default)g"
    )
    parts = ", ".join(part.name for part in PARTS)
    parser.epilog = f"Parts: {parts}; with --ray also {', '.join(part.name for part in RAY_PARTS)}."
    return parser


def _chosen(options: argparse.Namespace) -> tuple[Part, ...]:
    """
    Raises:
        ValueError: one line for the user.
    """
    if not options.budget_s > 0:
        raise ValueError(f"--budget-s: must be above 0 seconds; got {options.budget_s:g}")
    parts = PARTS + RAY_PARTS if options.ray else PARTS
    if options.only is None:
        return parts
    try:
        return named([name.strip() for name in options.only.split(",")], parts)
    except ValueError as error:
        raise ValueError(f"--only: {error}") from None


def _writable(out: Path) -> Path:
    """
    Raises:
        ValueError: one line for the user.
    """
    out = out.absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ValueError(f"--out {out}: must be a folder that can be written to; {error.strerror}") from None
    return out


def _refuse(line: str) -> int:
    print(f"gpu_check: error: {line}", file=sys.stderr)
    return 2


@contextmanager
def _signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise `Stopped`, once: what comes after it is bounded and must not be interrupted."""

    def stop(number: int, _: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
