"""distill-rl train: checks the input and runs it, or writes a batch script."""

from __future__ import annotations

from collections.abc import Sequence

from distill_rl.commands.dry_run import write_batch_script
from distill_rl.errors import ConfigError
from distill_rl.observe.log import say, setup_console, status
from distill_rl.preflight import gather
from distill_rl.run import run
from distill_rl.system.signals import Signals


def train(
    path: str,
    overrides: Sequence[str],
    *,
    clean: bool,
    dry_run: bool,
    gpus_per_node: int | None,
    arrays: Sequence[str] = (),
    then: str | None = None,
) -> int:
    """Runs a configuration until its end or until it is asked to stop, and returns the exit code of the process.

    They are those of `run.train`.

    Args:
        clean: delete the contents of the run directory first.
        dry_run: only write a batch script; excludes `clean`.
        gpus_per_node: for `dry_run`: GPUs of a node; None: as the section `slurm` says.
        arrays, then: for `dry_run`: as of `write_batch_script`.

    Raises:
        DistillError: bad input (all problems at once), or the error that ended the run.
    """
    for option, value in (("--array", arrays), ("--then", then)):
        if value and not dry_run:
            raise ConfigError(option, "has no effect without --dry-run", remedy="add --dry-run to write a batch script")
    if gpus_per_node is not None and not dry_run:
        remedy = "add --dry-run to write a batch script, or leave it out: a run takes the GPUs that its dp and tp need"
        raise ConfigError("--gpus-per-node", "has no effect without --dry-run", gpus_per_node, remedy)
    if dry_run:
        if clean:
            raise ConfigError("--dry-run and --clean", "exclude each other", remedy="a dry run deletes nothing")
        return write_batch_script(path, overrides, gpus_per_node=gpus_per_node, arrays=arrays, then=then)
    setup_console()
    with status(f"checking  {path}"):
        checked = gather(path, overrides, clean=clean, say=lambda text: say(f"data      {text}"))
        opened = checked.require_run()
    for note in checked.notes:
        say(f"note      {note}")
    command = run.command_line(path, overrides)
    return run.train(opened, checked.facts, Signals(), clean=clean, command=command)
