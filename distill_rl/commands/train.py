"""distill-rl train and capture: check the input and run it, or write a batch script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distill_rl.commands.dry_run import require_no_batch_options, write_batch_script
from distill_rl.config.capture import to_capture
from distill_rl.errors import ConfigError
from distill_rl.observe.log import say, say_of_data, setup_console, status
from distill_rl.preflight import Checked, gather
from distill_rl.run import run
from distill_rl.system.signals import Signals


def train(
    path: str,
    overrides: Sequence[str],
    *,
    clean: bool,
    dry_run: bool,
    gpus_per_node: int | None,
    arrays: Sequence[str],
    then: str | None,
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
    if dry_run:
        if clean:
            raise ConfigError("--dry-run and --clean", "exclude each other", remedy="a dry run deletes nothing")
        return write_batch_script(path, overrides, gpus_per_node=gpus_per_node, arrays=arrays, then=then)
    require_no_batch_options("a run", gpus_per_node, {"--array": arrays, "--then": then})
    setup_console()
    with status(f"checking  {path}"):
        checked = gather(path, overrides, clean=clean, say=say_of_data)
        opened = checked.require_run()
    checked.say_notes(say)
    return run.train(opened, checked.facts, Signals(), clean=clean, command=run.command_line(path, overrides))


def capture(path: str, overrides: Sequence[str], *, out: Path, dry_run: bool, gpus_per_node: int | None) -> int:
    """Stores the targets of a configuration's documents that `out` lacks, and returns the exit code of the process.

    They are those of `run.capture`.

    Args:
        out: folder of the store, or of one store per teacher; made if it does not exist.
        dry_run, gpus_per_node: as of `train`.

    Raises:
        DistillError: bad input (all problems at once), or the error that ended the capture.
    """
    out = out.expanduser().absolute()
    if dry_run:
        change = partial(to_capture, out=out)
        return write_batch_script(path, overrides, gpus_per_node=gpus_per_node, change=change, store=out)
    require_no_batch_options("a capture", gpus_per_node)
    setup_console()
    with status(f"checking  {path}"):
        checked = gather_capture(path, out, overrides)
        opened = checked.require_run()
    checked.say_notes(say)
    return run.capture(opened, checked.facts, Signals(), out)


def gather_capture(
    source: str | Path | Mapping[str, Any],
    out: Path,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Checked:
    """Reads, validates and inspects the configuration of a capture; otherwise as `gather`.

    Args:
        out: the absolute path of the store.
    """
    return gather(source, overrides, settings, say=say_of_data, change=partial(to_capture, out=out), trains=False)
