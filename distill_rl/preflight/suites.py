"""The suites on which a run evaluates its student: their options, and what is checked before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distill_rl.config.measured import best_metrics, is_suite_score
from distill_rl.config.schema import Config
from distill_rl.errors import DistillError, problem
from distill_rl.run.opened import OpenedModel, RunFindings


def check_suites(config: Config, student: OpenedModel, teachers: Sequence[OpenedModel], findings: RunFindings) -> None:
    """Opens the run's suites, and adds what is wrong or worth knowing to the findings.

    Wrong are unknown suites, bad data, options that no suite uses, and suites of chats for a model without a chat
    template. Worth knowing are options that only some suites use. Suites without data are not opened: the rules of the
    configuration report them.
    """
    evaluate = config.evaluate
    if not (evaluate.suites and evaluate.data):
        return
    from distill_rl.evals.options import chat_problem, chat_suites, evaluation_options, load_questions, without_effect

    options = replace(evaluation_options(config), limit=None)
    try:
        loaded = load_questions(evaluate.suites, Path(evaluate.data).expanduser(), options)
    except DistillError as error:
        findings.problems += [f"evaluate.suites: {line}" for line in error.problems]
        return
    unused, partial = without_effect(loaded, options)
    findings.problems += [f"evaluate.{line}" for line in unused]
    findings.notes += [f"evaluate.{line}" for line in partial]
    metric, names = config.checkpoint.best_by, [entry.suite.name for entry in loaded]
    if config.checkpoint.keep_best and is_suite_score(metric) and metric not in best_metrics(config, names):
        possible = ", ".join(best_metrics(config, names))
        rule = f"must be a metric that this run measures ({possible})"
        findings.problems.append(problem("checkpoint.best_by", rule, metric))
    for model in (student, *(teachers if evaluate.teachers else ())):
        if (chats := chat_suites(loaded)) and model.tokenizer is not None and not model.tokenizer.chat_template:
            findings.problems.append(chat_problem(chats, model.name))
