"""distill-rl capture: runs teachers over the data and stores their targets, so that students can be trained without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distill_rl.commands.dry_run import require_no_batch_options, write_batch_script
from distill_rl.config.capture import to_capture
from distill_rl.observe.log import say, setup_console, status
from distill_rl.preflight import Checked, gather
from distill_rl.run import run
from distill_rl.system.signals import Signals


def capture(path: str, overrides: Sequence[str], *, out: Path, dry_run: bool, gpus_per_node: int | None) -> int:
    """Stores the targets of a configuration's documents that `out` lacks, and returns the exit code of the process.

    They are those of `run.capture`.

    Args:
        out: folder of the store, or of one store per teacher; made if it does not exist.
        dry_run: only write a batch script.
        gpus_per_node: for `dry_run`: GPUs of a node; None: as the section `slurm` says.

    Raises:
        DistillError: bad input (all problems at once), or the error that ended the capture.
    """
    out = out.expanduser().absolute()
    change = partial(to_capture, out=out)
    if dry_run:
        return write_batch_script(path, overrides, gpus_per_node=gpus_per_node, change=change, store=out)
    require_no_batch_options("a capture", gpus_per_node)
    setup_console()
    with status(f"checking  {path}"):
        checked = gather_capture(path, out, overrides)
        opened = checked.require_run()
    for note in checked.notes:
        say(f"note      {note}")
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
    return gather(
        source,
        overrides,
        settings,
        say=lambda text: say(f"data      {text}"),
        change=partial(to_capture, out=out),
        trains=False,
    )
