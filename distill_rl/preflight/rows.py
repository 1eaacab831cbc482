"""Checks a sample of rows: what chat templates make of chats and leave out, and which tokens are trained on."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os.path import commonprefix
from typing import Any

import numpy as np

from distill_rl.config.schema import Config, DataConfig
from distill_rl.data.batch.chat import ChatPart, TemplateCoverage, render_document, roles_to_train_on
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.data.routing import asked, weights_of
from distill_rl.errors import ConfigError, DataError, problem
from distill_rl.run.opened import OpenedModel, OpenedTeacher, RunFindings

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHOWN = 60
"""Characters of a value that is shown as an example."""

Documents = Sequence[Mapping[str, Any]]


def check_chats(
    config: Config, rows: Documents, student: OpenedModel, teachers: Sequence[OpenedTeacher], findings: RunFindings
) -> None:
    """Renders a sample of chats as the run will, and adds what is wrong or worth knowing to the findings.

    Wrong are chats that a template refuses, turns that cannot be found, and what `data.unrendered` says. Tokenizers
    without a chat template are skipped.

    Args:
        rows: documents of chats (`Layout.document`).
        teachers: with their `cross_tokenizer_loss` set.
    """
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
            findings.notes += _other_template(teacher, student, rows, texts)
        elif teacher.tokenizer.chat_template:
            of_teacher = [row for row in rows if asked(weights_of(row), i)]
            _render_all(config, teacher.key, teacher, f"{teacher.name}'s tokenizer", of_teacher, None, findings)


def _unknown_roles(roles: Sequence[str], rows: Documents) -> Iterator[str]:
    seen = {message["role"] for row in rows for message in row["messages"]}
    for role in roles:
        if role not in seen and role not in _ROLES:
            close = difflib.get_close_matches(role, sorted(seen | set(_ROLES)), n=1)
            rule = f"no message of {len(rows)} rows has this role; they have {', '.join(sorted(seen))}"
            yield problem("data.loss_roles", rule, role, f"did you mean {close[0]}?" if close else "check the role")


def _render_all(
    config: Config,
    key: str,
    model: OpenedModel,
    whose: str,
    rows: Documents,
    roles: Collection[str] | None,
    findings: RunFindings,
) -> list[str] | None:
    """The rows as one model's chat template writes them; None if it does not accept one of them, which ends the check."""
    coverage, texts = TemplateCoverage(model.tokenizer, whose), []
    left_out: dict[ChatPart, list[Mapping[str, Any]]] = {}
    render = partial(render_document, model.tokenizer, roles=roles or (), whose=whose, text_only=roles is None)
    for row in rows:
        rendered = findings.attempt(key, partial(render, row))
        if rendered is None:
            return None
        texts.append(rendered.text)
        for part in coverage.left_out(row, rendered.written):
            left_out.setdefault(part, []).append(row)
    for part, where in left_out.items():
        what = f"the chat template of {whose} leaves out {part} in {len(where)} of {len(rows)} rows"
        example = f"row {where[0]['row']}: {_example(part, where[0])}"
        if part.trained_on and config.data.unrendered == "fail":
            findings.problems.append(problem("data.unrendered", what, example, coverage.remedy(part)))
        else:
            findings.notes.append(f"{what}, such as {example}")
    return texts


def _other_template(
    teacher: OpenedTeacher, student: OpenedModel, rows: Documents, texts: Sequence[str]
) -> Iterator[str]:
    """Yields a note on a teacher that reads the student's rows, if its own chat template writes them in another way."""
    tokenizer = teacher.tokenizer
    reads = f"{teacher.key}: {teacher.name} reads chats as the student's chat template writes them"
    if tokenizer is None or not tokenizer.chat_template:
        yield f"{reads}; it has no chat template of its own, so it may not know chats"
        return
    if all(
        getattr(tokenizer, name) == getattr(student.tokenizer, name) for name in ("chat_template", "special_tokens_map")
    ):
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
    if part.role:
        values = [message.get(part.column) for message in row["messages"] if message["role"] == part.role]
        value = next(value for value in values if value)
    else:
        value = row["tools"] if part.key == "tools" else row["chat_template_kwargs"][part.key]
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def check_labels(
    config: Config, key: str, kind: str, documents: Documents, student: OpenedModel, findings: RunFindings
) -> None:
    """Tokenises sampled documents as the run will; adds what is wrong or worth knowing to the findings.

    Args:
        key: the setting that names the data, for messages.
        kind: of the documents, `text` or `messages`; one that `data.loss_on` allows.
    """
    if student.tokenizer is None:
        return
    # What a template leaves out is checked with the chats.
    data = replace(config.data, unrendered="warn")
    tokenization = Tokenization(student.tokenizer, data, format=kind, stops=student.stops)
    found = len(findings.problems)
    findings.attempt(key, partial(_require_label, config.data, key, kind, documents, tokenization))
    if kind == "messages" and tokenization.roles and len(findings.problems) == found:
        findings.attempt(key, lambda: findings.notes.extend(_notes_on_turns(key, documents, tokenization)))
    findings.notes += _notes_on_special_tokens(key, kind, documents, tokenization)


def _require_label(data: DataConfig, key: str, kind: str, documents: Documents, tokenization: Tokenization) -> None:
    for document in documents:  # special tokens that the tokenizer adds to a blank text do not count
        if not _is_blank(document, tokenization.roles) and tokenization.encode(document).has_labels:
            return
    turns = " or ".join(tokenization.roles)
    if tokenization.roles and not any(_turns(document, tokenization.roles) for document in documents):
        setting = "data.loss_roles=[]" if data.loss_roles else "data.loss_on=all"
        value = f"chats without a turn of {turns}"
        remedy = f"give chats with such turns, or set {setting}"
    elif all(_is_blank(document, tokenization.roles) for document in documents):
        value, remedy = "blank rows", "give rows with text"
        if kind == "messages":
            value, remedy = f"turns of {turns or 'all roles'} with nothing in them", "give turns with a content"
    else:
        value, remedy = f"none within data.max_length={data.max_length}", "raise data.max_length, or give longer rows"
    rule = f"a row must have a token to train on; none of the {len(documents)} that were read has"
    raise ConfigError(key, rule, value, remedy)


def _notes_on_turns(key: str, documents: Documents, tokenization: Tokenization) -> Iterator[str]:
    """Yields how many of the turns that are trained on teach to stop, and where tokens cross their borders."""
    taught = labelled = 0
    says_something = False
    crossing: list[tuple[int, str]] = []
    for document in documents:
        text, spans, _ = tokenization.render(document)
        ids, offsets = tokenization.tokens(document, text)
        learnt = ids[tokenization.labels(document, spans, ids, offsets)]
        labelled += len(learnt) > 0
        taught += len(learnt) > 0 and int(learnt[-1]) in tokenization.stops.ids
        says_something = says_something or bool(set(learnt.tolist()) - tokenization.stops.ids)
        borders = np.array([border for span in spans or () for border in span])[:, None]
        inside = ((offsets[:, 0] < borders) & (borders < offsets[:, 1])).any(axis=0)
        if inside.any():
            crossing.append((document["row"], tokenization.tokenizer.decode(ids[inside][:1])))
    if labelled and not says_something:
        rule = f"turns must say something; in the {len(documents)} rows that were read only their ends would be learnt"
        raise ConfigError(key, rule, f"stops in {labelled} rows", "give turns with a content")
    if "assistant" in tokenization.roles:
        yield f"{key}: {taught} of {labelled} rows of a sample end what is learnt with a token at which generation stops"
    if crossing:
        row, token = crossing[0]
        where = f"in {len(crossing)} of {len(documents)} rows of a sample a turn begins or ends inside a token"
        yield f"{key}: {where}, which is learnt as a whole, such as {token!r} in row {row}"


def _notes_on_special_tokens(key: str, kind: str, documents: Documents, tokenization: Tokenization) -> Iterator[str]:
    """Yields a note on rows whose texts hold what a special token is written as."""
    part = "messages" if kind == "messages" else "text"
    rows = [document["row"] for document in documents if tokenization.stops.quoted_in(document[part])]
    if not rows:
        return
    counted = f"{key}: {len(rows)} of {len(documents)} rows of a sample have the text of a special token"
    if kind == "text":
        yield f"{counted}, which is read as that token; the first: row {rows[0]}"
    else:
        read_as = "that token" if tokenization.special_tokens_in_text else "text"
        setting = "data.special_tokens_in_text"
        yield f"{counted} in a message, which is read as {read_as} ({setting}); the first: row {rows[0]}"


def _is_blank(document: Mapping[str, Any], roles: Collection[str]) -> bool:
    """Whether a text is blank, or all turns of a chat that are trained on are: only their ends would be learnt."""
    if "text" in document:
        return not document["text"].strip()
    return all(
        message.keys() == {"role", "content"} and not str(message["content"] or "").strip()
        for message in _turns(document, roles)
    )


def _turns(document: Mapping[str, Any], roles: Collection[str]) -> list[Mapping[str, Any]]:
    """The turns of a chat that are trained on; without roles, all of them."""
    return [message for message in document["messages"] if not roles or message["role"] in roles]
