"""What a run that was stopped or failed says last: what is saved, what is lost, and how it is continued."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from distill_rl.run import run_directory
from distill_rl.run.checkpoints.store import newest_step
from distill_rl.types import RunPaths

_RESUME = "checkpoint.resume="


def lines(
    checkpoints: Path, command: Sequence[str], *, began: int, trained: int | None, resume: str | None
) -> list[str]:
    """Returns the last lines of a run that Ctrl-C ended: one on what is saved and lost, one with the command.

    Args:
        checkpoints: the run's folder of them; no save is in flight any more.
        command: that started this process (`command_line`).
        began: the step after which this start of the run began.
        trained: the last step that was finished; None if training had not begun.
        resume: `checkpoint.resume` of this start.
    """
    saved, lost = newest_step(checkpoints), "nothing is lost"
    kept = began if saved is None else saved
    if trained is not None and trained > kept:
        lost = f"step {trained} is lost" if trained == kept + 1 else f"steps {kept + 1} to {trained} are lost"
    if saved is not None:
        text = f"the checkpoint of step {saved} is saved, {lost}"
    elif trained is None or trained == began:
        text = f"no step was trained, {lost}"
    else:
        text = f"no checkpoint is saved, {lost}; checkpoint.every saves on the way, and SIGTERM saves before it stops"
    again = again_with(command, mode(saved, resume, new=trained is None or trained == 0))
    return [f"stopped   {text}", f"go on     {again}"]


def mode(saved: int | None, resume: str | None, *, new: bool) -> str | None:
    """The `checkpoint.resume` that continues a run; None where the command starts it as if for the first time.

    Args:
        saved: step of the newest checkpoint in the run directory.
        resume: as for `lines`.
        new: no step was trained yet, so that the run directory is not in use.
    """
    if saved is not None:
        return "latest"
    if resume not in (None, "latest", "auto"):
        return resume  # a checkpoint elsewhere, beyond which nothing is saved
    return None if new else "auto"


def way_on(paths: RunPaths, resume: str | None) -> str:
    """How a run that failed goes on, by what is saved, as the remedy of its error.

    Args:
        resume: as for `lines`.
    """
    saved = newest_step(paths.checkpoints)
    how = mode(saved, resume, new=not run_directory.in_use(paths.root))
    if saved is not None:
        return f"--resume continues from the checkpoint of step {saved}"
    if how is None:
        return "no step is recorded: start it again"
    return f"no checkpoint is saved: --resume {how} begins again" + ("" if how == "auto" else " from there")


def command_line(path: str, overrides: Sequence[str]) -> list[str]:
    """Returns the words of `distill-rl train` with these arguments, without a resume, as this process was called.

    Args:
        path: the configuration file.
        overrides: `key=value`.
    """
    called = Path(sys.argv[0])
    program = ["distill-rl"]
    if called.name == "__main__.py":
        program = [sys.executable, "-m", "distill_rl"]
    elif called.name == "distill-rl" and called.parent.name and shutil.which(called.name) != str(called):
        program = [str(called)]
    return [*program, "train", "-c", path, *(text for text in overrides if not text.startswith(_RESUME))]


def again_with(command: Sequence[str], resume: str | None) -> str:
    """Returns the command for a shell, with --resume as `checkpoint.resume` asks; None: without it.

    Of a batch job, whose cluster ends with it, it is what starts the next one.
    """
    if run_directory.ATTEMPT in os.environ:
        return "submit the batch script again"
    if resume is None:
        return shlex.join(command)
    return shlex.join([*command, "--resume", *([] if resume == "latest" else [resume])])
