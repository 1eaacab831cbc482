"""Compares the estimated memory of a run's workers with this machine's: its memory, its GPUs and /dev/shm.

Only what is clearly impossible is a problem; what comes near is a note. What joins a cluster is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from distill_rl.config.derive import all_rings, sizes, stored_targets
from distill_rl.config.facts import Facts
from distill_rl.config.layout import shared_by_engines
from distill_rl.config.memory.parts import WorkerMemory
from distill_rl.config.rules.validate import problems as rules
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError, problem
from distill_rl.preflight.models.opened import Findings
from distill_rl.system.files import size_text
from distill_rl.system.memory import ENLARGE_SHM, SPARE_OBJECT_STORE, object_store_room, object_store_size
from distill_rl.transport.choose import expected
from distill_rl.transport.segment import memfd_usable

NEAR = 0.9
"""From this share of the memory on there is a note: the estimate may be too low, and others use memory too."""


def compare_memory(config: Config, facts: Facts, findings: Findings, *, host: int, gpus: Sequence[int]) -> None:
    """Adds to the findings what the workers cannot have on this machine, and what comes near.

    Nothing is compared for a run that joins a cluster. Without valid settings, only whether Ray can start is looked at.

    Args:
        host: bytes of this machine, or of the control group that limits this process.
        gpus: bytes of every visible GPU; empty if not known.
    """
    if config.ray.address is not None:
        return
    room = findings.attempt("/dev/shm", object_store_room)
    if list(rules(config)):
        return
    if room is not None:
        _compare_shm(config, facts, findings, room)
    if facts.gpus:
        _compare_gpus(config, facts, findings, gpus)
    else:
        _compare_host(sizes(config, facts).memory, findings, host)


def _compare_host(workers: Sequence[WorkerMemory], findings: Findings, host: int) -> None:
    """Compares all workers together with the memory of a machine without GPUs.

    It is a problem if they need more even if the estimate is divided by the most by which it was too high, and what
    processes share is left out.
    """
    total = sum(worker.count * worker.total for worker in workers)
    if total <= NEAR * host:
        return
    parts = ", ".join(f"{worker.count} x {size_text(worker.total)} {worker.worker}" for worker in workers)
    rule = f"the workers need about {size_text(total)} of memory ({parts}), and this machine has {size_text(host)}"
    remedy = "lower train.micro_batch_size or data.max_length, take smaller models, or join a cluster with ray.address"
    if sum(worker.least for worker in workers) > host:
        findings.problems.append(problem("memory", rule, None, remedy))
    else:
        findings.notes.append(problem("memory", rule, None, f"if that is not enough, {remedy}"))


def _compare_gpus(config: Config, facts: Facts, findings: Findings, gpus: Sequence[int]) -> None:
    """Compares what shares one GPU with the GPUs' memory.

    That is each worker and, colocated, the first ranks of student and teachers together. A problem is compared with the
    largest GPU, a note with the smallest, because Ray decides who gets which. What engines of vLLM take of shared GPUs
    does not count.
    """
    if not gpus:
        return
    engines = shared_by_engines(config)
    gpus = [int(size * max(0.0, 1 - engines)) for size in gpus]
    workers = sizes(config, facts).memory
    sharing: list[tuple[WorkerMemory, ...]] = [(worker,) for worker in workers]
    ranks = tuple(worker for worker in workers if worker.worker != "evaluator")
    if config.ray.placement == "colocated" and len(ranks) > 1:
        sharing.append(ranks)
    refused: set[str] = set()
    for group in sharing:
        names = " and ".join(worker.worker for worker in group)
        total = sum(worker.total for worker in group)
        impossible = sum(worker.least // worker.count for worker in group) > max(gpus)
        if not impossible and total <= NEAR * min(gpus):
            continue
        has = size_text(max(gpus) if impossible else min(gpus))
        has += " beside the teachers of vLLM" if engines else ""
        rule = f"{names} on one GPU need about {size_text(total)}, and it has {has}"
        if len(group) == 1:
            rule = f"a process of {names} needs about {size_text(total)} on its GPU, which has {has}"
        if impossible:
            if not refused & {worker.worker for worker in group}:  # that one alone is too large is said already
                findings.problems.append(problem("memory", rule, None, _GPU_REMEDY))
            refused |= {worker.worker for worker in group}
        else:
            findings.notes.append(problem("memory", rule, None, f"if that is not enough, {_GPU_REMEDY}"))


_GPU_REMEDY = (
    "raise parallel.tp, parallel.sp or student.parallel.dp, lower train.micro_batch_size or data.max_length, "
    "set student.activation_checkpointing=true or teachers[].quantization=int8, or train adapters only with student.lora={} (and student.quantization=int4)"
)


def _compare_shm(config: Config, facts: Facts, findings: Findings, room: int) -> None:
    """Compares the targets in flight with /dev/shm: those in Ray's object store, and rings where memfd cannot be used.

    Args:
        room: free bytes of /dev/shm.
    """
    remedy = f"{ENLARGE_SHM}, or lower prefetch.depth, loss.top_k or train.global_batch_size"
    try:
        transport = expected(config.transport, gpus=facts.gpus).name
    except ConfigError:  # reported with the GPUs
        return
    if transport == "object_store":
        targets = stored_targets(config, facts)
        _, spilled = findings.attempt("/tmp", lambda: object_store_size(targets, room)) or (0, 0)
        if spilled:
            what = f"targets of {size_text(targets)} in flight and {size_text(SPARE_OBJECT_STORE)} for batches"
            rule = f"{what} do not fit into the {size_text(room)} that are free: Ray may spill to disk, which is slow"
            findings.notes.append(problem("/dev/shm", rule, None, remedy))
    elif transport == "shared_memory" and not memfd_usable():
        rings = all_rings(config, facts)
        if rings > room:
            rule = f"the teachers' rings need {size_text(rings)} of it, because memfd cannot be used here"
            findings.problems.append(problem("/dev/shm", rule, f"{size_text(room)} free", remedy))
