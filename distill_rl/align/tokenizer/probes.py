"""Finds out what a tokenizer does to a text by encoding test strings rather than by looking at its class."""

from __future__ import annotations

from typing import Any

import numpy as np

from distill_rl.align.chats.rendering import render
from distill_rl.align.tokenizer.encoder import Encoder

# Texts that some tokenizers change: case, composition, compatibility forms, white space, control characters.
_PROBES = (
    "Hello World",
    "hello world",
    "\u00e9",
    "\ufb01 \u2460",
    "a  b",
    " a",
    "a\nb\tc\r\nd",
    "a\u00a0b",
    "a\u200bb",
    "a\x07b",
    "中 \U0001f600",
)


def _spell(encoder: Encoder, table: list[bytes], text: str) -> tuple[np.ndarray, bytes]:
    """Encodes a text without the special tokens around it: the ids, int32 [n], and the bytes that they spell.

    Args:
        table: bytes of each id.
    """
    ids = encoder.ids(text, add_special=False)
    return ids, b"".join(table[token] for token in ids.tolist())


def probe_normalization(encoder: Encoder, table: list[bytes], unknown: int | None) -> tuple[str, str | None]:
    """The values of `Vocabulary.normalization` (none | nfc | lossy) and `Vocabulary.lossy`, by encoding test strings.

    The second is why the tokens may not spell a text, or None. It may be set for a tokenizer that is not "lossy": if
    its only loss are characters that it does not know.

    Args:
        table: bytes of each id.
        unknown: id of the unknown token; test strings that contain it are skipped. None: there is none.
    """
    description = encoder.description
    composes = description.composes() or _spell(encoder, table, "e\u0301")[1].endswith("\u00e9".encode())
    lossless = "nfc" if composes else "none"
    part = description.changes_text()
    for probe in _PROBES:
        ids, spelled = _spell(encoder, table, probe)
        if unknown is not None and unknown in ids:
            continue
        if spelled not in (probe.encode(), b" " + probe.encode()):
            changed = spelled.decode(errors="replace")
            return "lossy", f"{part or 'the tokenizer'} changes the text: {probe!r} is spelled {changed!r}"
    if part:
        return "lossy", f"{part} changes or drops some texts"
    if description.can_be_unknown():
        return lossless, "characters outside its vocabulary become the unknown token"
    return lossless, None


def probe_spaces(encoder: Encoder, table: list[bytes]) -> tuple[bool, bool, bool]:
    """The values of `dummy`, `dummy_after_special` and `drops_spaces` of `Vocabulary`, by encoding a letter.

    All False if the tokenizer knows none of a few letters of several scripts; only its first eight special tokens are
    tried.

    Args:
        table: bytes of each id.
    """
    known_letters = (letter for letter in "ax1.e中" if _spell(encoder, table, letter)[1].strip() == letter.encode())
    letter = next(known_letters, None)
    if letter is None:
        return False, False, False
    spelling = letter.encode()
    dummy = _spell(encoder, table, letter)[1] == b" " + spelling
    two_words = _spell(encoder, table, f"{letter} {letter}")[1]
    after_special = dummy and any(
        _adds_space_after(encoder, table, literal, letter) for literal in list(encoder.specials)[:8]
    )
    return dummy, after_special, two_words == spelling * 2


def _adds_space_after(encoder: Encoder, table: list[bytes], literal: str, letter: str) -> bool:
    """Whether the tokenizer puts a dummy space between the special token written as `literal` and a letter behind it.

    False if the tokenizer does not read `literal` as that token.
    """
    ids = encoder.chat(letter + literal + letter)[0].tolist()
    if encoder.specials[literal] not in ids:
        return False
    after = ids[ids.index(encoder.specials[literal]) + 1 :]
    return b"".join(table[token] for token in after) == b" " + letter.encode()


def end_of_turn(tokenizer: Any, encoder: Encoder) -> int | None:
    """The id of the first special token that the chat template writes after an assistant's answer.

    None if there is none: no template, one that fails on a simple chat, or nothing special behind the answer.
    """
    question, answer = "\ue000question\ue001", "\ue000answer\ue001"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        text = render(tokenizer, messages)
    except Exception:  # no template, or one that rejects this chat; templates raise errors of many kinds
        return None
    rest = text.rpartition(answer)[2] if answer in text else ""
    return encoder.first_special(rest)
