"""Which actors a run has, and how many GPUs they use: the counts that follow from a configuration, before anything is placed."""

from __future__ import annotations

from distill_rl.config.schema import Config, ParallelConfig, TeacherConfig
from distill_rl.errors import problem


def compute_groups(config: Config) -> list[int]:
    """Number of ranks of the student, then of each running teacher."""
    student = config.student.parallel
    return [student.dp * student.ranks_per_row, *(teacher.ranks for teacher in config.running_teachers)]


def gpu_groups(config: Config) -> list[int]:
    """Number of GPUs of the student, then of each running teacher that uses any where there are any."""
    teachers = [teacher for teacher in config.running_teachers if teacher.gpus_per_rank]
    return [compute_groups(config)[0], *(teacher.ranks * teacher.gpus_per_rank for teacher in teachers)]


def shares_gpus(config: Config, teacher: TeacherConfig) -> bool:
    """Whether the ranks of a teacher share GPUs with those of others. A rank with several GPUs has them for itself."""
    return config.ray.placement == "colocated" and teacher.gpus_per_rank == 1


def shared_by_engines(config: Config) -> float:
    """Fraction that engines take together of a GPU that they share with other ranks, unless these are too few."""
    sharing = (teacher for teacher in config.running_teachers if teacher.origin.engine and shares_gpus(config, teacher))
    return sum(teacher.origin.share_of_gpu(shared=True) for teacher in sharing)


def gpus_of_ranks(config: Config) -> int:
    """Number of GPUs that student and teachers use: colocated, one for the i-th rank of all that share GPUs."""
    sharing = [teacher.ranks for teacher in config.running_teachers if shares_gpus(config, teacher)]
    alone = [teacher for teacher in config.running_teachers if not shares_gpus(config, teacher)]
    own = sum(teacher.ranks * teacher.gpus_per_rank for teacher in alone)
    return max([compute_groups(config)[0], *sharing]) + own


def gpus_of_run(config: Config) -> int:
    """Number of GPUs that the run uses. The evaluator shares those of the ranks, but an engine's tensor parallelism cannot."""
    ranks, evaluate = gpus_of_ranks(config), config.evaluate
    tp = evaluate.parallel.tp if evaluate.suites else 1
    if tp == 1:
        return ranks
    return ranks + tp if evaluate.engine else max(ranks, tp)


def evaluator_ranks(backend: str, tp: int) -> int:
    """Number of actors that hold one copy of an evaluated model: an engine splits it in processes of its own."""
    return tp if backend == "hf" else 1


def evaluators(config: Config) -> int:
    """Number of actors of the run's evaluator; 0 without suites."""
    evaluate = config.evaluate
    return evaluator_ranks(evaluate.backend, evaluate.parallel.tp) if evaluate.suites else 0


def evaluator_problem(config: Config, gpus: float) -> str | None:
    """What is wrong with the GPUs of the evaluator's tensor parallelism, as one line; None if nothing is.

    Args:
        gpus: in the cluster or on this machine; 0: everything runs on CPUs.
    """
    evaluate, used = config.evaluate, gpus_of_ranks(config)
    tp = evaluate.parallel.tp
    if not evaluate.suites or tp == 1 or not gpus:
        return None
    key, remedy = "evaluate.parallel.tp", "lower it"
    if gpus < tp:
        return problem(key, f"{tp} GPUs are asked, there are {gpus:g}", None, remedy)
    if evaluate.engine and gpus < gpus_of_run(config):
        rule = f"{evaluate.backend} needs {tp} free GPUs; student and teachers use {used} of {gpus:g}"
        return problem(key, rule, None, f"{remedy}, or set evaluate.backend=hf")
    return None


def aligner_workers(config: Config, *, gpus: float, cpus: float) -> int:
    """Number of aligner actors on a machine or cluster of this size.

    As configured, or half the number of GPUs that the run uses, at most the cores that its ranks leave free, and at
    least 1.
    """
    if config.aligner.workers is not None:
        return config.aligner.workers
    ranks = compute_groups(config)
    return int(max(1, min(min(max(ranks), gpus) // 2, cpus - sum(ranks))))


def world(config: Config, gpus: int, cpus: int) -> dict[str, str]:
    """Role → its processes in words (`dp 2 x tp 1 = 2 processes`), to print.

    Roles are the student, every running teacher by name, `aligner` and, with suites, `evaluator`.

    Args:
        gpus, cpus: size of this machine; ignored if the run joins a cluster, whose size is not known yet.
    """
    roles = {"student": config.student.parallel}
    roles |= {teacher.name: teacher.parallel for teacher in config.running_teachers}
    found = {}
    if config.ray.address is not None:  # the size of a cluster is not known before it is joined
        gpus = cpus = 10**6
    aligners = aligner_workers(config, gpus=gpus, cpus=cpus)
    for name, parallel in roles.items():
        found[name] = f"{layout_in_words(parallel)} = {_processes(parallel.dp * parallel.ranks_per_row)}"
        if parallel.replicas > 1:
            sharded = parallel.dp // parallel.replicas * parallel.ranks_per_row
            found[name] += f", {parallel.replicas} replicas over {sharded} each"
    for teacher in config.running_teachers:
        if text := teacher.origin.processes(_processes(teacher.parallel.dp)):
            found[teacher.name] = text
        elif teacher.origin.engine:
            found[teacher.name] = _engines(config, teacher, gpus)
    reason = "half the GPUs, at least 1" if config.ray.address is None else "half the GPUs, where the cores suffice"
    if config.aligner.workers is not None:
        reason = "as configured"
    found["aligner"] = f"{_processes(aligners)} ({reason})" if aligners else "none: the driver aligns"
    if config.evaluate.suites:
        every = suites_every(config)
        when = f"every {every} steps on a copy of the student, and at the end" if every else "at the end"
        tp = config.evaluate.parallel.tp
        processes = _processes(1) if tp == 1 else f"tp {tp} = {_processes(tp)}"
        found["evaluator"] = f"{processes}: {', '.join(config.evaluate.suites)} {when}"
    return found


def layout_in_words(parallel: ParallelConfig) -> str:
    """The sizes of a layout, such as dp 2 x tp 1; sp only where rows are divided."""
    return f"dp {parallel.dp} x {f'sp {parallel.sp} x ' if parallel.sp > 1 else ''}tp {parallel.tp}"


def _engines(config: Config, teacher: TeacherConfig, gpus: int) -> str:
    """The engines of a teacher, in words."""
    parallel = teacher.parallel
    text = f"dp {parallel.dp} = {parallel.dp} {teacher.origin.engine} engine{'s' if parallel.dp > 1 else ''}"
    if not gpus:
        return text if parallel.tp == 1 else f"{text}, each of {_processes(parallel.tp)}"
    share = teacher.origin.share_of_gpu(shared=shares_gpus(config, teacher))
    where = "a GPU" if parallel.tp == 1 else f"{parallel.tp} GPUs"
    return f"{text}, each with {'' if share == 1 else f'{share:g} of '}{where}"


def _processes(count: int) -> str:
    return f"{count} process" if count == 1 else f"{count} processes"


def suites_every(config: Config) -> int:
    """Optimizer steps between evaluations on the suites; 0: only at the end of the run."""
    evaluate = config.evaluate
    return evaluate.every if evaluate.suites_every is None else evaluate.suites_every
