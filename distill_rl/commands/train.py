"""distill-rl train: checks the input, occupies the run directory, trains, evaluates the export, writes the report."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distill_rl.commands.dry_run import write_batch_script
from distill_rl.config.facts import Facts
from distill_rl.config.paths import absolute
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError, DistillError, GpuMemoryError, NumericsError, TransportError, WorkerError
from distill_rl.observe.log import log_file, say, setup_console, status
from distill_rl.preflight import gather, run_directory
from distill_rl.run import stop
from distill_rl.run.checkpoints.store import newest_step
from distill_rl.system.files import write_atomic
from distill_rl.system.signals import EXIT_PREEMPTED, Preempted, Signals
from distill_rl.types import RunPaths

if TYPE_CHECKING:
    from distill_rl.run.driver import Driver

log = logging.getLogger(__name__)


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

    0 after the whole run and its export; 85 if SIGTERM, SIGUSR1 or SIGHUP stopped it and `--resume` can continue. Occupies the
    run directory and handles the signals of this process meanwhile.

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
        config = checked.require_valid()
    for note in checked.notes:
        say(f"note      {note}")
    command = stop.command_line(path, overrides)
    return run_config(config, Signals(), checked.facts, clean=clean, command=command)


def run_config(config: Config, signals: Signals, facts: Facts, *, clean: bool, command: Sequence[str] = ()) -> int:
    """Runs a checked configuration, as `train` does after its checks; returns and raises as that does.

    Args:
        signals: not entered yet.
        facts: what the checks found.
        command: that started this process, to print how a stopped run goes on. Empty: one with the run's config.yaml.
    """
    if config.ray.address is not None:  # workers on an existing cluster have other working directories
        config = absolute(config)
    with run_directory.occupy(config, clean=clean) as paths, log_file(paths.logs / "driver.log"), signals:
        command = command or stop.command_line(str(paths.config), [])
        try:
            return _run(config, paths, signals, facts, command)
        except Preempted:
            say("stopped outside of training")
            resume = stop.mode(newest_step(paths.checkpoints), config.checkpoint.resume, new=False)
            say(f"go on     {stop.again_with(command, resume)}")
            return EXIT_PREEMPTED
        except OSError as error:
            log.info("the run failed", exc_info=True)
            remedy = f"fix this (free some space, perhaps); {stop.way_on(paths, config.checkpoint.resume)}"
            raise DistillError(
                f"the files of {paths.root}", "must be readable and writable", str(error), remedy
            ) from error
        except (WorkerError, NumericsError, TransportError, GpuMemoryError) as error:
            log.info("the run failed", exc_info=True)
            # Only now, as a save in flight has ended.
            error.remedy = "; ".join(filter(None, (error.remedy, stop.way_on(paths, config.checkpoint.resume))))
            raise
        except Exception:
            log.info("the run failed", exc_info=True)
            raise


def _run(config: Config, paths: RunPaths, signals: Signals, facts: Facts, command: Sequence[str]) -> int:
    """Opens models and data, trains and, after the last step, scores the export on the suites; then writes the report.

    Returns the driver's exit code: 0 at the end of the run. The report is also written if the run was stopped before
    its end.

    Args:
        signals: entered handlers of this process.
        facts: what the checks found.
        command: that started this process, to print how a stopped run goes on.

    Raises:
        Preempted: asked to stop before training began, or during evaluations after the last step.
        KeyboardInterrupt: asked to stop now; what is saved and lost has been printed.
    """
    say("opening   models and data")
    from distill_rl.evals.compare import of_run
    from distill_rl.observe.report.report import write_report
    from distill_rl.preflight.job import prepare
    from distill_rl.run.driver import Driver

    driver: Driver | None = None
    try:
        with signals.at_once():
            job = prepare(config, paths, facts)
        for source in facts.sources:
            say(f"data      {source}")
        if facts.step is not None:
            say(f"rows      {facts.step}")
        if job.facts.student is not None and job.facts.student.lora is not None:
            say(f"trained   {job.facts.student.lora}")
        for teacher, known in job.facts.by_teacher(config):
            if known.cross_tokenizer_loss is not None:
                say(
                    f"teacher   {teacher.name} has another tokenizer: loss {known.cross_tokenizer_loss} over chunks of text"
                )
            elif known.tokens_apart:
                say(f"teacher   {teacher.name}: {known.tokens_apart}")
        with Driver.open(job, signals) as driver:
            code = driver.run()
            if code == 0:
                say(f"exported  {paths.export}")
                if config.evaluate.suites:
                    score_export(driver)
    except KeyboardInterrupt:
        began, trained = (driver.began, driver.state.step) if driver else (0, None)
        resume = config.checkpoint.resume
        for line in stop.lines(paths.checkpoints, command, began=began, trained=trained, resume=resume):
            say(line)
        raise
    say(f"report    {write_report(paths.root, evaluation=of_run(paths.root))}")
    if code == EXIT_PREEMPTED:
        say(f"go on     {stop.again_with(command, 'latest')}")
    return code


def score_export(driver: Driver) -> None:
    """Runs the suites on the exported student, waits for the scores and prints them.

    They are added to the run's metrics and to the model card of the export.
    """
    from distill_rl.workers.evaluation.evaluations import scores

    export = driver.job.paths.export
    results = driver.evaluations.score(export, driver.state.step)
    write_atomic(export / "README.md", driver.card(scores(results)))
