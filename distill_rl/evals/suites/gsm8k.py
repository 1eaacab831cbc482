"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): grade-school word problems with numeric answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from distill_rl.evals.data import (
    GSM8K,
    PublishedSplit,
    Row,
    convert_rows,
    first_examples,
    first_value,
    make_questions,
    read_split,
    required_text,
)
from distill_rl.evals.suites.base import Item, Questions, SuiteSettings, Verdict

TEST = PublishedSplit("GSM8K test", 1319, "b72bc7d4740c667a947ebebe59447892badb9d21bf7b04ac6547e5a7306fb6aa")

_QUESTION, _ANSWER = ("question", "problem", "prompt"), ("answer", "solution", "target", "final_answer")
_GOLD = re.compile(r"(?:.*####)?\s*\$?(-?(?:\d[\d,]*)?\.?\d+)\s*", re.DOTALL)

INSTRUCTION = "Please reason step by step, and end with a line of the form `#### N`, where N is the answer, a number."


@dataclass(slots=True)
class Gsm8k(SuiteSettings):
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
        columns, foreign = {"question": _QUESTION, "answer": _ANSWER}, {"choices": ("choices", "options")}
        rows, files = read_split(data, GSM8K, "test", columns, foreign=foreign)
        pairs = convert_rows(rows, lambda row: (required_text(row, _QUESTION), _gold(row)))
        examples = first_examples("gsm8k", num_fewshot)
        prefix = "".join(f"Q: {example.question}\nA: {example.answer}\n\n" for example in examples)
        return make_questions(pairs, tuple, lambda item_id, pair: self._item(item_id, *pair, prefix), files, TEST)

    def judge(self, item: Item, completion: str) -> Verdict:
        """Scores 1 if the completion's final number (`extract.last_number`) equals the answer exactly as a number,
        otherwise 0; the number is the extracted answer, None if there is none."""
        from distill_rl.evals.grading.equivalence import same_number
        from distill_rl.evals.grading.extract import last_number

        number = last_number(completion)
        return Verdict(0.0 if number is None else float(same_number(item.answer, number)), number)

    def _item(self, item_id: str, question: str, answer: str, prefix: str) -> Item:
        if self.chat:
            return Item(item_id, ({"role": "user", "content": f"{question.strip()}\n\n{INSTRUCTION}"},), answer)
        return Item(item_id, f"Q: {question.strip()}\nA:", answer, prefix=prefix)


def _gold(row: Row) -> str:
    """The number after the last `####`, or the whole answer if it is a number."""
    answer = first_value(row, _ANSWER)
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    match = _GOLD.fullmatch(answer) if isinstance(answer, str) else None
    if match is None:
        raise ValueError("`answer` must end with `#### ` and a number, or be a number")
    return match[1].replace(",", "")


SUITES = (
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
