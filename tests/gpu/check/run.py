"""Runs the parts one after another, prints each result as it comes, and keeps the record."""

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

from tests.gpu.check.page import JSON, LOG, TEXT, Record, headline
from tests.gpu.check.parts import PARTS, RAY_PARTS, Part, named
from tests.gpu.check.process import NOT_RUN, OK, Call, Outcome, adopt_orphans, run_part

REQUIRED = ("torch", "transformers", "numpy", "safetensors")
BUDGET_S = 570.0
"""Under ten minutes, with a margin for writing the record."""
MACHINE = Part("machine", "facts about this machine", "tests.gpu.check.checks.environment", "facts", limit_s=120)
_LEAST_S = 5.0
"""A part is not started with less time than this."""


class Stopped(Exception):
    """A signal has asked the GPU check to stop."""

    def __init__(self, signal_number: int):
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen parts, prints each result as it comes, writes the record, and returns the exit code.

    Args:
        argv: the command line without the program's name; None: that of this process.

    Returns:
        0: no part failed; 1: a part failed, timed out or was not run in time; 2: bad input, a required package is
        missing, or `--device cuda` without a GPU; 130 or 143: stopped by SIGINT or SIGTERM.

    Raises:
        SystemExit: from argparse, after `--help` (code 0) or for an option that it cannot parse (code 2).
        OSError: the record cannot be written.
    """
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
    call_options = {name: getattr(options, name) for name in ("device", "tiny", "ray")}
    record = Record(out, call_options | {"budget": f"{options.budget_s:g} s"}, parts)
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
    """Runs the parts of a record that have no outcome yet; prints a line about each, and writes the record after each.

    Args:
        began: the `time.monotonic` at which the GPU check started.
        budget_s: seconds for all parts together. A part gets the smaller of its own limit and what is left of the
            budget after the reserves of later parts; if less than `_LEAST_S` is left, it is recorded as not run.

    Raises:
        OSError: the record cannot be written.
    """
    waiting = [part for part in record.parts if part.name not in record.outcomes]
    width = max((len(part.name) for part in record.parts), default=0)
    for i, part in enumerate(waiting):
        reserved = sum(later.reserve_s for later in waiting[i + 1 :])
        left = began + budget_s - monotonic() - reserved
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
    """The parser of the GPU check's command line; its help text lists the parts."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description="Shows what works on this GPU and how fast, and writes a page into a folder"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the GPU check itself")
    parser.add_argument("--ray", action="store_true", help="also run the parts that need Ray, OmegaConf and pytest")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--only", metavar="PART,…", help="run only these parts, of those listed below")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=BUDGET_S,
        metavar="S",
        help="seconds for all parts together; default: %(default)g",
    )
    parts = ", ".join(part.name for part in PARTS)
    parser.epilog = f"Parts: {parts}; with --ray also {', '.join(part.name for part in RAY_PARTS)}."
    return parser


def _chosen(options: argparse.Namespace) -> tuple[Part, ...]:
    """The parts to run, in order: those of `--only`, otherwise all; those that need Ray only with `--ray`.

    Raises:
        ValueError: a budget that is not above 0, or an unknown part; the message is one line for the user.
    """
    if not options.budget_s > 0:
        raise ValueError(f"--budget-s: must be above 0 seconds; got {options.budget_s:g}")
    parts = PARTS + RAY_PARTS if options.ray else PARTS
    if options.only is None:
        return parts
    return named([name.strip() for name in options.only.split(",")], parts)


def _writable(out: Path) -> Path:
    """The output folder as an absolute path; it is created if missing.

    Raises:
        ValueError: it cannot be created or written to; the message is one line for the user.
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
    """Prints an error in one line to stderr and returns the exit code for bad input, 2."""
    print(f"gpu_check: error: {line}", file=sys.stderr)
    return 2


@contextmanager
def _signals() -> Iterator[None]:
    """Raises `Stopped` in the block on the first SIGINT or SIGTERM, then ignores both until the block ends.

    Ignoring them lets the clean-up finish, whose time is bounded. Afterwards the previous handlers are back.
    """

    def stop(signal_number: int, _: FrameType | None) -> None:
        for handled_signal in handled:
            signal.signal(handled_signal, signal.SIG_IGN)
        raise Stopped(signal_number)

    handled = (signal.SIGINT, signal.SIGTERM)
    previous = {signal_number: signal.signal(signal_number, stop) for signal_number in handled}
    try:
        yield
    finally:
        for signal_number, handler in previous.items():
            signal.signal(signal_number, handler)
