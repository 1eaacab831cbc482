"""Checks what this machine offers: packages of extras, GPUs, kernels and disk space."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from distill_rl.config.facts import Facts, gpus_per_rank, running_teachers, runs_model
from distill_rl.config.layout import (
    evaluator_problem,
    gpu_groups,
    gpus_of_ranks,
    layout_in_words,
    shared_by_engines,
    suites_every,
)
from distill_rl.config.measured import is_suite_score
from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import problem, problems_of
from distill_rl.models.attention.choice import installed
from distill_rl.models.vllm.engine import cpu_head_sizes
from distill_rl.preflight.models.opened import Opened
from distill_rl.system.environment import install_extra
from distill_rl.system.files import size_text
from distill_rl.system.processes import call_in_child
from distill_rl.transport.choose import expected

_VLLM_DEADLINE_S = 600.0
"""For a process that imports vllm: ten seconds on an idle machine, far longer on a busy one or from a cold disk."""


def extra_problems(config: Config) -> Iterator[str]:
    """Yields settings that need a package of an extra that is not installed on this machine, one line each."""
    needs_dashboard = config.ray.dashboard and config.ray.address is None
    extras = {
        "student.quantization": (
            config.student.quantization is not None,
            str(config.student.quantization),
            "torchao",
            "quantization",
        ),
        "student.kernels": (config.student.kernels == "liger", "liger", "liger_kernel", "liger"),
        "loss.backend": (config.loss.backend == "triton", "triton", "triton", "triton"),
        "observe.wandb": (config.observe.wandb, "true", "wandb", "wandb"),
        "observe.mlflow": (config.observe.mlflow, "true", "mlflow", "mlflow"),
        "ray.dashboard": (needs_dashboard, "true", "aiohttp_cors", "dashboard"),
        "evaluate.backend": (config.evaluate.suites and config.evaluate.backend == "vllm", "vllm", "vllm", "vllm"),
    }
    extras |= {
        f"teachers.{i}.backend": (teacher.backend == "vllm", "vllm", "vllm", "vllm")
        for i, teacher in enumerate(running_teachers(config))
    }
    extras |= {
        f"teachers.{i}.quantization": (
            runs_model(teacher) and teacher.quantization not in (None, AS_STORED),
            str(teacher.quantization),
            "torchao",
            "quantization",
        )
        for i, teacher in enumerate(running_teachers(config))
    }
    for key, (wanted, value, package, extra) in extras.items():
        if wanted and not installed(package):
            rule, remedy = f"needs {package}, which is not installed", install_extra(extra)
            yield problem(key, rule, value, remedy)


def kernel_problems(config: Config, student: Opened, gpus: int) -> Iterator[str]:
    """Yields what `student.kernels: liger` lacks, one line each: a GPU, and a model that liger supports.

    Whether its package is installed is not looked at here (`extra_problems`).

    Nothing for other kernels. GPUs are not required here if the run joins a cluster.

    Args:
        gpus: number visible on this machine.
    """
    from distill_rl.models.kernels import liger_problems

    if config.student.kernels != "liger":
        return
    remedy = "set student.kernels=torch"
    if not gpus and config.ray.address is None:
        yield problem("student.kernels", "liger needs a GPU; none is visible", None, remedy)
    if student.config is not None:
        yield from (problem("student.kernels", rule, None, remedy) for rule in liger_problems(student.config))


def router_problems(config: Config, student: Opened) -> Iterator[str]:
    """Yields at most one problem: `loss.router_weight` is set for a student without routers."""
    if config.loss.router_weight and student.facts is not None and not student.facts.num_experts:
        rule = f"needs a student that is a mixture of experts; {student.facts.family} is not"
        yield problem("loss.router_weight", rule, f"{config.loss.router_weight:g}", "set it to 0")


def backend_problems(config: Config, teachers: Sequence[Opened], gpus: int) -> Iterator[str]:
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
        assert isinstance(teacher.settings, TeacherConfig)
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


def head_problems(config: Config, teachers: Sequence[Opened], gpus: int) -> Iterator[str]:
    """Yields teachers whose heads vLLM's attention does not support on CPUs, one line each.

    Only vLLM knows the sizes, and importing it takes seconds, in a process of its own. Nothing on GPUs, for a run that
    joins a cluster, and without vllm, which `extra_problems` reports.

    Args:
        teachers: the running ones.
        gpus: number visible on this machine.
    """
    from distill_rl.models.families import head_size

    heads = {opened.key: head_size(opened.config) for opened in teachers if opened.in_vllm and opened.config}
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
    if evaluator := evaluator_problem(config, gpus):
        yield evaluator
    running = running_teachers(config)
    groups = [("student", config.student.parallel)]
    groups += [(f"teachers.{i}", t.parallel) for i, t in enumerate(running) if gpus_per_rank(t)]
    needed = gpu_groups(config)
    remedy = "lower dp, sp or tp, or join a cluster with ray.address"
    if config.ray.placement == "disaggregated":
        if sum(needed) > gpus:
            rule = f"disaggregated asks {' + '.join(map(str, needed))} = {sum(needed)} GPUs, {gpus} are visible"
            yield problem("ray.placement", rule, None, f"set ray.placement=colocated, {remedy}")
        return
    for (key, parallel), count in zip(groups, needed):
        if count > gpus:
            rule = f"{layout_in_words(parallel)} = {count} GPUs are asked, {gpus} are visible"
            yield problem(f"{key}.parallel", rule, None, remedy)
    used = gpus_of_ranks(config)
    if max(needed) <= gpus < used:  # engines of vLLM on several GPUs, which they do not share
        rule = f"{used} GPUs are asked, {gpus} are visible: an engine of vLLM with parallel.tp above 1 shares none"
        yield problem("teachers", rule, None, remedy)
    share = shared_by_engines(config)
    if share >= 1 and config.student.parallel.dp:
        rule = "engines of vLLM that share GPUs with the student must leave it some of them"
        yield problem("teachers[].gpu_share", rule, f"{share:g} together", "lower it")


def _cuda_aligner_problems(gpus: int) -> Iterator[str]:
    """Yields what the aligners' CUDA kernel lacks on this machine, at most one line.

    Numba's simulator, which replaces a GPU in tests, needs nothing.

    Args:
        gpus: number visible on this machine.
    """
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
    copies = 2 if config.evaluate.suites and suites_every(config) else 0  # one being evaluated, one in the queue
    if config.checkpoint.keep_best and is_suite_score(config.checkpoint.best_by):
        count += copies  # kept until their scores are known
    needed = count * 12 * facts.student.trained + (1 + copies) * facts.student.bytes_on_disk
    usage = shutil.disk_usage(existing)
    # A pseudo file system has size 0; that it cannot be written to is reported elsewhere.
    if usage.total and needed > usage.free:
        exports = f"the export and {copies} copies to evaluate" if copies else "the export"
        rule = f"{count} checkpoints and {exports} need about {size_text(needed)}, and {size_text(usage.free)} are free"
        yield problem("run.dir", rule, config.run.dir, "free some space, lower checkpoint.keep_last, or change run.dir")
