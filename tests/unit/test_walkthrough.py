"""Pages whose commands are run: what is taken from a page, and what makes it fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.walkthrough import INTERRUPT, Command, commands, run

PAGE = """\
Words.

```console
$ cat <<'END'
> first
> END
first
$ false
(exit code 1)
```

```text
$ not run
```
"""


def test_commands_have_their_lines_and_exit_codes() -> None:
    assert list(commands(PAGE)) == [
        Command(4, "cat <<'END'\nfirst\nEND", ["first"]),
        Command(8, "false", [], 1),
    ]


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (Command(1, "echo a; echo c", ["a", "b"]), "never printed: b"),
        (Command(1, "echo b; echo a", ["a", "b"]), "never printed: b"),
        (Command(1, "echo loss 1.5 kl", ["loss … nll"]), "never printed: loss … nll"),
        (Command(1, "false"), "exit code 1, not 0"),
        (Command(1, "echo a", ["a"], 2), "exit code 0, not 2"),
        (Command(1, "echo Traceback of a program"), "Traceback"),
    ],
    ids=["missing", "order", "rest of a line", "failure", "no failure", "traceback"],
)
def test_a_page_that_is_not_true_fails(command: Command, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=complaint):
        run(command, tmp_path, os.environ)


def test_other_lines_and_parts_of_lines_may_differ(tmp_path: Path) -> None:
    run(Command(1, "echo x; echo loss 1.5 kl; echo y", ["loss … kl", "y"]), tmp_path, os.environ)


def test_ctrl_c_is_pressed_after_the_lines_before_it(tmp_path: Path) -> None:
    shell = "trap 'echo stopped; exit 130' INT; echo ready; sleep 60"
    run(Command(1, shell, ["ready", INTERRUPT, "stopped"], 130), tmp_path, os.environ)
