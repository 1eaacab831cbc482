"""The exact bytes that each id of a tokenizer stands for, and the ids that two vocabularies have in common."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from distill_rl.align.chats import render
from distill_rl.align.tokenizer import Description, TextEncoder

# Finds out what a tokenizer does to a text by encoding test strings rather than by looking at its class.

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


def _spell(encoder: TextEncoder, table: list[bytes], text: str) -> tuple[np.ndarray, bytes]:
    """Encodes a text without the special tokens around it: the ids, int32 [n], and the bytes that they spell."""
    ids = encoder.ids(text, add_special=False)
    return ids, b"".join(table[token] for token in ids.tolist())


def probe_normalization(encoder: TextEncoder, table: list[bytes], unknown: int | None) -> tuple[str, str | None]:
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


def probe_spaces(encoder: TextEncoder, table: list[bytes]) -> tuple[bool, bool, bool]:
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


def _adds_space_after(encoder: TextEncoder, table: list[bytes], literal: str, letter: str) -> bool:
    """Whether the tokenizer puts a dummy space between the special token written as `literal` and a letter behind it."""
    ids = encoder.chat(letter + literal + letter)[0].tolist()
    if encoder.specials[literal] not in ids:
        return False
    after = ids[ids.index(encoder.specials[literal]) + 1 :]
    return b"".join(table[token] for token in after) == b" " + letter.encode()


def end_of_turn(tokenizer: Any, encoder: TextEncoder) -> int | None:
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


ROLES = ("bos", "eos", "pad", "unk")
STOPS = ("eos", "end_of_turn")
SPACE = 0x20


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Id → exact bytes for one tokenizer, and what it does to a text."""

    flat: np.ndarray
    """uint8: the bytes of all tokens, one token after another"""
    starts: np.ndarray
    """int64 [size + 1]: token i spells `flat[starts[i]:starts[i + 1]]`"""
    lengths: np.ndarray
    """int32 [size]: number of bytes; 0 for special ids and for ids that do not exist"""
    special: np.ndarray
    """bool [size]: added tokens with `special=True`, and the tokenizer's bos, eos, pad and unk"""
    byte_fallback: np.ndarray
    """bool [size]: pieces such as <0x0A>"""
    roles: Mapping[str, int]
    """bos | eos | end_of_turn | pad | unk → id, for the roles that the tokenizer has"""
    normalization: str
    """none | nfc | lossy"""
    lossy: str | None
    """Why the tokens do not always spell the text, or None"""
    family: str
    """byte_level | tiktoken | sentencepiece | bpe | unigram | wordpiece | wordlevel"""
    hash: str
    """SHA-256 of everything that decides ids and bytes"""
    dummy: bool = False
    """Whether the first token of a text may begin with a space that is not in the text, a dummy space"""
    dummy_after_special: bool = False
    """The same for the first token behind a special token inside a text"""
    drops_spaces: bool = False
    """Whether no token spells the space between two words"""
    unknown: int | None = None
    """The id that stands for any text that the model has no piece for"""
    literals: Mapping[int, bytes] = field(default_factory=dict)
    """Special id → the text that it is written as"""
    strips: Mapping[int, tuple[bool, bool]] = field(default_factory=dict)
    """Added id → whether it strips the white space (before it, behind it) where it is written; other ids strip none"""
    stops: tuple[int, ...] = ()
    """Ids that may end an answer, ascending: eos, end_of_turn, and further ids at which the model stops"""

    @property
    def size(self) -> int:
        """The highest id + 1, added tokens included."""
        return len(self.lengths)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Vocabulary:
        """Reads the vocabulary of a fast transformers tokenizer or of a `tokenizers.Tokenizer`.

        Of the latter only the unknown token's role is known. Test strings are encoded to see what the tokenizer does to
        a text. The tokenizer is not modified.

        Raises:
            ValueError: a slow tokenizer; a tokenizer without tokens.
        """
        return read_vocabulary(tokenizer, TextEncoder(tokenizer))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token spells; empty for a special token, and for an id below `size` that does not exist."""
        return self.flat[self.starts[token_id] : self.starts[token_id + 1]].tobytes()

    def spellings(self) -> list[bytes]:
        """The bytes that each id spells, by id; empty for special ids and for ids that do not exist."""
        flat = self.flat.tobytes()
        return [flat[start:stop] for start, stop in pairwise(self.starts.tolist())]

    def ids_by_bytes(self) -> dict[bytes, int]:
        """Bytes → the id that spells them, for all ids that spell any.

        Of several ids, plain pieces take precedence over byte-fallback ones, then lower ids over higher.
        """
        spellings = self.spellings()
        ids: dict[bytes, int] = {}
        for fallback in (False, True):
            for token in np.flatnonzero((self.byte_fallback == fallback) & (self.lengths > 0)).tolist():
                ids.setdefault(spellings[token], token)
        return ids

    def literal(self, token_id: int) -> bytes:
        """The UTF-8 bytes of the text that a special token is written as; empty for other tokens."""
        return self.literals.get(int(token_id), b"")

    def opens_with_space(self, token_id: int) -> bool:
        """Whether the bytes that a token spells begin with a space."""
        return bool(self.lengths[token_id] and self.flat[self.starts[token_id]] == SPACE)


def read_vocabulary(tokenizer: Any, encoder: TextEncoder, stops: Iterable[int] = ()) -> Vocabulary:
    """`Vocabulary.from_tokenizer`, given the tokenizer's encoder and, if known, further stop tokens.

    Args:
        tokenizer: gives the roles, by its attributes `bos_token_id` etc., and the chat template; a
            `tokenizers.Tokenizer` has neither.
        stops: further ids that end an answer, such as those of the model's generation config. Ids that spell text or do
            not exist are ignored, and so is the unknown token's.

    Raises:
        ValueError: a tokenizer without tokens.
    """
    description = encoder.description
    roles = {role: token for role in ROLES if (token := getattr(tokenizer, f"{role}_token_id", None)) is not None}
    unknown = description.unknown
    named = set(roles.values())
    if unknown is not None:
        named.add(unknown)
    table, fallback, special, literals = _read_table(description, named)
    lengths = np.fromiter(map(len, table), np.int32, len(table))
    starts = np.zeros(len(table) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    if unknown is not None:
        roles.setdefault("unk", unknown)
    turn = end_of_turn(tokenizer, encoder)
    if turn is not None:
        roles["end_of_turn"] = turn
    normalization, lossy = probe_normalization(encoder, table, unknown)
    dummy, dummy_after_special, drops_spaces = probe_spaces(encoder, table)
    return Vocabulary(
        flat=np.frombuffer(b"".join(table), np.uint8),
        starts=starts,
        lengths=lengths,
        special=special,
        byte_fallback=fallback,
        roles=roles,
        normalization=normalization,
        lossy=lossy,
        family=description.family,
        hash=hashlib.sha256(encoder.identity.encode(errors="surrogatepass")).hexdigest(),
        dummy=dummy,
        dummy_after_special=dummy_after_special,
        drops_spaces=drops_spaces,
        unknown=unknown,
        literals=literals,
        strips=description.strips(),
        stops=_stops(roles, special, stops),
    )


def _stops(roles: Mapping[str, int], special: np.ndarray, more: Iterable[int]) -> tuple[int, ...]:
    """The ids that may end an answer, ascending: eos, end_of_turn and the special ones among `more`."""
    # The unknown token is never taken from `more`.
    stops = {roles[role] for role in STOPS if role in roles}
    stops |= {token for token in more if 0 <= token < len(special) and special[token]} - {roles.get("unk", -1)}
    return tuple(sorted(stops))


def _read_table(
    description: Description, named: set[int]
) -> tuple[list[bytes], np.ndarray, np.ndarray, dict[int, bytes]]:
    """(bytes of each id, bool: byte fallback, bool: special, special id → the text that it is written as)."""
    pieces = description.pieces
    size = 1 + max([*pieces.values(), *(added["id"] for added in description.added), *named], default=-1)
    if size == 0:
        raise ValueError("alignment needs a tokenizer with tokens, got an empty one; load the model's own tokenizer")
    table, literals = [b""] * size, {}
    fallback, special = np.zeros(size, bool), np.zeros(size, bool)
    spell = description.speller()
    for piece, token in pieces.items():
        table[token], fallback[token] = spell(piece)
    model_ids = set(pieces.values())
    for added in description.added:
        token, content = added["id"], added["content"]
        # A run of ▁ that is also a piece of the model stands for as many spaces.
        spaces = description.metaspace and token in model_ids and not content.strip(description.metaspace)
        table[token] = (" " * len(content) if spaces else content).encode()
        fallback[token] = False
        special[token] = added["special"]
        if added["special"] or token in named:
            literals[token] = content.encode()
    special[list(named)] = True
    for token in np.flatnonzero(special).tolist():
        table[token] = b""
    return table, fallback, special, literals


def common_vocabulary(student: Vocabulary, teacher: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """The ids that two vocabularies have in common, paired one to one.

    1. Ids that spell the same bytes; of several such ids the one of `Vocabulary.ids_by_bytes`.
    2. eos with eos, end_of_turn with end_of_turn, bos with bos, if both ids are still unpaired.
    3. Special tokens that are written alike, if both are still unpaired and either both or neither end an answer.

    Two copies of one tokenizer have every id in common.

    Returns:
        int32 [n]: student ids, those of step 1 in ascending order; int32 [n]: teacher ids.
    """
    if student.hash == teacher.hash:
        return np.arange(student.size, dtype=np.int32), np.arange(teacher.size, dtype=np.int32)
    teacher_ids = teacher.ids_by_bytes()
    pairs = sorted(
        (student_id, teacher_ids[spelling])
        for spelling, student_id in student.ids_by_bytes().items()
        if spelling in teacher_ids
    )
    matched = [left for left, _ in pairs], [right for _, right in pairs]
    for student_id, teacher_id in _special_pairs(student, teacher):
        if student_id not in matched[0] and teacher_id not in matched[1]:
            matched[0].append(student_id)
            matched[1].append(teacher_id)
    return np.array(matched[0], np.int32), np.array(matched[1], np.int32)


def _special_pairs(student: Vocabulary, teacher: Vocabulary) -> Iterator[tuple[int, int]]:
    """Candidate pairs (student id, teacher id) of tokens without bytes, best first; an id may occur in several."""
    for role in (*STOPS, "bos"):
        if role in student.roles and role in teacher.roles:
            yield student.roles[role], teacher.roles[role]
    teacher_id_of = {literal: token for token, literal in sorted(teacher.literals.items(), reverse=True)}
    for student_id, literal in sorted(student.literals.items()):
        teacher_id = teacher_id_of.get(literal)
        # Unknown tokens are never paired: what is unknown to one tokenizer need not be unknown to the other.
        if teacher_id is None or student_id == student.unknown or teacher_id == teacher.unknown:
            continue
        if (student_id in student.stops) == (teacher_id in teacher.stops):
            yield student_id, teacher_id


def compose(text: str) -> str:
    """The text in NFC."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)
