"""Turns a model's outputs into rows, and the rows of a suite into a result."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distill_rl.evals.backends.base import Output
from distill_rl.evals.results.statistics import wilson
from distill_rl.evals.suites.base import Item

if TYPE_CHECKING:
    from distill_rl.evals.grading.grader import Graded

OUTCOMES = ("right", "wrong", "unparsable", "truncated", "too_long", "grader_timeout", "grader_failed")
"""Every item has exactly one outcome:

right           full score
wrong           an answer with less than the full score
unparsable      no answer found in the completion
truncated       the completion reached its token limit and is not right
too_long        prompt and answer exceed the model's positions
grader_timeout  grading exceeded its deadline, twice
grader_failed   grading ran out of memory, or its process died
"""
UNGRADED = ("grader_timeout", "grader_failed")
"""Outcomes that say nothing about the answer, which scores 0."""

Row = dict[str, Any]


def choice_row(item: Item, output: Output) -> Row:
    """The row of an item with choices, for the items file: the likeliest choice is the answer, the first one in a tie.

    Beside the fields of every row it has `choice_logprobs`, rounded to six decimals, None where a value is not finite.
    An item that was too long to run, or without any finite value ("unparsable"), scores 0.
    """
    if output.too_long:
        return _row(item, output, "too_long", 0.0, None) | {"run_tokens": output.run_tokens, "choice_logprobs": []}
    logprobs = [value if math.isfinite(value) else None for value in output.logprobs]
    highest = max((value for value in logprobs if value is not None), default=None)
    if highest is None:  # a broken model: every log-likelihood is NaN or infinite
        return _row(item, output, "unparsable", 0.0, None) | {
            "run_tokens": output.run_tokens,
            "choice_logprobs": logprobs,
        }
    letter = item.choices[logprobs.index(highest)].strip()
    right = letter == item.answer.strip()
    row = _row(item, output, "right" if right else "wrong", float(right), letter)
    return row | {
        "run_tokens": output.run_tokens,
        "choice_logprobs": [value if value is None else round(value, 6) for value in logprobs],
    }


def completion_row(item: Item, output: Output, graded: Graded | None) -> Row:
    """The row of an item with a completion, for the items file: the fields of every row, the `completion` itself, and,
    if grading failed, the reason as `detail`.

    Args:
        graded: None if the prompt was too long and nothing was run.
    """
    outcome, score, extracted = _outcome(output, graded)
    row = _row(item, output, outcome, score, extracted)
    if graded is not None and graded.detail:
        row["detail"] = graded.detail
    return row | {"completion": output.text}


def _outcome(output: Output, graded: Graded | None) -> tuple[str, float, str | None]:
    """(outcome, score, extracted answer) of a completion; the outcome is one of OUTCOMES.

    A judged completion that was cut off is "truncated" unless its score is full; a grader's failure and an item that
    was not run (`graded` is None) score 0.
    """
    if graded is None:
        return "too_long", 0.0, None
    verdict = graded.verdict
    if verdict is None:
        return graded.outcome, 0.0, None
    if verdict.score >= 1:
        return "right", verdict.score, verdict.extracted
    if output.truncated:
        return "truncated", verdict.score, verdict.extracted
    return ("wrong" if verdict.extracted is not None else "unparsable"), verdict.score, verdict.extracted


def _row(item: Item, output: Output, outcome: str, score: float, extracted: str | None) -> Row:
    """The fields that every row has, whether the item has choices or a completion; `score` is 0 to 1, `extracted` None
    without an answer."""
    prompt = item.prompt if isinstance(item.prompt, str) else [dict(message) for message in item.prompt]
    return {
        "id": item.id,
        "task": item.task,
        "outcome": outcome,
        "score": score,
        "answer": item.answer,
        "extracted": extracted,
        "truncated": output.truncated,
        "num_tokens": output.num_tokens,
        "prompt_tokens": output.prompt_tokens,
        "prompt": prompt,
    }


def processed_tokens(rows: Iterable[Mapping[str, Any]]) -> int:
    """Tokens that count for a model's speed: generated ones, or those that it ran where choices are compared."""
    # Rows that an older version wrote do not say how many were run.
    return sum(
        row["num_tokens"] if "completion" in row else row.get("run_tokens", row["prompt_tokens"]) for row in rows
    )


def num_ungraded(outcomes: Mapping[str, int]) -> int:
    """How many items have an outcome of UNGRADED, given the numbers by outcome."""
    return sum(outcomes.get(name, 0) for name in UNGRADED)


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Score with its 95 % interval, outcomes and counts, `ungraded` among them, over all rows and, in `per_task`, by task.

    `macro` is the mean of the tasks' scores. Rows without a task belong to none; if all are, `per_task` is empty and
    `macro` None.

    Args:
        rows: of one suite; at least one.
    """
    tasks: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["task"]:
            tasks.setdefault(row["task"], []).append(row)
    per_task = {task: _summary(task_rows) for task, task_rows in tasks.items()}
    macro = math.fsum(part["score"] for part in per_task.values()) / len(per_task) if per_task else None
    return _summary(rows) | {"macro": macro, "per_task": per_task}


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean score, its 95 % Wilson interval as [low, high], and how many rows there are, have no grade (UNGRADED), have each
    of OUTCOMES and were cut off.

    Args:
        rows: at least one.
    """
    score = math.fsum(row["score"] for row in rows) / len(rows)
    counted = Counter(row["outcome"] for row in rows)
    return {
        "score": score,
        "interval": list(wilson(score, len(rows))),
        "num_items": len(rows),
        "ungraded": num_ungraded(counted),
        "outcomes": {name: counted[name] for name in OUTCOMES},
        "truncated": sum(bool(row["truncated"]) for row in rows),
    }
