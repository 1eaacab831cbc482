"""MMLU (Hendrycks et al. 2021, arXiv:2009.03300): questions of 57 subjects with four choices each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distill_rl.errors import DataError
from distill_rl.evals.data.find import MMLU, find
from distill_rl.evals.data.published import PublishedSplit
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

TEST = PublishedSplit("MMLU test", 14042, "c049713336da067cd68503805d6c2b4270a280e1cfd46b9a2fccac56e80480d1")
DEV = PublishedSplit("MMLU dev", 285, "641f921cfba366331d9d9eca6863cf3d47d1c60ef9e0a64e31d2d1ace32736f8")
LETTERS = "ABCD"

_HEADER = ("question", "a", "b", "c", "d", "answer")
"""the columns of the original files, which do not say so"""
_QUESTION, _ANSWER, _CHOICES = ("question", "input"), ("answer", "target"), ("choices", "options")
_SUBJECT = ("subject", "task")

INSTRUCTION = "Think step by step, then end with a line of the form `Answer: X`, where X is one of A, B, C and D."


@dataclass(frozen=True, slots=True)
class _Question:
    subject: str
    """abstract_algebra and the like"""
    question: str
    choices: tuple[str, ...]
    answer: str
    """a letter"""

    @property
    def content(self) -> tuple[str, ...]:
        return (self.subject, self.question, *self.choices, self.answer)

    @property
    def topic(self) -> str:
        return self.subject.replace("_", " ")

    @property
    def listed(self) -> str:
        """The question without white space around it, and its choices as they are; so does lm-evaluation-harness."""
        return self.question.strip() + "".join(f"\n{letter}. {one}" for letter, one in zip(LETTERS, self.choices))


@dataclass(slots=True)
class Mmlu:
    """As text after worked examples, the first of the subject's in the split dev; the answer is the letter that the
    model finds likeliest. Header, examples and question are joined as by Hendrycks et al."""

    name: str
    title: str
    num_fewshot: int
    max_fewshot: int
    chat: bool = False
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def load(self, data: Path, num_fewshot: int) -> Questions:
        if num_fewshot < 0:
            raise DataError(f"num_fewshot of {self.name}", "must be 0 or more", num_fewshot)
        questions, files = _read(data, "test")
        prefixes = {one.subject: _header(one) for one in questions}
        content = content_sha256(one.content for one in questions)
        warnings = TEST.warnings(len(questions), content)
        if num_fewshot:
            examples, more = _read(data, "dev")
            shown = _first(examples, num_fewshot, prefixes, self.name, more)
            for subject, ones in shown.items():
                prefixes[subject] += "".join(f"{one.listed}\nAnswer: {one.answer}\n\n" for one in ones)
            files += more
            warnings += DEV.warnings(len(examples), content_sha256(one.content for one in examples))
            # The questions are not the same after other examples; those that are not shown do not matter.
            content = content_sha256([(content,), *(one.content for ones in shown.values() for one in ones)])
        names = ContentIds()
        items = tuple(
            Item(
                id=f"{one.subject}/{names(*one.content)}",
                prompt=f"{one.listed}\nAnswer:",
                answer=one.answer,
                task=one.subject,
                prefix=prefixes[one.subject],
                choices=tuple(f" {letter}" for letter in LETTERS),
            )
            for one in questions
        )
        return Questions(items, tuple(files), content, warnings)

    def judge(self, item: Item, completion: str) -> Verdict:
        return _judge(item, completion)


@dataclass(slots=True)
class MmluChat:
    """As a chat, with reasoning; the answer is the letter of the last `Answer: X`."""

    name: str = "mmlu_cot"
    title: str = "MMLU as a chat, with reasoning, the last `Answer: X`"
    num_fewshot: int = 0
    max_fewshot: int = 0
    chat: bool = True
    max_new_tokens: int | None = 1024
    stop: tuple[str, ...] = ()

    def load(self, data: Path, num_fewshot: int = 0) -> Questions:
        questions, files = _read(data, "test")
        content, names = content_sha256(one.content for one in questions), ContentIds()
        items = []
        for one in questions:
            asked = f"The following is a multiple choice question about {one.topic}.\n\n{one.listed}\n\n{INSTRUCTION}"
            name = f"{one.subject}/{names(*one.content)}"
            items.append(Item(name, ({"role": "user", "content": asked},), one.answer, one.subject))
        return Questions(tuple(items), tuple(files), content, TEST.warnings(len(items), content))

    def judge(self, item: Item, completion: str) -> Verdict:
        return _judge(item, completion)


def _judge(item: Item, completion: str) -> Verdict:
    from distill_rl.evals.grading.extract import last_letter

    given = last_letter(completion, LETTERS)
    return Verdict(float(given == item.answer), given)


def _header(question: _Question) -> str:
    return f"The following are multiple choice questions (with answers) about {question.topic}.\n\n"


def _read(data: Path, split: str) -> tuple[list[_Question], list[Path]]:
    files = find(data, MMLU, split)
    rows = [row for file in files for row in read_rows(file, _HEADER)]
    require_columns(rows, {"question": _QUESTION, "answer": _ANSWER, "choices": (*_CHOICES, *LETTERS.lower())})
    return convert(rows, lambda row: _question(row, split, alone=len(files) == 1)), files


def _first(
    examples: Sequence[_Question], count: int, subjects: Mapping[str, str], name: str, files: Sequence[Path]
) -> dict[str, list[_Question]]:
    """Per subject the first examples.

    Raises:
        DataError: a subject has too few.
    """
    shown: dict[str, list[_Question]] = {subject: [] for subject in subjects}
    for one in examples:
        if one.subject in shown:
            shown[one.subject].append(one)
    few = {subject: len(ones) for subject, ones in shown.items() if len(ones) < count}
    if few:
        subject = min(few, key=lambda one: few[one])
        more = f" ({len(few)} subjects have less than {count})" if len(few) > 1 else ""
        rule = f"must be at most {few[subject]}, the examples of {subject} in {files[0]}{more}"
        raise DataError(f"num_fewshot of {name}", rule, count)
    return {subject: ones[:count] for subject, ones in shown.items()}


def _question(row: Row, split: str, alone: bool) -> _Question:
    choices = value(row, _CHOICES)
    if choices is None:
        choices = [row.values.get(letter) for letter in LETTERS.lower()]
    if not isinstance(choices, list | tuple) or len(choices) != len(LETTERS):
        raise ValueError("`choices` must be a list of four texts")
    choices = [str(one) if isinstance(one, int | float) else one for one in choices]
    if not all(isinstance(one, str) for one in choices):
        raise ValueError("all four choices must be texts")
    texts = tuple(checked(one, "choices") for one in choices)
    return _Question(_subject(row, split, alone), text(row, _QUESTION), texts, _letter(value(row, _ANSWER)))


def _letter(answer: object) -> str:
    """A letter, or the number of a choice from 0."""
    found = answer.strip().upper() if isinstance(answer, str) else answer
    if isinstance(found, str) and found.isdecimal():
        found = int(found)
    if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < len(LETTERS):
        return LETTERS[found]
    if isinstance(found, str) and len(found) == 1 and found in LETTERS:
        return found
    raise ValueError("`answer` must be one of A, B, C and D, or a number from 0 to 3")


def _subject(row: Row, split: str, alone: bool) -> str:
    """What the row says, or else the name of the file (abstract_algebra_test.csv) or, where it is one of several, of
    its folder (abstract_algebra/test.parquet)."""
    found, stem = value(row, _SUBJECT), row.file.stem
    if not isinstance(found, str) or not found.strip():
        if alone and not stem.endswith(f"_{split}"):
            raise ValueError("needs a `subject`, which its file's name does not tell either")
        found = stem.removesuffix(f"_{split}") if stem.endswith(f"_{split}") else row.file.parent.name
    return "_".join(found.lower().split())


SUITES = (
    Mmlu("mmlu", "MMLU, 5 worked examples, the likeliest letter", 5, 5),
    Mmlu("mmlu_0shot", "MMLU without examples, the likeliest letter", 0, 0),
    MmluChat(),
)
