"""What a tokenizer does to a text, found by trying rather than by its class."""

from __future__ import annotations

from typing import Any

import numpy as np

from distill_rl.align.chat import render
from distill_rl.align.tokenizer.encoder import Encoder

# Texts that tokenizers are known to change: case, composition, compatibility forms, white space, control characters.
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
    ids = encoder.ids(text, add_special=False)
    return ids, b"".join(table[number] for number in ids.tolist())


def losses(encoder: Encoder, table: list[bytes], unknown: int | None) -> tuple[str, str | None]:
    """(normalization, why bytes do not round-trip)."""
    description = encoder.description
    plain = (
        "nfc" if description.composes() or _spell(encoder, table, "e\u0301")[1].endswith("\u00e9".encode()) else "none"
    )
    part = description.changes_text()
    for probe in _PROBES:
        ids, spelled = _spell(encoder, table, probe)
        if unknown is not None and unknown in ids:
            continue
        if spelled not in (probe.encode(), b" " + probe.encode()):
            back = spelled.decode(errors="replace")
            return "lossy", f"{part or 'the tokenizer'} changes the text: {probe!r} is spelled {back!r}"
    if part:
        return "lossy", f"{part} changes or drops some texts"
    if description.can_be_unknown():
        return plain, "characters outside its vocabulary become the unknown token"
    return plain, None


def spaces(encoder: Encoder, table: list[bytes]) -> tuple[bool, bool, bool]:
    """(dummy, dummy_after_special, drops_spaces) of `Vocabulary`, found by trying a letter that it knows."""
    known = (letter for letter in "ax1.e中" if _spell(encoder, table, letter)[1].strip() == letter.encode())
    letter = next(known, None)
    if letter is None:
        return False, False, False
    alone = letter.encode()
    dummy = _spell(encoder, table, letter)[1] == b" " + alone
    spelled = _spell(encoder, table, f"{letter} {letter}")[1]
    after = dummy and any(_adds_after(encoder, table, literal, letter) for literal in list(encoder.specials)[:8])
    return dummy, after, spelled == alone * 2


def _adds_after(encoder: Encoder, table: list[bytes], literal: str, letter: str) -> bool:
    ids = encoder.marked(letter + literal + letter)[0].tolist()
    if encoder.specials[literal] not in ids:
        return False
    after = ids[ids.index(encoder.specials[literal]) + 1 :]
    return b"".join(table[number] for number in after) == b" " + letter.encode()


def end_of_turn(tokenizer: Any, encoder: Encoder) -> int | None:
    """The first special token that the chat template writes after an assistant's answer."""
    question, answer = "\ue000question\ue001", "\ue000answer\ue001"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        text = render(tokenizer, messages)
    except Exception:  # no template, or one that refuses this chat: no role, whatever it raises
        return None
    rest = text.rpartition(answer)[2] if answer in text else ""
    return encoder.first_special(rest)
