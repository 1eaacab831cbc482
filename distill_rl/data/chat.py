"""Chat messages → the text of the tokenizer's chat template, and where the assistant speaks in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

from distill_rl.align import chat as templates
from distill_rl.errors import DataError

Message = Mapping[str, str]
Span = tuple[int, int]

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = False, **options: Any) -> Any:
    """What the aligner reads, `align.chat.render`, by the name that data and evaluations know.

    Raises:
        ValueError: a tokenizer without a chat template.
        jinja2.TemplateError: a chat that the template refuses.
    """
    return templates.render(tokenizer, messages, add_generation_prompt=add_generation_prompt, **options)


def render_document(
    tokenizer: Any,
    messages: Sequence[Message],
    row: int,
    *,
    find_assistant: bool,
    whose: str = "the student's tokenizer",
) -> tuple[str, list[Span]]:
    """The whole chat as text and, when asked, the character spans of the assistant's turns in it.

    A span runs from the first character that the model would generate to the last of the end-of-turn token.

    Args:
        whose: the tokenizer, as the user knows it, for the errors.

    Raises:
        DataError: no chat template; a chat that the template refuses; turns that cannot be found in the text.
    """
    from jinja2.exceptions import TemplateError  # here, because batches of text need no templates

    if not tokenizer.chat_template:
        remedy = "give it one, or train on text"
        raise DataError(f"row {row}", f"chat messages need a chat template, which {whose} has not", remedy=remedy)
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
            "the chat template writes each assistant turn the same way in any conversation, or marks it by {% generation %}",
            "turns that it rewrites",
            "use data.loss_on=all or a template with {% generation %} blocks",
        )
    return whole, spans


def _spans_by_prefix(tokenizer: Any, messages: Sequence[Message], whole: str) -> list[Span] | None:
    """Find each turn by rendering the chat up to it and through it; None where the template rewrites history.

    A turn starts where the generation prompt ends, or where it departs from it: some prompts carry a block of thought,
    empty or begun, that a written turn need not have.
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
        start = len(commonprefix([prompt, through, whole]))  # noqa: RUF071 (by characters is what is meant)
        turn = _turn_in(whole[start:], through[start:], message["content"].strip())
        if start < len(before) or turn is None:
            return None
        spans.append((start, start + len(turn)))
    return spans


def _before_turn(tokenizer: Any, messages: Sequence[Message], through: str) -> tuple[str, str]:
    """The text of the chat before a turn, without and with the generation prompt.

    transformers writes no chat of no messages, so before a first turn the prompt is looked for in the text `through`
    that turn.
    """
    if messages:
        return render(tokenizer, messages), render(tokenizer, messages, add_generation_prompt=True)
    other = [{"role": "user", "content": "?"}]
    header = render(tokenizer, other, add_generation_prompt=True).removeprefix(render(tokenizer, other))
    prompt = through[: through.find(header) + len(header)] if header in through else ""
    return prompt, prompt


def _turn_in(rest: str, last: str, content: str) -> str | None:
    """The turn at the start of `rest`, given how it is written as the `last` of a chat.

    Some templates write more around the content of the last turn than of earlier ones (an empty block of thought), so
    the content and what follows it are also looked for without what precedes them.
    """
    place = last.find(content)
    if place < 0:
        return last.rstrip() if rest.startswith(last) else None
    while place >= 0:
        before, after = last[:place], last[place + len(content) :]
        # White space after the end-of-turn token is the template's, unless it is all there is to end the turn.
        after = after.rstrip() or after
        for turn in (before + content + after, content + after):
            if rest.startswith(turn):
                return turn
        place = last.find(content, place + 1)
    return None


def _has_generation_blocks(tokenizer: Any) -> bool:
    template = tokenizer.chat_template
    return bool(_GENERATION_BLOCK.search(template["default"] if isinstance(template, dict) else template))


def _spans_by_template(tokenizer: Any, messages: Sequence[Message]) -> list[Span]:
    """The template's own {% generation %} blocks, as character spans."""
    encoded = render(
        tokenizer,
        messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    spans: list[Span] = []
    previous = 0
    for flag, (start, end) in zip(encoded["assistant_masks"], encoded["offset_mapping"]):
        if flag and previous:
            spans[-1] = (spans[-1][0], end)
        elif flag:
            spans.append((start, end))
        previous = flag
    return spans
