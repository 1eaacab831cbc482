"""The driver of a capture: documents → aligners → teachers, which store their targets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

from distill_rl.observe.log import ProgressBar, say
from distill_rl.run.job import Job
from distill_rl.run.prefetch import Lookahead
from distill_rl.run.start import CaptureActors, start_capture
from distill_rl.run.steps import SkippedRows
from distill_rl.system.signals import EXIT_PREEMPTED, Signals
from distill_rl.types import DocumentBatch
from distill_rl.workers.pipeline.sub_batch import PendingBatch


@dataclass(slots=True)
class CaptureProgress:
    """What a capture has done so far, over all teachers."""

    computed: int = 0
    """Tokens whose targets were computed."""
    found: int = 0
    """Tokens that the stores had already when they were looked up."""
    busy_s: float = 0.0
    """Seconds that the teachers' calls took, their replicas' added."""
    began: float = 0.0

    def figures(self) -> list[str]:
        """For the progress bar."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        return [
            f"{self.computed / seconds:,.0f} tokens/s",
            f"{self.computed:,} computed",
            f"{self.found:,} already stored",
        ]


def capture_targets(job: Job, signals: Signals) -> int:
    """Stores the targets of all documents that the stores lack, and returns the exit code of the process.

    0 when all is stored; EXIT_PREEMPTED if a request to stop came: what was computed is then stored, and the same
    command continues. A teacher that died may have computed targets that it had not written; the documents are then
    scanned once more, which costs only those.

    Raises:
        DistillError: a worker failed and cannot be recovered from, or the disk is full. What was written is kept.
    """
    with start_capture(job, signals) as actors:
        progress = CaptureProgress(began=time.monotonic())
        restarts = actors.teachers.restarts  # while they started, when there was nothing to write
        stopped = _go_through(job, actors, signals, progress)
        written = actors.teachers.finish()
        # What is computed once more is among what was computed the first time.
        stored, found = progress.computed, progress.found
        while not stopped and actors.teachers.restarts > restarts:
            restarts = actors.teachers.restarts
            say("again     all documents are scanned once more: a teacher that died may not have written everything")
            stopped = _go_through(job, actors, signals, progress)
            written = actors.teachers.finish()
    seconds = time.monotonic() - progress.began
    dp = sum(teacher.parallel.dp for teacher in job.config.teachers)
    share = 100 * progress.busy_s / max(seconds * dp, 1e-9)
    rate = progress.computed / max(seconds, 1e-9)
    say(f"rate      {rate:,.0f} tokens/s; the teachers computed {min(share, 100):.0f} % of the time")
    say(f"stored    {stored:,} tokens, {written / 2**20:,.1f} MiB; {found:,} tokens were already stored")
    if stopped:
        say("stopped   what was computed is stored; run the same command again to continue")
        return EXIT_PREEMPTED
    return 0


def _go_through(job: Job, actors: CaptureActors, signals: Signals, progress: CaptureProgress) -> bool:
    """Captures all batches; returns whether a request to stop ended that early."""
    batches, total = _batches(job)
    skipped = SkippedRows(job.paths.bad_rows, job.config.data.max_bad_rows)
    depth = max(job.config.prefetch.depth, 1)
    bar = ProgressBar("capture", total)
    with closing(bar), closing(Lookahead(batches, actors.pipeline.submit, PendingBatch.release, depth)) as pending:
        for done, batch in enumerate(pending, start=1):
            if job.config.data.bad_rows == "skip":
                skipped.add(batch.documents)
            with batch.lease():
                _, stats = actors.teachers.capture(batch)
            progress.computed += sum(replica.tokens_computed for replica in stats)
            progress.found += sum(replica.tokens_read for replica in stats)
            progress.busy_s += sum(replica.forward_s for replica in stats)
            bar.update(done, progress.figures())
            if signals.preempted:
                return True
    return False


def _batches(job: Job) -> tuple[Iterator[DocumentBatch], int]:
    training, held_out = job.loader(), job.opened.validation
    if held_out is None:
        return iter(training), training.total_steps
    most, size = job.config.data.validation.max_documents, job.config.train.global_batch_size
    count = -(-min(len(held_out), most) // size)
    return chain(training, job.validation_batches()), training.total_steps + count
