"""How well two tokenizers cover each other on given texts."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from distill_rl.align.aligner import TokenAligner
from distill_rl.align.alignment import Alignment
from distill_rl.align.tokenizer.vocabulary import Vocabulary, common_vocabulary

CLASSES = ("letters", "digits", "punctuation", "cjk", "other scripts", "whitespace", "parts of characters", "mixed")
_MIXED, _WHITESPACE = CLASSES.index("mixed"), CLASSES.index("whitespace")

FEW_SINGLES = 0.2
"""Below this share of 1:1 chunks the common vocabulary supervises too little to be worth its payload."""


@dataclass(frozen=True)
class ClassCoverage:
    """Of the chunks whose text is of one class."""

    chunks: int
    one_to_one_share: float
    student_tokens: float
    """mean tokens of a chunk"""
    teacher_tokens: float


@dataclass(frozen=True)
class CoverageReport:
    """What an audit found; all shares are of 0 … 1."""

    one_to_one_share: float
    """of all chunks"""
    exact_share: float
    """of texts"""
    chunk_lengths: Mapping[str, int]
    """student tokens:teacher tokens → chunks, the commonest first"""
    classes: Mapping[str, ClassCoverage]
    common_vocabulary: int
    """token pairs that spell the same bytes"""
    suggested_loss: str
    reason: str
    """why that loss"""
    texts: int
    aligned_share: float
    """of the student's tokens that stand for text, spelled or unknown: those in a chunk"""
    unknown_share: float
    """of the same tokens: unknown ones, which stand for text that the student's tokenizer has no piece for"""
    methods: Mapping[str, int]
    """texts by the method that ran"""
    student_size: int
    teacher_size: int
    lossy: Mapping[str, str]
    """side → why its tokens do not always spell the text"""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def audit(aligner: TokenAligner, texts: Iterable[str]) -> CoverageReport:
    """Aligns texts and reports how the two tokenizers' chunks fall.

    Raises:
        ValueError: no texts.
    """
    lengths: Counter[tuple[int, int]] = Counter()
    methods: Counter[str] = Counter()
    classify = _Classifier(aligner.student)
    sums = np.zeros((len(CLASSES), 4))
    aligned = spelled = unknown = exact = 0
    written_around = _count_unknown(aligner.student, aligner.tokenize_student("").ids)
    for text in texts:
        found = aligner.align(text)
        methods[found.method] += 1
        exact += found.exact
        spelled += int(np.count_nonzero(~aligner.student.special[found.student_ids]))
        unknown += _count_unknown(aligner.student, found.student_ids) - written_around
        aligned += int(np.count_nonzero(found.student_chunk >= 0))
        sizes = found.chunk_sizes()
        pairs, times = np.unique(np.stack(sizes), axis=1, return_counts=True)
        lengths.update(dict(zip(zip(*pairs.tolist()), times.tolist())))
        single = (sizes[0] == 1) & (sizes[1] == 1)
        np.add.at(sums, classify(found), np.stack([np.ones(len(single)), single, *sizes], axis=1))
    count = methods.total()
    if not count:
        raise ValueError("an audit needs at least one text, got none; name data that has some")
    chunks = lengths.total()
    share = lengths[1, 1] / chunks if chunks else 0.0
    common = len(common_vocabulary(aligner.student, aligner.teacher)[0])
    loss, reason = _suggest(share, chunks, common)
    sides = {"student": aligner.student, "teacher": aligner.teacher}
    return CoverageReport(
        one_to_one_share=share,
        exact_share=exact / count,
        chunk_lengths={f"{left}:{right}": times for (left, right), times in lengths.most_common()},
        classes={name: _coverage(row) for name, row in zip(CLASSES, sums.tolist()) if row[0]},
        common_vocabulary=common,
        suggested_loss=loss,
        reason=reason,
        texts=count,
        aligned_share=aligned / max(spelled + unknown, 1),
        unknown_share=unknown / max(spelled + unknown, 1),
        methods=dict(methods),
        student_size=aligner.student.size,
        teacher_size=aligner.teacher.size,
        lossy={name: side.lossy for name, side in sides.items() if side.lossy},
    )


def _count_unknown(vocabulary: Vocabulary, ids: np.ndarray) -> int:
    """Tokens with the unknown token's id; a tokenizer that ends every text with that id writes it around an empty one."""
    return 0 if vocabulary.unknown is None else int(np.count_nonzero(ids == vocabulary.unknown))


def _coverage(row: list[float]) -> ClassCoverage:
    chunks, single, student, teacher = row
    return ClassCoverage(int(chunks), single / chunks, student / chunks, teacher / chunks)


def _suggest(share: float, chunks: int, common: int) -> tuple[str, str]:
    if not chunks:
        return "none", "no text could be aligned, so there is nothing to distil"
    if not common:
        return "alm", "no token of the two vocabularies spells the same, so only whole chunks can be compared"
    if share < FEW_SINGLES:
        return "alm", f"only {share:.1%} of the chunks are 1:1, so whole chunks carry nearly all of the signal"
    return "hybrid", (
        f"{share:.1%} of the chunks are 1:1 and compare {common:,} common tokens; the others are supervised as whole chunks"
    )


class _Classifier:
    """The class of each chunk's text, by what the student's tokens spell: looked up once per id."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known = np.full(vocabulary.size, -1, np.int8)

    def __call__(self, found: Alignment) -> np.ndarray:
        """int64 [num_chunks]: place in `CLASSES`."""
        inside = found.student_chunk >= 0
        ids = found.student_ids[inside]
        for number in np.unique(ids[self._known[ids] < 0]).tolist():
            self._known[number] = CLASSES.index(class_of(self._vocabulary.token_bytes(number)))
        classes, chunks = self._known[ids], found.student_chunk[inside]
        speaks = classes != _WHITESPACE  # white space beside something else does not make it another class
        low = np.full(found.num_chunks, len(CLASSES))
        high = np.full(found.num_chunks, -1)
        np.minimum.at(low, chunks[speaks], classes[speaks])
        np.maximum.at(high, chunks[speaks], classes[speaks])
        return np.where(high < 0, _WHITESPACE, np.where(low == high, low, _MIXED))


def class_of(spelled: bytes) -> str:
    """One of `CLASSES`, white space around it left out."""
    try:
        text = spelled.decode()
    except UnicodeDecodeError:
        return "parts of characters"
    classes = {_class_of_letter(letter) for letter in text.strip()}
    if not classes:
        return "whitespace"
    return classes.pop() if len(classes) == 1 else "mixed"


def _class_of_letter(letter: str) -> str:
    category = unicodedata.category(letter)
    if category[0] == "N":
        return "digits"
    if category[0] in "PSC":
        return "punctuation"
    name = unicodedata.name(letter, "")
    if name.startswith(("CJK", "HIRAGANA", "KATAKANA", "HANGUL")):
        return "cjk"
    return "letters" if name.startswith("LATIN") else "whitespace" if category[0] == "Z" else "other scripts"
