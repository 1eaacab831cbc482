"""Turns that end by the next role's token, with templates that are written in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from distill_rl.data.batch.chat import closing_stop, render_document, with_stops
from tests.helpers.tokenizers import tiny_tokenizer

STOPS = ("<|user|>", "<|observation|>", "<|end|>")
TOKENS = {"tool": "<|observation|>"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


def glm(messages: Sequence[Mapping[str, Any]]) -> str:
    """Every message behind its role's token, and nothing behind it."""
    return "".join(
        TOKENS.get(m["role"], f"<|{m['role']}|>") + (m["content"] or "f()" * len(m.get("tool_calls", [])))
        for m in messages
    )


def turns(text: str, *said: str) -> list[tuple[int, int]]:
    """Where the assistant says these in a text, each once."""
    return [(text.index(words), text.index(words) + len(words)) for words in said]


@pytest.mark.parametrize(
    ("chat", "said", "added", "learnt"),
    [
        ("u:q a:one", ["one"], "<|user|>", ["one<|user|>"]),
        ("u:q a:one u:p a:two", ["one", "two"], "<|user|>", ["one<|user|>", "two<|user|>"]),
        ("u:q a:one u:p", ["one"], "", ["one<|user|>"]),
        ("u:q call", ["f()"], "<|observation|>", ["f()<|observation|>"]),
        ("u:q call t:r a:one", ["f()", "one"], "<|user|>", ["f()<|observation|>", "one<|user|>"]),
        ("u:q a:one s:be", ["one"], "", ["one"]),  # no stop follows
        ("u:q a:one<|end|>", ["one<|end|>"], "", ["one<|end|>"]),
        ("u:q a:one<|end|> u:p", ["one<|end|>"], "", ["one<|end|>"]),  # one stop is enough
    ],
)
def test_a_turn_holds_the_stop_that_ends_it(chat: str, said: list[str], added: str, learnt: list[str]) -> None:
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    messages = [
        CALL if word == "call" else {"role": roles[word[0]], "content": word.partition(":")[2]} for word in chat.split()
    ]
    text = glm(messages)
    assert closing_stop(glm, messages, text, STOPS) == added
    whole = text + added
    spans = with_stops(whole, turns(text, *said), STOPS)
    assert [whole[start:stop] for start, stop in spans] == learnt


def test_the_longest_stop_counts() -> None:
    text = "<|user|>q<|assistant|>one<|user|>p"
    [span] = with_stops(text, turns(text, "one"), ["<|user", "<|user|>"])
    assert text[slice(*span)] == "one<|user|>"


def test_nothing_is_added_without_a_stop_or_a_second_question() -> None:
    def single(messages: Sequence[Mapping[str, Any]]) -> str:
        if len(messages) > 2:
            raise ValueError("one question")
        return glm(messages)

    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "one"}]
    assert closing_stop(single, chat, glm(chat), STOPS) == closing_stop(glm, chat, glm(chat), ["<|other|>"]) == ""


@pytest.mark.parametrize(
    ("stops_in_text", "learnt"),
    [(False, ["one<|user|><|user|>", "two<|user|><|user|>"]), (True, ["one<|user|>", "two<|user|>"])],
)
def test_a_stop_that_an_answer_quotes_ends_it_only_if_it_is_a_token(stops_in_text: bool, learnt: list[str]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    said = [("user", "q<|user|>"), ("assistant", "one<|user|>"), ("user", "p"), ("assistant", "two<|user|>")]
    document = {"row": 0, "messages": [{"role": role, "content": content} for role, content in said]}
    text, spans, _ = render_document(
        tokenizer, document, roles=("assistant",), stops=STOPS, stops_in_text=stops_in_text
    )
    assert [text[start:stop] for start, stop in spans or ()] == learnt
