"""MATH (Hendrycks et al. 2021, arXiv:2103.03874) and MATH-500 (Lightman et al. 2023, arXiv:2305.20050): problems of
mathematical competitions, whose answers are LaTeX."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distill_rl.evals.data.find import MATH, MATH500, DataSetNames, find
from distill_rl.evals.data.published import PublishedSplit, first_examples
from distill_rl.evals.data.read import (
    ContentIds,
    Row,
    checked,
    content_sha256,
    convert,
    read_rows,
    require_columns,
    text,
    value,
)
from distill_rl.evals.suites.base import Item, Questions, Verdict

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
class BoxedMath:
    r"""As a chat, without examples; the answer is what stands in the last `\boxed{}`."""

    name: str
    title: str
    names: DataSetNames
    published: PublishedSplit
    num_fewshot: int = 0
    max_fewshot: int = 0
    chat: bool = True
    max_new_tokens: int | None = 2048
    stop: tuple[str, ...] = ()

    def load(self, data: Path, num_fewshot: int = 0) -> Questions:
        def item(name: str, problem: _Problem) -> Item:
            content = f"{problem.text.strip()}\n\n{INSTRUCTION}"
            return Item(name, ({"role": "user", "content": content},), problem.answer, problem.type)

        problems, files = _load(data, self.names)
        return _questions(problems, files, self.published, item)

    def judge(self, item: Item, completion: str) -> Verdict:
        from distill_rl.evals.grading.extract import last_boxed

        return _judge(item, last_boxed(completion))


@dataclass(slots=True)
class MinervaMath:
    """As text after the worked examples of Lewkowycz et al. 2022 (arXiv:2206.14858), appendix D.2; the answer is what
    stands between "Final Answer: The final answer is" and ". I hope it is correct."."""

    name: str = "minerva_math"
    title: str = "MATH, 4 worked examples (Minerva), the final answer"
    num_fewshot: int = 4
    max_fewshot: int = 4
    chat: bool = False
    max_new_tokens: int | None = 1024
    stop: tuple[str, ...] = ("Problem:",)

    def load(self, data: Path, num_fewshot: int = 4) -> Questions:
        examples = first_examples(self.name, num_fewshot)
        prefix = "".join(f"Problem:\n{one.question}\n\nSolution: {one.answer}\n\n" for one in examples)

        def item(name: str, problem: _Problem) -> Item:
            prompt = f"Problem:\n{problem.text}\n\nSolution:"
            return Item(name, prompt, problem.answer, problem.type, prefix)

        problems, files = _load(data, MATH)
        return _questions(problems, files, TEST, item)

    def judge(self, item: Item, completion: str) -> Verdict:
        from distill_rl.evals.grading.extract import final_answer

        return _judge(item, final_answer(completion))


def _load(data: Path, names: DataSetNames) -> tuple[list[_Problem], list[Path]]:
    files = find(data, names, "test")
    rows = [row for file in files for row in read_rows(file)]
    require_columns(rows, {"problem": _PROBLEM, "answer": _ANSWER + _SOLUTION}, {"choices": ("choices", "options")})
    return convert(rows, _problem), files


def _questions(
    problems: Sequence[_Problem], files: Sequence[Path], published: PublishedSplit, item: Callable[[str, _Problem], Item]
) -> Questions:
    pairs = [(problem.text, problem.answer) for problem in problems]
    content, name = content_sha256(pairs), ContentIds()
    items = tuple(item(name(*pair), problem) for pair, problem in zip(pairs, problems))
    return Questions(items, tuple(files), content, published.warnings(len(items), content))


def _judge(item: Item, given: str | None) -> Verdict:
    from distill_rl.evals.grading.equivalence import same_math

    return Verdict(0.0 if given is None else float(same_math(item.answer, given)), given)


def _problem(row: Row) -> _Problem:
    answer = value(row, _ANSWER)
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if answer is None:
        from distill_rl.evals.grading.extract import last_boxed

        answer = last_boxed(text(row, _SOLUTION))
        if answer is None:
            raise ValueError("needs an `answer`, or a `solution` with the answer in \\boxed{}")
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"`answer` must be a text that is not empty; got {answer!r:.60}; mend the row, or remove it")
    if "####" in answer:
        raise ValueError("`answer` must be LaTeX; `####` is how GSM8K writes its answers")
    return _Problem(text(row, _PROBLEM), checked(answer.strip(), "answer"), _kind(row))


def _kind(row: Row) -> str:
    """counting_and_probability and the like, however it is spelt; of a row that does not say, empty."""
    kind = value(row, _TYPE)
    words = re.findall(r"[a-z0-9]+", kind.lower().replace("&", " and ")) if isinstance(kind, str) else []
    return "_".join(words)


SUITES = (
    BoxedMath("math", "MATH as a chat, with reasoning, the answer in \\boxed{}", MATH, TEST),
    BoxedMath("math500", "MATH-500 as a chat, with reasoning, the answer in \\boxed{}", MATH500, TEST500),
    MinervaMath(),
)
