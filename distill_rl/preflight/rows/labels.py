"""Checks what a sample of rows teaches: that there is something to train on, and where it begins and ends."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distill_rl.config.schema import Config, DataConfig
from distill_rl.errors import ConfigError
from distill_rl.preflight.models.opened import Findings, Opened

if TYPE_CHECKING:
    from distill_rl.data.batch.tokenization import Tokenization


def check_labels(
    config: Config, key: str, kind: str, documents: Sequence[Mapping[str, Any]], student: Opened, findings: Findings
) -> None:
    """Tokenises sampled documents as the run will; adds what is wrong or worth knowing to the findings.

    Args:
        key: the setting that names the data, for messages.
        kind: of the documents, `text` or `messages`; one that `data.loss_on` allows.
    """
    from distill_rl.data.batch.tokenization import Tokenization

    if student.tokenizer is None:
        return
    # What a template leaves out is checked with the chats (preflight/rows/chats.py).
    tokenization = Tokenization.of(
        student.tokenizer, replace(config.data, unrendered="warn"), format=kind, stops=student.stops
    )
    found = len(findings.problems)
    findings.attempt(key, partial(_require_label, config.data, key, kind, documents, tokenization))
    if kind == "messages" and tokenization.roles and len(findings.problems) == found:
        findings.attempt(key, lambda: findings.notes.extend(_notes_on_turns(key, documents, tokenization)))
    findings.notes += _notes_on_special_tokens(key, kind, documents, tokenization)


def _require_label(
    data: DataConfig, key: str, kind: str, documents: Sequence[Mapping[str, Any]], tokenization: Tokenization
) -> None:
    """Checks that one row at least has a token to train on.

    A row of blank text has none, even if the tokenizer adds special tokens to it.

    Raises:
        ConfigError: none has.
        DataError: a chat cannot be rendered, or its turns cannot be found.
    """
    for document in documents:
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


def _notes_on_turns(key: str, documents: Sequence[Mapping[str, Any]], tokenization: Tokenization) -> Iterator[str]:
    """Yields what is worth knowing of the turns that are trained on: how many teach to stop, and where tokens cross their borders.

    Raises:
        ConfigError: nothing but the ends of turns would be learnt.
        DataError: as for `Tokenization.encode`.
    """
    import numpy as np

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
        inside = (
            ((offsets[:, 0] < borders) & (borders < offsets[:, 1])).any(axis=0) if len(borders) else np.zeros(0, bool)
        )
        if inside.any():
            crossing.append((document["row"], tokenization.tokenizer.decode(ids[inside][:1])))
    if labelled and not says_something:
        rule = f"turns must say something; in the {len(documents)} rows that were read only their ends would be learnt"
        raise ConfigError(key, rule, f"stops in {labelled} rows", "give turns with a content")
    if "assistant" in tokenization.roles:
        yield f"{key}: {taught} of {labelled} rows of a sample end what is learnt with a token at which generation stops"
    if crossing:
        row, token = crossing[0]
        yield (
            f"{key}: in {len(crossing)} of {len(documents)} rows of a sample a turn begins or ends inside a token, which is "
            f"learnt as a whole, such as {token!r} in row {row}"
        )


def _notes_on_special_tokens(
    key: str, kind: str, documents: Sequence[Mapping[str, Any]], tokenization: Tokenization
) -> Iterator[str]:
    """Yields a note on rows whose texts hold what a special token is written as."""
    part = "messages" if kind == "messages" else "text"
    rows = [document["row"] for document in documents if tokenization.stops.quoted_in(document[part])]
    if not rows:
        return
    counted = f"{key}: {len(rows)} of {len(documents)} rows of a sample have the text of a special token"
    if kind == "text":
        yield f"{counted}, which is read as that token; the first: row {rows[0]}"
    elif tokenization.special_tokens_in_text:
        yield f"{counted} in a message, which is read as that token (data.special_tokens_in_text); the first: row {rows[0]}"
    else:
        yield f"{counted} in a message, which is read as text (data.special_tokens_in_text); the first: row {rows[0]}"


def _is_blank(document: Mapping[str, Any], roles: Collection[str]) -> bool:
    """Whether a text is blank, or all turns of a chat that are trained on are: only their ends would be learnt."""
    if "text" in document:
        return not document["text"].strip()
    return all(
        message.keys() == {"role", "content"} and _is_blank_content(message) for message in _turns(document, roles)
    )


def _is_blank_content(message: Mapping[str, Any]) -> bool:
    content = message["content"]
    return not content or (isinstance(content, str) and not content.strip())


def _turns(document: Mapping[str, Any], roles: Collection[str]) -> list[Mapping[str, Any]]:
    """The turns of a chat that are trained on; without roles, all of them."""
    return [message for message in document["messages"] if not roles or message["role"] in roles]
