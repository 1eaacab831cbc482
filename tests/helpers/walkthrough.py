"""Runs the commands of a page of documentation and compares what they print with the lines that the page shows.

The page has blocks marked `console`:

    $ distill-rl check -c mine.yaml          a command, for bash
    > another line of the same command       such as a here-document
    memory     student: about … in each      a line to expect; `…` stands for anything
    ^C                                       Ctrl-C is pressed once the lines before it have been printed
    (exit code 2)                            otherwise the command must succeed

Expected lines must be printed in this order; others may stand between them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer

BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXIT_CODE = re.compile(r"\(exit code (\d+)\)")
INTERRUPT = "^C"
DEADLINE_S = 300


@dataclass
class Command:
    page_line: int
    shell: str
    expected: list[str] = field(default_factory=list)
    """Lines to expect, among them INTERRUPT."""
    code: int = 0


def commands(page: str) -> Iterator[Command]:
    """The commands of all `console` blocks of a page, in order."""
    for block in BLOCK.finditer(page):
        first = page.count("\n", 0, block.start()) + 2
        command = None
        for number, line in enumerate(block[1].splitlines(), first):
            if line.startswith("$ "):
                if command is not None:
                    yield command
                command = Command(number, line[2:])
                continue
            assert command is not None, f"line {number}: a console block begins with a command"
            if line.startswith("> "):
                command.shell += "\n" + line[2:]
            elif code := EXIT_CODE.fullmatch(line):
                command.code = int(code[1])
            elif line.strip():
                command.expected.append(line)
        assert command is not None, f"line {first}: an empty console block"
        yield command


def run(command: Command, folder: Path, variables: Mapping[str, str]) -> None:
    """Runs a command in `folder`; fails with its whole output if a line does not come, or the exit code is another."""
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", command.shell],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = Timer(DEADLINE_S, os.killpg, (process.pid, signal.SIGKILL))
    deadline.start()
    pending, printed = list(command.expected), []
    try:
        for line in process.stdout:
            printed.append(line.rstrip())
            if pending and pending[0] != INTERRUPT and _matches(pending[0], printed[-1]):
                pending.pop(0)
            if pending and pending[0] == INTERRUPT:
                pending.pop(0)
                os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal does
        code = process.wait()
    finally:
        deadline.cancel()
    where = f"line {command.page_line}: {command.shell}\n" + "\n".join(printed)
    assert not pending, f"never printed: {pending[0]}\n{where}"
    assert code == command.code, f"exit code {code}, not {command.code}\n{where}"
    assert not any(line.startswith("Traceback") for line in printed), where


def _matches(expected: str, line: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in expected.rstrip().split("…"))
    return re.fullmatch(pattern, line) is not None
