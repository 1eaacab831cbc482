"""Canonical strings: the form in which the dynamic programme compares the tokens of two vocabularies."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distill_rl.align.spans import gather_bytes

if TYPE_CHECKING:
    from distill_rl.align.tokenizer.vocabulary import Vocabulary

NONE = -1
"""The canonical id of a token that spells nothing. Such a token equals no token, not even itself."""

# The base B of a polynomial hash mod 2⁶⁴, odd (the golden ratio's bits): h(a followed by b) = h(a)·B^|b| + h(b).
_BASE = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class ByteStrings:
    """Byte strings, and whether each may follow another string inside a join."""

    flat: np.ndarray
    """uint8: the bytes of all strings"""
    starts: np.ndarray
    """int64 [n]: where the i-th string begins in `flat`"""
    lengths: np.ndarray
    """int32 [n]"""
    inner: np.ndarray
    """bool [n]: False for an empty string, and for one whose leading space was removed"""
    widths: np.ndarray
    """int32 [n]: number of bytes that both sides are expected to spell: all, or without white space if a side is lossy"""

    def take(self, chosen: np.ndarray) -> ByteStrings:
        """The strings at these indices, in that order; they share `flat` with this object."""
        return ByteStrings(
            self.flat, self.starts[chosen], self.lengths[chosen], self.inner[chosen], self.widths[chosen]
        )

    def joined(self) -> np.ndarray:
        """uint8: all strings, one after another."""
        lengths = self.lengths.astype(np.int64)
        return gather_bytes(self.flat, self.starts, lengths, lengths.cumsum())


@dataclass(frozen=True)
class CanonicalTokens:
    """One side of a window: each token's canonical string, the string's id, and its hash."""

    strings: ByteStrings
    ids: np.ndarray
    """int32 [n]: equal if and only if the canonical strings are equal, across both sides; `NONE` for an empty string"""
    hashes: np.ndarray
    """uint64 [n]: polynomial hash of the string, mod 2⁶⁴"""
    powers: np.ndarray
    """uint64 [n]: B to the power of the string's length"""

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, chosen: np.ndarray) -> CanonicalTokens:
        """The chosen tokens, in the given order."""
        return CanonicalTokens(self.strings.take(chosen), self.ids[chosen], self.hashes[chosen], self.powers[chosen])


class CanonicalTables:
    """The canonical strings of two vocabularies' tokens.

    Normally a token's canonical string is exactly the bytes that it stands for (`Vocabulary` has resolved byte map,
    metaspace, `##` and byte fallback): `_` is not ▁, a tab is not a newline, " ," is not ",".

    If either vocabulary is lossy, both sides are folded:

    - By those of NFKC, accent stripping and lower-casing that leave every token of the lossy vocabulary unchanged. So
      a tokenizer that keeps capitals is never compared without them.
    - One space before a letter or digit is removed, since such a tokenizer may drop or add it.
    - A token whose bytes alone are not UTF-8 is not folded.

    Special tokens spell nothing.

    Args:
        student, teacher: the two vocabularies; only `flat`, `starts`, `lengths`, `size`, `normalization` are read.
        fast_ids: compute the canonical ids and hashes of both vocabularies once, here (about 0.5 s and 30 bytes per
            token at 150,000 tokens). With False they are computed for each window's tokens. The results are the same.
    """

    def __init__(self, student: Vocabulary, teacher: Vocabulary, *, fast_ids: bool = True) -> None:
        self.student, self.teacher = student, teacher
        lossy = [side for side in (student, teacher) if side.normalization == "lossy"]
        self.fold = fold_of(lossy) if lossy else None
        self._tables: tuple[CanonicalTokens, CanonicalTokens] | None = None
        if fast_ids:
            self._tables = self._tabulate(np.arange(student.size + 1), np.arange(teacher.size + 1))

    def _tabulate(self, student_ids: np.ndarray, teacher_ids: np.ndarray) -> tuple[CanonicalTokens, CanonicalTokens]:
        """Both sides' canonical tokens for these ids, int64; equal strings have equal ids across the two sides."""
        return _intern(
            _canonical(self.student, student_ids, self.fold), _canonical(self.teacher, teacher_ids, self.fold)
        )

    def look_up(self, student_ids: np.ndarray, teacher_ids: np.ndarray) -> tuple[CanonicalTokens, CanonicalTokens]:
        """The canonical tokens of both sides of a window, one per given id and in that order.

        Canonical ids may be compared only within one call, unless the tables were built with `fast_ids`.

        Args:
            student_ids, teacher_ids: int [n], [m]. Ids outside the vocabulary (padding of a model's embedding) spell
                nothing.
        """
        student_ids, teacher_ids = _in_table(student_ids, self.student), _in_table(teacher_ids, self.teacher)
        if self._tables is not None:
            return self._tables[0].take(student_ids), self._tables[1].take(teacher_ids)
        student_unique, student_inverse = np.unique(student_ids, return_inverse=True)
        teacher_unique, teacher_inverse = np.unique(teacher_ids, return_inverse=True)
        student, teacher = self._tabulate(student_unique, teacher_unique)
        return student.take(student_inverse), teacher.take(teacher_inverse)


def _in_table(ids: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """The ids; `size`, one past the last id, in place of those outside the vocabulary."""
    ids = np.asarray(ids, np.int64)
    return np.where((ids >= 0) & (ids < vocabulary.size), ids, vocabulary.size)


def _canonical(vocabulary: Vocabulary, ids: np.ndarray, fold: Callable[[str], str] | None) -> ByteStrings:
    """The canonical strings of these ids; empty for the id `size`, one past the last.

    Args:
        ids: int64 [n], from 0 to `vocabulary.size`.
        fold: applied to each token's text; None: the strings are the tokens' exact bytes.
    """
    starts = vocabulary.starts[ids]
    lengths = np.append(vocabulary.lengths, 0)[ids].astype(np.int32)
    if fold is None:
        return ByteStrings(vocabulary.flat, starts, lengths, lengths > 0, lengths)
    flat = vocabulary.flat.tobytes()
    folded = [_fold_bytes(flat[start : start + n], fold) for start, n in zip(starts.tolist(), lengths.tolist())]
    new_lengths = np.fromiter((len(text) for text, _ in folded), np.int32, len(folded))
    new_starts = np.zeros(len(folded), np.int64)
    np.cumsum(new_lengths[:-1], out=new_starts[1:])
    new_flat = np.frombuffer(b"".join(text for text, _ in folded), np.uint8)
    joinable = np.fromiter((inner for _, inner in folded), bool, len(folded))
    widths = np.fromiter((sum(map(len, text.split())) for text, _ in folded), np.int32, len(folded))
    return ByteStrings(new_flat, new_starts, new_lengths, joinable & (new_lengths > 0), widths)


def _fold_bytes(spelling: bytes, fold: Callable[[str], str]) -> tuple[bytes, bool]:
    """The folded bytes of a token, and whether it may follow another token inside a join.

    A space before a letter or digit is removed; the token then begins a new word and may not (False). Bytes that are
    not UTF-8 are returned as they are.
    """
    try:
        text = fold(spelling.decode())
    except UnicodeDecodeError:
        return spelling, True
    if len(text) > 1 and text[0] == " " and text[1].isalnum():
        return text[1:].encode(), False
    return text.encode(), True


def fold_of(lossy: list[Vocabulary]) -> Callable[[str], str]:
    """A function text → text that folds what lossy tokenizers may change: NFKC, accents and case.

    It composes those of the three folds that leave every token of a given vocabulary unchanged, so that a tokenizer
    that keeps capitals is not compared without them. Tokens that are not UTF-8 are not considered. Without vocabularies
    it changes nothing.

    Args:
        lossy: the vocabularies; a fold is used if it suits any one of them.
    """
    steps: list[Callable[[str], str]] = []
    for vocabulary in lossy:
        texts = []
        for spelling in vocabulary.spellings():
            with suppress(UnicodeDecodeError):
                texts.append(spelling.decode())
        for step, unfolded in ((_nfkc, str), (_strip_accents, _nfd), (str.lower, str)):
            if step not in steps and all(
                step(text) == unfolded(text) for text in texts if not text.isascii() or step is str.lower
            ):
                steps.append(step)
    # Accents before case: İ lower-cased first would leave a combining dot behind.
    steps.sort(key=(_nfkc, _strip_accents, str.lower).index)

    def fold(text: str) -> str:
        """The text after all folds that were chosen."""
        for step in steps:
            text = step(text)
        return text

    return fold


def _nfd(text: str) -> str:
    """The text in NFD."""
    return unicodedata.normalize("NFD", text)


def _nfkc(text: str) -> str:
    """The text in NFKC."""
    return unicodedata.normalize("NFKC", text)


def _strip_accents(text: str) -> str:
    """The text in NFD without its combining marks."""
    return "".join(letter for letter in _nfd(text) if unicodedata.category(letter) != "Mn")


def _intern(*sides: ByteStrings) -> tuple[CanonicalTokens, CanonicalTokens]:
    """Gives the strings of two sides common ids, equal if and only if the strings are equal, and hashes them.

    An empty string gets `NONE`. Takes exactly two sides, and returns them in the same order.
    """
    index: dict[bytes, int] = {b"": NONE}
    tokens = []
    for strings in sides:
        flat = strings.flat.tobytes()
        spans = zip(strings.starts.tolist(), strings.lengths.tolist())
        numbered = (index.setdefault(flat[start : start + length], len(index)) for start, length in spans)
        ids = np.fromiter(numbered, np.int32, len(strings.starts))
        tokens.append(CanonicalTokens(strings, ids, *_hashes(strings)))
    return tokens[0], tokens[1]


def _hashes(strings: ByteStrings) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [n], uint64 [n]: hash of every string, and B^length.

    The hash is Σₖ (byteₖ + 1)·B^(length − 1 − k), mod 2⁶⁴; 0 for an empty string.
    """
    lengths = strings.lengths.astype(np.int64)
    powers = np.full(int(lengths.max(initial=0)) + 1, _BASE, np.uint64)
    powers[0] = 1
    powers = np.cumprod(powers, dtype=np.uint64)
    ends = np.cumsum(lengths)
    order = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    values = strings.joined().astype(np.uint64) + np.uint64(1)
    terms = values * powers[np.repeat(ends, lengths) - 1 - order]
    sums = np.zeros(len(order) + 1, np.uint64)
    np.cumsum(terms, out=sums[1:])
    return sums[ends] - sums[ends - lengths], powers[lengths]
