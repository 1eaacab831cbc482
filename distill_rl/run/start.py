"""Starts the actors of a run, and ends them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill_rl.config.derive import ring_plan, sizes, stored_targets
from distill_rl.config.layout import aligner_workers, compute_groups, evaluators
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError, DistillError
from distill_rl.models.files import visible_gpus
from distill_rl.observe.log import say
from distill_rl.observe.timing import StepTimer
from distill_rl.run.job import Job, make_stores
from distill_rl.scaling.shape import Shape
from distill_rl.system.environment import environment
from distill_rl.system.files import write_json
from distill_rl.system.signals import Signals
from distill_rl.teacher.base import token_of
from distill_rl.workers.actors.aligner import AlignerWorker
from distill_rl.workers.actors.evaluator import EvalWorker
from distill_rl.workers.actors.rank import this_node
from distill_rl.workers.actors.student import StudentWorker
from distill_rl.workers.actors.teacher import TeacherWorker
from distill_rl.workers.cluster import placement
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup, stop
from distill_rl.workers.cluster.hosts import Hosts
from distill_rl.workers.cluster.placement import EVALUATOR, PlacementPlan, Reserved
from distill_rl.workers.cluster.process_monitor import ProcessMonitor, keep_logs
from distill_rl.workers.cluster.session import capacity, describe, nodes, ray_session
from distill_rl.workers.cluster.telemetry import write_timeline
from distill_rl.workers.pipeline.aligner_pool import AlignerPool, BadRows
from distill_rl.workers.pipeline.pipeline import Connector, Pipeline
from distill_rl.workers.pipeline.recovery import Starting, StudentRecovery, TeacherRecovery
from distill_rl.workers.pipeline.student_group import CaptureGroup, StudentGroup

THREADS = "DISTILL_RL_THREADS"
"""Variable with the most threads of a rank, which the quickstart sets for models that more of them slow down."""


@dataclass(frozen=True, slots=True)
class Roles:
    """What plays the parts of student and teachers; a benchmark has ranks that compute nothing."""

    student: type = StudentWorker
    teacher: type = TeacherWorker
    group: Callable[..., WorkerGroup] = WorkerGroup


ROLES = Roles()


@dataclass(frozen=True, slots=True)
class RunActors:
    pipeline: Pipeline
    student: StudentGroup
    recovery: StudentRecovery
    evaluator: WorkerGroup | None
    """None if the run evaluates no suites."""
    calls: Calls


@dataclass(frozen=True, slots=True)
class CaptureActors:
    pipeline: Pipeline
    teachers: CaptureGroup


@contextmanager
def start_actors(
    job: Job, total_steps: int, timer: StepTimer, signals: Signals, roles: Roles = ROLES
) -> Iterator[RunActors]:
    """Starts (or joins) Ray and all actors, loads the models, opens the rings, and yields the actors.

    They are ready for step 1, or to load a checkpoint. Prints what it does.

    If the block succeeds, a timeline is written if requested, and student and teachers leave their process groups.
    After a DistillError the actors' output is kept in `logs`, with their stacks if its exit code is 1. In any case the
    actors are then killed, and Ray is ended or left.

    Args:
        total_steps: of the whole run.
        timer: of the driver; the student group times its waits with it.
        signals: polled during every wait, which they may end.

    Raises:
        ConfigError: the resources are not available, or a transport that was requested by name does not work.
        WorkerError: an actor failed to start.
    """
    with _session(job, total_steps, signals, roles, captures=False) as (job, actors):
        assert actors.student is not None
        config, calls, readers, before = job.config, actors.calls, actors.student, actors.restarts
        rings = ring_plan(config)
        connector = Connector(config, actors.teachers, readers, rings, calls)
        actors.then(connector.connect)
        pipeline = Pipeline(_pool(job, actors), actors.teachers, job.plan, rings)
        names = set(readers.names)
        recovery = TeacherRecovery(config, actors.teachers, names, calls, connector, pipeline, before["teacher"])
        student = StudentGroup(config, calls, pipeline, recovery, readers, timer)
        restarts = StudentRecovery(config, readers, calls, connector, pipeline, recovery, before["student"])
        yield RunActors(pipeline, student, restarts, actors.evaluator, calls)
        if job.config.observe.timeline:
            ids = {calls.processes[name].worker_id: name for group in actors.groups for name in group.names}
            write_timeline(job.paths.logs / "timeline.json", ids)
        # Readers stop first, because what they have opened belongs to the teachers. Aligners have no process
        # group to leave, and evaluators may be in the middle of an evaluation.
        stop([readers, *(group for _, group in actors.teachers)])


@contextmanager
def start_capture(job: Job, signals: Signals) -> Iterator[CaptureActors]:
    """Starts (or joins) Ray, the aligners and the teachers of a capture, and yields them; otherwise as `start_actors`.

    Raises:
        DistillError: as for `start_actors`.
    """
    with _session(job, 0, signals, ROLES, captures=True) as (job, actors):
        calls, before = actors.calls, actors.restarts["teacher"]
        calls.after_death = "run the same command again: what was written is kept"
        pipeline = Pipeline(_pool(job, actors), actors.teachers, job.plan, ring_plan(job.config), "store_targets")
        recovery = TeacherRecovery(job.config, actors.teachers, set(), calls, None, pipeline, before)
        calls.interrupted = signals.raise_if_interrupted  # from now on a stop can wait for the batch
        yield CaptureActors(pipeline, CaptureGroup(job.config, calls, pipeline, recovery, actors.teachers))
        stop([group for _, group in actors.teachers])


@contextmanager
def _session(
    job: Job, total_steps: int, signals: Signals, roles: Roles, *, captures: bool
) -> Iterator[tuple[Job, Starting]]:
    config = job.config
    placed = config.without_student() if captures else config
    local_aligners = aligner_workers(placed, gpus=visible_gpus(), cpus=len(os.sched_getaffinity(0)))
    elsewhere = config.transport in ("shared_memory", "cuda_ipc")  # the targets certainly take another transport
    target_bytes = 0 if elsewhere else stored_targets(config, replace(job.facts, gpus=visible_gpus()))
    with ray_session(
        config.ray,
        num_cpus=sum(compute_groups(placed)) + local_aligners + evaluators(placed),
        target_bytes=target_bytes,
        started=signals.install_again,
        interrupted=signals.raise_if_stopping,
    ) as hosts:
        gpus, cpus = capacity()
        student = job.facts.student
        trained = {} if student is None or student.adapters is None else {"trained": str(student.adapters)}
        write_json(job.paths.environment, environment() | {"nodes": [describe(node) for node in nodes()]} | trained)
        num_aligners, here = local_aligners, this_node()
        if config.ray.address is not None:
            num_aligners = aligner_workers(placed, gpus=gpus, cpus=cpus)
        job = replace(job, plan=job.plan.for_device(on_gpu=gpus > 0))
        make_stores(job, on_gpu=gpus > 0, captures=captures)
        calls = Calls(signals.raise_if_stopping, hosts=hosts, report_after_s=config.faults.report_after_s)
        calls.monitor = ProcessMonitor(config.faults, calls.processes, job.paths.logs)

        def make_plan() -> PlacementPlan:
            needs = _memory_needs(job, int(gpus))
            return placement.place_actors(placed, num_aligners, gpus=gpus, nodes=nodes(), needs=needs)

        with _reserved(job, make_plan, signals, hosts) as places:
            actors = _create(job, total_steps, num_aligners, places, calls, placed, roles)
            say(f"starting  {', '.join(name for group in actors.groups for name in group.names)}")
            try:
                actors.load()
                yield job, actors
            except DistillError as error:
                if error.exit_code == 1 and not hosts.lost:  # or the answers would be waited for
                    calls.monitor.dump_stacks()
                keep_logs((entry for group in actors.groups for entry in group.processes), job.paths.logs)
                raise
            finally:
                processes = [process for group in actors.groups for _, process in group.processes]
                for group in actors.groups:
                    group.kill()
                calls.monitor.close()
                _remove_torch_counters(process.pid for process in processes if process.node_id == here)


@contextmanager
def _reserved(job: Job, make_plan: Callable[[], PlacementPlan], signals: Signals, hosts: Hosts) -> Iterator[Reserved]:
    """Reserves the places of all actors while the block runs; before that, a file tells the place in the queue, if there is one."""
    file = job.paths.queue
    places = placement.reserve(
        make_plan,
        job.config.ray,
        job.config.run.name,
        interrupted=signals.raise_if_stopping,
        waiting=lambda others: placement.tell(others, file),
        lost=lambda: hosts.lost,
    )
    try:
        with places as reserved:
            file.unlink(missing_ok=True)
            yield reserved
    finally:
        file.unlink(missing_ok=True)


def _remove_torch_counters(pids: Iterable[int]) -> None:
    """Deletes torch's counters of shared GPU buffers, which killed processes of this node leave in /dev/shm."""
    for pid in pids:
        for file in Path("/dev/shm").glob(f"torch_{pid}_*"):
            with suppress(OSError):  # a file of another user
                file.unlink()


def _create(
    job: Job, total_steps: int, num_aligners: int, places: Reserved, calls: Calls, placed: Config, roles: Roles
) -> Starting:
    config = job.config
    threads = threads_per_worker(sum(compute_groups(placed)))
    student_names, teacher_names, aligner_names = placement.actor_names(placed, num_aligners)

    reserved = *places, calls
    student = None
    if student_names:
        shape = None if job.facts.student is None else Shape.of(job.facts.student)
        arguments = config, total_steps, job.cross_tokenizer_specs, job.facts.vocabulary_size, threads, shape
        student = roles.group(roles.student, student_names, *reserved, *arguments)
    teachers = []
    for teacher, known in job.facts.by_teacher(config):
        # A rank without a GPU cannot see what the others have.
        sent = replace(teacher, wire_dtype=teacher.sent_dtype(on_gpu=job.plan.on_gpu))
        settings = config, sent, known.vocabulary_size, threads, job.plan.on_gpu, token_of(teacher)
        teachers.append((teacher, roles.group(roles.teacher, teacher_names[teacher.name], *reserved, *settings)))
    aligners = WorkerGroup(AlignerWorker, aligner_names, *reserved, *_aligner_arguments(job))
    evaluator = None
    if ranks := evaluators(config):
        evaluation = ranks, threads, config.evaluate.timeout_s, config.run.name
        evaluator = WorkerGroup(EvalWorker, placement.evaluator_names(EVALUATOR, ranks), *reserved, *evaluation)
    return Starting(config, calls, student, teachers, aligners, evaluator)


def _aligner_arguments(job: Job) -> tuple[Any, ...]:
    other_tokenizer = tuple(spec is not None for spec in job.cross_tokenizer_specs)
    return job.config, job.opened.train.kind, job.plan, other_tokenizer


def _pool(job: Job, actors: Starting) -> AlignerPool:
    local = None
    if not actors.aligners.actors:
        local = AlignerWorker(0, *_aligner_arguments(job))
        local.start()
    return AlignerPool(
        actors.aligners,
        actors.calls,
        job.config,
        local=local,
        num_ranks=sum(sharding.dp for sharding in (job.plan.student, *job.plan.teachers)),
        bad_rows=BadRows(job.paths.bad_rows, job.config.aligner.max_bad_rows),
        restarts=actors.restarts["aligner"],
    )


def threads_per_worker(num_compute_actors: int) -> int:
    """Torch threads of each student and teacher rank: the machine's cores, divided evenly; at most those of THREADS.

    Raises:
        ConfigError: THREADS is set, but not to a number of threads.
    """
    share = max(1, len(os.sched_getaffinity(0)) // num_compute_actors)
    limit = os.environ.get(THREADS, "").strip()
    if not limit:
        return share
    if not (limit.isdecimal() and int(limit)):
        raise ConfigError(THREADS, "must be a number of threads, 1 or more", limit, "correct or unset this variable")
    return min(share, int(limit))


def _memory_needs(job: Job, gpus: int) -> dict[str, float] | None:
    """Estimated bytes of GPU memory of each rank, by name; None if nothing could share a GPU with them."""
    engines = any(teacher.origin.engine for teacher in job.config.teachers)
    if not (gpus and (job.config.evaluate.suites or engines)):
        return None
    return {worker.worker: float(worker.total) for worker in sizes(job.config, replace(job.facts, gpus=gpus)).memory}
