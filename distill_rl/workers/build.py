"""From a job to running actors, and back to nothing."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from distill_rl.config.derive import Facts, aligner_workers, compute_groups, running_teachers, sizes
from distill_rl.errors import DistillError
from distill_rl.job import Job
from distill_rl.models.facts import visible_gpus
from distill_rl.observe.log import say
from distill_rl.observe.timing import StepTimer
from distill_rl.signals import Signals
from distill_rl.transport.choose import choose
from distill_rl.workers.aligner import AlignerWorker
from distill_rl.workers.calls import Calls
from distill_rl.workers.cluster import ray_session
from distill_rl.workers.group import WorkerGroup
from distill_rl.workers.pipeline import Pipeline, StudentGroup
from distill_rl.workers.placement import actor_names, reserve, seat
from distill_rl.workers.pool import AlignerPool, BadRows
from distill_rl.workers.student import StudentWorker
from distill_rl.workers.teacher import TeacherWorker

_STOP_TIMEOUT_S = 15.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Crew:
    pipeline: Pipeline
    student: StudentGroup


@contextmanager
def hire(job: Job, total_steps: int, timer: StepTimer, signals: Signals) -> Iterator[Crew]:
    """Starts Ray and all actors, loads all models, and yields them ready for step 1.

    Raises:
        ConfigError: the resources cannot be had.
        WorkerError: an actor failed to start.
    """
    config = job.config
    num_compute = sum(compute_groups(config))
    here = aligner_workers(config, gpus=visible_gpus(), cpus=len(os.sched_getaffinity(0)))
    transport = choose(config.transport)
    log.info("transport %s: %s", transport.name, transport.reason)
    with ray_session(
        config.ray, num_cpus=num_compute + here, target_bytes=_target_bytes(job), started=signals.install_again
    ) as ray_logs:
        cluster = ray.cluster_resources()
        gpus, cpus = cluster.get("GPU", 0.0), cluster.get("CPU", 0.0)
        num_aligners = here if config.ray.address is None else aligner_workers(config, gpus=gpus, cpus=cpus)
        student_names, teacher_names, aligner_names = actor_names(config, num_aligners)
        ranks = [*student_names, *(name for names in teacher_names.values() for name in names)]
        say(f"starting  {', '.join([*ranks, *aligner_names])}")
        plan = seat(config, num_aligners, gpus=gpus > 0)
        threads = threads_per_worker(num_compute)
        calls = Calls(signals.raise_if_stopping)
        with reserve(
            plan, timeout_s=config.ray.placement_timeout_s, interrupted=signals.raise_if_stopping
        ) as placement:
            crosses = tuple(crossing is not None for crossing in job.crossings)
            align = (config, job.data_format, job.plan, crosses)
            aligners = WorkerGroup(AlignerWorker, aligner_names, plan, placement, calls, *align)
            common = (transport.name, threads)
            teachers = {
                teacher.name: WorkerGroup(
                    TeacherWorker, teacher_names[teacher.name], plan, placement, calls, config, teacher, size, *common
                )
                for teacher, size in zip(running_teachers(config), job.teacher_vocabularies)
            }
            learn = (config, total_steps, job.crossings, job.vocabulary_size, *common)
            student = WorkerGroup(StudentWorker, student_names, plan, placement, calls, *learn)
            groups = [aligners, *teachers.values(), student]
            try:
                _start(job, aligners, teachers, student, calls)
                calls.interrupted = signals.raise_if_interrupted  # from here on a step can be finished and saved
                pipeline = Pipeline(config, _pool(job, aligners, calls, align), teachers, job.plan)
                yield Crew(pipeline, StudentGroup(student, config, calls, timer, pipeline.settle))
                _stop([*teachers.values(), student])
            except DistillError:
                _keep_logs(ray_logs, groups, job.paths.logs)
                raise
            finally:
                for group in groups:
                    group.kill()


def _pool(job: Job, group: WorkerGroup, calls: Calls, arguments: tuple[Any, ...]) -> AlignerPool:
    """Over the aligner actors, or over an aligner in this process where there are none."""
    local = None
    if not group.actors:
        local = AlignerWorker(0, *arguments)
        local.start()
    return AlignerPool(
        group,
        calls,
        local=local,
        num_parts=job.plan.student.dp + sum(share.dp for share in job.plan.teachers),
        deadline_s=job.config.aligner.deadline_s,
        start_timeout_s=job.config.ray.start_timeout_s,
        bad_rows=BadRows(job.paths.bad_rows, job.config.aligner.max_bad_rows),
    )


def threads_per_worker(num_compute_actors: int) -> int:
    """Torch threads of each student and teacher rank: the machine's cores, shared out."""
    return max(1, len(os.sched_getaffinity(0)) // num_compute_actors)


def _target_bytes(job: Job) -> int:
    """Targets alive at once: every teacher's ring, and one batch of validation beside it."""
    depth = job.config.prefetch.depth
    facts = Facts(vocabulary_size=job.vocabulary_size, teacher_vocabularies=job.teacher_vocabularies)
    derived = sizes(job.config, facts)
    dp = {teacher.name: teacher.parallel.dp for teacher in job.config.teachers}
    return sum(teacher.ring_bytes * dp[teacher.name] * (depth + 2) // (depth + 1) for teacher in derived.teachers)


def _keep_logs(ray_logs: Path | None, groups: list[WorkerGroup], folder: Path) -> None:
    """Copies what the workers printed into the run's logs, by actor; Ray's own copy goes away with the session."""
    for pid, name in (entry for group in groups for entry in group.pids.items()):
        for file in ray_logs.glob(f"worker-*-{pid}.*") if ray_logs else ():
            if file.stat().st_size:
                shutil.copyfile(file, folder / f"{name.replace('/', '-')}{file.suffix}")


def _start(
    job: Job, aligners: WorkerGroup, teachers: dict[str, WorkerGroup], student: WorkerGroup, calls: Calls
) -> None:
    """All models load at the same time."""
    config, timeout_s = job.config, job.config.ray.start_timeout_s
    for group in (aligners, *teachers.values(), student):
        if group.actors:
            group.identify(timeout_s)
    started = aligners.submit("start")
    for group, parallel, replicas in (
        *((teachers[t.name], t.parallel, True) for t in config.teachers if t.name in teachers),
        (student, config.student.parallel, False),
    ):
        addresses = group.rendezvous(dp=parallel.dp, tp=parallel.tp, replicas=replicas, timeout_s=timeout_s)
        for rank, address in enumerate(addresses):
            started |= group.submit("start", *address, ranks=[rank])
    calls.gather(started, what="loading the models", timeout_s=timeout_s)


def _stop(groups: list[WorkerGroup]) -> None:
    """Lets the ranks leave their process groups together; a rank that will not is killed by the caller."""
    for group in groups:
        try:
            group.call("stop", what="stopping", timeout_s=_STOP_TIMEOUT_S)
        except DistillError as error:
            log.info("%s", error)
