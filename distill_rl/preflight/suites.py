"""The suites on which a run evaluates its student: their options, and what is checked before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distill_rl.config.derive import SUITE_SCORE, best_metrics
from distill_rl.config.schema import Config
from distill_rl.errors import DistillError, problem
from distill_rl.preflight.opened import Opened

if TYPE_CHECKING:
    from distill_rl.evals.options import Options


def evaluation_options(config: Config, *, final: bool = False) -> Options:
    """Returns how the run's suites are run: during training, or (`final`) on the export at the end."""
    from distill_rl.evals.backends.base import Settings
    from distill_rl.evals.options import Options

    evaluate = config.evaluate
    return Options(
        num_fewshot=evaluate.num_fewshot,
        max_new_tokens=evaluate.max_new_tokens,
        limit=evaluate.final_limit if final else evaluate.limit,
        seed=config.run.seed,
        replace_others=True,
        backend=evaluate.backend,
        settings=Settings(batch_size=evaluate.batch_size),
    )


def suite_problems(config: Config, student: Opened, teachers: Sequence[Opened] = ()) -> list[str]:
    """Returns unknown suites, bad data, options that no suite uses, and suites of chats for a model without a chat
    template, one line each.

    Empty if the run has no suites, or suites without data, which the rules of the configuration report.
    """
    evaluate = config.evaluate
    if not (evaluate.suites and evaluate.data):
        return []
    from distill_rl.evals.options import chat_problem, chat_suites, load_questions, without_effect

    options = replace(evaluation_options(config), limit=None)
    try:
        loaded = load_questions(evaluate.suites, Path(evaluate.data).expanduser(), options)
    except DistillError as error:
        return [f"evaluate.suites: {line}" for line in error.problems]
    problems = [f"evaluate.{line}" for line in without_effect(loaded, options)[0]]
    metric, names = config.checkpoint.best_by, [entry.suite.name for entry in loaded]
    if config.checkpoint.keep_best and metric.startswith(SUITE_SCORE) and metric not in best_metrics(config, names):
        possible = ", ".join(best_metrics(config, names))
        problems.append(problem("checkpoint.best_by", f"must be a metric that this run measures ({possible})", metric))
    for model in (student, *(teachers if evaluate.teachers else ())):
        if (chats := chat_suites(loaded)) and model.tokenizer is not None and not model.tokenizer.chat_template:
            problems.append(chat_problem(chats, model.name))
    return problems
