"""The child runs of a demonstration: `distill-rl` in processes of its own, one after the other or several at once, and what
their metrics say.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from distill_rl.observe.log import printable, say
from distill_rl.observe.metrics import SECONDS, TOKENS
from distill_rl.observe.sinks import read_records
from distill_rl.system.processes import OwnCommands, exit_code

SHOWN_LINES = 20
"""Of the output of a run that failed beside another."""
WITHOUT_TEACHER = ("loss.kd_weight=0", "loss.ce_weight=1")
"""Of the training that another one with a teacher is compared with: the same data, order, steps and seed."""
_POLL_S = 0.05
_END_S = 60.0, 20.0
"""How long a run may take to end after Ctrl-C, and after a second one, which ends its process at once."""


@dataclass(frozen=True, slots=True)
class ChildRun:
    """A command of `distill-rl`."""

    arguments: tuple[str, ...]
    name: str
    """Printed when it starts, after the command."""
    subject: str
    """Of the line that is printed if it fails."""
    log: Path | None = None
    """Where its output can be read if it runs beside another."""

    def __str__(self) -> str:
        return f"{self.arguments[0]:<9} {self.name}"


@dataclass(slots=True)
class _RunningChild:
    run: ChildRun
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None
    """None: the terminal."""

    @property
    def code(self) -> int | None:
        code = self.process.poll()
        return None if code is None else exit_code(code)


def run_all(runs: Sequence[ChildRun], variables: Mapping[str, str], *, at_once: int = 1) -> int:
    """Runs all of them, started in their order, and returns 0; or the exit code of one that failed or was stopped.

    One of those that run has the terminal. The output of the others is not shown: a line says where it can be read, and
    another one when the run is done. If a run fails, its last lines are shown, the others are ended as by Ctrl-C, and no
    other is started. SIGINT, SIGTERM, SIGUSR1 and SIGHUP reach all that run. No process is left when this returns or raises.

    Args:
        variables: environment variables of the runs, where this process's environment does not have them.
        at_once: most runs that go on at once.

    Raises:
        KeyboardInterrupt: a signal arrived, and all that ran ended well, but there were more to start.
    """
    waiting = deque(runs)
    running: list[_RunningChild] = []
    with OwnCommands() as commands, ExitStack() as stack:
        stack.callback(_end_all, running)
        while waiting or running:
            while waiting and len(running) < at_once and not commands.signalled:
                running.append(_start(waiting.popleft(), commands, variables, running))
            if not running:
                raise KeyboardInterrupt
            while not (ended := [each for each in running if each.code is not None]):
                time.sleep(_POLL_S)
            for each in ended:
                if each.code:
                    return _stop(each, running, signalled=commands.signalled)
            done = ended[0]
            running.remove(done)
            if done.output is not None:
                done.output.close()
                _say_below(f"done      {done.run.name}")
            elif running:
                say(f"waiting   for {', '.join(each.run.name for each in running)}")
    return 0


def _start(
    run: ChildRun, commands: OwnCommands, variables: Mapping[str, str], running: Sequence[_RunningChild]
) -> _RunningChild:
    """Starts a run: on the terminal, or with its output in a file of no name if another run has the terminal."""
    output: IO[bytes] | None = None
    beside = next((each for each in running if each.output is None), None)
    if beside is None:
        say(str(run))
    else:
        # A file, because a pipe that nobody reads would block the run; of no name, so that nothing is left of it.
        output = TemporaryFile()  # noqa: SIM115
        _say_below(f"{run}, beside {beside.run.name}; its output is in {run.log}")
    return _RunningChild(run, commands.start(run.arguments, variables, output), output)


def _say_below(text: str) -> None:
    """`say`, where a run's progress bar may be on the screen: takes its line, and the bar is drawn again below."""
    if sys.stdout.isatty():
        print("\r\x1b[2K", end="")
    say(text)


def _stop(failed: _RunningChild, running: Sequence[_RunningChild], *, signalled: bool) -> int:
    """Ends all runs, says which one failed and why, and returns its exit code."""
    for each in running:
        _end(each, asked=signalled)
    if failed.output is not None and not signalled:
        failed.output.seek(0)
        for line in failed.output.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]:
            print(printable(line), file=sys.stderr)
    print(f"distill-rl: error: {failed.run.subject} ended with exit code {failed.code}", file=sys.stderr)
    return failed.code or 0


def _end(running: _RunningChild, *, asked: bool) -> None:
    """Ends a run and its workers: at its own pace if it was asked to stop, otherwise as by Ctrl-C, once and again."""
    if asked:
        running.process.wait()
        return
    for patience_s in _END_S:
        running.process.send_signal(signal.SIGINT)
        try:
            running.process.wait(patience_s)
            return
        except subprocess.TimeoutExpired:
            continue
    running.process.kill()  # a process beside it then ends its Ray
    running.process.wait()


def _end_all(running: Sequence[_RunningChild]) -> None:
    for each in running:
        _end(each, asked=False)
        if each.output is not None:
            each.output.close()


@dataclass(frozen=True, slots=True)
class Figures:
    """What the steps of a training amounted to."""

    steps: int = 0
    seconds: float = 0.0
    """Of the steps alone."""
    tokens: float = 0.0
    """Trained on."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def figures(metrics: Path) -> Figures:
    """Steps, seconds and tokens of a training, from its metrics.jsonl; zeros if it holds no steps."""
    steps, seconds, tokens = 0, 0.0, 0.0
    for record in read_records(metrics):
        if SECONDS in record:
            # A record that covers several steps has the sum of their tokens and the mean of their seconds.
            seconds += record[SECONDS] * (record["step"] - steps)
            tokens += record.get(TOKENS, 0.0)
            steps = record["step"]
    return Figures(steps, seconds, tokens)
