"""A part runs in its own process, and every way in which it can end is reported."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.gpu.check.parts import Part
from tests.gpu.check.process import FAILED, OK, SKIPPED, TIMED_OUT, Call, Outcome, run_part
from tests.helpers.command import until

LIMIT_S = 60.0
"""For a process that imports torch, on a busy machine."""


@pytest.fixture
def call(tmp_path: Path) -> Call:
    return Call("cpu", True, tmp_path, tmp_path / "log")


def run(call: Call, function: str, limit_s: float = LIMIT_S, *, takes_budget: bool = False) -> Outcome:
    part = Part(function, "", "tests.helpers.gpu_check_parts", function, takes_budget=takes_budget)
    return run_part(part, call, limit_s)


def test_figures_are_returned_as_plain_numbers_in_order(call):
    outcome = run(call, "well")
    assert (outcome.status, outcome.reason) == (OK, "")
    assert list(outcome.figures) == ["error", "count", "rows"]
    assert outcome.figures["error"] == pytest.approx(1e-7)
    assert outcome.figures["rows"] == [{"name": "first", "ms": "nan"}]
    assert "printed by a part" in call.log.read_text()


def test_the_budget_of_a_part_is_less_than_its_limit(call):
    assert 0 < run(call, "budgeted", takes_budget=True).figures["budget"] < LIMIT_S


@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        ("wrong", FAILED, "the gradient is off by 3.0e-01"),
        ("raises", FAILED, "KeyError: 'a setting'"),
        ("skips", SKIPPED, "needs two GPUs"),
        ("missing", FAILED, "AttributeError: module 'tests.helpers.gpu_check_parts' has no attribute 'missing'"),
    ],
)
def test_exceptions_are_reported_in_one_line(call, function, status, reason):
    outcome = run(call, function)
    assert (outcome.status, outcome.reason) == (status, reason)
    assert ("Traceback" in call.log.read_text()) == (status == FAILED)


def test_a_crash_reports_its_signal_and_stacks(call):
    outcome = run(call, "crashes")
    assert outcome.status == FAILED
    assert outcome.reason.startswith("killed by SIGSEGV")
    assert "gpu_check_parts.py" in call.log.read_text()


def test_a_part_that_exits_early_fails(call):
    outcome = run(call, "leaves")
    assert outcome.status == FAILED
    assert outcome.reason.startswith("exit code 7")


def test_a_hanging_part_is_killed_with_its_children(call):
    outcome = run(call, "hangs", limit_s=12.0)
    assert outcome.status == TIMED_OUT
    log = call.log.read_text()
    assert "gpu_check_parts.py" in log, "the log shows where it hung"
    child = int(re.search("child ([0-9]+)", log)[1])
    until(lambda: not alive(child), "the end of the part's child")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which only init can reap, does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_hanging_command_gets_sigterm_before_sigkill(call):
    program = "import signal, sys; signal.signal(15, lambda *_: sys.exit(print('stopped'))); print('waiting', flush=True); signal.pause()"
    outcome = run_part(Part("command", "", command=(sys.executable, "-c", program)), call, 5.0)
    assert (outcome.status, outcome.reason) == (TIMED_OUT, "not done after 5 s")
    assert "waiting\nstopped" in call.log.read_text()


def test_no_temporary_folder_is_left(call, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", os.fspath(tmp_path))
    run(call, "leaves")
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_command_reports_exit_code_and_last_line(call):
    def run_program(program: str, **more) -> Outcome:
        return run_part(Part("command", "", command=(sys.executable, "-c", program), **more), call, LIMIT_S)

    done = run_program("import json, pathlib; pathlib.Path('{out}/f.json').write_text('{{\"results\": {{\"x\": 1}}}}'); print('3 passed')",
              figures_file="{out}/f.json")  # fmt: skip
    assert (done.status, done.reason, done.figures) == (OK, "3 passed", {"x": 1})
    assert run_program("print('{device}'); print('1 failed'); exit(1)").reason == "exit code 1; 1 failed"
    missing = run_program("", needs=("a_package_that_is_not_there",))
    assert (missing.status, missing.reason) == (SKIPPED, "needs a_package_that_is_not_there, not installed here")
    assert run_program("", gpu_only=True).reason == "needs a GPU"
