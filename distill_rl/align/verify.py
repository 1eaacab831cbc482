"""Measures how well two tokenizers' chunks match on a user's texts, and checks on them what the aligner guarantees."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from distill_rl.align.aligner import TokenAligner
from distill_rl.align.alignment import Alignment
from distill_rl.align.chats import Chat, Message
from distill_rl.align.vocabulary import Vocabulary, common_vocabulary

# Which cross-tokenizer loss suits a pair of tokenizers.
#
# Alone, `hybrid` and `alm` teach better than every other method. On real text `hybrid` is the better one where 87 % of the chunks are
# 1:1, and `alm` where 47 % are; where few answers are likely they tie (docs/results.md).

FEW_SINGLES = 0.6
"""Below this share of 1:1 chunks `hybrid` too often teaches a piece of the teacher's as a token of its own. Between the two shares measured."""


def advise(one_to_one_share: float, num_chunks: int, num_common: int) -> tuple[str, str]:
    """The loss that suits a pair of tokenizers, a value of `loss.cross_tokenizer` or `none`, and why, as a clause.

    Args:
        one_to_one_share: of the chunks, those of one token on either side, from 0 to 1.
        num_chunks: of the texts that were aligned.
        num_common: ids that the vocabularies have in common.
    """
    if not num_chunks:
        return "none", "no text could be aligned, so there is nothing to distil"
    if not num_common:
        return "alm", "no token of the two vocabularies spells the same, so only whole chunks can be compared"
    share = f"{one_to_one_share:.1%} of the chunks are 1:1"
    if one_to_one_share < FEW_SINGLES:
        return "alm", f"only {share}, so whole chunks say more than single tokens; xtoken beside labels may teach more"
    return "hybrid", f"{share} and compare {num_common:,} common tokens; the others are compared as whole chunks"


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
    def advice(self) -> str:
        """The suggested loss, and why."""
        return f"loss.cross_tokenizer={self.suggested_loss}: {self.reason}"

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
    sums = np.zeros((len(CLASSES), 4))  # chunks, 1:1 chunks, student tokens, teacher tokens
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
        np.add.at(sums, _classify(aligner.student, row), np.stack([np.ones(len(single)), single, *sizes], axis=1))
    count = methods.total()
    if not count:
        raise ValueError("an audit needs at least one text, got none; give data with texts")
    chunks = lengths.total()
    share = lengths[1, 1] / chunks if chunks else 0.0
    common = len(common_vocabulary(aligner.student, aligner.teacher)[0])
    suggested_loss, reason = advise(share, chunks, common)
    sides = {"student": aligner.student, "teacher": aligner.teacher}
    return CoverageReport(
        one_to_one_share=share,
        exact_share=exact / count,
        chunk_lengths={f"{left}:{right}": repeats for (left, right), repeats in lengths.most_common()},
        classes={
            name: ClassCoverage(int(chunks), *(each / chunks for each in rest))
            for name, (chunks, *rest) in zip(CLASSES, sums.tolist())
            if chunks
        },
        common_vocabulary=common,
        suggested_loss=suggested_loss,
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
    return 0 if vocabulary.unknown is None else int(np.count_nonzero(ids == vocabulary.unknown))


def _classify(vocabulary: Vocabulary, row: Alignment) -> np.ndarray:
    """int64 [num_chunks]: for each chunk of an alignment an index into `CLASSES`, by what its student tokens spell."""
    # White space beside other text does not change the class. A chunk is mixed if its lowest and highest class differ.
    inside = row.student_chunk >= 0
    ids, places = np.unique(row.student_ids[inside], return_inverse=True)
    class_of_id = [CLASSES.index(class_of(vocabulary.token_bytes(token))) for token in ids.tolist()]
    classes, chunks = np.array(class_of_id, np.int64)[places], row.student_chunk[inside]
    visible = classes != _WHITESPACE
    low, high = np.full(row.num_chunks, len(CLASSES)), np.full(row.num_chunks, -1)
    np.minimum.at(low, chunks[visible], classes[visible])
    np.maximum.at(high, chunks[visible], classes[visible])
    return np.where(high < 0, _WHITESPACE, np.where(low == high, low, _MIXED))


@cache
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


# Checks that alignments of the user's texts have the properties that the aligner guarantees.

# How answers end: the stop tokens of both sides, and the number of rows that end in a pair of them.


@dataclass(frozen=True)
class Endings:
    """Both sides' stop tokens, and how many of the aligned rows end in a pair of them."""

    student_stops: list[str]
    """The stop tokens' text"""
    teacher_stops: list[str]
    rows: int
    ending: int
    """Rows in which a pair of stop tokens follows the last chunk; only these teach a student to stop"""


def endings(aligner: TokenAligner, texts: Sequence[str], chats: Sequence[Chat] = ()) -> Endings:
    """Aligns rows as a run reads them, and reports both sides' stop tokens and how many rows end in a pair of them.

    Args:
        chats: if there are any, they are aligned in place of the texts.

    Raises:
        ValueError: chats, and a tokenizer without a chat template; a lone surrogate.
        jinja2.TemplateError: a chat that a template rejects.
    """
    rows = align_training_rows(aligner, texts, chats)
    student, teacher = (
        [side.literal(token).decode(errors="replace") or f"id {token}" for token in side.stops]
        for side in (aligner.student, aligner.teacher)
    )
    return Endings(student, teacher, len(rows), sum(ends_in_stop(aligner, row) for row in rows))


def align_training_rows(aligner: TokenAligner, texts: Sequence[str], chats: Sequence[Chat] = ()) -> list[Alignment]:
    """One alignment per row, as a run reads it, but not cut to a length.

    Rows are the chats, each rendered with both sides' own templates, or, if there are none, the texts, followed by eos.

    Raises:
        ValueError: chats, and a tokenizer without a chat template; a lone surrogate.
        jinja2.TemplateError: a chat that a template rejects.
    """
    if chats:
        return [aligner.align_messages(chat.messages, options=chat.options) for chat in chats]
    return [
        aligner.pair(aligner.tokenize_student(text, end=True), aligner.tokenize_teacher(text, end=True))
        for text in map(aligner.normalize, texts)
    ]


def ends_in_stop(aligner: TokenAligner, row: Alignment) -> bool:
    """Whether a pair of stop tokens follows the last chunk of an alignment; with no chunks, whether there is a pair."""
    last = int(np.flatnonzero(row.student_chunk >= 0).max(initial=-1))
    behind = [int(row.student_ids[student]) for student, _ in row.stop_pairs if student > last]
    return any(token in aligner.student.stops for token in behind)


_PAD_LEFT, _PAD_RIGHT = 3, 5


@dataclass(frozen=True, slots=True)
class PropertyCheck:
    """What was checked, whether it holds, and how this was found."""

    name: str
    """What must hold"""
    passed: bool | None
    """None: there was nothing to check"""
    detail: str
    """How many items were checked, the first one that failed, or the worst value and its bound"""


def check_each(name: str, problems: Iterable[str | None], items: str) -> PropertyCheck:
    """The result of a check of many items, which passes if none has a problem.

    Without items it neither passes nor fails (`passed` is None). `detail` names the first problem and its index.

    Args:
        name: what must hold.
        problems: for each item, what is wrong with it, or None.
        items: what to call the items in `detail`.
    """
    results = list(problems)
    if failed := [(i, problem) for i, problem in enumerate(results) if problem is not None]:
        first = "first at index {}: {}".format(*failed[0])
        return PropertyCheck(name, False, f"{len(failed)} of {len(results)} {items} fail, {first}")
    return PropertyCheck(name, True if results else None, f"{len(results)} {items}")


def check_bound(name: str, values: Sequence[float], bound: float, what: str) -> PropertyCheck:
    """The result of a check that all measured numbers are at most `bound`. NaN fails.

    Args:
        name: what must hold.
        values: at least one.
        what: put before the largest value in `detail`.
    """
    value = float(np.max(values))
    return PropertyCheck(name, value <= bound, f"{what} {value:.1e}, at most {bound:.0e}")


def check_alignment(
    aligner: TokenAligner, student_tokenizer: Any, teacher_tokenizer: Any, texts: Sequence[str]
) -> list[PropertyCheck]:
    """The results of seven checks of what the aligner guarantees, on `texts`.

    The first three checks (equal bytes, order, chunks that cannot be divided) also run on the texts truncated to half.

    Args:
        aligner: for these two tokenizers, in this order.
        texts: if there are none, the checks neither pass nor fail.

    Raises:
        ValueError: a text with a lone surrogate.
    """
    whole = [aligner.align(text) for text in texts]
    pairs = [*zip(texts, whole)]
    rows = [*pairs, *((text, _half(aligner, text, row)) for text, row in pairs)]
    exact = [(text, row) for text, row in rows if row.exact]
    swapped = TokenAligner(teacher_tokenizer, student_tokenizer)
    same = TokenAligner(student_tokenizer, student_tokenizer)
    batch = zip(whole, aligner.align_batch(list(texts)), strict=True)
    spelled = (bytes_problem(aligner, text, row) for text, row in exact)
    ordered = (order_problem(row) for _, row in rows)
    undivided = (boundary_problem(aligner, text, row) for text, row in exact)
    reversible = (difference(row, swapped.align(text).swapped()) for text, row in pairs)
    batched = (difference(row, in_batch) for row, in_batch in batch)
    padded = (padding_problem(aligner, row) for row in whole)
    identical = (identity_problem(same.align(text)) for text in texts)
    return [
        check_each("a chunk spells the same bytes of the text on both sides", spelled, "exact rows"),
        check_each("chunks are numbered in order, without gaps, on both sides", ordered, "rows"),
        check_each("no chunk could be divided", undivided, "exact rows"),
        check_each("swapping the tokenizers swaps the alignment", reversible, "rows"),
        check_each("a batch is aligned like its rows one by one", batched, "rows"),
        check_each("padding changes nothing", padded, "rows"),
        check_each("a tokenizer aligned with itself has only 1:1 chunks", identical, "rows"),
    ]


def check_chats(aligner: TokenAligner, chats: Sequence[Chat]) -> list[PropertyCheck]:
    """The results of two checks on chats: equal bytes on both sides of a chunk, and paired ends of answers.

    Each side renders a chat with its own template. Without chats the checks neither pass nor fail.

    Raises:
        ValueError: a tokenizer without a chat template; a text with a lone surrogate.
    """
    rows = [(chat, aligner.align_messages(chat.messages, options=chat.options)) for chat in chats]
    spelled = (_chunks_problem(aligner, row, b"") for _, row in rows if row.exact)
    ended = (stop_problem(chat.messages, row) for chat, row in rows)
    return [
        check_each("a chunk of a chat spells the same bytes on both sides", spelled, "exact chats"),
        check_each("the end of every answer is paired, so that the student learns to stop", ended, "chats"),
    ]


def bytes_problem(aligner: TokenAligner, text: str, row: Alignment) -> str | None:
    """Checks that the chunks of an exact alignment spell the text from its start, with the same bytes on both sides.

    Returns what is wrong, or None.

    Args:
        text: as given to the aligner; it is normalised here.
    """
    expected = aligner.normalize(text).encode()
    spelled = b"".join(piece for _, piece in _pieces(aligner, row, expected)[0])
    problem = _chunks_problem(aligner, row, expected)
    return problem or (None if expected.startswith(spelled) else "the chunks do not spell the text")


def stop_problem(chat: Sequence[Message], row: Alignment) -> str | None:
    """Checks that there are at least as many paired stop tokens as assistant turns; other turns may end with one, too.

    Returns what is wrong, or None.
    """
    turns = sum(message["role"] == "assistant" for message in chat)
    pairs = len(row.stop_pairs)
    return None if pairs >= turns else f"{pairs} paired stop tokens for {turns} answers"


def order_problem(row: Alignment) -> str | None:
    """Checks that on both sides the chunk indices of the tokens run from 0 to the last, without going back or gaps.

    Tokens in no chunk are passed over. Returns what is wrong, or None.
    """
    for side, chunks in (("student", row.student_chunk), ("teacher", row.teacher_chunk)):
        indices = chunks[chunks >= 0]
        steps = np.diff(indices, prepend=-1)
        if ((steps < 0) | (steps > 1)).any() or (len(indices) and indices[-1] != row.num_chunks - 1):
            return f"the {side}'s chunks are {indices.tolist()[:20]}, with {row.num_chunks} chunks in all"
        if not len(indices) and row.num_chunks:
            return f"the {side} has none of the {row.num_chunks} chunks"
    return None


def boundary_problem(aligner: TokenAligner, text: str, row: Alignment) -> str | None:
    """Checks that no chunk could be divided: inside a chunk, student and teacher tokens never end at the same byte.

    Returns what is wrong, or None.

    Args:
        row: an exact alignment of the text.
    """
    student, teacher = map(_inner_ends, _pieces(aligner, row, aligner.normalize(text).encode()))
    shared = student & teacher
    return f"both sides end a token at byte {min(shared)}, inside a chunk" if shared else None


def difference(one: Alignment, other: Alignment) -> str | None:
    """What differs first between two alignments (ids, chunks, counts or exactness), in words; None if nothing does.

    Methods, dropped tokens, stop pairs and lossy stretches are not compared.
    """
    for name in ("student_ids", "teacher_ids", "student_chunk", "teacher_chunk"):
        if not np.array_equal(getattr(one, name), getattr(other, name)):
            return f"{name} differ"
    if (one.num_chunks, one.counts) != (other.num_chunks, other.counts):
        return f"{one.num_chunks} chunks {one.counts}, but {other.num_chunks} chunks {other.counts}"
    return None if one.exact == other.exact else f"exact is {one.exact}, but {other.exact}"


def padding_problem(aligner: TokenAligner, row: Alignment) -> str | None:
    """Checks that `align_ids` gives an alignment's ids the same chunks with masked padding around them as without it.

    Returns what is wrong, or None.
    """
    plain = aligner.align_ids(row.student_ids, row.teacher_ids)
    student, student_mask = _padded(row.student_ids)
    teacher, teacher_mask = _padded(row.teacher_ids)
    padded = aligner.align_ids(student, teacher, student_mask=student_mask, teacher_mask=teacher_mask)
    for side in ("student", "teacher"):
        before, after = getattr(plain, f"{side}_chunk"), getattr(padded, f"{side}_chunk")
        expected = np.pad(before, (_PAD_LEFT, _PAD_RIGHT), constant_values=-1)
        if not np.array_equal(after, expected):
            return f"the {side}'s chunks differ"
    return None


def identity_problem(row: Alignment) -> str | None:
    """Checks that the alignment of a tokenizer with itself has only 1:1 chunks, the same on both sides.

    Tokens in no chunk are allowed. Returns what is wrong, or None.
    """
    if not np.array_equal(row.student_chunk, row.teacher_chunk):
        return "the two sides have different chunks"
    others = {kind: count for kind, count in row.counts.items() if kind != "1:1" and count}
    return f"other chunks: {others}" if others else None


def _half(aligner: TokenAligner, text: str, row: Alignment) -> Alignment:
    """The alignment of a text, truncated: each side's limit is half of its tokens in `row`, at least one."""
    student, teacher = (max(1, len(ids) // 2) for ids in (row.student_ids, row.teacher_ids))
    return aligner.align(text, max_student_tokens=student, max_teacher_tokens=teacher)


def _chunks_problem(aligner: TokenAligner, row: Alignment, text: bytes) -> str | None:
    """Checks that every chunk spells the same bytes on both sides. Returns what is wrong, or None."""
    spelled = [[b"", b""] for _ in range(row.num_chunks)]
    for side, pieces in enumerate(_pieces(aligner, row, text)):
        for chunk, piece in pieces:
            spelled[chunk][side] += piece
    for i, (left, right) in enumerate(spelled):
        if left != right:
            return f"chunk {i} is {left!r} for the student, {right!r} for the teacher"
    return None


def _pieces(aligner: TokenAligner, row: Alignment, text: bytes) -> list[list[tuple[int, bytes]]]:
    """For student and teacher: (chunk, bytes) of every token that lies in a chunk; a chunk index of -1 means none."""
    student = aligner.student, row.student_ids, row.student_chunk
    sides = []
    for vocabulary, ids, chunks in (student, (aligner.teacher, row.teacher_ids, row.teacher_chunk)):
        pieces = [(int(chunk), vocabulary.token_bytes(int(token))) for token, chunk in zip(ids, chunks) if chunk >= 0]
        spelled = b"".join(piece for _, piece in pieces)
        # Some tokenizers put a dummy space before the text.
        if text and spelled.startswith(b" ") and not text.startswith(spelled):
            pieces[0] = (pieces[0][0], pieces[0][1][1:])
        sides.append(pieces)
    return sides


def _inner_ends(pieces: Sequence[tuple[int, bytes]]) -> set[int]:
    """Byte positions at which tokens end inside their chunk, that is, without the last token of each chunk."""
    ends = accumulate(len(piece) for _, piece in pieces)
    return {end for end, (chunk, _), (after, _) in zip(ends, pieces, pieces[1:]) if chunk == after}


def _padded(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids with padding on both sides, and the mask (int32, 1 for the ids)."""
    # The padding's id also occurs in the text: only the mask tells them apart.
    filler = int(ids[0]) if len(ids) else 0
    mask = np.pad(np.ones(len(ids), dtype=np.int32), (_PAD_LEFT, _PAD_RIGHT))
    return np.pad(ids, (_PAD_LEFT, _PAD_RIGHT), constant_values=filler), mask
