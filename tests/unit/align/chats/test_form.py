"""The form in which a template gets contents: null, text or parts, and arguments of calls."""

from __future__ import annotations

from typing import Any

import pytest

from distill_rl.align.chats.form import template_form, text_of
from distill_rl.align.chats.rendering import render
from tests.helpers.tokenizers import tiny_tokenizer

CALLS = "{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.name }}{% endfor %}"
PARTS = "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
CALL: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
NULL = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def written(body: str, message: dict[str, Any]) -> str:
    """A question and this message, each between bars."""
    made = tiny_tokenizer()
    made.chat_template = "{% for m in messages %}|" + body + "{% endfor %}|"
    return render(made, [{"role": "user", "content": "q"}, message])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("{{ m.content }}" + CALLS, "|q|call f|"),  # would write None
        ("{{ m.content | tojson }}" + CALLS, '|"q"|""call f|'),  # would write null
        ("{{ m.content + '.' }}" + CALLS, "|q.|.call f|"),  # would fail
        ("{{ m.content.strip() }}" + CALLS, "|q|call f|"),
        ("{{ m.content or '' }}" + CALLS, "|q|call f|"),
        ("{% if m.content is none %}nothing {% else %}{{ m.content + '.' }}{% endif %}" + CALLS, "|q.|nothing call f|"),
        (PARTS + CALLS, "|q|call f|"),
    ],
)
def test_null_is_empty_unless_the_template_reads_it(body: str, text: str) -> None:
    assert written(body, NULL) == text
    assert NULL["content"] is None


def test_null_of_a_template_without_calls() -> None:
    answer = {"role": "assistant", "content": None}
    assert written("{{ m.content }}", answer) == "|q||"
    assert written("{% if m.tool_calls %}{{ raise_exception('no') }}{% endif %}{{ m.content }}", answer) == "|q||"


@pytest.mark.parametrize("content", ["a b", [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]])
@pytest.mark.parametrize("body", ["{{ m.content }}", PARTS, EITHER])
def test_text_and_parts_say_the_same(body: str, content: Any) -> None:
    assert written(body, {"role": "assistant", "content": content}) == "|q|a b|"


@pytest.mark.parametrize(("body", "form"), [("{{ m.content }}", "text"), (PARTS, "parts"), (EITHER, "either")])
def test_the_form_is_found_again_for_another_template(body: str, form: str) -> None:
    made = tiny_tokenizer()
    for template, expected in ((body, form), ("{{ messages[0].content }}", "text")):
        made.chat_template = template.replace("m.content", "messages[0].content")
        assert template_form(made).content == expected


@pytest.mark.parametrize("arguments", [{"a": "é"}, '{"a": "é"}'])
@pytest.mark.parametrize("filtered", ["| tojson", "", ".a"])
def test_arguments_are_an_object_or_text_as_the_template_reads_them(filtered: str, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    field = "m.tool_calls[0].function.arguments" + filtered.replace(".a", ".items() | map('join', '=') | join")
    text = written(
        "{% if m.tool_calls %}{{ " + field + " }}{% endif %}",
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    assert text == ("|" * 2 + {"| tojson": '{"a": "é"}', "": '{"a": "é"}', ".a": "a=é"}[filtered] + "|")


def test_the_text_of_a_message() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": None}, {"text": "b"}]
    contents: list[Any] = ["a", None, [], parts]
    assert [text_of({"content": content}) for content in contents] == ["a", "", "", "ab"]
    assert text_of({}) == ""
