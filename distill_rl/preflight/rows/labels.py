"""Checks that a sample of rows has something to train on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError
from distill_rl.preflight.models.opened import Findings, Opened


def check_labels(
    config: Config, key: str, kind: str, documents: Sequence[Mapping[str, Any]], student: Opened, findings: Findings
) -> None:
    """Tokenises sampled documents as the run will, up to the first with a label; adds what is wrong to the findings.

    Args:
        key: the setting that names the data, for messages.
        kind: of the documents, `text` or `messages`; one that `data.loss_on` allows.
    """
    if student.tokenizer is not None:
        findings.attempt(key, partial(_require_label, config, key, kind, documents, student))


def _require_label(
    config: Config, key: str, kind: str, documents: Sequence[Mapping[str, Any]], student: Opened
) -> None:
    """Checks that one row at least has a token to train on.

    A row of blank text has none, even if the tokenizer adds special tokens to it.

    Raises:
        ConfigError: none has.
        DataError: a chat cannot be rendered, or its turns cannot be found.
    """
    from distill_rl.data.batch.tokenization import Tokenization

    data = config.data
    # What a template leaves out is checked with the chats (preflight/rows/chats.py).
    tokenization = Tokenization.of(
        student.tokenizer, replace(data, unrendered="warn"), format=kind, stops=student.stops
    )
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
