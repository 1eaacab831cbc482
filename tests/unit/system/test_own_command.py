from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import distill_rl
from distill_rl.system.processes import OwnCommands, exit_code

ROOT = Path(distill_rl.__file__).parents[1]

# Replaces `distill_rl` in the child: reports that it runs, waits for a signal, and ends with the exit code of the real one. A
# signal that arrives twice changes the code.
STAND_IN = """
import signal, sys, threading
signal_number, code = getattr(signal, sys.argv[1]), int(sys.argv[2])
received = []
signal.signal(signal_number, lambda *_: received.append(1))
print("ready", flush=True)
for _ in range(600):
    signal.sigtimedwait([], 0.1)
    if received:
        sys.exit(code + len(received) - 1)
sys.exit(99)
"""
PARENT = """
import sys
from distill_rl.system.processes import OwnCommands, exit_code
with OwnCommands() as commands:
    sys.exit(exit_code(commands.start(sys.argv[1:]).wait()))
"""


def stand_in(folder: Path, program: str) -> tuple[list[str], dict[str, str]]:
    """A command that starts `distill-rl` and waits for it, with its environment. In the working directory `folder`, the child runs `program`.

    The parent finds the real package through PYTHONPATH (-P excludes the working directory); `-m` in the child searches the
    working directory first.
    """
    (folder / "distill_rl").mkdir()
    (folder / "distill_rl" / "__init__.py").touch()
    (folder / "distill_rl" / "__main__.py").write_text(program)
    return [sys.executable, "-P", "-c", PARENT], os.environ | {"PYTHONPATH": os.fspath(ROOT)}


def test_exit_code_of_the_command_line_is_returned(capfd: pytest.CaptureFixture[str]) -> None:
    with OwnCommands() as commands:
        assert commands.start(["--version"]).wait() == 0
        assert capfd.readouterr().out.startswith("distill-rl ")
        assert exit_code(commands.start(["check", "-c", "/does/not/exist.yaml"]).wait()) == 2
    assert "/does/not/exist.yaml" in capfd.readouterr().err


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 85), ("SIGUSR1", 85), ("SIGHUP", 85)])
def test_signal_reaches_the_child_once(tmp_path: Path, name: str, code: int) -> None:
    command, environment = stand_in(tmp_path, STAND_IN)
    heard = ["env", "--default-signal=HUP"]  # which `nohup` has ignored
    parent = subprocess.Popen(
        [*heard, *command, name, str(code)], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(getattr(signal, name))
        assert parent.wait(timeout=60) == code
    finally:
        parent.kill()
        parent.wait()


def test_child_killed_by_a_signal_gives_the_shells_code(tmp_path: Path) -> None:
    command, environment = stand_in(tmp_path, "import os; os.kill(os.getpid(), 9)")
    done = subprocess.run(command, cwd=tmp_path, env=environment)
    assert done.returncode == 128 + 9


def test_signal_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with OwnCommands():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_child_gets_the_signals_that_came_before_it() -> None:
    with OwnCommands() as commands:
        os.kill(os.getpid(), signal.SIGTERM)
        assert commands.signalled
        assert exit_code(commands.start(["--version"]).wait()) == 128 + signal.SIGTERM


def test_output_can_go_to_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with OwnCommands() as commands, (tmp_path / "out").open("wb") as output:
        commands.start(["--version"], output=output).wait()
    assert (tmp_path / "out").read_text().startswith("distill-rl ")
    assert capfd.readouterr() == ("", "")
