"""Measures how well two tokenizers' chunks match on a set of texts."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from distill_rl.align.aligner import TokenAligner
from distill_rl.align.alignment import Alignment
from distill_rl.align.vocabulary import Vocabulary, common_vocabulary

# Which cross-tokenizer loss suits a pair of tokenizers.
#
# Alone, `hybrid` and `alm` teach better than every other method. On real text `hybrid` is the better one where 87 % of the chunks are
# 1:1, and `alm` where 47 % are; where few answers are likely they tie (docs/results.md).

FEW_SINGLES = 0.6
"""Below this share of 1:1 chunks `hybrid` too often teaches a piece of the teacher's as a token of its own. Between the two shares measured."""


@dataclass(frozen=True, slots=True)
class Advice:
    loss: str
    """A value of `loss.cross_tokenizer`; `none` if there is nothing to compare."""
    reason: str
    """Why, as a clause."""

    def __str__(self) -> str:
        return f"loss.cross_tokenizer={self.loss}: {self.reason}"


def advise(one_to_one_share: float, num_chunks: int, num_common: int) -> Advice:
    """The loss that suits a pair of tokenizers.

    Args:
        one_to_one_share: of the chunks, those of one token on either side, from 0 to 1.
        num_chunks: of the texts that were aligned.
        num_common: ids that the vocabularies have in common.
    """
    if not num_chunks:
        return Advice("none", "no text could be aligned, so there is nothing to distil")
    if not num_common:
        return Advice("alm", "no token of the two vocabularies spells the same, so only whole chunks can be compared")
    share = f"{one_to_one_share:.1%} of the chunks are 1:1"
    if one_to_one_share < FEW_SINGLES:
        return Advice(
            "alm", f"only {share}, so whole chunks say more than single tokens; xtoken beside labels may teach more"
        )
    return Advice(
        "hybrid", f"{share} and compare {num_common:,} common tokens; the others are compared as whole chunks"
    )


CLASSES = ("letters", "digits", "punctuation", "cjk", "other scripts", "whitespace", "parts of characters", "mixed")
_MIXED, _WHITESPACE = CLASSES.index("mixed"), CLASSES.index("whitespace")


@dataclass(frozen=True)
class ClassCoverage:
    """The chunks whose text is of one class."""

    chunks: int
    one_to_one_share: float
    student_tokens: float
    """Mean number of tokens per chunk"""
    teacher_tokens: float


@dataclass(frozen=True)
class CoverageReport:
    """The result of an audit. All shares lie in 0 … 1."""

    one_to_one_share: float
    """Share of all chunks"""
    exact_share: float
    """Share of texts"""
    chunk_lengths: Mapping[str, int]
    """`student tokens:teacher tokens` → number of chunks, most common first"""
    classes: Mapping[str, ClassCoverage]
    common_vocabulary: int
    """Number of ids in common"""
    suggested_loss: str
    reason: str
    """Why that loss is suggested"""
    texts: int
    aligned_share: float
    """Share of the student's tokens for text, spelled or unknown, that are in a chunk"""
    unknown_share: float
    """Share of the same tokens that are unknown: text that the student's tokenizer has no piece for"""
    methods: Mapping[str, int]
    """Method → number of texts aligned by it"""
    student_size: int
    teacher_size: int
    lossy: Mapping[str, str]
    """Side → why its tokens do not always spell the text"""

    @property
    def advice(self) -> Advice:
        """The suggested loss, and why."""
        return Advice(self.suggested_loss, self.reason)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def audit(aligner: TokenAligner, texts: Iterable[str]) -> CoverageReport:
    """Aligns the texts, one after another, and reports how well the two tokenizers' chunks match.

    The texts are read once, so a generator will do. If there is no chunk in any of them, `one_to_one_share` is 0 and no
    loss is suggested ("none").

    Raises:
        ValueError: no texts; a text with a lone surrogate.
    """
    lengths: Counter[tuple[int, int]] = Counter()
    methods: Counter[str] = Counter()
    classify = _Classifier(aligner.student)
    sums = np.zeros((len(CLASSES), 4))
    aligned = spelled = unknown = exact = 0
    # A tokenizer whose eos has the id of the unknown token writes that id around an empty text as well.
    unknown_around = _count_unknown(aligner.student, aligner.tokenize_student("").ids)
    for text in texts:
        row = aligner.align(text)
        methods[row.method] += 1
        exact += row.exact
        spelled += int(np.count_nonzero(~aligner.student.special[row.student_ids]))
        unknown += _count_unknown(aligner.student, row.student_ids) - unknown_around
        aligned += int(np.count_nonzero(row.student_chunk >= 0))
        sizes = row.chunk_sizes()
        kinds, repeats = np.unique(np.stack(sizes), axis=1, return_counts=True)
        lengths.update(dict(zip(zip(*kinds.tolist()), repeats.tolist())))
        single = (sizes[0] == 1) & (sizes[1] == 1)
        np.add.at(sums, classify(row), np.stack([np.ones(len(single)), single, *sizes], axis=1))
    count = methods.total()
    if not count:
        raise ValueError("an audit needs at least one text, got none; give data with texts")
    chunks = lengths.total()
    share = lengths[1, 1] / chunks if chunks else 0.0
    common = len(common_vocabulary(aligner.student, aligner.teacher)[0])
    advice = advise(share, chunks, common)
    sides = {"student": aligner.student, "teacher": aligner.teacher}
    return CoverageReport(
        one_to_one_share=share,
        exact_share=exact / count,
        chunk_lengths={f"{left}:{right}": repeats for (left, right), repeats in lengths.most_common()},
        classes={name: _coverage(row) for name, row in zip(CLASSES, sums.tolist()) if row[0]},
        common_vocabulary=common,
        suggested_loss=advice.loss,
        reason=advice.reason,
        texts=count,
        aligned_share=aligned / max(spelled + unknown, 1),
        unknown_share=unknown / max(spelled + unknown, 1),
        methods=dict(methods),
        student_size=aligner.student.size,
        teacher_size=aligner.teacher.size,
        lossy={name: side.lossy for name, side in sides.items() if side.lossy},
    )


def _count_unknown(vocabulary: Vocabulary, ids: np.ndarray) -> int:
    return 0 if vocabulary.unknown is None else int(np.count_nonzero(ids == vocabulary.unknown))


def _coverage(row: list[float]) -> ClassCoverage:
    """The share and means of one class, from its sums (chunks, 1:1 chunks, student tokens, teacher tokens)."""
    chunks, single, student, teacher = row
    return ClassCoverage(int(chunks), single / chunks, student / chunks, teacher / chunks)


class _Classifier:
    """Classifies chunks by what the student's tokens spell. The class of each id is computed once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._class_of_id = np.full(vocabulary.size, -1, np.int8)

    def __call__(self, row: Alignment) -> np.ndarray:
        """int64 [num_chunks]: for each chunk of an alignment an index into `CLASSES`, by what its student tokens spell.

        Tokens of white space do not count beside others; a chunk whose other tokens differ in class is "mixed".
        """
        inside = row.student_chunk >= 0
        ids = row.student_ids[inside]
        for token in np.unique(ids[self._class_of_id[ids] < 0]).tolist():
            self._class_of_id[token] = CLASSES.index(class_of(self._vocabulary.token_bytes(token)))
        classes, chunks = self._class_of_id[ids], row.student_chunk[inside]
        # White space beside other text does not change the class. A chunk is mixed if its lowest and highest class differ.
        visible = classes != _WHITESPACE
        low = np.full(row.num_chunks, len(CLASSES))
        high = np.full(row.num_chunks, -1)
        np.minimum.at(low, chunks[visible], classes[visible])
        np.maximum.at(high, chunks[visible], classes[visible])
        return np.where(high < 0, _WHITESPACE, np.where(low == high, low, _MIXED))


def class_of(spelled: bytes) -> str:
    """The one of `CLASSES` that fits all characters of the decoded bytes, ignoring white space around them.

    "mixed" if the characters are of several classes, "whitespace" if there are none, "parts of characters" if the bytes
    are not UTF-8.
    """
    try:
        text = spelled.decode()
    except UnicodeDecodeError:
        return "parts of characters"
    classes = {_class_of_letter(letter) for letter in text.strip()}
    if not classes:
        return "whitespace"
    return classes.pop() if len(classes) == 1 else "mixed"


def _class_of_letter(letter: str) -> str:
    """The one of `CLASSES` that a single character belongs to, by its Unicode category and name."""
    category = unicodedata.category(letter)
    if category[0] == "N":
        return "digits"
    if category[0] in "PSC":
        return "punctuation"
    name = unicodedata.name(letter, "")
    if name.startswith(("CJK", "HIRAGANA", "KATAKANA", "HANGUL")):
        return "cjk"
    if name.startswith("LATIN"):
        return "letters"
    return "whitespace" if category[0] == "Z" else "other scripts"
