"""MATH (Hendrycks et al. 2021, arXiv:2103.03874) and MATH-500 (Lightman et al. 2023, arXiv:2305.20050): problems from
mathematics competitions, with answers in LaTeX."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distill_rl.evals.data import (
    MATH,
    MATH500,
    DataSetNames,
    PublishedSplit,
    Row,
    convert_rows,
    first_examples,
    first_value,
    make_questions,
    read_split,
    require_unicode,
    required_text,
)
from distill_rl.evals.suites.base import Item, Questions, SuiteSettings, Verdict

TEST = PublishedSplit("MATH test", 5000, "d7c3edcdb626368bb3f82200bea6d81dd7bb1d51dea91a46c98827d3451fb13a")
TEST500 = PublishedSplit("MATH-500", 500, "4a06788f3cba46e9a4ab4525f68621e9c2e6dfa08fe1951ffb7345026ab0dea6")

_PROBLEM, _ANSWER, _SOLUTION = ("problem", "question"), ("answer", "final_answer", "target"), ("solution",)
_TYPE = ("type", "subject", "category")

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True)
class _Problem:
    text: str
    answer: str
    type: str


@dataclass(slots=True)
class BoxedMath(SuiteSettings):
    r"""MATH or MATH-500 as a chat, without examples; the answer is the content of the last `\boxed{}`."""

    chat: bool = True
    max_new_tokens: int | None = 2048
    names: DataSetNames = MATH
    published: PublishedSplit = TEST

    def load(self, data: Path, num_fewshot: int = 0) -> Questions:
        """Loads the test split from a folder of data sets or a single file; each prompt is a chat of one user message
        with the problem and an instruction, and the problem's type is its task.

        `num_fewshot` is ignored. Differences from the published split become warnings.

        Raises:
            DataError: no data, missing columns, or bad rows, one line each.
        """

        def make_item(item_id: str, problem: _Problem) -> Item:
            content = f"{problem.text.strip()}\n\n{INSTRUCTION}"
            return Item(item_id, ({"role": "user", "content": content},), problem.answer, problem.type)

        return _load(data, self.names, self.published, make_item)

    def judge(self, item: Item, completion: str) -> Verdict:
        r"""Scores 1 if the content of the completion's last `\boxed{}` is equivalent to the answer
        (`equivalence.same_math`), otherwise 0; the content, or None, is the extracted answer."""
        from distill_rl.evals.grading.extract import last_boxed

        return _judge(item, last_boxed(completion))


@dataclass(slots=True)
class MinervaMath(SuiteSettings):
    """MATH as text after the worked examples of Lewkowycz et al. 2022 (arXiv:2206.14858), appendix D.2; the answer is
    the text between "Final Answer: The final answer is" and ". I hope it is correct."."""

    def load(self, data: Path, num_fewshot: int = 4) -> Questions:
        """Loads the test split of MATH from a folder of data sets or a single file; each prompt is text, the problem
        after the paper's first `num_fewshot` worked examples, and the problem's type is its task.

        Differences from the published split become warnings.

        Raises:
            DataError: no data, missing columns, bad rows, or more examples requested than the paper's four.
        """
        examples = first_examples(self.name, num_fewshot)
        prefix = "".join(f"Problem:\n{example.question}\n\nSolution: {example.answer}\n\n" for example in examples)

        def make_item(item_id: str, problem: _Problem) -> Item:
            prompt = f"Problem:\n{problem.text}\n\nSolution:"
            return Item(item_id, prompt, problem.answer, problem.type, prefix)

        return _load(data, MATH, TEST, make_item)

    def judge(self, item: Item, completion: str) -> Verdict:
        """Scores 1 if the text after the completion's first "Final Answer: The final answer is" is equivalent to the
        answer (`equivalence.same_math`), otherwise 0; that text (`extract.final_answer`), or None, is the extracted
        answer."""
        from distill_rl.evals.grading.extract import final_answer

        return _judge(item, final_answer(completion))


def _load(
    data: Path, names: DataSetNames, published: PublishedSplit, make_item: Callable[[str, _Problem], Item]
) -> Questions:
    """Reads the test split of a data set of problems with LaTeX answers, and makes an item of each problem."""
    columns = {"problem": _PROBLEM, "answer": _ANSWER + _SOLUTION}
    rows, files = read_split(data, names, "test", columns, foreign={"choices": ("choices", "options")})
    problems = convert_rows(rows, _problem)
    return make_questions(problems, lambda problem: (problem.text, problem.answer), make_item, files, published)


def _judge(item: Item, extracted: str | None) -> Verdict:
    """Call it only in a grading process: the comparison may hang."""
    from distill_rl.evals.grading.equivalence import same_math

    return Verdict(0.0 if extracted is None else float(same_math(item.answer, extracted)), extracted)


def _problem(row: Row) -> _Problem:
    """The answer is the answer column's, or the last box of the worked solution."""
    answer = first_value(row, _ANSWER)
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if answer is None:
        from distill_rl.evals.grading.extract import last_boxed

        answer = last_boxed(required_text(row, _SOLUTION))
        if answer is None:
            raise ValueError("needs an `answer`, or a `solution` with the answer in \\boxed{}")
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"`answer` must be non-empty text; got {answer!r:.60}; correct the row, or remove it")
    if "####" in answer:
        raise ValueError("`answer` must be LaTeX; `####` is how GSM8K writes its answers")
    return _Problem(required_text(row, _PROBLEM), require_unicode(answer.strip(), "answer"), _type(row))


def _type(row: Row) -> str:
    """The problem's type in one spelling, such as counting_and_probability; empty if the row has none."""
    name = first_value(row, _TYPE)
    words = re.findall(r"[a-z0-9]+", name.lower().replace("&", " and ")) if isinstance(name, str) else []
    return "_".join(words)


SUITES = (
    BoxedMath("math", "MATH as a chat, with reasoning, the answer in \\boxed{}"),
    BoxedMath(
        "math500", "MATH-500 as a chat, with reasoning, the answer in \\boxed{}", names=MATH500, published=TEST500
    ),
    MinervaMath(
        "minerva_math",
        "MATH, 4 worked examples (Minerva), the final answer",
        num_fewshot=4,
        max_fewshot=4,
        max_new_tokens=1024,
        stop=("Problem:",),
    ),
)
