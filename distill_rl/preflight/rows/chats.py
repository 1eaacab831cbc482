"""Checks a sample of chats: what the chat templates make of them, and what they leave out."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from distill_rl.config.schema import Config
from distill_rl.errors import problem
from distill_rl.preflight.models.opened import Findings, Opened

if TYPE_CHECKING:
    from distill_rl.data.batch.chat import ChatPart

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHOWN = 60
"""Characters of a value that is shown as an example."""


@dataclass
class _Left:
    """What one template leaves out of the sample."""

    rows: dict[ChatPart, list[int]] = field(default_factory=dict)
    examples: dict[ChatPart, str] = field(default_factory=dict)

    def add(self, parts: Sequence[ChatPart], row: Mapping[str, Any]) -> None:
        """Counts the parts that are left out of a row."""
        for part in parts:
            self.rows.setdefault(part, []).append(row["row"])
            if part not in self.examples:
                self.examples[part] = _example(part, row)


def check_chats(
    config: Config, rows: Sequence[Mapping[str, Any]], student: Opened, teachers: Sequence[Opened], findings: Findings
) -> None:
    """Renders a sample of chats as the run will, and adds what is wrong or worth knowing to the findings.

    Wrong are chats that a template refuses, turns that cannot be found, and what `data.unrendered` says. Tokenizers
    without a chat template are skipped.

    Args:
        rows: documents of chats (`Layout.document`).
        teachers: with their `cross_tokenizer_loss` set.
    """
    from distill_rl.data.batch.chat import roles_to_train_on
    from distill_rl.data.routing import asked, weights_of

    data = config.data
    roles = roles_to_train_on(data.loss_on, data.loss_roles)
    findings.problems += _unknown_roles(data.loss_roles, rows)
    if student.tokenizer is None or not student.tokenizer.chat_template:
        return
    texts = _render_all(config, "data", student, "the student's tokenizer", rows, roles, findings)
    if texts is None:
        return
    for i, teacher in enumerate(teachers):
        if teacher.tokenizer is None:
            continue
        if teacher.cross_tokenizer_loss is None:
            findings.notes += _other_template(teacher, rows, texts)
        elif teacher.tokenizer.chat_template:
            of_teacher = [row for row in rows if asked(weights_of(row), i)]
            _render_all(config, teacher.key, teacher, f"{teacher.name}'s tokenizer", of_teacher, None, findings)


def _unknown_roles(roles: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields roles to train on that no row of the sample has and that are not common, one line each."""
    seen = {message["role"] for row in rows for message in row["messages"]}
    for role in roles:
        if role not in seen and role not in _ROLES:
            close = difflib.get_close_matches(role, sorted(seen | set(_ROLES)), n=1)
            rule = f"no message of {len(rows)} rows has this role; they have {', '.join(sorted(seen))}"
            yield problem("data.loss_roles", rule, role, f"did you mean {close[0]}?" if close else "check the role")


def _render_all(
    config: Config,
    key: str,
    model: Opened,
    whose: str,
    rows: Sequence[Mapping[str, Any]],
    roles: Collection[str] | None,
    findings: Findings,
) -> list[str] | None:
    """The rows as one model's chat template writes them; None if it does not accept one of them, which ends the check.

    What it leaves out is added to the findings.

    Args:
        key: the setting with which the line about a chat that is not accepted begins.
        roles: those whose turns must be found; None: none is looked for, as a run does for a teacher.
    """
    from distill_rl.data.batch.chat import TemplateCoverage, render_document

    coverage, left, texts = TemplateCoverage(model.tokenizer, whose), _Left(), []
    for row in rows:
        rendered = findings.attempt(
            key,
            lambda row=row: render_document(
                model.tokenizer, row, roles=roles or (), whose=whose, text_only=roles is None
            ),  # type: ignore[misc]
        )
        if rendered is None:
            return None
        texts.append(rendered.text)
        left.add(coverage.left_out(row, rendered.written), row)
    for part, where in left.rows.items():
        what = f"the chat template of {whose} leaves out {part} in {len(where)} of {len(rows)} rows"
        example = f"row {where[0]}: {left.examples[part]}"
        if part.trained_on and config.data.unrendered == "fail":
            findings.problems.append(problem("data.unrendered", what, example, coverage.remedy(part)))
        else:
            findings.notes.append(f"{what}, such as {example}")
    return texts


def _other_template(teacher: Opened, rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> Iterator[str]:
    """Yields a note on a teacher with the student's tokenizer whose chat template writes the rows in another way.

    Such a teacher reads the student's rows, and so chats of a form that it may never have seen.

    Args:
        texts: the rows as the student's chat template writes them.
    """
    from distill_rl.data.batch.chat import render_document
    from distill_rl.errors import DataError

    tokenizer = teacher.tokenizer
    reads = f"{teacher.key}: {teacher.name} reads chats as the student's chat template writes them"
    if tokenizer is None or not tokenizer.chat_template:
        yield f"{reads}; it has no chat template of its own, so it may not know chats"
        return
    different, example = 0, ""
    for row, text in zip(rows, texts):
        try:
            other = render_document(tokenizer, row, text_only=True).text
        except DataError as error:
            other, difference = "", f"row {row['row']}, which its own template refuses: {error.value}"
        else:
            difference = f"row {row['row']}: {_difference(text, other)}"
        if other != text:
            different += 1
            example = example or difference
    if different:
        yield f"{reads}; its own template writes {different} of {len(rows)} rows differently, such as {example}"


def _difference(ours: str, theirs: str) -> str:
    """The first place where two texts differ, with what both have there."""
    start = max(len(commonprefix([ours, theirs])) - 12, 0)  # noqa: RUF071 (character by character is intended)
    shown = [repr(text[start : start + _SHOWN // 2]) for text in (ours, theirs)]
    return f"{shown[0]} by the student's, {shown[1]} by its own"


def _example(part: ChatPart, row: Mapping[str, Any]) -> str:
    """The value of a part in a row that has it, shortened."""
    if part.role:
        values = [message.get(part.column) for message in row["messages"] if message["role"] == part.role]
        value = next(value for value in values if value)
    else:
        value = row["tools"] if part.key == "tools" else row["chat_template_kwargs"][part.key]
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
