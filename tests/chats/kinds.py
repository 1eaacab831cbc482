"""The kinds of chats that every template is tried with.

Contents, thoughts, names of tools, arguments and results consist of words that occur in one message only, and that say
which part of which message they belong to (`WORD`), so that the labels of a chat follow from its words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.chats.templates import Template

Message = dict[str, Any]

WORD = re.compile(r"(?:sys|usr|ans|tht|nam|arg|res|too)\d+q[a-z]")
"""A marked word: of a system message, a question, an answer, a thought, a call's name, an argument, a result, a tool."""
LEARNT = ("ans", "tht", "nam", "arg")
"""Beginnings of the words that the assistant says."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat of some kind."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    quoted: str = ""
    """A piece of the template's own text that contents quote, each time directly behind a marked word"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of chats."""

    name: str
    shows: str
    chat: Callable[[Template], Chat]


def say(what: str, number: int, between: str = " ") -> str:
    """Two marked words."""
    return f"{what}{number}qa{between}{what}{number}qb"


def user(number: int) -> Message:
    """A question."""
    return {"role": "user", "content": say("usr", number)}


def answer(number: int, content: Any = None, **more: Any) -> Message:
    """An answer of marked words, or of another content."""
    return {"role": "assistant", "content": say("ans", number) if content is None else content, **more}


def system(number: int) -> Message:
    """A system message."""
    return {"role": "system", "content": say("sys", number)}


def call(number: int, content: str | None = "", *, count: int = 1, text: bool = False, **more: Any) -> Message:
    """A turn with calls.

    Args:
        number: of the first call.
        text: arguments as JSON text.
    """
    calls = []
    for i in range(number, number + count):
        arguments = {"city": say("arg", i), "unit": f"arg{i}qc"}
        function = {"name": f"nam{i}qa", "arguments": json.dumps(arguments) if text else arguments}
        calls.append({"id": f"call0000{i}", "type": "function", "function": function})
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def result(number: int) -> Message:
    """The result of a call."""
    content = say("res", number)
    return {"role": "tool", "name": f"nam{number}qa", "tool_call_id": f"call0000{number}", "content": content}


def tool(number: int) -> dict[str, Any]:
    """The schema of a tool that can be called."""
    properties = {
        "city": {"type": "string", "description": "A city."},
        "unit": {"type": "string", "description": "A unit."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    function = {"name": f"nam{number}qa", "description": f"too{number}qa", "parameters": parameters}
    return {"type": "function", "function": function}


def thought(number: int, key: str = "reasoning_content") -> dict[str, str]:
    """A thought, as a key of an answer."""
    return {key: say("tht", number)}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def inline(number: int, before: str = "\n", behind: str = "\n\n", between: str = " ") -> str:
    """An answer that begins with its thought.

    Args:
        before: around the thought, inside its tags.
        behind: behind its tags.
        between: between the words of the thought.
    """
    return f"<think>{before}{say('tht', number, between)}{before}</think>{behind}{say('ans', number)}"


def calling(function: dict[str, Any], said: str = say("res", 1)) -> list[Message]:
    """A question, a call of one function, its result and an answer."""
    turn = call(1)
    turn["tool_calls"][0]["function"] = function
    return [user(1), turn, {**result(1), "name": function["name"], "content": said}, answer(2)]


def _quoting(quoted: str, answered: str) -> Chat:
    """A chat in which a question and an answer quote a piece of the template's text."""
    quote = f"usr1qa{quoted}usr1qb"
    messages = [{"role": "user", "content": quote}, answer(1, answered), user(2), answer(2)]
    return Chat(messages, quoted=quoted)


def _always(*messages: Message, tools: list[dict[str, Any]] | None = None) -> Callable[[Template], Chat]:
    """The same chat for every template."""
    return lambda _: Chat(list(messages), tools or [])


_KINDS = (
    Kind("single", "a question and an answer", _always(user(1), answer(1))),
    Kind("two turns", "two questions and two answers", _always(user(1), answer(1), user(2), answer(2))),
    Kind("system", "a system message first", _always(system(1), user(1), answer(1), user(2), answer(2))),
    Kind("late system", "a system message in mid-chat", _always(user(1), answer(1), system(2), user(2), answer(2))),
    Kind("assistant first", "an answer before any question", _always(answer(1), user(1), answer(2))),
    Kind("two answers", "two answers in a row", _always(user(1), answer(1), answer(2), user(3), answer(3))),
    Kind("question last", "no answer to the last question", _always(user(1), answer(1), user(2))),
    Kind(
        "empty answer",
        "an answer without text before one with text",
        _always(user(1), answer(1, ""), user(2), answer(2)),
    ),
    Kind(
        "white space",
        "white space around and inside an answer",
        _always(user(1), answer(1, "  " + say("ans", 1, "\n\n") + " \n"), user(2), answer(2, f"\n{say('ans', 2)}\n")),
    ),
    Kind(
        "unicode",
        "letters of several bytes, emoji, combining characters",
        _always(
            {"role": "user", "content": say("usr", 1, " é中🙂 ")}, answer(1, say("ans", 1, " 中é e\u0301👩‍🚀 ") + "🙂")
        ),
    ),
    Kind(
        "same words",
        "answers with the words of questions and of headers",
        _always(
            {"role": "user", "content": "user"},
            answer(1, "assistant"),
            {"role": "user", "content": "assistant"},
            answer(2, "user"),
            {"role": "user", "content": "user"},
            answer(3, "assistant"),
        ),
    ),
    Kind("thought", "a thought before the last answer", _always(user(1), answer(1), user(2), answer(2, **thought(2)))),
    Kind(
        "thoughts",
        "thoughts before all answers",
        _always(user(1), answer(1, **thought(1)), user(2), answer(2, **thought(2))),
    ),
    Kind(
        "thinking",
        "thoughts under the key `thinking`",
        _always(user(1), answer(1, **thought(1, "thinking")), user(2), answer(2, **thought(2, "thinking"))),
    ),
    Kind(
        "inline",
        "thoughts inside the answers' text",
        _always(user(1), answer(1, inline(1)), user(2), answer(2, inline(2))),
    ),
    Kind(
        "inline tight",
        "the same without line breaks",
        _always(user(1), answer(1, inline(1, "", "")), user(2), answer(2, inline(2, "", ""))),
    ),
    Kind(
        "inline break",
        "the same with one line break behind the thoughts",
        _always(user(1), answer(1, inline(1, "\n", "\n")), user(2), answer(2, inline(2, "\n", "\n"))),
    ),
    Kind("call", "a call at the end, arguments as an object", _always(user(1), call(1))),
    Kind(
        "call text",
        "arguments as JSON text; a result and an answer",
        _always(user(1), call(1, text=True), result(1), answer(2)),
    ),
    Kind("call null", "a call beside a content of null", _always(user(1), call(1, None), result(1), answer(2))),
    Kind("call answer", "a call beside text", _always(user(1), call(1, say("ans", 1)), result(1), answer(2))),
    Kind(
        "calls",
        "several calls in a turn",
        _always(user(1), call(1, count=2), result(1), result(2), answer(2), user(2), answer(3)),
    ),
    Kind("call of nothing", "a call without arguments", _always(*calling({"name": "nam1qa", "arguments": {}}))),
    Kind(
        "call again",
        "a call whose arguments and result have its name, with keys out of the alphabet's order",
        _always(
            *calling(
                {"name": "nam1qa", "arguments": {"nam1qa": "arg1qa nam1qa arg1qb", "city": "arg1qc"}},
                "res1qa nam1qa",
            )
        ),
    ),
    Kind(
        "rounds",
        "two rounds of calls before the answer, and a second question",
        _always(user(1), call(1), result(1), call(2), result(2), answer(2), user(2), answer(3)),
    ),
    Kind(
        "thought call",
        "thoughts before a call and before the answer",
        _always(user(1), call(1, **thought(1)), result(1), answer(2, **thought(2))),
    ),
    Kind(
        "thinking call",
        "thoughts under the key `thinking` before a call and before the answer",
        _always(user(1), call(1, **thought(1, "thinking")), result(1), answer(2, **thought(2, "thinking"))),
    ),
    Kind("tools", "tools, which no turn calls", _always(system(1), user(1), answer(1), tools=[tool(1), tool(2)])),
    Kind(
        "tools call",
        "tools, one of which is called",
        _always(user(1), call(1), result(1), answer(2), user(2), answer(3), tools=[tool(1)]),
    ),
    Kind(
        "parts",
        "contents as lists of text parts",
        _always(
            {"role": "user", "content": _parts("usr1qa ", "usr1qb")},
            answer(1, _parts("ans1qa ", "ans1qb")),
            user(2),
            answer(2, _parts(say("ans", 2))),
        ),
    ),
    Kind(
        "quoted stop",
        "contents that quote the token that ends a turn",
        lambda t: _quoting(t.stop, f"ans1qa{t.stop}ans1qb"),
    ),
    Kind(
        "quoted header",
        "contents that quote the header of an answer",
        lambda t: _quoting(t.header, f"ans1qa{t.header}ans1qb"),
    ),
    Kind(
        "quoted turn",
        "an answer that quotes the end of a turn and the next header",
        lambda t: _quoting(t.stop + t.header, f"ans1qa{t.stop + t.header}ans1qb"),
    ),
    Kind(
        "quoted end",
        "answers that end with the text of the token that ends a turn",
        lambda t: Chat([user(1), answer(1, f"ans1qa{t.stop}"), user(2), answer(2, f"ans2qa{t.stop}")], quoted=t.stop),
    ),
    Kind(
        "quoted thought",
        "thoughts inside the answers' text, without line breaks, that quote the token that ends a turn",
        lambda t: Chat(
            [user(1), answer(1, inline(1, "", "", t.stop)), user(2), answer(2, inline(2, "", "", t.stop))],
            quoted=t.stop,
        ),
    ),
    Kind(
        "quoted arguments",
        "arguments that quote the token that ends a turn",
        lambda t: Chat(calling({"name": "nam1qa", "arguments": {"city": f"arg1qa{t.stop}arg1qb"}}), quoted=t.stop),
    ),
    Kind(
        "quoted result",
        "a result that quotes the token that ends a turn, and other characters that JSON writes in its own way",
        lambda t: Chat(
            calling({"name": "nam1qa", "arguments": {"city": "arg1qa"}}, f'"res1qa{t.stop}res1qb"\n'), quoted=t.stop
        ),
    ),
    Kind(
        "quoted parts",
        "contents as lists of text parts, which quote the token that ends a turn",
        lambda t: Chat(
            [
                {"role": "user", "content": _parts(f"usr1qa{t.stop}", " usr1qb ")},
                answer(1, _parts(f"ans1qa{t.stop} ", "ans1qb")),
            ],
            quoted=t.stop,
        ),
    ),
)
KINDS = {kind.name: kind for kind in _KINDS}
