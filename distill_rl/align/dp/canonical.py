"""What a token spells, in the form in which the tokens of two vocabularies are compared by the dynamic programme."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from distill_rl.align.tokenizer.vocabulary import Vocabulary

NONE = -1
"""the canonical id of a token that spells nothing: it equals no token, itself included"""

# An odd multiplier of a polynomial hash mod 2⁶⁴ (the golden ratio's bits): concatenation is h(a)·B^|b| + h(b).
_BASE = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Strings:
    """Byte strings one after another, and whether each may follow another one inside a join."""

    flat: np.ndarray
    """uint8: all bytes"""
    starts: np.ndarray
    """int64 [n]: where the i-th string begins in `flat`"""
    lengths: np.ndarray
    """int32 [n]"""
    inner: np.ndarray
    """bool [n]: False for an empty string and for one whose leading space was taken off"""
    widths: np.ndarray
    """int32 [n]: the bytes that both sides are expected to keep: all, or without white space where a side is lossy"""

    def take(self, chosen: np.ndarray) -> Strings:
        return Strings(self.flat, self.starts[chosen], self.lengths[chosen], self.inner[chosen], self.widths[chosen])

    def joined(self) -> np.ndarray:
        """uint8: all strings, one directly after another."""
        lengths = self.lengths.astype(np.int64)
        ends = np.cumsum(lengths)
        order = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
        return self.flat[np.repeat(self.starts - ends + lengths, lengths) + order]


@dataclass(frozen=True)
class Spelled:
    """One side of a window: every token's canonical string, its id among the pair's strings, and its hash."""

    strings: Strings
    ids: np.ndarray
    """int32 [n]: equal ids ⇔ equal canonical strings, on either side; `NONE` for an empty one"""
    hashes: np.ndarray
    """uint64 [n]: polynomial hash of the string, mod 2⁶⁴"""
    powers: np.ndarray
    """uint64 [n]: B to the string's length"""

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, chosen: np.ndarray) -> Spelled:
        return Spelled(self.strings.take(chosen), self.ids[chosen], self.hashes[chosen], self.powers[chosen])


class CanonicalTables:
    """The canonical strings of two vocabularies' tokens.

    A token's canonical string is the bytes that it stands for (byte map, metaspace, `##` and byte fallback are
    resolved in `Vocabulary`), nothing else: `_` is not ▁, a tab is not a newline, " ," is not ",". Only where a
    vocabulary's normaliser is lossy are both sides folded, by those of NFKC, accent stripping and lower-casing that
    leave every token of the lossy vocabulary as it is (so a tokenizer that keeps capitals is never compared without
    them); one space before a letter or digit then counts as optional, since such a tokenizer may drop or invent it.
    A token whose bytes are not UTF-8 by themselves is never folded. Specials spell nothing.

    Args:
        student, teacher: the two vocabularies; only `flat`, `starts`, `lengths`, `size`, `normalization` are read.
        fast_ids: canonical ids and hashes of both vocabularies are made here, once (about 0.5 s and 30 bytes per
            token at 150,000 tokens); False makes them for each window's tokens when it comes. The answers are the
            same.
    """

    def __init__(self, student: Vocabulary, teacher: Vocabulary, *, fast_ids: bool = True) -> None:
        self.student, self.teacher, self.fast_ids = student, teacher, fast_ids
        lossy = [side for side in (student, teacher) if side.normalization == "lossy"]
        self.fold = fold_of(lossy) if lossy else None
        self._made: tuple[Spelled, Spelled] | None = None
        if fast_ids:
            self._made = _spell(
                *(_canonical(side, np.arange(side.size, dtype=np.int64), self.fold) for side in (student, teacher))
            )

    def look_up(self, student_ids: np.ndarray, teacher_ids: np.ndarray) -> tuple[Spelled, Spelled]:
        """The two sides of a window. Ids outside a vocabulary (a model's padded ids) spell nothing."""
        student_ids, teacher_ids = np.asarray(student_ids, np.int64), np.asarray(teacher_ids, np.int64)
        if self._made is not None:
            made = self._made
            return _inside(made[0], student_ids), _inside(made[1], teacher_ids)
        unique_s, back_s = np.unique(student_ids, return_inverse=True)
        unique_t, back_t = np.unique(teacher_ids, return_inverse=True)
        spelled_s, spelled_t = _spell(
            _canonical(self.student, unique_s, self.fold), _canonical(self.teacher, unique_t, self.fold)
        )
        return spelled_s.take(back_s), spelled_t.take(back_t)


def _inside(table: Spelled, ids: np.ndarray) -> Spelled:
    valid = (ids >= 0) & (ids < len(table))
    if valid.all():
        return table.take(ids)
    if len(table) == 0:
        raise ValueError(
            "a vocabulary of no tokens: nothing can be aligned with it; pass the tokenizer's own vocabulary"
        )
    taken = table.take(np.where(valid, ids, 0))
    strings = taken.strings
    strings = Strings(
        strings.flat,
        strings.starts,
        np.where(valid, strings.lengths, 0),
        strings.inner & valid,
        np.where(valid, strings.widths, 0),
    )
    return Spelled(strings, np.where(valid, taken.ids, NONE).astype(np.int32), taken.hashes, taken.powers)


def _canonical(vocabulary: Vocabulary, ids: np.ndarray, fold: Callable[[str], str] | None) -> Strings:
    """The canonical strings of these ids (which may lie outside the vocabulary: empty)."""
    valid = (ids >= 0) & (ids < vocabulary.size)
    inside = np.where(valid, ids, 0)
    starts = vocabulary.starts[inside] if vocabulary.size else np.zeros(len(ids), np.int64)
    lengths = np.where(valid, vocabulary.lengths[inside] if vocabulary.size else 0, 0).astype(np.int32)
    if fold is None:
        return Strings(vocabulary.flat, starts, lengths, lengths > 0, lengths)
    flat = vocabulary.flat.tobytes()
    folded = [_folded(flat[start : start + n], fold) for start, n in zip(starts.tolist(), lengths.tolist())]
    new_lengths = np.fromiter((len(text) for text, _ in folded), np.int32, len(folded))
    new_starts = np.zeros(len(folded), np.int64)
    np.cumsum(new_lengths[:-1], out=new_starts[1:])
    new_flat = np.frombuffer(b"".join(text for text, _ in folded), np.uint8)
    glued = np.fromiter((inner for _, inner in folded), bool, len(folded))
    widths = np.fromiter((sum(map(len, text.split())) for text, _ in folded), np.int32, len(folded))
    return Strings(new_flat, new_starts, new_lengths, glued & (new_lengths > 0), widths)


def _folded(spelling: bytes, fold: Callable[[str], str]) -> tuple[bytes, bool]:
    """The folded bytes, and whether they may stand inside a join: not if a space was taken off their front."""
    try:
        text = fold(spelling.decode())
    except UnicodeDecodeError:
        return spelling, True
    if len(text) > 1 and text[0] == " " and text[1].isalnum():
        return text[1:].encode(), False
    return text.encode(), True


def fold_of(lossy: list[Vocabulary]) -> Callable[[str], str]:
    """The composition of those folds under which a lossy vocabulary's own tokens do not change."""
    steps: list[Callable[[str], str]] = []
    for vocabulary in lossy:
        flat = vocabulary.flat.tobytes()
        texts = []
        for start, length in zip(vocabulary.starts.tolist(), vocabulary.lengths.tolist()):
            try:
                texts.append(flat[start : start + length].decode())
            except UnicodeDecodeError:
                continue
        # Accents before case: İ lower-cased first leaves a dot above behind.
        for step, plain in ((_nfkc, str), (_strip_accents, _nfd), (str.lower, str)):
            if step not in steps and all(
                step(text) == plain(text) for text in texts if not text.isascii() or step is str.lower
            ):
                steps.append(step)
    steps.sort(key=(_nfkc, _strip_accents, str.lower).index)

    def fold(text: str) -> str:
        for step in steps:
            text = step(text)
        return text

    return fold


def _nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _strip_accents(text: str) -> str:
    return "".join(letter for letter in _nfd(text) if unicodedata.category(letter) != "Mn")


def _spell(*sides: Strings) -> tuple[Spelled, Spelled]:
    """Interns the strings of two sides together and hashes them."""
    index: dict[bytes, int] = {b"": NONE}
    spelled = []
    for strings in sides:
        flat = strings.flat.tobytes()
        ids = np.fromiter(
            (
                index.setdefault(flat[start : start + length], len(index))
                for start, length in zip(strings.starts.tolist(), strings.lengths.tolist())
            ),
            np.int32,
            len(strings.starts),
        )
        spelled.append(Spelled(strings, ids, *_hashes(strings)))
    return spelled[0], spelled[1]


def _hashes(strings: Strings) -> tuple[np.ndarray, np.ndarray]:
    """(hash, B^length) of every string: Σ (byte + 1)·B^(length − 1 − k), mod 2⁶⁴."""
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
