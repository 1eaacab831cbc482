"""Checks that a value of a row is text or chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from distill_rl.errors import DataError

MEDIA = frozenset({"image", "images", "image_url", "input_image", "audio", "audios", "input_audio", "video", "videos"})
"""Keys and types of parts that hold something other than text."""


def check_value(value: Any, kind: Literal["text", "messages"], what: str) -> Any:
    """Checks one value, and returns it: the text, or the messages as a new list with all of their keys.

    Messages may also be given as the JSON text of their list. A key of a message whose value is null is dropped, so that
    a template sees it as absent. Only a null content stays, which some templates test for; it needs another key beside
    it, such as tool calls. Nulls inside of the values stay.

    Args:
        what: file, row and column, for error messages.

    Raises:
        DataError: not text; not a non-empty list of messages; not valid Unicode; images, audio or video.
    """
    if kind == "text":
        return check_text(value, what)
    value = parse_json(value, what) if isinstance(value, str) else value
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise DataError(what, "a list of at least one message {role, content}", found)
    return [_check_message(message, f"{what}, message {i}") for i, message in enumerate(value)]


def _check_message(message: Any, what: str) -> dict[str, Any]:
    """Checks one message, and returns it as a new dict without null values, except for a null content.

    Args:
        what: file, row, column and message, for error messages.

    Raises:
        DataError: as for `check_value`.
    """
    if not isinstance(message, Mapping) or "role" not in message:
        if isinstance(message, Mapping) and {"from", "value"} <= message.keys():
            raise DataError(what, "a message has a role and a content", sorted(message), "set data.format=sharegpt")
        found = f"the keys {sorted(message)}" if isinstance(message, Mapping) else type(message).__name__
        raise DataError(what, "a message has a role and a content", found)
    checked = {key: item for key, item in message.items() if item is not None or key in ("role", "content")}
    check_text(checked.get("role"), f"{what}, role")
    content = checked.get("content")
    others = checked.keys() - {"role", "content"}
    if isinstance(content, list):
        _check_parts(content, what)
    elif content is not None or not others:
        if "content" not in message and not others:
            raise DataError(what, "a message has a role and a content", f"the keys {sorted(message)}")
        check_text(content, f"{what}, content")
    media = sorted(key for key in others & MEDIA if checked[key])
    if media:
        raise DataError(f"{what}, {media[0]}", "chats are text only", media[0], "leave such rows out")
    if others:
        check_strings(checked, what)
    return checked


def _check_parts(content: list[Any], what: str) -> None:
    """Raises DataError for a content with a part that is not `{"type": "text", "text": …}`."""
    for i, part in enumerate(content):
        where = f"{what}, part {i} of the content"
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind in MEDIA:
            raise DataError(where, "chats are text only", f"a part of type {kind}", "leave such rows out")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(where, 'is {"type": "text", "text": ...}', f"a part of type {kind}")
    check_strings(content, what)


def check_text(value: Any, what: str) -> str:
    """Returns a value that is text, unchanged; an empty text is allowed.

    Args:
        what: file, row and column, for error messages.

    Raises:
        DataError: anything but a string, or a string with a lone surrogate.
    """
    if not isinstance(value, str):
        found = "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
        raise DataError(what, "text", found)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(what, "valid Unicode", f"a lone surrogate at character {error.start}") from error
    return value


def check_strings(value: Any, what: str) -> None:
    """Raises DataError if a text somewhere inside of a value has a lone surrogate."""
    if isinstance(value, str):
        check_text(value, what)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_strings(key, what)
            check_strings(item, what)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_strings(item, what)


def parse_json(text: str, what: str, rule: str = "a list of messages, or its JSON text") -> Any:
    """The value of a JSON text in a column. Raises DataError, with this rule, if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(what, rule, f"text {text[:40]!r}") from error
