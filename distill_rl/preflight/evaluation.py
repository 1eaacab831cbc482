"""Checks the suites on which a run evaluates its student."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from distill_rl.config.schema import Config
from distill_rl.errors import DistillError
from distill_rl.preflight.opened import Opened, line


def suite_problems(config: Config, student: Opened) -> list[str]:
    """Unknown suites, bad data, a missing backend, and suites of chats for a student without a chat template."""
    evaluate = config.evaluate
    if not evaluate.suites:
        return []
    problems = []
    if evaluate.backend == "vllm" and find_spec("vllm") is None:
        remedy = "install the vllm extra, or set evaluate.backend=hf"
        problems.append(line("evaluate.backend", "needs vllm, which is not installed", "vllm", remedy))
    if not evaluate.data:
        return problems  # the rules of the configuration report this
    from distill_rl.evals.options import Options, chat_problem, chat_suites, load_questions

    try:
        questions = load_questions(evaluate.suites, Path(evaluate.data).expanduser(), Options())
    except DistillError as error:
        return [*problems, *(f"evaluate.suites: {problem}" for problem in error.problems)]
    chats = chat_suites(questions)
    if chats and student.tokenizer is not None and not student.tokenizer.chat_template:
        problems.append(chat_problem(chats, "student"))
    return problems
