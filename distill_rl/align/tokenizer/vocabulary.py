"""A tokenizer's ids as the exact bytes that they stand for, and which of two vocabularies' ids mean the same."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from distill_rl.align.tokenizer.encoder import Encoder
from distill_rl.align.tokenizer.families import Description
from distill_rl.align.tokenizer.probes import end_of_turn, losses, spaces

ROLES = ("bos", "eos", "pad", "unk")
STOPS = ("eos", "end_of_turn")
SPACE = 0x20


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Id → exact bytes of one tokenizer, and what it does to a text."""

    flat: np.ndarray
    """uint8: all tokens' bytes one after another"""
    starts: np.ndarray
    """int64 [size + 1]: token i spells flat[starts[i]:starts[i + 1]]"""
    lengths: np.ndarray
    """int32 [size]: 0 for special ids and for ids that do not exist"""
    special: np.ndarray
    """bool [size]: added tokens with special=True, and those that the tokenizer names bos, eos, pad or unk"""
    byte_fallback: np.ndarray
    """bool [size]: pieces such as <0x0A>"""
    roles: Mapping[str, int]
    """bos, eos, end_of_turn, pad, unk → id, where the tokenizer has them"""
    normalization: str
    """none | nfc | lossy"""
    lossy: str | None
    """why bytes do not always round-trip, or None"""
    family: str
    """byte_level | tiktoken | sentencepiece | bpe | unigram | wordpiece | wordlevel"""
    hash: str
    """sha256 of everything that decides ids and bytes"""
    dummy: bool = False
    """whether a space that is not in the text may stand before its first token"""
    dummy_after_special: bool = False
    """the same after a special token inside of a text"""
    drops_spaces: bool = False
    """whether the space between two words is spelled by no token"""
    unknown: int | None = None
    """the id that stands for any text that the model has no piece for"""
    literals: Mapping[int, bytes] = field(default_factory=dict)
    """special id → what it is written as"""
    strips: Mapping[int, tuple[bool, bool]] = field(default_factory=dict)
    """added id → whether it swallows the white space (before it, behind it) where it is written; others strip none"""
    stops: tuple[int, ...] = ()
    """ids that may end an answer, ascending: eos, end_of_turn, and what else the model stops by"""

    @property
    def size(self) -> int:
        """The highest id + 1, added tokens included."""
        return len(self.lengths)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Vocabulary:
        """Of a fast transformers tokenizer, or of a `tokenizers.Tokenizer` (whose roles are not known).

        Raises:
            ValueError: a slow tokenizer; a tokenizer without tokens.
        """
        return read_vocabulary(tokenizer, Encoder(tokenizer))

    def token_bytes(self, token_id: int) -> bytes:
        """What a token spells; empty for a special one."""
        return self.flat[self.starts[token_id] : self.starts[token_id + 1]].tobytes()

    def literal(self, token_id: int) -> bytes:
        """The text that a special token is written as; empty for other tokens."""
        return self.literals.get(int(token_id), b"")

    def opens_with_space(self, token_id: int) -> bool:
        return bool(self.lengths[token_id] and self.flat[self.starts[token_id]] == SPACE)


def read_vocabulary(tokenizer: Any, encoder: Encoder, stops: Iterable[int] = ()) -> Vocabulary:
    """`Vocabulary.from_tokenizer` with the tokenizer's encoder, which probes need.

    Args:
        stops: ids that end an answer besides those that the tokenizer names: the model's generation config has a list.
            Those that spell text, and those that do not exist, are left out.
    """
    description = encoder.description
    roles = {role: found for role in ROLES if (found := getattr(tokenizer, f"{role}_token_id", None)) is not None}
    unknown = description.unknown
    table, fallback, special, literals = _table(description, {*roles.values(), *([] if unknown is None else [unknown])})
    lengths = np.fromiter(map(len, table), np.int32, len(table))
    starts = np.zeros(len(table) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    if unknown is not None:
        roles.setdefault("unk", unknown)
    turn = end_of_turn(tokenizer, encoder)
    if turn is not None:
        roles["end_of_turn"] = turn
    dummy, after_special, drops = spaces(encoder, table)
    return Vocabulary(
        np.frombuffer(b"".join(table), np.uint8),
        starts,
        lengths,
        special,
        fallback,
        roles,
        *losses(encoder, table, unknown),
        family=description.family,
        hash=hashlib.sha256(encoder.decisive.encode(errors="surrogatepass")).hexdigest(),
        unknown=unknown,
        literals=literals,
        stops=_stops(roles, special, stops),
        strips=description.strips(),
        dummy=dummy,
        dummy_after_special=after_special,
        drops_spaces=drops,
    )


def _stops(roles: Mapping[str, int], special: np.ndarray, more: Iterable[int]) -> tuple[int, ...]:
    found = {roles[role] for role in STOPS if role in roles}
    found |= {number for number in more if 0 <= number < len(special) and special[number]} - {roles.get("unk", -1)}
    return tuple(sorted(found))


def _table(description: Description, named: set[int]) -> tuple[list[bytes], np.ndarray, np.ndarray, dict[int, bytes]]:
    """(bytes by id, byte fallback, special, what specials are written as)."""
    pieces = description.pieces
    size = 1 + max([*pieces.values(), *(token["id"] for token in description.added), *named], default=-1)
    if size == 0:
        raise ValueError("alignment needs a tokenizer with tokens, got one without any; load the one of the model")
    table, literals = [b""] * size, {}
    fallback, special = np.zeros(size, bool), np.zeros(size, bool)
    spell = description.speller()
    for piece, number in pieces.items():
        table[number], fallback[number] = spell(piece)
    inside = set(pieces.values())
    for token in description.added:
        number, content = token["id"], token["content"]
        # A run of ▁ that is also a piece of the model is what the model writes for spaces.
        spaces = description.metaspace and number in inside and not content.strip(description.metaspace)
        table[number] = (" " * len(content) if spaces else content).encode()
        fallback[number] = False
        special[number] = token["special"]
        if token["special"] or number in named:
            literals[number] = content.encode()
    special[list(named)] = True
    for number in np.flatnonzero(special).tolist():
        table[number] = b""
    return table, fallback, special, literals


def canonical_ids(student: Vocabulary, teacher: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """int32 [V_s], int32 [V_t]: equal numbers, within a side and across, exactly for equal bytes; −1 for no bytes."""
    index: dict[bytes, int] = {b"": -1}
    sides = []
    for vocabulary in (student, teacher):
        flat, starts = vocabulary.flat.tobytes(), vocabulary.starts.tolist()
        spelled = (flat[start:stop] for start, stop in pairwise(starts))
        numbers = (index.setdefault(piece, len(index)) for piece in spelled)
        sides.append(np.fromiter(numbers, np.int32, vocabulary.size))
    return sides[0], sides[1]


def common_vocabulary(student: Vocabulary, teacher: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """The ids that spell the same bytes in both vocabularies, one to one.

    Of several ids with the same bytes a plain piece is taken before a byte-fallback one, then the lowest id. Tokens
    without bytes come behind them, where both ids are still without a partner: eos, end_of_turn and bos as pairs, then
    special tokens that are written alike, unless one ends an answer and the other does not. Two copies of one tokenizer have every id in common.

    Returns:
        int32 [n] student ids, ascending up to the appended ones; int32 [n] teacher ids.
    """
    if student.hash == teacher.hash:
        return np.arange(student.size, dtype=np.int32), np.arange(teacher.size, dtype=np.int32)
    chosen = []
    for vocabulary, canonical in zip((student, teacher), canonical_ids(student, teacher)):
        ids = np.flatnonzero(canonical >= 0)
        ids = ids[np.lexsort((ids, vocabulary.byte_fallback[ids], canonical[ids]))]
        first = np.r_[True, canonical[ids][1:] != canonical[ids][:-1]][: len(ids)]
        chosen.append((canonical[ids[first]], ids[first]))
    (student_keys, student_ids), (teacher_keys, teacher_ids) = chosen
    _, in_student, in_teacher = np.intersect1d(student_keys, teacher_keys, assume_unique=True, return_indices=True)
    left, right = student_ids[in_student], teacher_ids[in_teacher]
    order = np.argsort(left)
    matched = left[order].tolist(), right[order].tolist()
    for pair in _silent_pairs(student, teacher):
        if pair[0] not in matched[0] and pair[1] not in matched[1]:
            matched[0].append(pair[0])
            matched[1].append(pair[1])
    return np.array(matched[0], np.int32), np.array(matched[1], np.int32)


def _silent_pairs(student: Vocabulary, teacher: Vocabulary) -> Iterator[tuple[int, int]]:
    for role in (*STOPS, "bos"):
        if role in student.roles and role in teacher.roles:
            yield student.roles[role], teacher.roles[role]
    written = {literal: number for number, literal in sorted(teacher.literals.items(), reverse=True)}
    for number, literal in sorted(student.literals.items()):
        found = written.get(literal)
        if found is None or number == student.unknown or found == teacher.unknown:  # each knows other texts
            continue
        if (number in student.stops) == (found in teacher.stops):
            yield number, found


def compose(text: str) -> str:
    """NFC; a text that is already composed comes back as it is."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)
