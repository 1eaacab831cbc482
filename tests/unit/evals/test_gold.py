"""Reference solutions of the real data, graded like a model's completions by the real suites in real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from distill_rl.evals.grading.extract import last_boxed
from distill_rl.evals.grading.grader import Graded, Grader
from distill_rl.evals.grading.normalize import normalize
from distill_rl.evals.suites.base import Item
from distill_rl.evals.suites.registry import find

EVALS = Path(__file__).parents[4] / "shared" / "data" / "evals"

pytestmark = pytest.mark.skipif(not EVALS.is_dir(), reason="needs the real data of the suites beside the repository")


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader() as pool:
        yield pool


def grade(pool: Grader, suite: str, items: Sequence[Item], completions: Sequence[str]) -> list[Graded]:
    futures = [pool.submit(suite, item, completion) for item, completion in zip(items, completions, strict=True)]
    return [future.result(timeout=300) for future in futures]


def not_right(items: Sequence[Item], graded: Sequence[Graded]) -> list[str]:
    """One line per item that is not right; also printed."""
    lines = [
        f"{item.id}: gold {item.answer!r}, {result.outcome}, {result.verdict or result.detail}"
        for item, result in zip(items, graded, strict=True)
        if result.verdict is None or result.verdict.score != 1
    ]
    print(f"{len(items) - len(lines)} of {len(items)} right", *lines, sep="\n")
    return lines


def solutions(file: str) -> list[str]:
    return parquet.read_table(EVALS / "math" / file).column("solution").to_pylist()


@pytest.mark.parametrize(("suite", "file", "rows"), [("math", "test", 5000), ("math500", "math500", 500)])
def test_math_solutions_are_right(grader: Grader, suite: str, file: str, rows: int) -> None:
    items, texts = find(suite).load(EVALS, 0).items, solutions(f"{file}.parquet")
    assert len(items) == rows
    wrong = not_right(items, grade(grader, suite, items, texts))
    assert len(wrong) <= rows * 0.005, "\n".join(wrong)


def test_gold_answers_in_minerva_form_are_right(grader: Grader) -> None:
    items = find("minerva_math").load(EVALS, 4).items
    texts = [
        f" {text}\nFinal Answer: The final answer is ${item.answer}$. I hope it is correct.\n\n"
        for text, item in zip(solutions("test.parquet"), items, strict=True)
    ]
    wrong = not_right(items, grade(grader, "minerva_math", items, texts))
    assert len(wrong) <= len(items) * 0.005, "\n".join(wrong)


def test_math_answers_in_another_spelling_are_right(grader: Grader) -> None:
    def respelled(answer: str) -> str:
        for old, new in (
            ("\\frac", "\\dfrac"),
            ("\\left", ""),
            ("\\right", ""),
            (" + ", "+"),
            ("\\!", ""),
            ("^2", "^{2}"),
        ):
            answer = answer.replace(old, new)
        return f"Thus\n\\[ \\boxed{{ {answer} }} \\]"

    items = find("math500").load(EVALS, 0).items
    wrong = not_right(items, grade(grader, "math500", items, [respelled(item.answer) for item in items]))
    assert len(wrong) <= len(items) * 0.005, "\n".join(wrong)


def test_solutions_of_other_math_problems_are_wrong(grader: Grader) -> None:
    items, texts = find("math500").load(EVALS, 0).items, solutions("math500.parquet")
    others = [*texts[1:], texts[0]]
    graded = grade(grader, "math500", items, others)
    alike = [
        f"{item.id}: {item.answer!r}, {last_boxed(other)!r}"
        for item, other, result in zip(items, others, graded, strict=True)
        if (result.verdict is None or result.verdict.score)
        and normalize(item.answer) != normalize((last_boxed(other) or "").rpartition("=")[2])  # `x = 5` is 5
    ]
    assert not alike, "\n".join(alike)


@pytest.mark.parametrize("suite", ["gsm8k", "gsm8k_0shot"])
def test_gsm8k_solutions_are_right(grader: Grader, suite: str) -> None:
    items = find(suite).load(EVALS, 0).items
    rows = [json.loads(line)["answer"] for line in (EVALS / "gsm8k" / "test.jsonl").read_text().splitlines()]
    forms = {
        "as published": rows,
        "worked example": [row.replace("\n####", " The answer is") + ".\n\n" for row in rows],
        "chat": [row.replace("\n#### ", "\n\n**The final answer is \\boxed{") + "}.**" for row in rows],
    }
    for form, texts in forms.items():
        assert not not_right(items, grade(grader, suite, items, texts)), form


def test_mmlu_letters_are_right(grader: Grader) -> None:
    items = find("mmlu_cot").load(EVALS, 0).items
    assert len(items) == 14042
    forms = (
        "So it is {}, not A.\nAnswer: {}",
        "**Answer: {}**\n",
        "**Answer:** ({})",
        "Answer: $\\boxed{{\\text{{{}}}}}$",
        "answer: {}. For sure",
    )
    texts = [forms[n % len(forms)].format(*[item.answer] * 2) for n, item in enumerate(items)]
    assert not not_right(items, grade(grader, "mmlu_cot", items, texts))
    some = items[::10]
    wrong = [f"Answer: {'DABC'['ABCD'.index(item.answer)]}" for item in some]
    assert not any(result.verdict is None or result.verdict.score for result in grade(grader, "mmlu_cot", some, wrong))
