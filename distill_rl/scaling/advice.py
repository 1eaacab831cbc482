"""Settings of a run on many GPUs that are predicted to cost speed, for `distill-rl check`."""

from __future__ import annotations

from dataclasses import replace

from distill_rl.config.facts import Facts, running_teachers
from distill_rl.config.schema import Config
from distill_rl.scaling.cluster import Cluster
from distill_rl.scaling.splits import Prediction, Split, predict

LEAST_GPUS = 8
"""With fewer, faults are too rare for the interval between checkpoints to matter."""
WORTH = 0.01
"""Smallest gain in speed, as a share, for which a setting is suggested."""
_LONG_RUN = 10_000
"""Steps of a run whose length is not known."""


def suggestions(config: Config, facts: Facts) -> list[str]:
    """Returns lines with a setting and what it is predicted to gain; empty if nothing is worth it, or nothing is predicted.

    That needs GPUs, of this machine or of a cluster that the run joins, one teacher in torch, no sequence parallelism, and models
    whose sizes are known. H100s are assumed.
    """
    split = _split(config)
    if split is None or facts.student is None or not facts.teachers or facts.teachers[0].model is None:
        return []
    if not (facts.gpus or config.ray.address):
        return []
    cluster = Cluster(split.gpus)
    found = predict(config, facts, cluster, split)
    lines = _interval(config, found), _look_ahead(config, facts, cluster, found)
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


def _interval(config: Config, found: Prediction) -> str:
    """A line with a better interval between checkpoints; empty if the present one is as good."""
    if found.split.gpus < LEAST_GPUS:
        return ""
    steps = config.train.steps or _LONG_RUN
    every, best = (min(each or steps, steps) for each in (config.checkpoint.every, found.save_every))
    now, kept = found.goodput_at(every), found.goodput_at(best)
    if kept < now + WORTH:
        return ""
    present = f"checkpoint.every={config.checkpoint.every}" if config.checkpoint.every else "none before the end"
    return (
        f"checkpoint.every={best}: {kept:.1%} of the time is predicted to be kept, {now:.1%} with {present} "
        "(H100s that fail as often as Llama 3's)"
    )


def _look_ahead(config: Config, facts: Facts, cluster: Cluster, found: Prediction) -> str:
    """A line that asks for look-ahead, if there is none and it makes steps shorter."""
    if config.prefetch.depth:
        return ""
    ahead = predict(replace(config, prefetch=replace(config.prefetch, depth=1)), facts, cluster, found.split)
    if ahead.step > (1 - WORTH) * found.step:
        return ""
    return f"prefetch.depth=1: a step is predicted to take {ahead.step:.2f} s, and {found.step:.2f} s without look-ahead (H100s)"
