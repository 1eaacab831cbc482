"""What a template leaves out of chats, and whether it writes a key where it refuses some of the chats that are compared."""

from __future__ import annotations

from typing import Any

import pytest

from distill_rl.data.batch.chat import RenderedChat, TemplateCoverage
from distill_rl.errors import DataError
from tests.helpers.tokenizers import tiny_tokenizer


def template(whole, alone, length):
    """A template that writes the same for a chat with the key, and for one without it as said: True: another text, False: the
    same one, None: it refuses the chat."""

    def write(messages, **options):
        if messages[0].get("name") == "n":
            return "text"
        changes = whole if len(messages) == length else alone
        if changes is None:
            raise ValueError("refused")
        return "other" if changes else "text"

    return write


@pytest.mark.parametrize(
    ("whole", "alone", "written"),
    [
        (True, False, True),
        (True, None, True),
        (False, True, True),
        (None, True, True),
        (None, None, True),  # refused without the key, so it was read
        (None, False, False),
        (False, None, False),
        (False, False, False),
    ],
)
def test_key_before_the_last_message_counts_by_either_text(whole, alone, written):
    chat = [{"role": "user", "content": "a", "name": "n"}, {"role": "assistant", "content": "b"}]
    assert RenderedChat(template(whole, alone, 2), chat, "text").changes_with_key(0, "name") is written


@pytest.mark.parametrize(("whole", "written"), [(True, True), (None, True), (False, False)])
def test_key_of_the_last_message_counts_by_the_whole_text(whole, written):
    chat = [{"role": "user", "content": "a", "name": "n"}]
    assert RenderedChat(template(whole, None, 1), chat, "text").changes_with_key(0, "name") is written


NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
CALLS = "{% for c in m.tool_calls or [] %}" + NAME + ARGUMENTS + "{% endfor %}"
FIRST = CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
AFTER = "{{ m.content.split('</think>')[-1] }}"
THOUGHT = "{{ m.reasoning_content }}"
ASKED, RESULT = {"role": "user", "content": "why"}, {"role": "tool", "content": 'say "é"\n<b>'}
INLINE = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"}
OPENED = {"role": "assistant", "content": "hm\n</think>\n\nso"}
THINKING = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
CONTENT_OF_TURN, CALLS_OF_TURN = "`content` of assistant messages", "`tool_calls` of assistant messages"


def calling(*names: str, content: str = "", **arguments: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def parts_left_out(template: str, *chats: list[dict[str, Any]]) -> list[list[str]]:
    """What one template leaves out of each chat."""
    made = tiny_tokenizer()
    made.chat_template = "{% for m in messages %}{{ '|' + m.role + '|' }}" + template + "{% endfor %}"
    coverage = TemplateCoverage(made, "the student's tokenizer")
    return [
        [*map(str, coverage.left_out({"row": 0, "messages": chat}, made.apply_chat_template(chat, tokenize=False)))]
        for chat in chats
    ]


@pytest.mark.parametrize(
    ("template", "turn", "missing"),
    [
        ("{{ m.content }}" + CALLS, calling("f", content="let me", a="x"), None),
        ("{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}", calling("f", a="x"), None),
        (
            "{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
            calling("f", content="let me", a="x"),
            CONTENT_OF_TURN,
        ),
        ("{{ m.content }}" + FIRST, calling("f", a="x"), None),
        ("{{ m.content }}" + FIRST, calling("f", "g", a="x"), CALLS_OF_TURN),
        # The second call says the same as the first.
        ("{{ m.content }}" + FIRST, calling("f", "f", a="x"), CALLS_OF_TURN),
        ("{{ m.content }}" + CALLS.replace(NAME, ""), calling("f", a="x"), CALLS_OF_TURN),
        # The name stands in the question, and so in the text.
        ("{{ m.content }}" + CALLS.replace(NAME, ""), calling("why", a="x"), CALLS_OF_TURN),
        ("{{ m.content }}" + CALLS.replace(ARGUMENTS, ""), calling("f", a="x"), CALLS_OF_TURN),
        ("{{ m.content }}" + CALLS.replace(ARGUMENTS, ""), calling("f"), None),
        ("{{ m.content }}" + CALLS.replace("arguments", "arguments.a"), calling("f", a="x", b="y"), CALLS_OF_TURN),
        ("{{ m.content }}", INLINE, None),
        (AFTER, INLINE, "`<think> in content` of assistant messages"),
        ("{{ m.content }}", OPENED, None),
        (AFTER, OPENED, "`<think> in content` of assistant messages"),
        (AFTER, {**OPENED, "content": "</think>\n\nso"}, None),
        ("{% if loop.last %}{{ m.content }}{% else %}" + AFTER + "{% endif %}", OPENED, None),
        ("{{ m.content | tojson }}", {**RESULT, "content": 'say "é"\n</think>so'}, None),
        ("{% if loop.last %}{{ m.content }}{% else %}" + AFTER + "{% endif %}", INLINE, None),
        (
            "{% if loop.last %}{{ m.content }}{% else %}" + AFTER + "{% endif %}",
            {**INLINE, "content": "<think>hm</think>"},
            None,
        ),
        ("{{ m.content }}" + THOUGHT, THINKING, None),
        ("{{ m.content }}", THINKING, "`reasoning_content` of assistant messages"),
        ("{{ m.content }}{% if loop.last %}" + THOUGHT + "{% endif %}", THINKING, None),
        ("{{ m.content | tojson }}", RESULT, None),
        ("{{ m.content | tojson | tojson }}", RESULT, None),
        ("{{ m.content | trim | upper }}", {**RESULT, "content": "  a b \n"}, None),
        ("{% if m.role != 'tool' %}{{ m.content }}{% endif %}", RESULT, "`content` of tool messages"),
        ("{{ m.content }}", {"role": "assistant", "content": " "}, None),
        ("{{ m.content }}", {"role": "assistant", "content": "so", "weight": 0, "train": False, "mask": 1}, None),
    ],
)
def test_all_that_is_read_or_said_is_looked_for(template: str, turn: dict[str, Any], missing: str | None) -> None:
    expected = [missing] if missing else []
    for chat in ([ASKED, turn], [ASKED, turn, ASKED]):
        assert parts_left_out(template, chat) == [expected], chat
    assert parts_left_out(template, *[[ASKED, turn]] * 20) == [expected] * 20


def test_a_message_is_looked_for_when_many_like_it_were_written() -> None:
    good, bad = [ASKED, INLINE], [ASKED, INLINE, {**ASKED, "content": "and then"}, THINKING, ASKED]
    first_question = "{% if m.role != 'user' or loop.first or loop.last %}{{ m.content }}{% endif %}" + THOUGHT
    assert parts_left_out(first_question, *[good] * 40, bad) == [*[[]] * 40, ["`content` of user messages"]]


@pytest.mark.parametrize("turn", [{"role": "assistant", "content": "so"}, calling("f", a="x")])
def test_only_thoughts_may_be_left_out_of_earlier_turns(turn: dict[str, Any]) -> None:
    of_last = "{% if loop.last or m.role == 'user' %}{{ m.content }}" + CALLS + "{% endif %}"
    missing = [CALLS_OF_TURN if "tool_calls" in turn else CONTENT_OF_TURN]
    assert parts_left_out(of_last, [ASKED, turn], [ASKED, turn, ASKED]) == [[], missing]


def test_what_is_left_out_fails_or_is_reported() -> None:
    made = tiny_tokenizer()
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    coverage = TemplateCoverage(made, "teacher big's tokenizer")
    document = {"row": 4, "messages": [ASKED, {**THINKING, "name": "bo"}]}
    words = tuple(
        f"`{key}` of assistant messages, by the chat template of teacher big's tokenizer"
        for key in ("reasoning_content", "name")
    )
    assert coverage.check(document, "whyso", "warn") == words
    with pytest.raises(
        DataError, match=r"^row 4: the chat template of teacher big's .*`reasoning_content`.*unrendered=warn"
    ):
        coverage.check(document, "whyso", "fail")
    named = {"row": 4, "messages": [ASKED, {"role": "assistant", "content": "so", "name": "bo"}]}
    assert coverage.check(named, "whyso", "fail") == words[1:]
