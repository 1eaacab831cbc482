"""The run itself, training or capture: occupies the run directory, makes the job, and ends with what is left to say."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distill_rl.config.capture import stores_of
from distill_rl.config.facts import Facts
from distill_rl.config.paths import absolute
from distill_rl.errors import DistillError, GpuMemoryError, NumericsError, StoreError, TransportError, WorkerError
from distill_rl.observe.log import log_file, say
from distill_rl.run import run_directory, stop
from distill_rl.run.checkpoints.store import newest_step
from distill_rl.run.opened import OpenedRun
from distill_rl.system.files import write_atomic
from distill_rl.system.folders import close_folder
from distill_rl.system.signals import EXIT_PREEMPTED, Preempted, Signals
from distill_rl.types import RunPaths

if TYPE_CHECKING:
    from distill_rl.run.driver import Driver
    from distill_rl.run.job import Job

log = logging.getLogger(__name__)


def train(run: OpenedRun, facts: Facts, signals: Signals, *, clean: bool, command: Sequence[str] = ()) -> int:
    """Runs a checked configuration until its end or until it is asked to stop, and returns the exit code of the process.

    0 after the whole run and its export; 85 if SIGTERM, SIGUSR1 or SIGHUP stopped it and `--resume` can continue.
    Occupies the run directory and handles the signals of this process meanwhile.

    Args:
        facts: what the checks found.
        signals: not entered yet.
        clean: delete the contents of the run directory first.
        command: that started this process, to print how a stopped run goes on. Empty: one with the run's config.yaml.

    Raises:
        DistillError: the error that ended the run.
        KeyboardInterrupt: asked to stop now; what is saved and lost has been printed.
    """
    with _occupied(run, signals, clean=clean) as (run, paths):
        resume = run.config.checkpoint.resume
        command = command or stop.command_line(str(paths.config), [])
        try:
            return _train(run, paths, signals, facts, command)
        except Preempted:
            say("stopped outside of training")
            again = stop.mode(newest_step(paths.checkpoints), resume, new=False)
            say(f"go on     {stop.again_with(command, again)}")
            return EXIT_PREEMPTED
        except OSError as error:
            log.info("the run failed", exc_info=True)
            remedy = f"fix this (free some space, perhaps); {stop.way_on(paths, resume)}"
            raise DistillError(
                f"the files of {paths.root}", "must be readable and writable", str(error), remedy
            ) from error
        except (WorkerError, NumericsError, TransportError, GpuMemoryError) as error:
            log.info("the run failed", exc_info=True)
            # Only now, as a save in flight has ended.
            error.remedy = "; ".join(filter(None, (error.remedy, stop.way_on(paths, resume))))
            raise
        except Exception:
            log.info("the run failed", exc_info=True)
            raise


def capture(run: OpenedRun, facts: Facts, signals: Signals, out: Path) -> int:
    """Stores the targets of a checked configuration's documents that `out` lacks, and returns the process's exit code.

    0 when all is stored; 85 if SIGTERM, SIGUSR1 or SIGHUP stopped it: what was computed is stored, and the same command
    continues. Handles the signals of this process meanwhile.

    Args:
        run: of a configuration from `to_capture`.
        facts: what the checks found.
        signals: not entered yet.
        out: the absolute path of the store, or of the folder of one store per teacher.

    Raises:
        DistillError: the error that ended the capture.
    """
    out.mkdir(parents=True, exist_ok=True)
    close_folder(out)
    with _occupied(run, signals, clean=False) as (run, paths):
        try:
            return _capture(run, paths, signals, facts)
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


@contextmanager
def _occupied(run: OpenedRun, signals: Signals, *, clean: bool) -> Iterator[tuple[OpenedRun, RunPaths]]:
    if run.config.ray.address is not None:  # workers on an existing cluster have other working directories
        run = replace(run, config=absolute(run.config))
    with run_directory.occupy(run.config, clean=clean) as paths, log_file(paths.logs / "driver.log"), signals:
        yield run, paths


def _job(run: OpenedRun, paths: RunPaths, signals: Signals, facts: Facts) -> Job:
    say("opening   models and data")
    from distill_rl.run.job import prepare

    with signals.at_once():
        job = prepare(run, paths)
    run.release()
    for source in facts.sources:
        say(f"data      {source}")
    if facts.step is not None:
        say(f"rows      {facts.step}")
    return job


def _capture(run: OpenedRun, paths: RunPaths, signals: Signals, facts: Facts) -> int:
    """Captures, and says who decides how rows are cut."""
    config, job = run.config, _job(run, paths, signals, facts)
    from distill_rl.run.capture import capture_targets

    first = config.teachers[0]
    if config.student.model == first.model:
        say(f"rows      no student is named: they are cut as the tokenizer of teacher {first.name} reads them")
    code = capture_targets(job, signals)
    for folder in stores_of(config):
        say(f"store     {folder}")
    return code


def _train(run: OpenedRun, paths: RunPaths, signals: Signals, facts: Facts, command: Sequence[str]) -> int:
    """Trains and, after the last step, scores the export on the suites; then, or after a stop, writes the report."""
    config = run.config
    driver: Driver | None = None
    try:
        job = _job(run, paths, signals, facts)
        from distill_rl.evals.compare import of_run
        from distill_rl.observe.report.report import write_report
        from distill_rl.run.driver import Driver

        if job.facts.student is not None and job.facts.student.adapters is not None:
            say(f"trained   {job.facts.student.adapters}")
        for teacher, known in job.facts.by_teacher(config):
            if known.cross_tokenizer_loss is not None:
                how = f"loss {known.cross_tokenizer_loss} over chunks of text"
                say(f"teacher   {teacher.name} has another tokenizer: {how}")
            elif known.tokens_apart:
                say(f"teacher   {teacher.name}: {known.tokens_apart}")
        with Driver.open(job, signals) as driver:
            code = driver.run()
            if code == 0:
                say(f"exported  {paths.export}")
                if config.evaluate.suites:
                    _score_export(driver)
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


def _score_export(driver: Driver) -> None:
    from distill_rl.workers.evaluation import scores

    export = driver.job.paths.export
    results = driver.evaluations.score(export, driver.state.step)
    write_atomic(export / "README.md", driver.card(scores(results)))
