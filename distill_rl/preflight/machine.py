"""Checks what this machine offers: packages of extras, GPUs, kernels, disk space, memory and /dev/shm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from distill_rl.config import layout
from distill_rl.config.derive import all_rings, sizes, stored_targets
from distill_rl.config.facts import Facts
from distill_rl.config.measured import is_suite_score
from distill_rl.config.memory import WorkerMemory
from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError, problem, problems_of
from distill_rl.models.attention import installed
from distill_rl.models.families import head_size, liger_problems
from distill_rl.models.vllm import cpu_head_sizes
from distill_rl.run.opened import OpenedModel, OpenedTeacher, RunFindings
from distill_rl.system.environment import install_extra
from distill_rl.system.files import size_text
from distill_rl.system.memory import ENLARGE_SHM, SPARE_OBJECT_STORE, object_store_room, object_store_size
from distill_rl.system.processes import call_in_child
from distill_rl.transport.choose import expected
from distill_rl.transport.segment import memfd_usable

NEAR = 0.9
"""From this share of the memory on there is a note: the estimate may be too low, and others use memory too."""

_VLLM_DEADLINE_S = 600.0
"""For a process that imports vllm: ten seconds on an idle machine, far longer on a busy one or from a cold disk."""


def extra_problems(config: Config) -> Iterator[str]:
    """Yields settings that need a package of an extra that is not installed on this machine, one line each."""
    student, observe, evaluate, backend = config.student, config.observe, config.evaluate, config.evaluate.backend
    needed: list[tuple[str, Any, str, str]] = [  # (setting, its value if it needs one, package, extra)
        ("student.quantization", student.quantization, "torchao", "quantization"),
        ("student.kernels", student.kernels == "liger" and student.kernels, "liger_kernel", "liger"),
        ("loss.backend", config.loss.backend == "triton" and "triton", "triton", "triton"),
        ("observe.wandb", observe.wandb and "true", "wandb", "wandb"),
        ("observe.mlflow", observe.mlflow and "true", "mlflow", "mlflow"),
        ("ray.dashboard", config.ray.dashboard and config.ray.address is None and "true", "aiohttp_cors", "dashboard"),
        ("evaluate.backend", evaluate.suites and evaluate.engine and backend, backend, backend),
    ]
    for i, teacher in enumerate(config.running_teachers):
        package, runs = teacher.origin.package, teacher.origin.runs_model
        made_here = runs and teacher.quantization != AS_STORED and teacher.quantization
        needed += [
            (f"teachers.{i}.backend", package, package, package),
            (f"teachers.{i}.quantization", made_here, "torchao", "quantization"),
        ]
    for key, value, package, extra in needed:
        if value and not installed(package):
            yield problem(key, f"needs {package}, which is not installed", value, install_extra(extra))


def kernel_problems(config: Config, student: OpenedModel, gpus: int) -> Iterator[str]:
    """Yields what `student.kernels: liger` lacks, one line each: a GPU, and a model that liger supports.

    Whether its package is installed is not looked at here (`extra_problems`).

    Nothing for other kernels. GPUs are not required here if the run joins a cluster.

    Args:
        gpus: number visible on this machine.
    """
    if config.student.kernels != "liger":
        return
    remedy = "set student.kernels=torch"
    if not gpus and config.ray.address is None:
        yield problem("student.kernels", "liger needs a GPU; none is visible", None, remedy)
    if student.config is not None:
        yield from (problem("student.kernels", rule, None, remedy) for rule in liger_problems(student.config))


def router_problems(config: Config, student: OpenedModel) -> Iterator[str]:
    """Yields at most one problem: `loss.router_weight` is set for a student without routers."""
    if config.loss.router_weight and student.facts is not None and not student.facts.num_experts:
        rule = f"needs a student that is a mixture of experts; {student.facts.family} is not"
        yield problem("loss.router_weight", rule, f"{config.loss.router_weight:g}", "set it to 0")


def backend_problems(config: Config, teachers: Sequence[OpenedTeacher], gpus: int) -> Iterator[str]:
    """Yields what `loss.backend: triton` lacks, one line each: a GPU, and a kernel for what is compared.

    Whether its package is installed is not looked at here (`extra_problems`).

    Nothing for other backends. GPUs are not required here if the run joins a cluster, or if Triton interprets kernels.

    Args:
        teachers: the running ones.
        gpus: number visible on this machine.
    """
    if config.loss.backend != "triton":
        return
    from distill_rl.losses.divergence import resolve
    from distill_rl.losses.kernels import CHUNK_METHODS, interpreted

    if not gpus and config.ray.address is None and not interpreted():
        yield problem("loss.backend", "triton needs a GPU; none is visible", None, "set loss.backend=auto")
    for teacher in teachers:
        method, export = teacher.cross_tokenizer_loss, teacher.settings.export
        rule = ""
        if method is not None and method not in CHUNK_METHODS:
            rule = f"triton has no kernel for {method}, the loss of {teacher.name}"
        elif export == "sampled":
            rule = f"triton has no kernel for the draws of {teacher.name} (export: sampled)"
        elif method is None and export != "topk" and not resolve(config.loss.divergence, config.loss.beta).leads:
            what = "hidden states" if export == "hidden" else export
            rule = f"triton has no kernel for {config.loss.divergence} against the {what} of {teacher.name}"
        if rule:
            yield problem("loss.backend", rule, None, "set loss.backend=auto")


def head_problems(config: Config, teachers: Sequence[OpenedModel], gpus: int) -> Iterator[str]:
    """Yields teachers whose heads vLLM's attention does not support on CPUs, one line each.

    Only vLLM knows the sizes, and importing it takes seconds, in a process of its own. Nothing on GPUs, for a run that
    joins a cluster, and without vllm, which `extra_problems` reports.

    Args:
        teachers: the running ones.
        gpus: number visible on this machine.
    """
    in_engines = (opened for opened in teachers if opened.settings.origin.engine and opened.config)
    heads = {opened.key: head_size(opened.config) for opened in in_engines}
    if not heads or gpus or config.ray.address is not None or not installed("vllm"):
        return
    sizes = call_in_child("teachers[].backend", _head_sizes, deadline_s=_VLLM_DEADLINE_S)
    for key, size in heads.items():
        if size not in sizes:
            rule = f"vllm on CPUs needs attention heads of {', '.join(map(str, sizes))}"
            yield problem(f"{key}.backend", rule, size, f"set {key}.backend=hf")


def _head_sizes() -> list[int]:
    """`cpu_head_sizes`, without what vllm logs when it is imported."""
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere), redirect_stdout(nowhere):  # noqa: PTH123
        return cpu_head_sizes()


def gpu_problems(config: Config, gpus: int) -> Iterator[str]:
    """Yields problems with the GPUs, one line each: too few for the layout, or not what aligners or transport need.

    Colocated workers share GPUs rank by rank, so the largest group determines how many are needed. Disaggregated
    workers need one each. On CPUs any number of processes may share the cores. A cluster checks this at placement, so
    nothing is reported if the run joins one.

    Args:
        gpus: number visible on this machine.
    """
    if config.ray.address is not None:
        return
    if config.aligner.dp.backend == "cuda":
        yield from _cuda_aligner_problems(gpus)
    yield from problems_of(lambda: expected(config.transport, gpus=gpus))
    if not gpus:
        return
    if evaluator := layout.evaluator_problem(config, gpus):
        yield evaluator
    running = config.running_teachers
    groups = [("student", config.student.parallel)]
    groups += [(f"teachers.{i}", t.parallel) for i, t in enumerate(running) if t.gpus_per_rank]
    needed = layout.gpu_groups(config)
    remedy = "lower dp, sp or tp, or join a cluster with ray.address"
    if config.ray.placement == "disaggregated":
        if sum(needed) > gpus:
            rule = f"disaggregated asks {' + '.join(map(str, needed))} = {sum(needed)} GPUs, {gpus} are visible"
            yield problem("ray.placement", rule, None, f"set ray.placement=colocated, {remedy}")
        return
    for (key, parallel), count in zip(groups, needed):
        if count > gpus:
            rule = f"{layout.layout_in_words(parallel)} = {count} GPUs are asked, {gpus} are visible"
            yield problem(f"{key}.parallel", rule, None, remedy)
    used = layout.gpus_of_ranks(config)
    if max(needed) <= gpus < used:  # engines of vLLM on several GPUs, which they do not share
        rule = f"{used} GPUs are asked, {gpus} are visible: an engine of vLLM with parallel.tp above 1 shares none"
        yield problem("teachers", rule, None, remedy)
    share = layout.shared_by_engines(config)
    if share >= 1 and config.student.parallel.dp:
        rule = "engines of vLLM that share GPUs with the student must leave it some of them"
        yield problem("teachers[].vllm.gpu_share", rule, f"{share:g} together", "lower it")


def _cuda_aligner_problems(gpus: int) -> Iterator[str]:
    from distill_rl.align.dp.windows import missing_for_cuda

    missing = missing_for_cuda()
    if missing and not gpus:
        yield problem("aligner.dp.backend", "needs a GPU; none is visible", "cuda", "set aligner.dp.backend=numba")
    elif missing:
        yield problem("aligner.dp.backend", missing.rule, "cuda", missing.remedy)


def space_problems(config: Config, facts: Facts) -> Iterator[str]:
    """Yields at most one problem: too little disk space for the run's checkpoints, export and copies to evaluate.

    The checkpoints are those kept and one being written, or two if none are saved during training. Each needs 12 bytes
    per parameter: master weights and two optimizer moments in fp32. Nothing is reported if the student's size or the
    disk is not known.
    """
    if facts.student is None:
        return
    run = Path(config.run.dir).expanduser().absolute()
    existing = next((folder for folder in (run, *run.parents) if folder.is_dir()), None)
    if existing is None:
        return
    count = config.checkpoint.keep_last + config.checkpoint.keep_best + 1 if config.checkpoint.every else 2
    copies = 2 if config.evaluate.suites and layout.suites_every(config) else 0  # one being evaluated, one in the queue
    if config.checkpoint.keep_best and is_suite_score(config.checkpoint.best_by):
        count += copies  # kept until their scores are known
    needed = count * 12 * facts.student.trained + (1 + copies) * facts.student.bytes_on_disk
    usage = shutil.disk_usage(existing)
    # A pseudo file system has size 0; that it cannot be written to is reported elsewhere.
    if usage.total and needed > usage.free:
        exports = f"the export and {copies} copies to evaluate" if copies else "the export"
        rule = f"{count} checkpoints and {exports} need about {size_text(needed)}, and {size_text(usage.free)} are free"
        yield problem("run.dir", rule, config.run.dir, "free some space, lower checkpoint.keep_last, or change run.dir")


def compare_memory(
    config: Config, facts: Facts, findings: RunFindings, *, host: int, gpus: Sequence[int], valid: bool = True
) -> None:
    """Adds to the findings what the workers cannot have on this machine, and what comes near.

    Only what is clearly impossible is a problem; what comes near is a note. Nothing is compared for a run that joins a
    cluster.

    Args:
        host: bytes of this machine, or of the control group that limits this process.
        gpus: bytes of every visible GPU; empty if not known.
        valid: whether the settings are; otherwise only whether Ray can start is looked at.
    """
    if config.ray.address is not None:
        return
    room = findings.attempt("/dev/shm", object_store_room)
    if not valid:
        return
    if room is not None:
        _compare_shm(config, facts, findings, room)
    if facts.gpus:
        _compare_gpus(config, facts, findings, gpus)
    else:
        _compare_host(sizes(config, facts).memory, findings, host)


def _compare_host(workers: Sequence[WorkerMemory], findings: RunFindings, host: int) -> None:
    """Compares all workers together with the memory of a machine without GPUs."""
    total = sum(worker.count * worker.total for worker in workers)
    if total <= NEAR * host:
        return
    parts = ", ".join(f"{worker.count} x {size_text(worker.total)} {worker.worker}" for worker in workers)
    rule = f"the workers need about {size_text(total)} of memory ({parts}), and this machine has {size_text(host)}"
    remedy = "lower train.micro_batch_size or data.max_length, take smaller models, or join a cluster with ray.address"
    # `least` is the estimate divided by the most by which it was too high, without what processes share.
    if sum(worker.least for worker in workers) > host:
        findings.problems.append(problem("memory", rule, None, remedy))
    else:
        findings.notes.append(problem("memory", rule, None, f"if that is not enough, {remedy}"))


def _compare_gpus(config: Config, facts: Facts, findings: RunFindings, gpus: Sequence[int]) -> None:
    """Compares what shares one GPU with the GPUs' memory, of which what engines of vLLM take does not count."""
    if not gpus:
        return
    engines = layout.shared_by_engines(config)
    gpus = [int(size * max(0.0, 1 - engines)) for size in gpus]
    workers = sizes(config, facts).memory
    # Each worker and, colocated, the first ranks of student and teachers together.
    sharing: list[tuple[WorkerMemory, ...]] = [(worker,) for worker in workers]
    ranks = tuple(worker for worker in workers if worker.worker != "evaluator")
    if config.ray.placement == "colocated" and len(ranks) > 1:
        sharing.append(ranks)
    refused: set[str] = set()
    for group in sharing:
        names = " and ".join(worker.worker for worker in group)
        total = sum(worker.total for worker in group)
        # A problem is compared with the largest GPU, a note with the smallest, because Ray decides who gets which.
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


def _compare_shm(config: Config, facts: Facts, findings: RunFindings, room: int) -> None:
    """Compares the targets in flight with the free bytes of /dev/shm: the object store's, and rings where memfd cannot be used."""
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
