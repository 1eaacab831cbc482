"""Chats → text rendered by the tokenizer's chat template, and the turns in it that are trained on."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from distill_rl.align.chats.form import text_of
from distill_rl.align.chats.rendering import CharSpan, Message, message_spans, render
from distill_rl.data.reading.layouts import template_options
from distill_rl.errors import DataError

__all__ = ["render", "render_document", "roles_to_train_on"]

Write = Callable[..., Any]
"""Messages → text with one tokenizer's template and one document's tools and variables."""

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK = "\ue000"


def roles_to_train_on(loss_on: str, loss_roles: Sequence[str]) -> tuple[str, ...]:
    """The roles whose turns are trained on by `data.loss_on` and `data.loss_roles`; empty: all tokens are."""
    return tuple(loss_roles) or (("assistant",) if loss_on == "assistant" else ())


def render_document(
    tokenizer: Any,
    document: Mapping[str, Any],
    *,
    roles: Collection[str] = (),
    whose: str = "the student's tokenizer",
) -> tuple[str, list[CharSpan]]:
    """Renders a whole chat, and finds the character spans of the turns of these roles in it.

    The span of an assistant's turn runs from the first character that the model would generate to the last one of the
    end-of-turn token, and so includes reasoning and tool calls. It is found by the first of these that works:

    1. The template's {% generation %} blocks, if it has any.
    2. Rendering the chat up to the turn and through it, for a template that writes a turn the same way whatever follows.
    3. Rendering the chat with another turn in its place: what stays the same around it is not the turn.

    Spans of other roles are those of their texts, without what the template writes around them.

    Args:
        document: with "row", "messages" and perhaps tools and variables (`Layout.document`).
        whose: the tokenizer, for error messages.

    Raises:
        DataError: no chat template; a chat that the template refuses; turns that cannot be found in the text.
    """
    row, messages = document["row"], document["messages"]
    if not tokenizer.chat_template:
        remedy = "give it one, or train on text"
        raise DataError(f"row {row}", f"chat messages need a chat template; {whose} has none", remedy=remedy)
    options = template_options(document)

    def write(chat: Sequence[Message], **more: Any) -> Any:
        """The text of these messages with the document's tools and variables."""
        return render(tokenizer, chat, **options, **more)

    try:
        whole = write(messages)
    except Exception as error:  # a template can raise anything
        raise DataError(f"row {row}", f"a chat that the template of {whose} accepts", str(error)) from error
    spans: list[CharSpan] = []
    if "assistant" in roles and any(message["role"] == "assistant" for message in messages):
        turns = _assistant_turns(tokenizer, write, messages, whole)
        if turns is None:
            raise DataError(
                f"row {row}",
                "the chat template renders an assistant turn the same way in any conversation, or marks it with {% generation %}",
                "a template that rewrites earlier turns",
                "use data.loss_on=all or a template with {% generation %} blocks",
            )
        spans += turns
    if others := set(roles) - {"assistant"}:
        spans += _texts_of_roles(write, messages, whole, others, row)
    return whole, sorted(spans)


def _texts_of_roles(
    write: Write, messages: Sequence[Message], whole: str, roles: Collection[str], row: int
) -> list[CharSpan]:
    """The spans of the texts of all messages with one of these roles.

    Raises:
        DataError: a message with text of which the rendered chat has nothing.
    """
    found: list[CharSpan] = []
    for message, spans in zip(messages, message_spans(whole, messages, write)):
        if message["role"] in roles:
            written = [(start, stop) for start, stop in spans if stop > start]
            if not written and text_of(message).strip():
                rule = f"the chat template writes the content of a {message['role']} message as it is"
                raise DataError(f"row {row}", rule, "another text", "take the role out of data.loss_roles")
            found += written
    return found


def _assistant_turns(tokenizer: Any, write: Write, messages: Sequence[Message], whole: str) -> list[CharSpan] | None:
    """The spans of all assistant turns in the rendered chat, as `render_document` says; None if they cannot be found."""
    if _has_generation_blocks(tokenizer):
        blocks = _spans_by_template(write, messages)
        if blocks:
            return blocks
    spans = _spans_by_prefix(write, messages, whole)
    return spans if spans is not None else _spans_by_exchange(write, messages, whole)


def _spans_by_prefix(write: Write, messages: Sequence[Message], whole: str) -> list[CharSpan] | None:
    """The span of each assistant turn in `whole`, by rendering the chat up to the turn and through it.

    None if the template rewrites earlier turns, or refuses a part of the chat. A turn starts where the generation
    prompt ends, or where the text departs from the prompt: some prompts open a block of thought, or write an empty one,
    that the rendered turn does not have.

    Args:
        whole: the rendered chat.
    """
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            through = write(messages[: index + 1])
            before, prompt = _before_turn(write, messages[:index], through)
        except Exception:  # a template can raise anything on a part of a chat
            return None
        start = len(commonprefix([prompt, through, whole]))  # noqa: RUF071 (character by character is intended)
        turn = _turn_in(whole[start:], through[start:], text_of(message).strip())
        if start < len(before) or turn is None:
            return None
        spans.append((start, start + len(turn)))
    return spans


def _before_turn(write: Write, messages: Sequence[Message], through: str) -> tuple[str, str]:
    """The text of the chat before a turn, without and with the generation prompt.

    transformers cannot render an empty chat, so before a first turn the prompt is searched for in `through`, and both
    texts are those up to its end; empty if it does not occur there.

    Args:
        messages: those before the turn.
        through: the rendered text up to the end of the turn.
    """
    if messages:
        return write(messages), write(messages, add_generation_prompt=True)
    header = _header(write)
    prompt = through[: through.find(header) + len(header)] if header in through else ""
    return prompt, prompt


def _header(write: Write) -> str:
    """The generation prompt: what the template writes before an answer."""
    other = [{"role": "user", "content": "?"}]
    return write(other, add_generation_prompt=True).removeprefix(write(other))


def _turn_in(rest: str, last: str, content: str) -> str | None:
    """The assistant's turn that `rest` starts with, up to its end-of-turn token; None if it does not start with it.

    Some templates write more before the content of the last turn than of earlier ones (a block of thought), so the turn
    is also searched for without what precedes its content, and a content without its block of thought.

    Args:
        rest: the whole rendered chat from the turn on.
        last: the turn as the template renders it at the end of a chat.
        content: the turn's stripped content.
    """
    contents = [content, content.rpartition("</think>")[2].strip()] if "</think>" in content else [content]
    if all(last.find(text) < 0 for text in contents):
        return last.rstrip() if rest.startswith(last) else None
    for text in contents:
        place = last.find(text)
        while place >= 0:
            before, after = last[:place], last[place + len(text) :]
            # White space after the end-of-turn token is not part of the turn, unless nothing else ends it.
            after = after.rstrip() or after
            for turn in (before + text + after, text + after):
                if turn and rest.startswith(turn):
                    return turn
            place = last.find(text, place + 1)
    return None


def _spans_by_exchange(write: Write, messages: Sequence[Message], whole: str) -> list[CharSpan] | None:
    """The span of each assistant turn in `whole`, by rendering the chat with a turn of one character in its place.

    The character occurs nowhere else, so the turn's text is what differs, apart from the beginning that both turns share
    and from the end-of-turn token. None if other turns change with it, or the template refuses the chat or writes another
    content than the message's.
    """
    try:
        header = _header(write)
        mark = {"role": "assistant", "content": _MARK}
        ends = _ends_of_turn(write, mark)
        spans: list[CharSpan] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            other = write([*messages[:i], mark, *messages[i + 1 :]])
            same = len(commonprefix([whole, other]))  # noqa: RUF071 (character by character is intended)
            after = other.partition(_MARK)[2]
            end = next(end for end in ends if after.startswith(end))  # StopIteration: none fits
            start, stop = _start_of_turn(whole[:same], header), len(whole) - len(after) + len(end)
            turn = whole[start:stop]
            earlier = spans[-1][1] if spans else 0
            content = text_of(message).rpartition("</think>")[2].strip()
            found = whole.endswith(after) and earlier <= start < stop and content in turn
            if not found or (header and header in turn):
                return None
            spans.append((start, stop))
    except Exception:  # a template can raise anything on another chat
        return None
    return spans


def _ends_of_turn(write: Write, turn: Message) -> list[str]:
    """What the template writes behind an assistant's turn: at the end of a chat, and before a user's turn.

    They differ if the template also writes the end of the whole chat. White space behind an end-of-turn token is not
    part of it, unless nothing else ends the turn.

    Args:
        turn: an assistant's message with the content `_MARK`.
    """
    user = {"role": "user", "content": "?"}
    last = write([user, turn]).partition(_MARK)[2]
    middle, alone = write([user, turn, user]).partition(_MARK)[2], write([user])
    common = commonprefix([middle[::-1], alone[::-1]])  # noqa: RUF071 (character by character is intended)
    return [end.rstrip() or end for end in (last, middle[: len(middle) - len(common)])]


def _start_of_turn(before: str, header: str) -> int:
    """Where a turn starts: where the text departs from the generation prompt, or behind the last one.

    Args:
        before: the text up to where two turns in the same place differ.
        header: the generation prompt; empty for a template without one.
    """
    for length in range(len(header), 3, -1):
        if before.endswith(header[:length]):
            return len(before)
    return before.rfind(header) + len(header) if header in before else len(before)


def _has_generation_blocks(tokenizer: Any) -> bool:
    """Whether the template, or one of several, has {% generation %} blocks."""
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template]
    return any(_GENERATION_BLOCK.search(text) for text in texts)


def _spans_by_template(write: Write, messages: Sequence[Message]) -> list[CharSpan]:
    """The character spans of the template's {% generation %} blocks, in order; adjoining blocks count as one.

    Tokenises the chat, because transformers reports them by token.
    """
    encoded = write(
        messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    spans: list[CharSpan] = []
    in_block = False
    for is_assistant, (start, end) in zip(encoded["assistant_masks"], encoded["offset_mapping"]):
        if is_assistant and in_block:
            spans[-1] = (spans[-1][0], end)
        elif is_assistant:
            spans.append((start, end))
        in_block = bool(is_assistant)
    return spans
