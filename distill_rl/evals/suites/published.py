"""The suites of published questions: MATH, MATH-500 and GSM8K, whose answers a model works out, and MMLU, whose answers are letters.

MATH (Hendrycks et al. 2021, arXiv:2103.03874) and MATH-500 (Lightman et al. 2023, arXiv:2305.20050): problems from
mathematics competitions, with answers in LaTeX. GSM8K (Cobbe et al. 2021, arXiv:2110.14168): grade-school word problems with
numeric answers. MMLU (Hendrycks et al. 2021, arXiv:2009.03300): multiple-choice questions from 57 subjects, four choices each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill_rl.errors import DataError
from distill_rl.evals import data as sources
from distill_rl.evals.data import PublishedSplit
from distill_rl.evals.grading.equivalence import same_math, same_number
from distill_rl.evals.grading.extract import final_answer, last_boxed, last_letter, last_number
from distill_rl.evals.suites.base import Item, Questions, Suite, Verdict

_CHOICES = ("choices", "options")
"""Columns of MMLU, which the data of the other suites do not have."""

# MATH and MATH-500.

MATH_TEST = PublishedSplit("MATH test", 5000, "d7c3edcdb626368bb3f82200bea6d81dd7bb1d51dea91a46c98827d3451fb13a")
MATH500_TEST = PublishedSplit("MATH-500", 500, "4a06788f3cba46e9a4ab4525f68621e9c2e6dfa08fe1951ffb7345026ab0dea6")

_PROBLEM, _LATEX, _SOLUTION = ("problem", "question"), ("answer", "final_answer", "target"), ("solution",)
_TYPE = ("type", "subject", "category")

MATH_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True)
class _Problem:
    text: str
    answer: str
    type: str


@dataclass(slots=True)
class Math(Suite):
    r"""MATH or MATH-500 as text, or as a chat if `chat` is set.

    As text: after the worked examples of Lewkowycz et al. 2022 (arXiv:2206.14858), appendix D.2; the answer is the text
    between "Final Answer: The final answer is" and ". I hope it is correct.".
    As a chat: the problem and an instruction, without examples; the answer is the content of the last `\boxed{}`.
    """

    names: sources.DataSetNames = sources.MATH
    published: PublishedSplit = MATH_TEST

    def load(self, data: Path, num_fewshot: int = 0) -> Questions:
        """Loads the test split from a folder of data sets or a single file, each problem as text after the paper's first
        `num_fewshot` worked examples; the problem's type is its task.

        A chat shows no examples, and ignores `num_fewshot`. Differences from the published split become warnings.

        Raises:
            DataError: no data, missing columns, bad rows, one line each, or more examples requested than the paper's four.
        """
        examples = [] if self.chat else sources.first_examples(self.name, num_fewshot)
        prefix = "".join(f"Problem:\n{question}\n\nSolution: {answer}\n\n" for question, answer in examples)
        columns, foreign = {"problem": _PROBLEM, "answer": _LATEX + _SOLUTION}, {"choices": _CHOICES}
        rows, files = sources.read_split(data, self.names, "test", columns, foreign=foreign)

        def make_item(item_id: str, problem: _Problem) -> Item:
            if self.chat:
                message = {"role": "user", "content": f"{problem.text.strip()}\n\n{MATH_INSTRUCTION}"}
                return Item(item_id, (message,), problem.answer, problem.type)
            return Item(item_id, f"Problem:\n{problem.text}\n\nSolution:", problem.answer, problem.type, prefix)

        problems = sources.convert_rows(rows, _problem)
        return sources.make_questions(problems, lambda one: (one.text, one.answer), make_item, files, self.published)

    def judge(self, item: Item, completion: str) -> Verdict:
        r"""Scores 1 if the completion's answer is equivalent to the item's (`equivalence.same_math`), otherwise 0; it
        (`extract.last_boxed` of a chat, `extract.final_answer` of a text), or None, is the extracted answer.

        Call it only in a grading process: the comparison may hang."""
        answer = last_boxed(completion) if self.chat else final_answer(completion)
        return Verdict(0.0 if answer is None else float(same_math(item.answer, answer)), answer)


def _problem(row: sources.Row) -> _Problem:
    """The answer is the answer column's, or the last box of the worked solution."""
    answer = _text(sources.first_value(row, _LATEX))
    if answer is None:
        answer = last_boxed(sources.required_text(row, _SOLUTION))
        if answer is None:
            raise ValueError("needs an `answer`, or a `solution` with the answer in \\boxed{}")
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"`answer` must be non-empty text; got {answer!r:.60}; correct the row, or remove it")
    if "####" in answer:
        raise ValueError("`answer` must be LaTeX; `####` is how GSM8K writes its answers")
    return _Problem(sources.required_text(row, _PROBLEM), sources.require_unicode(answer.strip(), "answer"), _type(row))


def _text(value: Any) -> Any:
    """A number as text; other values unchanged."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _type(row: sources.Row) -> str:
    """The problem's type in one spelling, such as counting_and_probability; empty if the row has none."""
    name = sources.first_value(row, _TYPE)
    words = re.findall(r"[a-z0-9]+", name.lower().replace("&", " and ")) if isinstance(name, str) else []
    return "_".join(words)


MATH_SUITES = (
    Math("math", "MATH as a chat, with reasoning, the answer in \\boxed{}", chat=True, max_new_tokens=2048),
    Math(
        "math500",
        "MATH-500 as a chat, with reasoning, the answer in \\boxed{}",
        chat=True,
        max_new_tokens=2048,
        names=sources.MATH500,
        published=MATH500_TEST,
    ),
    Math(
        "minerva_math",
        "MATH, 4 worked examples (Minerva), the final answer",
        num_fewshot=4,
        max_fewshot=4,
        max_new_tokens=1024,
        stop=("Problem:",),
    ),
)


# GSM8K.

GSM8K_TEST = PublishedSplit("GSM8K test", 1319, "b72bc7d4740c667a947ebebe59447892badb9d21bf7b04ac6547e5a7306fb6aa")

_WORD_PROBLEM, _NUMBER = ("question", "problem", "prompt"), ("answer", "solution", "target", "final_answer")
_GOLD = re.compile(r"(?:.*####)?\s*\$?(-?(?:\d[\d,]*)?\.?\d+)\s*", re.DOTALL)

GSM8K_INSTRUCTION = (
    "Please reason step by step, and end with a line of the form `#### N`, where N is the answer, a number."
)


@dataclass(slots=True)
class Gsm8k(Suite):
    """GSM8K as text, or as a chat if `chat` is set.

    As text: worked examples "Q: …" and "A: …", the chain-of-thought prompt of Wei et al. 2022 (arXiv:2201.11903).
    As a chat: the question and an instruction on how to write the answer.
    """

    def load(self, data: Path, num_fewshot: int) -> Questions:
        """Loads the test split from a folder of data sets or a single file, each question after the paper's first
        `num_fewshot` worked examples.

        A chat variant shows no examples. Differences from the published split become warnings.

        Raises:
            DataError: no data, missing columns, bad rows, or more examples requested than the paper's eight.
        """
        columns, foreign = {"question": _WORD_PROBLEM, "answer": _NUMBER}, {"choices": _CHOICES}
        rows, files = sources.read_split(data, sources.GSM8K, "test", columns, foreign=foreign)
        pairs = sources.convert_rows(rows, lambda row: (sources.required_text(row, _WORD_PROBLEM), _gold(row)))
        examples = sources.first_examples("gsm8k", num_fewshot)
        prefix = "".join(f"Q: {question}\nA: {answer}\n\n" for question, answer in examples)

        def make_item(item_id: str, pair: tuple[str, str]) -> Item:
            question, answer = pair[0].strip(), pair[1]
            if self.chat:
                return Item(item_id, ({"role": "user", "content": f"{question}\n\n{GSM8K_INSTRUCTION}"},), answer)
            return Item(item_id, f"Q: {question}\nA:", answer, prefix=prefix)

        return sources.make_questions(pairs, tuple, make_item, files, GSM8K_TEST)

    def judge(self, item: Item, completion: str) -> Verdict:
        """Scores 1 if the completion's final number (`extract.last_number`) equals the answer exactly as a number,
        otherwise 0; the number is the extracted answer, None if there is none."""
        number = last_number(completion)
        return Verdict(0.0 if number is None else float(same_number(item.answer, number)), number)


def _gold(row: sources.Row) -> str:
    """The number after the last `####`, or the whole answer if it is a number."""
    answer = _text(sources.first_value(row, _NUMBER))
    match = _GOLD.fullmatch(answer) if isinstance(answer, str) else None
    if match is None:
        raise ValueError("`answer` must end with `#### ` and a number, or be a number")
    return match[1].replace(",", "")


GSM8K_SUITES = (
    Gsm8k(
        "gsm8k",
        "GSM8K, 8 worked examples with reasoning, the last number",
        num_fewshot=8,
        max_fewshot=8,
        max_new_tokens=512,
        stop=("\nQ:",),
    ),
    Gsm8k("gsm8k_0shot", "GSM8K as a chat, with reasoning, the last number", chat=True, max_new_tokens=1024),
)


# MMLU.

MMLU_TEST = PublishedSplit("MMLU test", 14042, "c049713336da067cd68503805d6c2b4270a280e1cfd46b9a2fccac56e80480d1")
MMLU_DEV = PublishedSplit("MMLU dev", 285, "641f921cfba366331d9d9eca6863cf3d47d1c60ef9e0a64e31d2d1ace32736f8")
LETTERS = "ABCD"

_HEADER = ("question", "a", "b", "c", "d", "answer")
"""The columns of the original CSV files, which have no header."""
_QUESTION, _LETTER = ("question", "input"), ("answer", "target")
_SUBJECT = ("subject", "task")

MMLU_INSTRUCTION = "Think step by step, then end with a line of the form `Answer: X`, where X is one of A, B, C and D."


@dataclass(frozen=True, slots=True)
class _Question:
    subject: str
    """Such as abstract_algebra."""
    question: str
    choices: tuple[str, ...]
    answer: str
    """A letter."""

    @property
    def content(self) -> tuple[str, ...]:
        """The texts that identify the question: subject, question, choices and answer."""
        return (self.subject, self.question, *self.choices, self.answer)

    @property
    def listed(self) -> str:
        """The stripped question and, on a line each, the unchanged choices (`A. …`), as in lm-evaluation-harness."""
        lines = [f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices)]
        return self.question.strip() + "".join(lines)


@dataclass(slots=True)
class Mmlu(Suite):
    """MMLU as text, or as a chat if `chat` is set.

    As text, the question follows worked examples, the first ones of its subject in the dev split, and the answer is the
    letter with the highest likelihood. Header, examples and question are joined as by Hendrycks et al.

    As a chat, the model reasons, without examples, and the answer is the letter of the last `Answer: X`.
    """

    def load(self, data: Path, num_fewshot: int) -> Questions:
        """Loads the test split from a folder of data sets or a single file; the subject is each item's task.

        As text, the prefix of an item names the subject and shows the first `num_fewshot` questions of that subject in
        the dev split with their answers; these then belong to the content hash. A chat shows none. Differences from the
        published splits become warnings.

        Raises:
            DataError: no test data, or no dev data although examples are requested; missing columns; bad rows, one line
                each; a negative number of examples, or more than a subject has.
        """
        if num_fewshot < 0:
            raise DataError(f"num_fewshot of {self.name}", "must be 0 or more", num_fewshot)
        rows, files = _read(data, "test")
        prefixes = {
            subject: f"The following are multiple choice questions (with answers) about {_topic(subject)}.\n\n"
            for subject in dict.fromkeys(row.subject for row in rows)
        }
        shown: list[_Question] = []
        warnings: tuple[str, ...] = ()
        if num_fewshot:
            dev, dev_files = _read(data, "dev")
            for subject, examples in _first_examples(dev, num_fewshot, prefixes, self.name, dev_files).items():
                prefixes[subject] += "".join(f"{one.listed}\nAnswer: {one.answer}\n\n" for one in examples)
                shown += examples
            files += dev_files
            warnings = MMLU_DEV.warnings(len(dev), sources.content_sha256(one.content for one in dev))

        def make_item(content_id: str, row: _Question) -> Item:
            item_id = f"{row.subject}/{content_id}"
            if self.chat:
                header = f"The following is a multiple choice question about {_topic(row.subject)}."
                message = {"role": "user", "content": f"{header}\n\n{row.listed}\n\n{MMLU_INSTRUCTION}"}
                return Item(item_id, (message,), row.answer, row.subject)
            prompt, choices = f"{row.listed}\nAnswer:", tuple(f" {letter}" for letter in LETTERS)
            return Item(item_id, prompt, row.answer, row.subject, prefixes[row.subject], choices)

        questions = sources.make_questions(rows, lambda row: row.content, make_item, files, MMLU_TEST)
        if not shown:
            return questions
        # The examples that are shown are part of the content; the remaining ones of the split are not.
        content = sources.content_sha256([(questions.content_sha256,), *(one.content for one in shown)])
        return replace(questions, content_sha256=content, warnings=questions.warnings + warnings)

    def judge(self, item: Item, completion: str) -> Verdict:
        """Scores 1 if the X of the completion's last `Answer: X` is the right letter, otherwise 0; the letter, or None,
        is the extracted answer. Used for chats only, since text prompts compare choices."""
        letter = last_letter(completion, LETTERS)
        return Verdict(float(letter == item.answer), letter)


def _topic(subject: str) -> str:
    return subject.replace("_", " ")


def _read(data: Path, split: str) -> tuple[list[_Question], list[Path]]:
    """Reads a split (`test` or `dev`) of MMLU: its questions, and the files that they come from."""
    columns = {"question": _QUESTION, "answer": _LETTER, "choices": (*_CHOICES, *LETTERS.lower())}
    rows, files = sources.read_split(data, sources.MMLU, split, columns, foreign={}, header=_HEADER)
    return sources.convert_rows(rows, lambda row: _question(row, split, alone=len(files) == 1)), files


def _first_examples(
    dev: Sequence[_Question], count: int, subjects: Mapping[str, str], name: str, files: Sequence[Path]
) -> dict[str, list[_Question]]:
    """The first `count` questions of every subject in the dev split, by subject."""
    examples: dict[str, list[_Question]] = {subject: [] for subject in subjects}
    for question in dev:
        if question.subject in examples:
            examples[question.subject].append(question)
    if too_few := {subject: len(members) for subject, members in examples.items() if len(members) < count}:
        subject = min(too_few, key=lambda candidate: too_few[candidate])
        more = f" ({len(too_few)} subjects have fewer than {count})" if len(too_few) > 1 else ""
        rule = f"must be at most {too_few[subject]}, the examples of {subject} in {files[0]}{more}"
        raise DataError(f"num_fewshot of {name}", rule, count)
    return {subject: members[:count] for subject, members in examples.items()}


def _question(row: sources.Row, split: str, alone: bool) -> _Question:
    """The question of a row, with its subject, its four choices in order and the letter of the right one."""
    choices = sources.first_value(row, _CHOICES)
    if choices is None:
        choices = [row.values.get(letter) for letter in LETTERS.lower()]
    if not isinstance(choices, list | tuple) or len(choices) != len(LETTERS):
        raise ValueError("`choices` must be a list of four texts")
    choices = [str(choice) if isinstance(choice, int | float) else choice for choice in choices]
    if not all(isinstance(choice, str) for choice in choices):
        raise ValueError("all four choices must be texts")
    texts = tuple(sources.require_unicode(choice, "choices") for choice in choices)
    subject, question = _subject(row, split, alone), sources.required_text(row, _QUESTION)
    return _Question(subject, question, texts, _letter(sources.first_value(row, _LETTER)))


def _letter(answer: object) -> str:
    """The letter, A to D, of an answer that is written as a letter of either case or as the index of a choice, from 0."""
    if isinstance(answer, str):
        answer = answer.strip().upper()
        if answer.isdecimal():
            answer = int(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(LETTERS):
        return LETTERS[answer]
    if isinstance(answer, str) and len(answer) == 1 and answer in LETTERS:
        return answer
    raise ValueError("`answer` must be one of A, B, C and D, or a number from 0 to 3")


def _subject(row: sources.Row, split: str, alone: bool) -> str:
    """From the column, the file's name (x_test.csv), or with several files the folder's (x/test.parquet)."""
    subject, stem = sources.first_value(row, _SUBJECT), row.file.stem
    if not isinstance(subject, str) or not subject.strip():
        if stem.endswith(f"_{split}"):
            subject = stem.removesuffix(f"_{split}")
        elif alone:
            raise ValueError("needs a `subject`, in a column or in the name of its file")
        else:
            subject = row.file.parent.name
    return "_".join(subject.lower().split())


MMLU_SUITES = (
    Mmlu("mmlu", "MMLU, 5 worked examples, the likeliest letter", num_fewshot=5, max_fewshot=5),
    Mmlu("mmlu_0shot", "MMLU without examples, the likeliest letter"),
    Mmlu("mmlu_cot", "MMLU as a chat, with reasoning, the last `Answer: X`", chat=True, max_new_tokens=1024),
)
