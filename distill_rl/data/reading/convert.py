"""ShareGPT and Alpaca rows → chat messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distill_rl.data.reading.values import check_text, parse_json
from distill_rl.errors import DataError

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Role of a ShareGPT turn → role of a message. A `function_call` is an assistant's message with one tool call."""


def from_sharegpt(value: Any, system: Any, what: str) -> list[dict[str, Any]]:
    """The messages of a ShareGPT row, a list of turns `{"from": …, "value": …}`; further keys of a turn are kept.

    Args:
        value: the turns, or the JSON text of their list.
        system: text of a system message that comes before the turns; null or empty: there is none.
        what: file, row and column, for error messages.

    Raises:
        DataError: not a non-empty list of such turns; an unknown role.
    """
    turns = parse_json(value, what) if isinstance(value, str) else value
    if not isinstance(turns, list) or not turns:
        found = "an empty list" if turns == [] else type(turns).__name__
        raise DataError(what, "a list of at least one turn {from, value}", found)
    messages = [{"role": "system", "content": system}] if system else []
    for i, turn in enumerate(turns):
        where = f"{what}, turn {i}"
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            found = f"the keys {sorted(turn)}" if isinstance(turn, Mapping) else type(turn).__name__
            remedy = f"set data.format=messages and data.messages_key={what.rpartition('column ')[2].split(',')[0]}"
            is_message = isinstance(turn, Mapping) and {"role", "content"} <= turn.keys()
            raise DataError(where, "a turn has the keys from and value", found, remedy if is_message else "")
        role = turn["from"]
        if role not in SHAREGPT_ROLES:
            remedy = "use data.format=messages for other roles"
            raise DataError(f"{where}, from", f"one of {', '.join(SHAREGPT_ROLES)}", repr(role), remedy)
        message = {key: item for key, item in turn.items() if key not in ("from", "value")}
        if role == "function_call":
            message |= {"content": "", "tool_calls": _tool_calls(turn["value"], where)}
        else:
            message["content"] = turn["value"]
        messages.append({"role": SHAREGPT_ROLES[role], **message})
    return messages


def _tool_calls(value: Any, what: str) -> list[dict[str, Any]]:
    """The calls of a `function_call` turn: one `{"name": …, "arguments": …}` or a list of them, usually as JSON text.

    Raises:
        DataError: anything else.
    """
    rule = 'a function_call is {"name": ..., "arguments": ...}'
    calls = parse_json(value, what, rule) if isinstance(value, str) else value
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, Mapping) and {"name", "arguments"} <= call.keys() for call in calls):
        raise DataError(what, rule, str(value)[:40])
    return [{"type": "function", "function": {key: call[key] for key in ("name", "arguments")}} for call in calls]


def from_alpaca(row: Mapping[str, Any], at: Callable[[str], str]) -> list[dict[str, Any]]:
    """The messages of an Alpaca row: `instruction`, a blank line and `input` if there is one; then `output`.

    Before them come a `system` message and the pairs (instruction, output) of a `history`, if the row has them.

    Args:
        at: the name of a column → the words for file, row and column in error messages.

    Raises:
        DataError: a value that is not text, or a history of another form.
    """
    instruction, output = (check_text(row[key], at(key)) for key in ("instruction", "output"))
    given = check_text(row.get("input") or "", at("input"))
    messages = [{"role": "system", "content": check_text(row["system"], at("system"))}] if row.get("system") else []
    history = row.get("history") or []
    if isinstance(history, str):
        history = parse_json(history, at("history"), "a list of pairs [instruction, output]")
    if not isinstance(history, list):
        raise DataError(at("history"), "a list of pairs [instruction, output]", type(history).__name__)
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(at("history"), "a list of pairs [instruction, output]", str(pair)[:40])
        for role, text in zip(("user", "assistant"), pair):
            messages.append({"role": role, "content": check_text(text, at("history"))})
    messages.append({"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction})
    messages.append({"role": "assistant", "content": output})
    return messages
