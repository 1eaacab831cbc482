"""MMLU (Hendrycks et al. 2021, arXiv:2009.03300): multiple-choice questions from 57 subjects, four choices each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distill_rl.errors import DataError
from distill_rl.evals.data import (
    MMLU,
    PublishedSplit,
    Row,
    content_sha256,
    convert_rows,
    first_value,
    make_questions,
    read_split,
    require_unicode,
    required_text,
)
from distill_rl.evals.suites.base import Item, Questions, SuiteSettings, Verdict

TEST = PublishedSplit("MMLU test", 14042, "c049713336da067cd68503805d6c2b4270a280e1cfd46b9a2fccac56e80480d1")
DEV = PublishedSplit("MMLU dev", 285, "641f921cfba366331d9d9eca6863cf3d47d1c60ef9e0a64e31d2d1ace32736f8")
LETTERS = "ABCD"

_HEADER = ("question", "a", "b", "c", "d", "answer")
"""The columns of the original CSV files, which have no header."""
_QUESTION, _ANSWER, _CHOICES = ("question", "input"), ("answer", "target"), ("choices", "options")
_SUBJECT = ("subject", "task")

INSTRUCTION = "Think step by step, then end with a line of the form `Answer: X`, where X is one of A, B, C and D."


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
    def topic(self) -> str:
        """The subject with blanks in place of underscores."""
        return self.subject.replace("_", " ")

    @property
    def listed(self) -> str:
        """The stripped question and, on a line each, the unchanged choices (`A. …`), as in lm-evaluation-harness."""
        lines = [f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices)]
        return self.question.strip() + "".join(lines)


@dataclass(slots=True)
class Mmlu(SuiteSettings):
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
        prefixes = {row.subject: _header(row) for row in rows}
        shown: list[_Question] = []
        warnings: tuple[str, ...] = ()
        if num_fewshot:
            dev, dev_files = _read(data, "dev")
            for subject, examples in _first_examples(dev, num_fewshot, prefixes, self.name, dev_files).items():
                prefixes[subject] += "".join(f"{one.listed}\nAnswer: {one.answer}\n\n" for one in examples)
                shown += examples
            files += dev_files
            warnings = DEV.warnings(len(dev), content_sha256(one.content for one in dev))

        def make_item(content_id: str, row: _Question) -> Item:
            return self._item(f"{row.subject}/{content_id}", row, prefixes[row.subject])

        questions = make_questions(rows, lambda row: row.content, make_item, files, TEST)
        if not shown:
            return questions
        # The examples that are shown are part of the content; the remaining ones of the split are not.
        content = content_sha256([(questions.content_sha256,), *(one.content for one in shown)])
        return replace(questions, content_sha256=content, warnings=questions.warnings + warnings)

    def judge(self, item: Item, completion: str) -> Verdict:
        """Scores 1 if the X of the completion's last `Answer: X` is the right letter, otherwise 0; the letter, or None,
        is the extracted answer. Used for chats only, since text prompts compare choices."""
        from distill_rl.evals.grading.extract import last_letter

        letter = last_letter(completion, LETTERS)
        return Verdict(float(letter == item.answer), letter)

    def _item(self, item_id: str, question: _Question, prefix: str) -> Item:
        if self.chat:
            header = f"The following is a multiple choice question about {question.topic}."
            message = {"role": "user", "content": f"{header}\n\n{question.listed}\n\n{INSTRUCTION}"}
            return Item(item_id, (message,), question.answer, question.subject)
        choices = tuple(f" {letter}" for letter in LETTERS)
        return Item(item_id, f"{question.listed}\nAnswer:", question.answer, question.subject, prefix, choices)


def _header(question: _Question) -> str:
    return f"The following are multiple choice questions (with answers) about {question.topic}.\n\n"


def _read(data: Path, split: str) -> tuple[list[_Question], list[Path]]:
    """Reads a split (`test` or `dev`) of MMLU: its questions, and the files that they come from."""
    columns = {"question": _QUESTION, "answer": _ANSWER, "choices": (*_CHOICES, *LETTERS.lower())}
    rows, files = read_split(data, MMLU, split, columns, header=_HEADER)
    return convert_rows(rows, lambda row: _question(row, split, alone=len(files) == 1)), files


def _first_examples(
    dev: Sequence[_Question], count: int, subjects: Mapping[str, str], name: str, files: Sequence[Path]
) -> dict[str, list[_Question]]:
    """The first `count` questions of every subject in the dev split, by subject."""
    examples: dict[str, list[_Question]] = {subject: [] for subject in subjects}
    for question in dev:
        if question.subject in examples:
            examples[question.subject].append(question)
    too_few = {subject: len(members) for subject, members in examples.items() if len(members) < count}
    if too_few:
        subject = min(too_few, key=lambda candidate: too_few[candidate])
        more = f" ({len(too_few)} subjects have fewer than {count})" if len(too_few) > 1 else ""
        rule = f"must be at most {too_few[subject]}, the examples of {subject} in {files[0]}{more}"
        raise DataError(f"num_fewshot of {name}", rule, count)
    return {subject: members[:count] for subject, members in examples.items()}


def _question(row: Row, split: str, alone: bool) -> _Question:
    """The question of a row, with its subject, its four choices in order and the letter of the right one."""
    choices = first_value(row, _CHOICES)
    if choices is None:
        choices = [row.values.get(letter) for letter in LETTERS.lower()]
    if not isinstance(choices, list | tuple) or len(choices) != len(LETTERS):
        raise ValueError("`choices` must be a list of four texts")
    choices = [str(choice) if isinstance(choice, int | float) else choice for choice in choices]
    if not all(isinstance(choice, str) for choice in choices):
        raise ValueError("all four choices must be texts")
    texts = tuple(require_unicode(choice, "choices") for choice in choices)
    subject, question = _subject(row, split, alone), required_text(row, _QUESTION)
    return _Question(subject, question, texts, _letter(first_value(row, _ANSWER)))


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


def _subject(row: Row, split: str, alone: bool) -> str:
    """From the column, the file's name (x_test.csv), or with several files the folder's (x/test.parquet)."""
    subject, stem = first_value(row, _SUBJECT), row.file.stem
    if not isinstance(subject, str) or not subject.strip():
        if stem.endswith(f"_{split}"):
            subject = stem.removesuffix(f"_{split}")
        elif alone:
            raise ValueError("needs a `subject`, in a column or in the name of its file")
        else:
            subject = row.file.parent.name
    return "_".join(subject.lower().split())


SUITES = (
    Mmlu("mmlu", "MMLU, 5 worked examples, the likeliest letter", num_fewshot=5, max_fewshot=5),
    Mmlu("mmlu_0shot", "MMLU without examples, the likeliest letter"),
    Mmlu("mmlu_cot", "MMLU as a chat, with reasoning, the last `Answer: X`", chat=True, max_new_tokens=1024),
)
