"""Which words of a chat are compared when two templates write it: the same ones, and all that both write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from distill_rl.align import TokenAligner
from distill_rl.align.alignment import Alignment
from tests.chats.kinds import KINDS, WORD, Chat
from tests.chats.oracle import expected
from tests.chats.templates import TEMPLATES, Template
from tests.chats.tokenizers import byte_spans, special

TEACHERS = ["qwen3", "qwen3-coder", "glm4.5", "gpt-oss", "mistral-tekken", "gemma4"]
"""Templates of teachers: calls in JSON and one argument after another, thoughts in three layouts, a system text that moves."""
TRIED = [
    *("system", "parts", "inline", "inline tight", "inline break", "thoughts", "call text", "call of nothing"),
    *(
        "call again",
        "calls",
        "rounds",
        "tools call",
        "quoted end",
        "quoted thought",
        "quoted arguments",
        "quoted parts",
    ),
]
Word = tuple[str, bool, int]
"""A marked word, whether it is learnt, and how many of the same that are learnt stand before it."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side's text of a chat: the word at each byte."""

    words: list[Word | None]
    learnt: list[Word]
    """The words that are learnt, in order"""

    @classmethod
    def of(cls, tokenizer: Any, template: Template, chat: Chat) -> Side | None:
        """That of a template; None for a chat that is refused."""
        wanted = expected(tokenizer, template, chat)
        if wanted.refused is not None:
            return None
        words: list[Word | None] = [None] * len(wanted.text.encode())
        seen: Counter[str] = Counter()
        for match in WORD.finditer(wanted.text):
            is_learnt = all(wanted.learnt[match.start() : match.end()])
            start = len(wanted.text[: match.start()].encode())
            words[start : start + len(match[0])] = [(match[0], is_learnt, seen[match[0]])] * len(match[0])
            seen[match[0]] += is_learnt
        return cls(words, [word for word in dict.fromkeys(words) if word and word[1]])

    def of_token(self, span: tuple[int, int]) -> set[Word]:
        """The words that a token holds a part of."""
        return {word for word in self.words[slice(*span)] if word}


@cache
def _tokenizer(name: str) -> Any:
    return special(TEMPLATES[name])


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("student", TEMPLATES)
def test_the_words_that_both_templates_write_are_compared(student: str, teacher: str) -> None:
    tokenizers = _tokenizer(student), _tokenizer(teacher)
    aligner = TokenAligner(*tokenizers)
    wrong = {}
    for kind in TRIED:
        chat = KINDS[kind].chat(TEMPLATES[student])
        names = zip(tokenizers, (student, teacher))
        sides = [Side.of(tokenizer, TEMPLATES[name], chat) for tokenizer, name in names]
        if None not in sides:
            found = _wrong(sides, tokenizers, aligner.align_messages(chat.messages, options=_options(student, chat)))
            wrong |= {kind: found} if found else {}
    assert wrong == {}


def _options(template: str, chat: Chat) -> dict[str, Any]:
    """What a template gets besides the messages."""
    return {**TEMPLATES[template].variables, **({"tools": chat.tools} if chat.tools else {})}


def _wrong(sides: Sequence[Side], tokenizers: Sequence[Any], alignment: Alignment) -> list[str]:
    """What is wrong with the chunks: words that are not the same on both sides, and those that are not compared."""
    rows = (alignment.student_ids, alignment.student_chunk), (alignment.teacher_ids, alignment.teacher_chunk)
    held: list[list[set[Word]]] = []
    for side, tokenizer, (ids, chunks) in zip(sides, tokenizers, rows):
        words: list[set[Word]] = [set() for _ in range(alignment.num_chunks)]
        for span, chunk in zip(byte_spans(tokenizer, ids.tolist())[1], chunks.tolist()):
            if chunk >= 0:
                words[chunk] |= side.of_token(span)
        held.append(words)
    pairs = {(*one, *other) for one, other in zip(*held) if one != other}
    compared = {word for words in held[0] for word in words}
    said, others = ([word for word in side.learnt if word in other.learnt] for side, other in (sides, sides[::-1]))
    missing = [word for word in said if word not in compared]
    if said != others and len(missing) <= len(said) // 2:
        missing = []  # what the templates write in different orders cannot all be compared
    return [f"different: {sorted(pair)}" for pair in pairs] + [f"not compared: {word}" for word in missing]
