"""The driver: one CPU process that moves references, never tensors.

`Driver.open` starts everything that a run needs and ends it again. `Driver.run` trains, and goes on after the death of the student.
`Driver.train` is the training loop: a look-ahead
submits batches to the aligners and teachers, the student trains on them in order, and validation, evaluations and
checkpoints follow between two steps.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Self

from distill_rl.config.derive import warmup_note
from distill_rl.config.layout import suites_every
from distill_rl.config.measured import KD, is_suite_score
from distill_rl.config.save import fingerprint
from distill_rl.data.loader import ENDLESS
from distill_rl.data.reading.source import Mixture
from distill_rl.errors import DistillError
from distill_rl.observe.log import say
from distill_rl.observe.metrics import Metric, Metrics, merge, values
from distill_rl.observe.sinks import open_observer
from distill_rl.observe.timing import StepTimer
from distill_rl.run import checkpoints, run_directory
from distill_rl.run.card import card_of
from distill_rl.run.checkpoints import Checkpoint, CheckpointStore, SavedState, Saver
from distill_rl.run.job import Job
from distill_rl.run.prefetch import Lookahead
from distill_rl.run.start import ROLES, Roles, RunActors, start_actors
from distill_rl.run.steps import Learning, Pace, SkippedRows, advice, moved_rate, settled
from distill_rl.system.signals import EXIT_PREEMPTED, Signals
from distill_rl.types import DocumentBatch, TrainState
from distill_rl.workers.cluster.hosts import HostLost
from distill_rl.workers.cluster.telemetry import GaugeSink, write_targets
from distill_rl.workers.evaluation import Evaluations
from distill_rl.workers.pipeline.sub_batch import PendingBatch

log = logging.getLogger(__name__)


@dataclass
class Driver:
    """A run with all its parts, made by `open`."""

    job: Job
    actors: RunActors
    store: CheckpointStore
    timer: StepTimer
    signals: Signals

    @classmethod
    @contextmanager
    def open(cls, job: Job, signals: Signals, roles: Roles = ROLES) -> Iterator[Self]:
        """Starts (or joins) Ray, the actors and the sinks, and ends them all when the block ends, whatever happened.

        Yields a driver ready to `run`, after printing which steps are left. Half-written checkpoints are deleted first
        and again at the end. A checkpoint to resume from is verified before anything starts, and then loaded;
        config.yaml is rewritten, and checkpoints of later steps are set aside.

        Raises:
            CheckpointError: the checkpoint to resume from is missing, damaged, or of other data, tokenizers or models.
            DistillError: an actor failed to start.
        """
        kept = job.config.checkpoint
        store = CheckpointStore(
            job.paths.checkpoints,
            keep_last=kept.keep_last,
            keep_best=kept.keep_best,
            best_by=kept.best_by,
            scores=job.paths.scores,
            about=about(job),
        )
        store.clean_up()
        if resumed := checkpoints.find(store, kept.resume, lambda text: say(f"damaged   {text}")):
            job = job.going_on(resumed.state.fingerprints)
            checkpoints.require_same(resumed.state.fingerprints, job.fingerprints)
            say(f"resuming  from {resumed.path}")
        timer = StepTimer(cpu_clock=time.process_time)
        start = resumed.state.train if resumed else TrainState()
        total = ENDLESS if job.config.train.minutes else job.loader(start).total_steps
        with ExitStack() as stack:
            stack.callback(store.clean_up)  # runs last, when no rank writes any more
            actors = stack.enter_context(start_actors(job, total, timer, signals, roles))
            driver = cls(job, actors, store, timer, signals)
            stack.callback(driver.parts.close)
            try:
                driver.load(resumed)
            except DistillError as error:
                recovery = actors.recovery
                recovery.restart(recovery.lost(error, "loading the checkpoint"), partial(driver.load, resumed))
            run_directory.record_config(job.config, job.paths)
            write_targets(job.paths.prometheus)
            driver.begin(resumed, after=start.step)
            yield driver

    def __post_init__(self) -> None:
        self.config, self.student = self.job.config, self.actors.student
        self.parts = ExitStack()
        """Ends what `begin` has opened."""
        self.learning = Learning([teacher.name for teacher in self.config.running_teachers])
        self.last_step: int | None = None
        """Of a run that is limited by `train.minutes`, once it is known; the ranks are made before."""

    def begin(self, resumed: Checkpoint | None, *, after: int) -> None:
        """Makes all that depends on where the run goes on: loader, sinks, evaluations, saver and counts.

        The student must be that of the checkpoint. Prints which steps are left.

        Args:
            resumed: where it goes on; None: at step 0.
            after: what was recorded of later steps is dropped.
        """
        job, config = self.job, self.config
        self.resumed = resumed
        saved = resumed.state if resumed else SavedState(TrainState(), learnt=False)
        self.state = saved.train
        self.began = self.state.step
        self.loader = job.loader(self.state)
        minutes, limit = config.train.minutes, self.loader.total_steps
        self.pace = None if minutes is None else Pace(minutes, most=limit - self.began)
        self.learning.begin(learnt=saved.learnt)
        self.skipped = SkippedRows(job.paths.bad_rows, config.data.max_bad_rows)
        self._checkpoint_owed = False
        """Whether a checkpoint is due that a skipped step deferred."""
        self._saved_step = self.state.step if resumed else -1
        self.store.abandon_after(after)
        if saved.score is not None:  # the file of scores may be missing beside a checkpoint that was copied
            self.store.scores.add(self.state.step, {KD: saved.score})
        # The last step may have been validated after its checkpoint.
        self._validated_step = -1 if self.store.scores.get(self._saved_step, KD) is None else self._saved_step
        total = None if minutes else limit
        gauges = [GaugeSink(config.run.name)]
        self.observer = open_observer(config, job.paths, total_steps=total, resume_step=after, others=gauges)
        self.parts.enter_context(closing(self.observer))
        self.evaluations = Evaluations(
            self.actors.evaluator,
            config,
            self.actors.calls,
            job.paths,
            copy=self.copy_weights,
            record=self.observer.record,
            compare=self.store.scores.add,
            stopping=lambda: self.signals.preempted,
        )
        if is_suite_score(config.checkpoint.best_by):
            self.store.awaited = lambda: self.evaluations.unfinished
        self.evaluations.recover(after)
        left = "nothing left"
        if self.state.step < limit:
            left = f"for {minutes:g} minutes" if minutes else f"steps {self.state.step + 1} to {limit}"
        if note := warmup_note(config.schedule, total):
            say(f"warm-up   {note}")
        if resumed and total is not None and (note := moved_rate(config, job.paths, self.state.step, total)):
            say(f"schedule  {note}")
        say(f"training  {left} in {job.paths.root}")
        saver = Saver(
            self.store,
            self.student.collective,
            in_background=config.checkpoint.async_save,
            deadline_s=config.ray.step_timeout_s,
            dead=lambda: any(name.startswith("student-dp") for name in self.actors.calls.dead()),
            interrupted=lambda: self.actors.calls.interrupted(),
        )
        self.saver = self.parts.enter_context(saver)
        # From now on a stop can wait for the step and a save.
        self.actors.calls.interrupted = self.signals.raise_if_interrupted

    def run(self) -> int:
        """Trains to the end of the run (`train`), and goes on from the newest checkpoint if the student dies on the way.

        Returns:
            The process's exit code, as `train`.

        Raises:
            DistillError: something failed that cannot be recovered from, or `faults.student_restarts` is spent.
        """
        gc.freeze()  # what is imported stays; to look through all of it takes Python a fifth of a second of some step
        try:
            while True:
                try:
                    return self.train()
                except HostLost as lost:
                    self.save_what_is_left(lost)
                    raise
                except DistillError as error:
                    self.parts.close()
                    self.timer.flush()  # of a step that will be done again
                    with self.timer.part("recovery"):
                        self.restart(error)
        finally:
            gc.unfreeze()

    def restart(self, error: DistillError) -> None:
        """Starts the student again after `error`, and begins again at the newest checkpoint, or where this run began.

        Raises:
            DistillError: `error`, if it is not the student that died, or as `StudentRecovery`.
        """
        recovery = self.actors.recovery
        lost = recovery.lost(error, f"the work after step {self.state.step}")
        self.actors.calls.interrupted = self.signals.raise_if_stopping  # there is nothing to save
        newest = recovery.restart(lost, self.go_back)
        say(f"going on  from {newest.path if newest else 'step 0: there is no checkpoint yet'}")
        self.evaluations.abandon()
        self.begin(newest, after=newest.state.train.step if newest else -1)

    def go_back(self) -> Checkpoint | None:
        """Makes the student, whose ranks are new, that of the newest checkpoint of this run, or what the run began with.

        Returns:
            The checkpoint; None if the run began with none.
        """
        self.store.clean_up()
        newest = self.store.newest()
        if newest is None or newest.state.train.step <= self.began:
            newest = self.resumed
        self.load(newest)
        return newest

    def load(self, checkpoint: Checkpoint | None) -> None:
        """Makes the student, whose ranks are new, that of a checkpoint; None: it is what the run began with."""
        self.student.is_within_step = False
        if checkpoint:
            self.student.collective("load", os.fspath(checkpoint.student), what=f"loading {checkpoint.path}")
        if self.last_step is not None:
            self.student.collective("end_at", self.last_step, self.config.schedule, what="the number of steps")

    def copy_weights(self, folder: Path) -> str | None:
        """Writes a copy of the student's weights to a folder, for an evaluation; returns why that failed, or None."""
        problems = self.student.collective("copy", os.fspath(folder), what=f"copying the weights to {folder}")
        return next((problem for problem in problems if problem is not None), None)

    def train(self) -> int:
        """Trains until the last step or a request to stop, with validation, evaluations and checkpoints when due.

        After the last step it ends the run (`finish`), which exports the student. On a request to stop it saves after
        the current step, or, if that was skipped, after the next one that is not, and exports nothing.

        Returns:
            The process's exit code: 0 after the last step, EXIT_PREEMPTED after a request to stop.
        """
        self.measure_untrained()
        submit, depth, hosts = self.actors.pipeline.submit, self.config.prefetch.depth, self.actors.calls.hosts
        if self.pace is not None:
            self.pace.begin()
        documents = takewhile(lambda _: not hosts.lost, self.loader)
        with closing(Lookahead(documents, submit, PendingBatch.release, depth)) as batches:
            for step, batch in enumerate(batches, start=self.state.step + 1):
                # Where nothing is due between two steps, the student is called on the second one while it is in the first.
                following = partial(self.following, batches, step)
                with self.timer.step(step, follows=self.student.is_within_step), batch.lease():
                    trained = self.student.train_step(batch, following)
                self.record(step, batch, trained)
                if self.student.is_within_step:
                    with hosts.finishing():
                        self.evaluations.collect()
                    continue
                hosts.require()  # or what follows would not end
                # Before what is done at a last step only, or at every step but the last.
                if self.pace is not None and (count := self.pace.last_step(step - self.began)) is not None:
                    self.end_at(self.began + count)
                if self.due(self.config.evaluate.every):
                    self.validate()
                self.evaluate()
                if self.checkpoint_is_due():
                    self.save()
                if self.signals.preempted and not self.learning.last_skipped:
                    return self.preempt()
                if step >= self.loader.total_steps:  # batches beyond it may have been asked for before it was known
                    break
        return self.finish()

    def following(self, batches: Lookahead[DocumentBatch, PendingBatch], step: int) -> PendingBatch | None:
        """Returns the batch after `step`, unless the student is needed between the two, or may be, or no step is to follow."""
        every = self.config.checkpoint.every, self.config.evaluate.every, suites_every(self.config)
        is_needed = self._checkpoint_owed or self.pace is not None or any(falls_due(n, step) for n in every)
        is_stopping = self.signals.preempted or self.actors.calls.hosts.lost or step >= self.loader.total_steps
        return None if is_needed or is_stopping else batches.next

    def record(self, step: int, batch: PendingBatch, trained: Metrics) -> None:
        """Takes note of a step: its state, what came of it, and all of its metrics; `trained` are the student's."""
        self.state = TrainState(step=step, cursor=batch.documents.cursor)
        for line in self.learning.note(step, trained, batch.metrics, batch.documents.row_numbers):
            say(line)
        for line in advice(self.config, trained) if self.learning.steps == 1 else ():
            say(line)
        self.observer.log(step, trained, batch.metrics, *self.metrics(batch.documents))

    def end_at(self, step: int) -> None:
        """Makes this the last step of a run that is limited by `train.minutes`, unless another setting ends it earlier.

        config.yaml becomes that of a run with this number of steps.
        """
        last = self.last_step = self.loader.end_at(step)
        self.config, self.pace = settled(self.config, done=self.state.step, last=last), None
        self.job = replace(self.job, config=self.config)
        self.store.about = about(self.job)
        self.observer.expect(last)
        run_directory.record_config(self.config, self.job.paths)
        say(f"steps     {last:,} in all, by the speed of the first {self.state.step - self.began:,}")
        # Last: if a rank dies now, `load` says it to the next ones.
        self.student.collective("end_at", last, self.config.schedule, what="the number of steps")

    def metrics(self, batch: DocumentBatch) -> list[Mapping[str, Metric]]:
        """Lists the rows that a batch lacks, and returns what the driver itself measures of a step.

        That is how many documents each source gave and how many rows are missing, faults, and times.

        Raises:
            DataError: more rows than `data.max_bad_rows` were left out.
        """
        metrics: dict[str, Metric] = {}
        if self.config.data.bad_rows == "skip":
            metrics["data/bad_rows"] = Metric(self.skipped.add(batch), "sum")
        if isinstance(self.job.opened.train, Mixture):
            counts = self.job.opened.train.count(batch.row_numbers)
            metrics |= {f"data/documents/{name}": Metric(count, "sum") for name, count in counts.items()}
        return [metrics, self.learning.metrics, self.actors.recovery.counts(), self.timer.flush()]

    def measure_untrained(self) -> None:
        """Validates and evaluates step 0, the untrained student, if `evaluate.at_start`; not if a checkpoint was loaded.

        Queues the evaluation of the teachers, too, if `evaluate.teachers`.
        """
        if self.resumed is not None:
            return
        if self.config.evaluate.at_start:
            self.validate()
            self.evaluations.start(0)
        if self.config.evaluate.teachers:
            self.evaluations.start_teachers()

    def checkpoint_is_due(self) -> bool:
        """Returns whether to save now; True at most once per due checkpoint, so call it once per step.

        A checkpoint that falls due at a skipped step is deferred to the next step that is not, because the weights may
        already be bad.
        """
        self._checkpoint_owed = self._checkpoint_owed or self.due(self.config.checkpoint.every)
        if self.learning.last_skipped or not self._checkpoint_owed:
            return False
        self._checkpoint_owed = False
        return True

    def due(self, every: int) -> bool:
        """Returns whether the present step is a multiple of `every`; False if that is 0."""
        return falls_due(every, self.state.step)

    @property
    def score(self) -> float | None:
        """The KD on held-out text when it was last measured; None if it was not, or is not finite."""
        return self.store.scores.get(self._validated_step, KD)

    def validate(self) -> None:
        """Measures and records KD and CE on held-out text, at most once per step; does nothing if the run has none.

        They are a record of their own; pending metrics are written before it.
        """
        if self.job.opened.validation is None or self._validated_step == self.state.step:
            return
        parts: list[dict[str, Metric]] = []
        for batch in self.job.validation_batches():
            self.skipped.add(batch)
            pending = self.actors.pipeline.submit(batch)
            with pending.lease():
                parts.append(self.student.evaluate(pending))
        metrics = merge(parts)
        self.observer.flush()  # a separate record: it is of this step alone, whatever observe.every is
        self.observer.log(self.state.step, metrics)
        self.observer.flush()
        self._validated_step = self.state.step
        self.store.scores.add(self.state.step, values(metrics))  # after its record, which is not written again

    def evaluate(self) -> None:
        """Starts the suites on this step's weights if they are due, and records the scores of those that have ended.

        At the last step none are started, because its weights are the export. May wait for an earlier evaluation
        (`Evaluations.start`).
        """
        # The last step is left out: its weights are the export, which is evaluated on all items.
        if self.due(suites_every(self.config)) and self.state.step < self.loader.total_steps:
            self.evaluations.start(self.state.step)
        self.evaluations.collect()

    def save(self, *, last: bool = False) -> None:
        """Saves a checkpoint of this step, at most once per step, in the background if so configured.

        Args:
            last: the run ends: the checkpoint is committed on return, and tried again if it was begun before and
                failed.

        Raises:
            WorkerError: this save failed, or (unless `last`) the one before it.
        """
        if self._saved_step != self.state.step or (last and not self.saver.try_settle()):
            self.observer.sync()
            score = self.score if self._validated_step == self.state.step else None
            state = SavedState(self.state, self.job.fingerprints, score, self.learning.learnt)
            with self.timer.part("save"):
                self.saver.save(state, at_once=last)
            self._saved_step = self.state.step
        if last:  # no step follows whose record could hold the seconds of the last validation and save
            self.observer.log(self.state.step, self.timer.flush())
            self.observer.flush()

    def save_what_is_left(self, lost: HostLost) -> None:
        """Saves the last step after the loss of what hosts the workers, if the student's ranks live; else only logs why not."""
        say(f"lost      {lost.what}: {lost.rule}; got {lost.value}")
        if self.student.is_within_step or self.learning.last_skipped:
            return
        try:
            with self.actors.calls.hosts.finishing():
                self.save(last=True)
        except DistillError as error:
            log.info("step %d could not be saved: %s", self.state.step, error)

    def preempt(self) -> int:
        """Saves and commits a checkpoint, says so, and returns the process's exit code, EXIT_PREEMPTED.

        Raises:
            WorkerError: the save failed.
        """
        self.save(last=True)
        say(f"stopped   after step {self.state.step}, which is saved; nothing is lost")
        return EXIT_PREEMPTED

    def finish(self) -> int:
        """Ends a run after its last step: validates, saves, exports the student with its card, waits for evaluations.

        Returns:
            0, the exit code.

        Raises:
            DistillError: no step trained on anything: nothing is saved or exported.
            WorkerError: the last save failed, or (raised after all else is done) an earlier one.
            KeyboardInterrupt, Preempted: a signal ended the wait for evaluations.
        """
        for line in self.learning.summary():
            say(line)
        self.learning.require_learnt()
        self.validate()
        self.save(last=True)
        self.student.collective("export", os.fspath(self.job.paths.export), self.card(), what="the export")
        self.actors.calls.interrupted = self.signals.raise_if_stopping  # all is saved: any signal may end the wait
        self.evaluations.wait()
        self.store.prune()  # by the scores that arrived after the last save
        self.saver.raise_earlier_error()
        return 0

    def card(self, scores: Mapping[str, float] | None = None) -> str:
        """Returns the text of the model card of the student in its present state.

        Args:
            scores: of evaluations, by metric, to add to the validation loss; None: none.
        """
        measured = {} if self.score is None else {KD: self.score}
        return card_of(
            self.config,
            step=self.state.step,
            data_fingerprint=self.job.fingerprints["data"],
            scores=measured | dict(scores or {}),
            methods=[None if spec is None else spec.method for spec in self.job.cross_tokenizer_specs],
        )


def falls_due(every: int, step: int) -> bool:
    """Returns whether a step is a multiple of `every`; False if that is 0."""
    return every > 0 and step % every == 0


def about(job: Job) -> dict[str, dict[str, str]]:
    """Returns what manifests of checkpoints say of a run."""
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"libraries": libraries, "fingerprints": {"config": fingerprint(job.config), **job.fingerprints}}
