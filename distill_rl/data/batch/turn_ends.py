"""Turns that end by the next role's token: it is a stop, so it is part of the turn.

Some templates write nothing behind an answer (GLM): the next turn begins with its role's token, and generation stops there. The
last turn of a chat then has no end, so its next role's token is written behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from distill_rl.align.chats import CharSpan

_MARK = "\ue000"
_CALL = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": {}}}


def closing_stop(
    write: Callable[..., str], messages: Sequence[Mapping[str, Any]], whole: str, stops: Collection[str]
) -> str:
    """The stop that ends the last turn of a chat, where the template leaves it to the next role; empty if it ends it itself.

    Args:
        write: messages → text with the template.
        whole: the rendered chat.
        stops: what the stop tokens are written as.
    """
    if not stops or messages[-1]["role"] != "assistant" or _ends_in(whole, stops):
        return ""
    return _following(write, messages[-1], stops)


def with_stops(whole: str, turns: Sequence[CharSpan], stops: Collection[str]) -> list[CharSpan]:
    """The assistant turns of a rendered chat, each with the stop token that ends it.

    A turn that ends in a stop already is left as it is, and so is one behind which no stop follows.

    Args:
        turns: their spans.
        stops: what the stop tokens are written as.
    """
    return [
        (start, stop if _ends_in(whole[start:stop], stops) else stop + len(_first(whole[stop:], stops)))
        for start, stop in turns
    ]


def _following(write: Callable[..., str], last: Mapping[str, Any], stops: Collection[str]) -> str:
    """The stop that the template would write behind the last turn of a chat, before a tool's result or a user's turn."""
    calls = [_CALL] if last.get("tool_calls") else []
    turn = {"role": "assistant", "content": "", "tool_calls": calls} if calls else {"role": "assistant", "content": "."}
    result = {"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": _MARK}
    chat = [{"role": "user", "content": "?"}, turn, result if calls else {"role": "user", "content": _MARK}]
    try:
        written, text = write(chat[:2]), write(chat)
    except Exception:  # a template can raise anything
        return ""
    return _first(text[len(written) :], stops) if text.startswith(written) else ""


def _first(text: str, stops: Collection[str]) -> str:
    """The stop that a text begins with; empty if it begins with none."""
    return max((stop for stop in stops if text.startswith(stop)), key=len, default="")


def _ends_in(turn: str, stops: Collection[str]) -> bool:
    """Whether a turn, or a whole chat, ends in a stop, but for white space."""
    return any(turn.rstrip().endswith(stop) for stop in stops)
