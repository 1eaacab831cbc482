"""The frozen pasts, and the corrections that came after them."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill_rl.errors import DistillError
from tests.helpers.command import distill_rl_in_process

FOLDER = Path(__file__).parents[1] / "data" / "frozen"
PASTS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


@dataclass(frozen=True)
class Correction:
    """A correction on which a frozen file depends, and the one line by which such a file is refused or read with a note."""

    name: str
    """What was wrong, in the words of docs/changelog.md."""
    past: str
    """The folder's name."""
    file: str
    """What the tests call it: `runs/lora`, `targets/exact`, `results`, `yaml`."""
    line: str
    """Regular expression of the line."""


CORRECTIONS: tuple[Correction, ...] = (
    Correction(
        "answers that end in no token at which generation stops are refused",
        "ab47e93a",
        "runs/lora without data.stops",
        r"^data\.path: row \d+: an answer must end in a token at which generation stops; .* set data\.stops=none$",
    ),
)
NEEDED: Mapping[str, tuple[str, ...]] = {"lora": ("data.stops=none",)}
"""Frozen run → the settings with which it goes on since a correction."""

SHORT: Mapping[str, str] = {"teachers.0.store": "teachers.0.store.path"}
"""Dotted key in frozen YAMLs → the setting that it is short for. Such a key is read without a note."""
MOVED: Mapping[str, str] = {
    "teachers.0.gpu_share": "teachers.0.vllm.gpu_share",
    **{
        f"teachers.0.{name}": f"teachers.0.endpoint.{name}"
        for name in ("url", "api", "token_env", "ca_file", "concurrency", "request_timeout_s", "retry_s")
    },
    "teachers.0.missing": "teachers.0.store.missing",
}
"""Dotted key in frozen YAMLs → its new spelling. Such a key is read with a note that names both."""


@dataclass(frozen=True)
class Past:
    name: str
    folder: Path
    """A copy of the frozen files that belongs to this user alone, and is the working directory."""

    @property
    def recorded(self) -> dict[str, Any]:
        """What the frozen commit did with the files (`record.py`)."""
        return json.loads((FOLDER / self.name / "recorded.json").read_text())


def copied(name: str, target: Path) -> Past:
    """A copy without write permissions of others, which a clone may have: with them, checkpoints and stores are refused."""
    shutil.copytree(FOLDER / name, target)
    for entry in (target, *target.rglob("*")):
        entry.chmod(entry.stat().st_mode & ~0o022)
    return Past(name, target)


def reads(file: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test that reads a frozen file; `{run}` in its name is the test's argument.

    If a correction concerns the file, exactly one line of what the test prints and logs, or of the error with which it ends, is that
    of the correction.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*, past: Past, **arguments: Any) -> None:
            name = file.format(**arguments)
            expected = [entry.line for entry in CORRECTIONS if (entry.past, entry.file) == (past.name, name)]
            said = _said_by(lambda: test(past=past, **arguments), refused=bool(expected)).splitlines()
            for line in expected:
                assert sum(re.search(line, text) is not None for text in said) == 1, said

        return run

    return decorate


def _said_by(action: Callable[[], None], *, refused: bool) -> str:
    """What an action prints and logs, and, if it may be refused, the error with which it ends."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("distill_rl").addHandler(handler)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            action()
    except (DistillError, AssertionError) as error:
        if not refused:
            raise
        said.write(f"{error}\n")
    finally:
        logging.getLogger("distill_rl").removeHandler(handler)
    return said.getvalue()


def succeeds(*arguments: str | Path) -> str:
    """Runs a command, which must succeed, in this process, and returns what it prints."""
    ended = distill_rl_in_process(*arguments)
    print(ended.out, ended.err, sep="")
    assert ended.code == 0, ended.err
    return ended.out
