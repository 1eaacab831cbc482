"""Tokenizers that differ only in added tokens at the end are compared token by token; others are not."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken

from distill_rl.run.shared_vocabulary import SharedVocabulary, shared_vocabulary
from tests.helpers.tokenizers import CHAT_TEMPLATE, tiny_tokenizer

SIZE = 320


def with_tokens(*tokens: str, special: bool = True, template: str = CHAT_TEMPLATE, **named: str) -> Any:
    """The tiny tokenizer with added tokens."""
    tokenizer = tiny_tokenizer(SIZE)
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    tokenizer.chat_template = template
    for name, token in named.items():
        setattr(tokenizer, name, token)
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
def test_added_tokens_at_the_end_do_not_count(special: bool) -> None:
    longer, shorter = with_tokens("<x>", "<y>", special=special), with_tokens()
    assert shared_vocabulary(shorter, longer) == SharedVocabulary(SIZE, (), ("<x>", "<y>"))
    assert shared_vocabulary(longer, shorter) == SharedVocabulary(SIZE, ("<x>", "<y>"))
    assert shared_vocabulary(with_tokens("<x>"), longer) == SharedVocabulary(SIZE + 1, (), ("<y>",))
    assert shared_vocabulary(shorter, shorter) == SharedVocabulary(SIZE)


def test_same_id_with_another_meaning_is_another_tokenizer() -> None:
    assert shared_vocabulary(with_tokens("<x>"), with_tokens("<y>")) is None
    assert shared_vocabulary(with_tokens("<x>"), with_tokens("<y>", "<x>")) is None
    assert shared_vocabulary(tiny_tokenizer(SIZE), tiny_tokenizer(SIZE, seed=7)) is None
    assert shared_vocabulary(tiny_tokenizer(SIZE), tiny_tokenizer(SIZE + 1)) is None, (
        "a learnt token more, not an added one"
    )


def test_common_added_token_that_is_read_differently_is_another_tokenizer() -> None:
    ours, theirs = tiny_tokenizer(SIZE), with_tokens()
    ours.add_tokens([AddedToken("<x>", lstrip=True)])
    theirs.add_tokens([AddedToken("<x>"), AddedToken("<y>")])
    assert shared_vocabulary(ours, theirs) is None


def test_stop_token_of_the_teacher_must_be_known_to_the_student() -> None:
    longer = with_tokens("<stop>")
    assert shared_vocabulary(with_tokens(), longer, teacher_stops=(SIZE,)) is None
    assert shared_vocabulary(with_tokens(), with_tokens("<stop>", eos_token="<stop>")) is None
    assert shared_vocabulary(with_tokens(), longer, student_stops=(SIZE,)) is not None


def test_token_that_the_student_always_writes_must_be_known_to_the_teacher() -> None:
    shorter = with_tokens()
    for name in ("bos_token", "eos_token"):
        assert shared_vocabulary(with_tokens("<x>", **{name: "<x>"}), shorter) is None
    assert shared_vocabulary(with_tokens("<x>", template="<x>{{ messages }}"), shorter) is None
    assert shared_vocabulary(with_tokens("<x>", pad_token="<x>"), shorter) == SharedVocabulary(SIZE, ("<x>",))
    assert shared_vocabulary(shorter, with_tokens("<x>", bos_token="<x>", template="<x>")) is not None


def test_difference_is_put_into_words() -> None:
    assert str(SharedVocabulary(SIZE)) == ""
    text = str(SharedVocabulary(SIZE, (), ("<x>",)))
    assert (
        text
        == "its tokenizer has 1 token more than the student's (<x>); compared token by token over the 320 ids of both"
    )
    text = str(SharedVocabulary(1000, tuple("abcdef")))
    assert text.startswith("the student's tokenizer has 6 tokens more than the teacher's (a, b, c, d, ...); ")
