"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): word problems of grade-school arithmetic, whose answers are numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from distill_rl.evals.data.find import GSM8K, find
from distill_rl.evals.data.published import PublishedSplit, first_examples
from distill_rl.evals.data.read import ContentIds, Row, content_sha256, convert, read_rows, require_columns, text, value
from distill_rl.evals.suites.base import Item, Questions, Verdict

TEST = PublishedSplit("GSM8K test", 1319, "b72bc7d4740c667a947ebebe59447892badb9d21bf7b04ac6547e5a7306fb6aa")

_QUESTION, _ANSWER = ("question", "problem", "prompt"), ("answer", "solution", "target", "final_answer")
_GOLD = re.compile(r"(?:.*####)?\s*\$?(-?(?:\d[\d,]*)?\.?\d+)\s*", re.DOTALL)

INSTRUCTION = "Please reason step by step, and end with a line of the form `#### N`, where N is the answer, a number."


@dataclass(slots=True)
class Gsm8k:
    """With worked examples: text, "Q: …" and "A: …", the chain-of-thought prompt of Wei et al. 2022 (arXiv:2201.11903).
    As a chat: the question and how to write the answer down.
    """

    name: str
    title: str
    num_fewshot: int
    max_fewshot: int
    chat: bool
    max_new_tokens: int | None
    stop: tuple[str, ...]

    def load(self, data: Path, num_fewshot: int) -> Questions:
        files = find(data, GSM8K, "test")
        rows = [row for file in files for row in read_rows(file)]
        require_columns(rows, {"question": _QUESTION, "answer": _ANSWER}, {"choices": ("choices", "options")})
        pairs = convert(rows, lambda row: (text(row, _QUESTION), _gold(row)))
        examples = first_examples("gsm8k", num_fewshot)
        prefix = "".join(f"Q: {one.question}\nA: {one.answer}\n\n" for one in examples)
        content, name = content_sha256(pairs), ContentIds()
        items = tuple(self._item(name(*pair), *pair, prefix) for pair in pairs)
        return Questions(items, tuple(files), content, TEST.warnings(len(items), content))

    def judge(self, item: Item, completion: str) -> Verdict:
        from distill_rl.evals.grading.equivalence import same_number
        from distill_rl.evals.grading.extract import last_number

        given = last_number(completion)
        return Verdict(0.0 if given is None else float(same_number(item.answer, given)), given)

    def _item(self, name: str, question: str, answer: str, prefix: str) -> Item:
        if self.chat:
            return Item(name, ({"role": "user", "content": f"{question.strip()}\n\n{INSTRUCTION}"},), answer)
        return Item(name, f"Q: {question.strip()}\nA:", answer, prefix=prefix)


def _gold(row: Row) -> str:
    """The number after `####`, or the whole answer if it is a number; without separators of thousands."""
    found = value(row, _ANSWER)
    if isinstance(found, int | float) and not isinstance(found, bool):
        found = str(found)
    match = _GOLD.fullmatch(found) if isinstance(found, str) else None
    if match is None:
        raise ValueError("`answer` must end with `#### ` and a number, or be a number")
    return match[1].replace(",", "")


SUITES = (
    Gsm8k("gsm8k", "GSM8K, 8 worked examples with reasoning, the last number", 8, 8, False, 512, ("\nQ:",)),
    Gsm8k("gsm8k_0shot", "GSM8K as a chat, with reasoning, the last number", 0, 0, True, 1024, ()),
)
