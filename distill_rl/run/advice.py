"""What the first step shows of the settings."""

from __future__ import annotations

from distill_rl.config.facts import running_teachers
from distill_rl.config.schema import Config
from distill_rl.observe.metrics import Metrics

LEAST_MASS = 0.9
"""Share of a teacher's probability in its top k below which all logits, or draws, teach better: on real text
with 74 %, by a third of what a teacher teaches (docs/results.md)."""


def advice(config: Config, trained: Metrics) -> list[str]:
    """Returns the lines to print after the first step, from the student's metrics of it.

    Hidden states or draws are suggested in place of a top k with too little of the first teacher's probability, where both are possible:
    for forward KL, with one tokenizer, and of a teacher that this run computes itself.
    """
    mass, teachers = trained.get("train/teacher_mass"), running_teachers(config)
    if not teachers or mass is None or mass.weight == 0 or mass.value >= LEAST_MASS:
        return []
    first = teachers[0]
    if (first.export, first.backend, first.cache, config.loss.divergence) != ("topk", "hf", None, "forward_kl"):
        return []
    return [
        f"hint      the top {config.loss.top_k} of teacher {first.name} hold {mass.value:.0%} of its probability. More of the rest is taught by "
        "teachers.0.export=hidden, if it shares a GPU or host with the student, or else teachers.0.export=sampled loss.draws=32 "
        "(docs/losses.md, Which loss when)"
    ]
