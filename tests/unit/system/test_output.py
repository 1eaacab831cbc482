"""Streams that cannot be written, in processes of their own: a full device, a pipe that nobody reads, none at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from distill_rl.observe.log import ProgressBar, say

PRINTS = """
import sys
from distill_rl.system import output
output.guard()
{mode}
print("x" * 100_000)
print("one more line", flush=True)
raise RuntimeError("the end")
"""
GOES_ON = PRINTS.format(mode="output.go_on_without()")


def run(program: str, **streams: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], text=True, timeout=60, **streams)  # type: ignore[call-overload]


def unread_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_a_full_stdout_is_one_line_of_log_and_the_program_goes_on() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = run(GOES_ON, stdout=full, stderr=subprocess.PIPE)
    first, *traceback = done.stderr.splitlines()
    assert first == "stdout cannot be written (No space left on device): what it lacks is in the log of the run"
    assert traceback[0].startswith("Traceback")
    assert (traceback[-1], done.returncode) == (
        "RuntimeError: the end",
        1,
    )  # not 120, with which Python ends if it cannot flush


def test_nobody_reads_stdout_and_the_program_goes_on_quietly() -> None:
    pipe = unread_pipe()
    done = run(GOES_ON, stdout=pipe, stderr=subprocess.PIPE)
    os.close(pipe)
    assert done.stderr.startswith("Traceback")
    assert done.stderr.splitlines()[-1] == "RuntimeError: the end"


def test_a_program_whose_output_is_all_it_makes_is_ended() -> None:
    pipe = unread_pipe()
    done = run(PRINTS.format(mode=""), stdout=pipe, stderr=subprocess.PIPE)
    os.close(pipe)
    assert done.stderr.splitlines()[-1] == "distill_rl.system.output.OutputLost: [Errno 32] Broken pipe"


def test_a_full_stderr_changes_nothing() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = run(GOES_ON, stdout=subprocess.PIPE, stderr=full)
    assert done.stdout.endswith("one more line\n")
    assert done.returncode == 1


def test_files_opened_later_do_not_become_a_closed_stdout() -> None:
    program = (
        "import os\nfrom distill_rl.system import output\noutput.guard()\n"
        "opened = os.open('/dev/null', os.O_RDONLY)\nprint('nobody sees this', flush=True)\nos._exit(opened)"
    )
    done = run(program, preexec_fn=lambda: [os.close(number) for number in range(3)])
    assert done.returncode > 2


def test_say_and_bar_never_raise_in_a_callers_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "distill_rl")
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        say("lost")
        bar = ProgressBar("step", 1)
        bar.update(1, ())
        bar.close()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    monkeypatch.setattr(sys, "stdout", full)
    say("closed")
    monkeypatch.setattr(sys, "stdout", None)
    say("none")
    assert [record.message for record in caplog.records] == ["lost", "closed", "none"], "the log is the record"


def test_letters_that_the_encoding_lacks_are_escaped() -> None:
    program = "from distill_rl.observe.log import say\nsay('größe 中文')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=60,
    )
    assert done.stdout == "größe ".encode("latin-1") + rb"\u4e2d\u6587" + b"\n"
