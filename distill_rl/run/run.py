"""The run itself, training or capture: occupies the run directory, makes the job, and ends with what is left to say."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
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
from distill_rl.run import run_directory
from distill_rl.run.checkpoints import newest_step
from distill_rl.run.opened import OpenedRun
from distill_rl.system.files import close_folder, write_atomic
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
        command = command or command_line(str(paths.config), [])
        try:
            with _logged("the run"):
                return _train(run, paths, signals, facts, command)
        except Preempted:
            say("stopped outside of training")
            say(f"go on     {again_with(command, resume_mode(newest_step(paths.checkpoints), resume, new=False))}")
            return EXIT_PREEMPTED
        except OSError as error:
            what, rule = f"the files of {paths.root}", "must be readable and writable"
            remedy = f"fix this (free some space, perhaps); {way_on(paths, resume)}"
            raise DistillError(what, rule, str(error), remedy) from error
        except (WorkerError, NumericsError, TransportError, GpuMemoryError) as error:
            # Only now, as a save in flight has ended.
            error.remedy = "; ".join(filter(None, (error.remedy, way_on(paths, resume))))
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
            with _logged("the capture"):
                return _capture(run, paths, signals, facts)
        except Preempted:
            say("stopped   before anything was computed; run the same command again to continue")
            return EXIT_PREEMPTED
        except OSError as error:
            rule, remedy = "must be readable and writable", "what was written is kept"
            raise StoreError(f"{out}", rule, str(error), remedy) from error


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Logs an error that ends the block, with its traceback."""
    try:
        yield
    except Exception:
        log.info("%s failed", what, exc_info=True)
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
        from distill_rl.workers.evaluation import scores

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
                    results = driver.evaluations.score(paths.export, driver.state.step)
                    write_atomic(paths.export / "README.md", driver.card(scores(results)))
    except KeyboardInterrupt:
        began, trained = (driver.began, driver.state.step) if driver else (0, None)
        resume = config.checkpoint.resume
        for line in last_lines(paths.checkpoints, command, began=began, trained=trained, resume=resume):
            say(line)
        raise
    say(f"report    {write_report(paths.root, evaluation=of_run(paths.root))}")
    if code == EXIT_PREEMPTED:
        say(f"go on     {again_with(command, 'latest')}")
    return code


# What a run that was stopped or failed says last: what is saved, what is lost, and how it is continued.

_RESUME = "checkpoint.resume="


def last_lines(
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
    again = again_with(command, resume_mode(saved, resume, new=trained is None or trained == 0))
    return [f"stopped   {text}", f"go on     {again}"]


def resume_mode(saved: int | None, resume: str | None, *, new: bool) -> str | None:
    """The `checkpoint.resume` that continues a run; None where the command starts it as if for the first time.

    Args:
        saved: step of the newest checkpoint in the run directory.
        resume: as for `last_lines`.
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
        resume: as for `last_lines`.
    """
    saved = newest_step(paths.checkpoints)
    how = resume_mode(saved, resume, new=not run_directory.in_use(paths.root))
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
