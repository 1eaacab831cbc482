"""distill-rl capture: runs teachers over the data and stores their targets, so that students can be trained without them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distill_rl.commands.dry_run import write_batch_script
from distill_rl.config.capture import stores_of, to_capture
from distill_rl.config.facts import Facts
from distill_rl.config.paths import absolute
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError, StoreError
from distill_rl.observe.log import log_file, say, setup_console, status
from distill_rl.preflight import Checked, gather, run_directory
from distill_rl.system.folders import close_folder
from distill_rl.system.signals import EXIT_PREEMPTED, Preempted, Signals
from distill_rl.types import RunPaths

log = logging.getLogger(__name__)


def capture(path: str, overrides: Sequence[str], *, out: Path, dry_run: bool, gpus_per_node: int | None) -> int:
    """Stores the targets of a configuration's documents that `out` lacks, and returns the exit code of the process.

    0 when all is stored; 85 if SIGTERM, SIGUSR1 or SIGHUP stopped it: what was computed is stored, and the same command
    continues. Handles the signals of this process meanwhile.

    Args:
        out: folder of the store, or of one store per teacher; made if it does not exist.
        dry_run: only write a batch script.
        gpus_per_node: for `dry_run`: GPUs of a node; None: as the section `slurm` says.

    Raises:
        DistillError: bad input (all problems at once), or the error that ended the capture.
    """
    out = out.expanduser().absolute()
    if gpus_per_node is not None and not dry_run:
        remedy = (
            "add --dry-run to write a batch script, or leave it out: a capture takes the GPUs that its dp and tp need"
        )
        raise ConfigError("--gpus-per-node", "has no effect without --dry-run", gpus_per_node, remedy)
    if dry_run:
        return write_batch_script(
            path, overrides, gpus_per_node=gpus_per_node, change=partial(to_capture, out=out), store=out
        )
    setup_console()
    with status(f"checking  {path}"):
        checked = gather_capture(path, out, overrides)
        config = checked.require_valid()
    for note in checked.notes:
        say(f"note      {note}")
    return run_config(config, Signals(), checked.facts, out)


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


def run_config(config: Config, signals: Signals, facts: Facts, out: Path) -> int:
    """Runs a checked capture, as `capture` does after its checks; returns and raises as that does.

    Args:
        config: from `to_capture`.
        signals: not entered yet.
        facts: what the checks found.
        out: the absolute path of the store.
    """
    if config.ray.address is not None:  # workers on an existing cluster have other working directories
        config = absolute(config)
    out.mkdir(parents=True, exist_ok=True)
    close_folder(out)
    with run_directory.occupy(config, clean=False) as paths, log_file(paths.logs / "driver.log"), signals:
        try:
            return _run(config, paths, signals, facts)
        except Preempted:
            say("stopped   before anything was computed; run the same command again to continue")
            return EXIT_PREEMPTED
        except OSError as error:
            log.info("the capture failed", exc_info=True)
            raise StoreError(
                f"{out}", "must be readable and writable", str(error), "what was written is kept"
            ) from error
        except Exception:
            log.info("the capture failed", exc_info=True)
            raise


def _run(config: Config, paths: RunPaths, signals: Signals, facts: Facts) -> int:
    """Opens models and data, and captures. Says what rows there are, and who decides."""
    say("opening   models and data")
    from distill_rl.preflight.job import prepare
    from distill_rl.run.capture import capture as run_capture

    with signals.at_once():
        job = prepare(config, paths)
    for source in facts.sources:
        say(f"data      {source}")
    if facts.step is not None:
        say(f"rows      {facts.step}")
    if config.student.model == config.teachers[0].model:
        say(
            f"rows      no student is named: they are cut as the tokenizer of teacher {config.teachers[0].name} reads them"
        )
    code = run_capture(job, signals)
    for folder in stores_of(config):
        say(f"store     {folder}")
    return code
