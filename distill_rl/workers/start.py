"""From a job to running actors, and back to nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from distill_rl.config.derive import aligner_workers, compute_groups, ring_plan, sizes
from distill_rl.config.facts import Facts, running_teachers
from distill_rl.errors import DistillError
from distill_rl.models.facts import visible_gpus
from distill_rl.observe.log import say
from distill_rl.observe.timing import StepTimer
from distill_rl.preflight.job import Job
from distill_rl.system.signals import Signals
from distill_rl.workers.actors.aligner import AlignerWorker
from distill_rl.workers.actors.evaluator import EvalWorker
from distill_rl.workers.actors.student import StudentWorker
from distill_rl.workers.actors.teacher import TeacherWorker
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup, stop
from distill_rl.workers.cluster.placement import EVALUATOR, PlacementPlan, actor_names, place_actors, reserve
from distill_rl.workers.cluster.process_monitor import ProcessMonitor, keep_logs
from distill_rl.workers.cluster.session import nodes, ray_session
from distill_rl.workers.cluster.timeline import write_timeline
from distill_rl.workers.pipeline.aligner_pool import AlignerPool, BadRows
from distill_rl.workers.pipeline.connect import Connector
from distill_rl.workers.pipeline.pipeline import Pipeline
from distill_rl.workers.pipeline.student_group import StudentGroup
from distill_rl.workers.pipeline.sub_batch import Teachers
from distill_rl.workers.pipeline.teacher_recovery import TeacherRecovery


@dataclass(frozen=True, slots=True)
class RunActors:
    pipeline: Pipeline
    student: StudentGroup
    evaluator: WorkerGroup | None
    """where suites are asked for"""
    calls: Calls


@contextmanager
def start_actors(job: Job, total_steps: int, timer: StepTimer, signals: Signals) -> Iterator[RunActors]:
    """Starts Ray and all actors, loads all models, opens the rings, and yields the crew ready for step 1.

    Raises:
        ConfigError: the resources cannot be had, or a transport asked for by name does not work.
        WorkerError: an actor failed to start.
    """
    config = job.config
    here = aligner_workers(config, gpus=visible_gpus(), cpus=len(os.sched_getaffinity(0)))
    num_cpus = sum(compute_groups(config)) + here + bool(config.evaluate.suites)
    with ray_session(config.ray, num_cpus=num_cpus, target_bytes=_target_bytes(job), started=signals.install_again):
        cluster, own_node = ray.cluster_resources(), ray.get_runtime_context().get_node_id()
        gpus, cpus = cluster.get("GPU", 0.0), cluster.get("CPU", 0.0)
        num_aligners = here if config.ray.address is None else aligner_workers(config, gpus=gpus, cpus=cpus)
        plan = place_actors(config, num_aligners, gpus=gpus, nodes=nodes(), needs=_memory_needs(job, int(gpus)))
        job = replace(job, plan=job.plan.for_device(on_gpu=gpus > 0))
        calls = Calls(signals.raise_if_stopping, report_after_s=config.faults.report_after_s)
        calls.monitor = ProcessMonitor(config.faults, calls.processes, job.paths.logs)
        with reserve(
            plan, timeout_s=config.ray.placement_timeout_s, interrupted=signals.raise_if_stopping
        ) as placement:
            actors = _make(job, total_steps, num_aligners, plan, placement, calls)
            say(f"starting  {', '.join(name for group in actors.groups for name in group.names)}")
            try:
                _start(job, actors, calls)
                rings = ring_plan(config)
                connector = Connector(config, actors.teachers, actors.student, rings, calls)
                connector.connect()
                calls.interrupted = signals.raise_if_interrupted  # from here on a step can be finished and saved
                pipeline = Pipeline(_pool(job, actors.aligners, calls), actors.teachers, job.plan, rings)
                recovery = TeacherRecovery(config, actors.teachers, actors.student.names, calls, connector, pipeline)
                student = StudentGroup(actors.student, config, calls, timer, pipeline, recovery)
                yield RunActors(pipeline, student, actors.evaluator, calls)
                if config.observe.timeline:
                    ids = {worker: name for group in actors.groups for worker, name in group.worker_ids.items()}
                    write_timeline(job.paths.logs / "timeline.json", ids)
                # Readers first: what they have opened belongs to the teachers. Aligners and evaluators are in no process group.
                stop([actors.student, *(group for _, group in actors.teachers)])
            except DistillError as error:
                if error.exit_code == 1:
                    calls.monitor.dump_stacks()
                keep_logs((each for group in actors.groups for each in group.processes), job.paths.logs)
                raise
            finally:
                ended = [process for group in actors.groups for _, process in group.processes]
                for group in actors.groups:
                    group.kill()
                calls.monitor.close()
                _sweep(process.pid for process in ended if process.node_id == own_node)


def _sweep(pids: Iterable[int]) -> None:
    """Removes the counters that torch keeps in shared memory for each GPU buffer it has shared; a killed process leaves them."""
    for pid in pids:
        for file in Path("/dev/shm").glob(f"torch_{pid}_*"):
            with suppress(OSError):  # somebody else's
                file.unlink()


@dataclass(frozen=True, slots=True)
class _Actors:
    """Actors, made and not yet started."""

    student: WorkerGroup
    teachers: Teachers
    aligners: WorkerGroup
    evaluator: WorkerGroup | None

    @property
    def evaluators(self) -> list[WorkerGroup]:
        return [] if self.evaluator is None else [self.evaluator]

    @property
    def groups(self) -> list[WorkerGroup]:
        return [self.student, *(group for _, group in self.teachers), self.aligners, *self.evaluators]


def _make(
    job: Job, total_steps: int, num_aligners: int, plan: PlacementPlan, placement: PlacementGroup, calls: Calls
) -> _Actors:
    config = job.config
    threads = threads_per_worker(sum(compute_groups(config)))
    student, teachers, aligners = actor_names(config, num_aligners)
    at = (plan, placement, calls, config)
    learn = (total_steps, job.cross_tokenizer_specs, job.vocabulary_size, threads)
    scores = (plan, placement, calls, threads, config.run.name)
    return _Actors(
        WorkerGroup(StudentWorker, student, *at, *learn),
        [
            (teacher, WorkerGroup(TeacherWorker, teachers[teacher.name], *at, teacher, size, threads))
            for teacher, size in zip(running_teachers(config), job.teacher_vocabularies)
        ],
        WorkerGroup(AlignerWorker, aligners, *at, *_aligning(job)),
        WorkerGroup(EvalWorker, [EVALUATOR], *scores) if config.evaluate.suites else None,
    )


def _aligning(job: Job) -> tuple[Any, ...]:
    """What an aligner is made with, besides the configuration."""
    return job.data_format, job.plan, tuple(spec is not None for spec in job.cross_tokenizer_specs)


def _pool(job: Job, group: WorkerGroup, calls: Calls) -> AlignerPool:
    """Over the aligner actors, or over an aligner in this process where there are none."""
    local = None
    if not group.actors:
        local = AlignerWorker(0, job.config, *_aligning(job))
        local.start()
    return AlignerPool(
        group,
        calls,
        local=local,
        num_parts=job.plan.sub_batches * sum(share.dp for share in (job.plan.student, *job.plan.teachers)),
        deadline_s=job.config.aligner.deadline_s,
        start_timeout_s=job.config.ray.start_timeout_s,
        bad_rows=BadRows(job.paths.bad_rows, job.config.aligner.max_bad_rows),
        max_restarts=job.config.faults.aligner_restarts,
    )


def threads_per_worker(num_compute_actors: int) -> int:
    """Torch threads of each student and teacher rank: the machine's cores, shared out."""
    return max(1, len(os.sched_getaffinity(0)) // num_compute_actors)


def _facts(job: Job, gpus: int) -> Facts:
    """What sizes and memory estimates follow from, with the GPUs that the run really has."""
    return Facts(
        student=job.student_facts,
        teachers=job.teacher_facts,
        teacher_vocabularies=job.teacher_vocabularies,
        cross_tokenizer_losses=tuple(None if found is None else found.method for found in job.cross_tokenizer_specs),
        vocabulary_size=job.vocabulary_size,
        gpus=gpus,
    )


def _memory_needs(job: Job, gpus: int) -> dict[str, float] | None:
    """Estimated bytes of a rank of the student and of each teacher, by name; None where no evaluator can share a GPU
    with them."""
    if not (gpus and job.config.evaluate.suites):
        return None
    return {worker.worker: float(worker.total) for worker in sizes(job.config, _facts(job, gpus)).memory}


def _target_bytes(job: Job) -> int:
    """Targets in the object store at once: every teacher's ring, twice, because a slot's last object goes only when the
    next is there; 0 where they are sure to go another way."""
    if job.config.transport in ("shared_memory", "cuda_ipc"):
        return 0
    dp = {teacher.name: teacher.parallel.dp for teacher in job.config.teachers}
    derived = sizes(job.config, _facts(job, visible_gpus()))
    return sum(2 * teacher.ring_bytes * dp[teacher.name] for teacher in derived.teachers)


def _start(job: Job, actors: _Actors, calls: Calls) -> None:
    """All models load at the same time."""
    timeout_s = job.config.ray.start_timeout_s
    for group in actors.groups:
        if group.actors:
            group.identify(timeout_s)
    started = actors.aligners.submit("start")
    for teacher, group in actors.teachers:
        started |= group.start(size=teacher.parallel.tp, timeout_s=timeout_s)
    started |= actors.student.start(size=len(actors.student.actors), timeout_s=timeout_s)
    calls.gather(started, what="loading the models", timeout_s=timeout_s)
