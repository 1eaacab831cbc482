"""Chat messages → text rendered by the tokenizer's chat template, and the assistant's turns in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

from distill_rl.align.chat import CharSpan, Message, render
from distill_rl.errors import DataError

__all__ = ["render", "render_document"]

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render_document(
    tokenizer: Any,
    messages: Sequence[Message],
    row: int,
    *,
    find_assistant: bool,
    whose: str = "the student's tokenizer",
) -> tuple[str, list[CharSpan]]:
    """Renders a whole chat and, with `find_assistant`, finds the character spans of the assistant's turns in it.

    A span runs from the first character that the model would generate to the last one of the end-of-turn token. Turns
    are found by rendering the chat up to each of them and through it, which works for any template that writes a turn
    the same way whatever follows; if that fails, by the template's {% generation %} blocks if it has any.

    Args:
        row: of the data, for error messages.
        find_assistant: with False, the list of spans is empty.
        whose: the tokenizer, for error messages.

    Raises:
        DataError: no chat template; a chat that the template refuses; turns that cannot be found in the text.
    """
    from jinja2.exceptions import TemplateError  # here: batches of plain text need no templates

    if not tokenizer.chat_template:
        remedy = "give it one, or train on text"
        raise DataError(f"row {row}", f"chat messages need a chat template; {whose} has none", remedy=remedy)
    try:
        whole = render(tokenizer, messages)
    except TemplateError as error:
        raise DataError(f"row {row}", f"a chat that the template of {whose} accepts", str(error)) from error
    if not find_assistant:
        return whole, []
    spans = _spans_by_prefix(tokenizer, messages, whole)
    if spans is None and _has_generation_blocks(tokenizer):
        spans = _spans_by_template(tokenizer, messages)
    if spans is None:
        raise DataError(
            f"row {row}",
            "the chat template renders an assistant turn the same way in any conversation, or marks it with {% generation %}",
            "a template that rewrites earlier turns",
            "use data.loss_on=all or a template with {% generation %} blocks",
        )
    return whole, spans


def _spans_by_prefix(tokenizer: Any, messages: Sequence[Message], whole: str) -> list[CharSpan] | None:
    """The span of each assistant turn in `whole`, by rendering the chat up to the turn and through it.

    None if the template rewrites earlier turns, or refuses a part of the chat. A turn starts where the generation
    prompt ends, or where the text departs from the prompt: some prompts open a block of thought, or write an empty one,
    that the rendered turn does not have.

    Args:
        whole: the rendered chat.
    """
    from jinja2.exceptions import TemplateError

    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            through = render(tokenizer, messages[: index + 1])
            before, prompt = _before_turn(tokenizer, messages[:index], through)
        except (TemplateError, IndexError):
            return None
        start = len(commonprefix([prompt, through, whole]))  # noqa: RUF071 (character by character is intended)
        turn = _turn_in(whole[start:], through[start:], message["content"].strip())
        if start < len(before) or turn is None:
            return None
        spans.append((start, start + len(turn)))
    return spans


def _before_turn(tokenizer: Any, messages: Sequence[Message], through: str) -> tuple[str, str]:
    """The text of the chat before a turn, without and with the generation prompt.

    transformers cannot render an empty chat, so before a first turn the prompt is searched for in `through`, and both
    texts are those up to its end; empty if it does not occur there.

    Args:
        messages: those before the turn.
        through: the rendered text up to the end of the turn.
    """
    if messages:
        return render(tokenizer, messages), render(tokenizer, messages, add_generation_prompt=True)
    other = [{"role": "user", "content": "?"}]
    header = render(tokenizer, other, add_generation_prompt=True).removeprefix(render(tokenizer, other))
    prompt = through[: through.find(header) + len(header)] if header in through else ""
    return prompt, prompt


def _turn_in(rest: str, last: str, content: str) -> str | None:
    """The assistant's turn that `rest` starts with, up to its end-of-turn token; None if it does not start with it.

    Some templates write more before the content of the last turn than of earlier ones (an empty block of thought), so
    the turn is also searched for without what precedes its content.

    Args:
        rest: the whole rendered chat from the turn on.
        last: the turn as the template renders it at the end of a chat.
        content: the turn's stripped content.
    """
    place = last.find(content)
    if place < 0:
        return last.rstrip() if rest.startswith(last) else None
    while place >= 0:
        before, after = last[:place], last[place + len(content) :]
        # White space after the end-of-turn token is not part of the turn, unless nothing else ends it.
        after = after.rstrip() or after
        for turn in (before + content + after, content + after):
            if rest.startswith(turn):
                return turn
        place = last.find(content, place + 1)
    return None


def _has_generation_blocks(tokenizer: Any) -> bool:
    """Whether the template, or the one named "default" of several, has {% generation %} blocks."""
    template = tokenizer.chat_template
    return bool(_GENERATION_BLOCK.search(template["default"] if isinstance(template, dict) else template))


def _spans_by_template(tokenizer: Any, messages: Sequence[Message]) -> list[CharSpan]:
    """The character spans of the template's {% generation %} blocks, in order; adjoining blocks count as one.

    The template must have such blocks. Tokenises the chat, because transformers reports them by token.
    """
    encoded = render(
        tokenizer,
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
