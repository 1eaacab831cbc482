"""Every item has one outcome, and a result counts them all."""

from __future__ import annotations

import math

import pytest

from distill_rl.evals.backends.base import Output
from distill_rl.evals.grading.grader import Graded
from distill_rl.evals.results import OUTCOMES, choice_row, completion_row, processed_tokens, summarise
from distill_rl.evals.suites.base import Item, Verdict

LETTERS = Item("i", "question", "B", "task", choices=(" A", " B", " C", " D"))
FREE = Item("i", ({"role": "user", "content": "question"},), "42")


def judged(score: float, extracted: str | None) -> Graded:
    return Graded("judged", Verdict(score, extracted))


@pytest.mark.parametrize(
    ("output", "graded", "outcome", "score"),
    [
        (Output("42"), judged(1.0, "42"), "right", 1.0),
        (Output("42 and so on", truncated=True), judged(1.0, "42"), "right", 1.0),
        (Output("41"), judged(0.0, "41"), "wrong", 0.0),
        (Output("half"), judged(0.5, "half"), "wrong", 0.5),
        (Output("what"), judged(0.0, None), "unparsable", 0.0),
        (Output("what", truncated=True), judged(0.0, None), "truncated", 0.0),
        (Output("41", truncated=True), judged(0.0, "41"), "truncated", 0.0),
        (Output("9^9^9"), Graded("grader_timeout", detail="late"), "grader_timeout", 0.0),
        (Output("x"), Graded("grader_failed", detail="dead"), "grader_failed", 0.0),
        (Output(too_long=True), None, "too_long", 0.0),
    ],
)
def test_a_completion_has_one_outcome(output: Output, graded: Graded | None, outcome: str, score: float) -> None:
    row = completion_row(FREE, output, graded)
    assert (row["outcome"], row["score"], row["completion"], row["answer"]) == (outcome, score, output.text, "42")
    assert row["prompt"] == [{"role": "user", "content": "question"}]


@pytest.mark.parametrize(
    ("logprobs", "outcome", "letter"),
    [
        ((-4.0, -1.0, -2.0, -3.0), "right", "B"),
        ((-1.0, -4.0, -2.0, -3.0), "wrong", "A"),
        ((-1.0, -1.0, -2.0, -3.0), "wrong", "A"),
        ((-math.inf, -1.0, math.nan, -3.0), "right", "B"),
        ((math.nan,) * 4, "unparsable", None),
    ],
)
def test_the_likeliest_choice_counts(logprobs: tuple[float, ...], outcome: str, letter: str | None) -> None:
    row = choice_row(LETTERS, Output(num_tokens=4, logprobs=logprobs))
    assert (row["outcome"], row["extracted"], row["score"]) == (outcome, letter, float(outcome == "right"))
    assert row["choice_logprobs"] == [value if math.isfinite(value) else None for value in logprobs]


def test_too_long_choices_are_counted_as_too_long() -> None:
    assert choice_row(LETTERS, Output(too_long=True))["outcome"] == "too_long"


def test_result_counts_every_outcome_and_task() -> None:
    rows = [
        completion_row(Item(str(n), "q", "a", task), Output(truncated=outcome == "truncated"), None)
        | {"outcome": outcome, "score": score}
        for n, (task, outcome, score) in enumerate(
            [
                *[("x", "right", 1.0), ("x", "wrong", 0.0), ("x", "truncated", 0.0), ("y", "right", 1.0)],
                *[
                    ("", "wrong", 0.5),
                    ("x", "grader_timeout", 0.0),
                    ("", "grader_failed", 0.0),
                    ("", "grader_failed", 0.5),
                ],
            ]
        )
    ]
    result = summarise(rows)
    assert (result["score"], result["num_items"], result["truncated"], result["ungraded"]) == (0.375, 8, 1, 3)
    counts = {"right": 2, "wrong": 2, "truncated": 1, "grader_timeout": 1, "grader_failed": 2}
    assert result["outcomes"] == dict.fromkeys(OUTCOMES, 0) | counts
    assert {task: part["score"] for task, part in result["per_task"].items()} == {"x": 0.25, "y": 1.0}
    assert {task: part["ungraded"] for task, part in result["per_task"].items()} == {"x": 1, "y": 0}
    assert result["macro"] == pytest.approx((0.25 + 1) / 2)
    assert sum(result["outcomes"].values()) == result["num_items"]


def test_speed_counts_generated_tokens_or_prompts_of_choices() -> None:
    output = Output(num_tokens=4, prompt_tokens=700, logprobs=(-1.0,) * 4, run_tokens=50)
    assert processed_tokens([completion_row(FREE, output, None), choice_row(LETTERS, output)]) == 4 + 50
