"""What a run measures during training, and by which of it checkpoints can be compared (`checkpoint.best_by`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distill_rl.config.derive import has_validation
from distill_rl.config.facts import TOKENS, UNKNOWN, Facts
from distill_rl.config.layout import suites_every
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import problem

KD, CE = "validation/kl_loss", "validation/nll_loss"
TOP1, ACCEPTANCE = "validation/top1_agreement", "validation/acceptance"
ENTROPIES = ("validation/student_entropy", "validation/teacher_entropy")
BOUNDS = tuple(f"{name}_{bound}" for name in (ACCEPTANCE, ENTROPIES[1]) for bound in ("low", "high"))
"""What a top k tells."""
VALIDATED = (KD, CE, TOP1, ACCEPTANCE, *ENTROPIES, *BOUNDS)
"""The metrics of a validation pass. Those about one of several teachers end with `/NAME`."""
SUITE_SCORE = "eval/"
"""Beginning of the metric that is a suite's score; its name follows."""


def best_metrics(config: Config, suites: Sequence[str]) -> list[str]:
    """The metrics by which this run can compare checkpoints during training, as far as the settings tell.

    Args:
        suites: names of its suites.
    """
    metrics: list[str] = []
    if config.evaluate.every and has_validation(config):
        metrics += validation_metrics(config, Facts())
    if suites_every(config):
        metrics += [SUITE_SCORE + suite for suite in suites]
    return metrics


def validation_metrics(config: Config, facts: Facts) -> list[str]:
    """The metrics of a validation pass by which checkpoints can be compared, whether or not the run has validation data.

    Args:
        facts: of the files; what is not known excludes no metric.
    """
    teachers, without = config.running_teachers, without_acceptance(config, facts)
    if not teachers:
        return [CE]
    accepting = [teacher for teacher in teachers if teacher.name not in without]
    if len(teachers) == 1:
        return [KD, CE, TOP1, *([ACCEPTANCE] if accepting else [])]
    own = {KD: teachers, TOP1: teachers, ACCEPTANCE: accepting}
    return [KD, CE, *(f"{metric}/{teacher.name}" for metric, measured in own.items() for teacher in measured)]


def without_acceptance(config: Config, facts: Facts) -> dict[str, str]:
    """Why the acceptance is not known of a teacher, by its name, for those of which it is not.

    Args:
        facts: of the files; what is not known is no reason.
    """
    reasons = {}
    for teacher, method in zip(config.running_teachers, facts.comparisons(config)):
        if teacher.export == "sampled":
            reasons[teacher.name] = "its draws (export: sampled) tell no probabilities"
        elif _at_another_temperature(config, teacher):
            reasons[teacher.name] = f"its top k is taken at loss.temperature {config.loss.temperature:g}, not at 1"
        elif teacher.export == "topk":
            reasons[teacher.name] = "its top k tells bounds only (acceptance_low and acceptance_high)"
        elif method not in (TOKENS, UNKNOWN):
            reasons[teacher.name] = "it is not compared token by token"
    return reasons


def acceptance_note(config: Config, facts: Facts) -> Iterator[str]:
    """Yields at most one line: the teachers whose acceptance would be measured at temperature 1."""
    compared = zip(config.running_teachers, facts.comparisons(config))
    names = [t.name for t, method in compared if method == TOKENS and _at_another_temperature(config, t)]
    if names and has_validation(config):
        yield (
            f"loss.temperature is {config.loss.temperature:g}, at which the top k of {', '.join(names)} is taken: "
            f"{ACCEPTANCE}, which is that of temperature 1, is not measured; it is with teachers[].export hidden or logits"
        )


def _at_another_temperature(config: Config, teacher: TeacherConfig) -> bool:
    return teacher.export == "topk" and config.loss.temperature != 1


def is_validated(metric: str) -> bool:
    """Whether a metric is one of VALIDATED, or the same about one of several teachers."""
    return any(metric == name or metric.startswith(f"{name}/") for name in VALIDATED)


def is_suite_score(metric: str) -> bool:
    """Whether a metric is a suite's score, which may arrive after the checkpoint of its step."""
    return metric.startswith(SUITE_SCORE)


def higher_is_better(metric: str) -> bool:
    """Whether the higher of two values of a metric of `best_metrics` is better: of scores and shares, not of losses."""
    return is_suite_score(metric) or metric.startswith((TOP1, ACCEPTANCE))


def unmeasured(config: Config, facts: Facts) -> Iterator[str]:
    """Yields at most one problem: no validation pass of this run measures `checkpoint.best_by`.

    Args:
        facts: of the files; what is not known is no problem.
    """
    key, metric = "checkpoint.best_by", config.checkpoint.best_by
    teachers = config.running_teachers
    if not is_validated(metric) or metric in validation_metrics(config, facts):
        return
    if not teachers:
        yield problem(key, "needs teachers, and loss.kd_weight above 0", metric, f"set {key}={CE}")
        return
    for name, reason in without_acceptance(config, facts).items():
        if metric == (ACCEPTANCE if len(teachers) == 1 else f"{ACCEPTANCE}/{name}"):
            rule = f"is not measured for teacher {name}: {reason}"
            yield problem(key, rule, metric, f"set {key}={metric.replace(ACCEPTANCE, TOP1)}")
            return
    possible = ", ".join(validation_metrics(config, Facts()))
    yield problem(key, f"must be a metric that this run measures ({possible})", metric)
