"""Settings of a run on many GPUs that are predicted to cost speed, for `distill-rl check`."""

from __future__ import annotations

from dataclasses import replace

from distill_rl.config.facts import Facts, running_teachers
from distill_rl.config.schema import Config
from distill_rl.scaling.cluster import Cluster
from distill_rl.scaling.faults import goodput
from distill_rl.scaling.splits import Prediction, Split, predict, saving_seconds

LEAST_RANKS = 8
"""Fewer ranks meet so few faults that no setting matters."""
WORTH = 0.01
"""Share of the speed from which on a setting is suggested."""
_LONG_RUN = 10_000
"""Steps of a run whose length is not known."""


def suggestions(config: Config, facts: Facts) -> list[str]:
    """Lines with a setting and what it is predicted to gain; empty if nothing is worth it, or the prediction does not apply.

    It applies to a run on GPUs, of this machine or of a cluster that it joins, with one teacher in torch, without sequence
    parallelism, and with models whose sizes are known. H100s are assumed.
    """
    split = _split(config)
    if split is None or facts.student is None or not facts.teachers or facts.teachers[0].model is None:
        return []
    cluster = Cluster(split.student_gpus if split.shared else split.student_gpus + split.teacher_gpus)
    if cluster.gpus < LEAST_RANKS or not (facts.gpus or config.ray.address):
        return []
    found = predict(config, facts, cluster, split)
    lines = _interval(config, facts, found), _look_ahead(config, facts, cluster, found)
    return [line for line in lines if line]


def _split(config: Config) -> Split | None:
    """How the configuration divides the GPUs; None for what is not modelled."""
    teachers, student = running_teachers(config), config.student.parallel
    if len(teachers) != 1 or teachers[0].backend != "hf":
        return None
    teacher = teachers[0].parallel
    if student.sp > 1 or teacher.sp > 1:
        return None
    shared = config.ray.placement == "colocated"
    return Split(student.dp, student.tp, teacher.dp, teacher.tp, config.train.micro_batch_size, shared)


def _interval(config: Config, facts: Facts, found: Prediction) -> str:
    """Another interval between checkpoints; empty if that makes no difference."""
    assert facts.student is not None
    steps = config.train.steps or _LONG_RUN
    every = min(config.checkpoint.every or steps, steps)
    save = saving_seconds(facts.student, found.split)
    now = goodput(found.faults, step=found.step, save=save, every=every)
    if found.save_every >= steps or found.goodput < now + WORTH:
        return ""
    return (
        f"checkpoint.every={found.save_every}: at the rate of faults of Llama 3's cluster {found.goodput:.1%} of the time goes into "
        f"steps that count, {now:.1%} with {config.checkpoint.every}"
    )


def _look_ahead(config: Config, facts: Facts, cluster: Cluster, found: Prediction) -> str:
    """Look-ahead, if there is none and it makes steps shorter."""
    if config.prefetch.depth:
        return ""
    ahead = predict(replace(config, prefetch=replace(config.prefetch, depth=1)), facts, cluster, found.split)
    if ahead.step > (1 - WORTH) * found.step:
        return ""
    return f"prefetch.depth=1: a step takes {ahead.step:.2f} s, as predicted for H100s, and {found.step:.2f} s without look-ahead"
