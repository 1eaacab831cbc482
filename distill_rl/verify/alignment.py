"""Do two tokenizations of these texts match as they must? What an alignment promises, looked at from outside.

The bytes of a token are asked of the tokenizers' tables and its place in the text is added up here; nothing of how an
alignment was found is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distill_rl.align import Alignment, TokenAligner, Vocabulary
from distill_rl.verify.check import Check, every

Message = Mapping[str, str]
_PAD_LEFT, _PAD_RIGHT = 3, 5


def check_alignment(
    aligner: TokenAligner, student_tokenizer: Any, teacher_tokenizer: Any, texts: Sequence[str]
) -> list[Check]:
    """Seven checks on `texts`, whole and cut in the middle.

    Args:
        aligner: of the two tokenizers, in this order.
    """
    whole = [aligner.align(text) for text in texts]
    rows = [*zip(texts, whole), *((text, _half(aligner, text, found)) for text, found in zip(texts, whole))]
    exact = [(text, found) for text, found in rows if found.exact]
    swapped, same = (
        TokenAligner(teacher_tokenizer, student_tokenizer),
        TokenAligner(student_tokenizer, student_tokenizer),
    )
    batch = aligner.align_batch(list(texts))
    return [
        every(
            "a chunk spells the same bytes of the text on both sides",
            (bytes_problem(aligner, text, found) for text, found in exact),
            "exact rows",
        ),
        every(
            "chunks are numbered in order, without a hole, on both sides",
            (order_problem(found) for _, found in rows),
            "rows",
        ),
        every(
            "no chunk could be cut into two",
            (boundary_problem(aligner, text, found) for text, found in exact),
            "exact rows",
        ),
        every(
            "swapping the tokenizers swaps the answer",
            (difference(found, swapped.align(text).swapped()) for text, found in zip(texts, whole)),
            "rows",
        ),
        every(
            "a batch is aligned as its rows are one by one",
            (difference(found, again) for found, again in zip(whole, batch, strict=True)),
            "rows",
        ),
        every("padding changes nothing", (padding_problem(aligner, found) for found in whole), "rows"),
        every(
            "a tokenizer beside itself gives 1:1 alone",
            (identity_problem(same.align(text)) for text in texts),
            "rows",
        ),
    ]


def check_chats(aligner: TokenAligner, chats: Sequence[Sequence[Message]]) -> list[Check]:
    """Two checks on chats, each written by either side's own template.

    Raises:
        ValueError: a tokenizer without a chat template.
    """
    found = [(chat, aligner.align_messages(chat)) for chat in chats]
    return [
        every(
            "a chunk of a chat spells the same bytes on both sides",
            (_chunks_problem(aligner, one, b"") for _, one in found if one.exact),
            "exact chats",
        ),
        every(
            "the end of every answer is paired, so that a student learns to stop",
            (stop_problem(chat, one) for chat, one in found),
            "chats",
        ),
    ]


def bytes_problem(aligner: TokenAligner, text: str, found: Alignment) -> str | None:
    """An exact alignment's chunks spell the text from its start, the same bytes on both sides."""
    expected = aligner.normalize(text).encode()
    ours = _spelled(aligner.student, found.student_ids, found.student_chunk, found.num_chunks, expected)
    problem = _chunks_problem(aligner, found, expected)
    return problem or (None if expected.startswith(b"".join(ours)) else "the chunks do not spell the text")


def stop_problem(chat: Sequence[Message], found: Alignment) -> str | None:
    """There are as many paired stop tokens as the assistant has turns, or more: other turns may end with one, too."""
    turns = sum(message["role"] == "assistant" for message in chat)
    pairs = len(found.stop_pairs)
    return None if pairs >= turns else f"{pairs} paired stop tokens for {turns} answers"


def order_problem(found: Alignment) -> str | None:
    """Chunk numbers rise by at most one from token to token, from 0 to the last, on both sides."""
    for side, chunks in (("student", found.student_chunk), ("teacher", found.teacher_chunk)):
        numbers = chunks[chunks >= 0]
        steps = np.diff(numbers, prepend=-1)
        if ((steps < 0) | (steps > 1)).any() or (len(numbers) and numbers[-1] != found.num_chunks - 1):
            return f"the {side}'s numbers are {numbers.tolist()[:20]} of {found.num_chunks} chunks"
        if not len(numbers) and found.num_chunks:
            return f"the {side} has none of {found.num_chunks} chunks"
    return None


def boundary_problem(aligner: TokenAligner, text: str, found: Alignment) -> str | None:
    """Inside a chunk no token of the student ends at a byte where one of the teacher ends."""
    expected = aligner.normalize(text).encode()
    ours = _inner_ends(aligner.student, found.student_ids, found.student_chunk, expected)
    theirs = _inner_ends(aligner.teacher, found.teacher_ids, found.teacher_chunk, expected)
    shared = ours & theirs
    return f"both sides end a token at byte {min(shared)}, inside a chunk" if shared else None


def difference(one: Alignment, other: Alignment) -> str | None:
    """What differs between two alignments, None if nothing does."""
    for name in ("student_ids", "teacher_ids", "student_chunk", "teacher_chunk"):
        if not np.array_equal(getattr(one, name), getattr(other, name)):
            return f"{name} differ"
    if (one.num_chunks, one.exact, one.counts) != (other.num_chunks, other.exact, other.counts):
        return f"{one.num_chunks} chunks {one.counts}, against {other.num_chunks} chunks {other.counts}"
    return None


def padding_problem(aligner: TokenAligner, found: Alignment) -> str | None:
    """Ids between padding that a mask marks are aligned as without it."""
    plain = aligner.align_ids(found.student_ids, found.teacher_ids)
    sides = [_padded(found.student_ids), _padded(found.teacher_ids)]
    padded = aligner.align_ids(sides[0][0], sides[1][0], student_mask=sides[0][1], teacher_mask=sides[1][1])
    for side in ("student", "teacher"):
        before, after = getattr(plain, f"{side}_chunk"), getattr(padded, f"{side}_chunk")
        expected = np.pad(before, (_PAD_LEFT, _PAD_RIGHT), constant_values=-1)
        if not np.array_equal(after, expected):
            return f"the {side}'s chunks differ"
    return None


def identity_problem(found: Alignment) -> str | None:
    if not np.array_equal(found.student_chunk, found.teacher_chunk):
        return "the two sides have different chunks"
    others = {kind: count for kind, count in found.counts.items() if kind != "1:1" and count}
    return f"other chunks: {others}" if others else None


def _half(aligner: TokenAligner, text: str, found: Alignment) -> Alignment:
    ours, theirs = (max(1, len(ids) // 2) for ids in (found.student_ids, found.teacher_ids))
    return aligner.align(text, max_student_tokens=ours, max_teacher_tokens=theirs)


def _chunks_problem(aligner: TokenAligner, found: Alignment, text: bytes) -> str | None:
    ours = _spelled(aligner.student, found.student_ids, found.student_chunk, found.num_chunks, text)
    theirs = _spelled(aligner.teacher, found.teacher_ids, found.teacher_chunk, found.num_chunks, text)
    for number, (left, right) in enumerate(zip(ours, theirs)):
        if left != right:
            return f"chunk {number} is {left!r} for the student, {right!r} for the teacher"
    return None


def _pieces(vocabulary: Vocabulary, ids: np.ndarray, chunks: np.ndarray, text: bytes) -> list[tuple[int, bytes]]:
    """(chunk, bytes) of every token in a chunk; a dummy space before `text`, where it is given, is taken off the first."""
    pieces = [(int(chunk), vocabulary.token_bytes(int(token))) for token, chunk in zip(ids, chunks) if chunk >= 0]
    if (
        text
        and pieces
        and pieces[0][1].startswith(b" ")
        and not text.startswith(b"".join(piece for _, piece in pieces))
    ):
        pieces[0] = (pieces[0][0], pieces[0][1][1:])
    return pieces


def _spelled(vocabulary: Vocabulary, ids: np.ndarray, chunks: np.ndarray, count: int, text: bytes) -> list[bytes]:
    spelled = [b""] * count
    for chunk, piece in _pieces(vocabulary, ids, chunks, text):
        spelled[chunk] += piece
    return spelled


def _inner_ends(vocabulary: Vocabulary, ids: np.ndarray, chunks: np.ndarray, text: bytes) -> set[int]:
    """Byte offsets at which a token ends that is not the last of its chunk."""
    pieces = _pieces(vocabulary, ids, chunks, text)
    ends = np.cumsum([len(piece) for _, piece in pieces]) if pieces else np.zeros(0, dtype=int)
    return {int(end) for end, (chunk, _), (after, _) in zip(ends, pieces, pieces[1:]) if chunk == after}


def _padded(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids between copies of an id that also stands in the text: the mask decides, not the id."""
    filler = int(ids[0]) if len(ids) else 0
    mask = np.pad(np.ones(len(ids), dtype=np.int32), (_PAD_LEFT, _PAD_RIGHT))
    return np.pad(ids, (_PAD_LEFT, _PAD_RIGHT), constant_values=filler), mask
