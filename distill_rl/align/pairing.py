"""From two tokenizations of one document to their alignment: `Pairing`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from distill_rl.align.alignment import Alignment, Tokenized, outside_of_chunks
from distill_rl.align.chats.stops import StopPairs, pair_stops, pair_stops_of_spans
from distill_rl.align.dp.window import IdPair
from distill_rl.align.ids import IdAligner, IdAlignment
from distill_rl.align.place import encode, equal_spans, keep_same_place, place_by_bytes, place_by_offsets, strips_spans
from distill_rl.align.side import Side
from distill_rl.align.spans import Chunks, TokenPositions, chunks_by_spans, chunks_of_places
from distill_rl.align.tokenizer.encoder import Encoder
from distill_rl.align.tokenizer.vocabulary import Vocabulary


class _Located(NamedTuple):
    """Positions of both sides' tokens in their texts."""

    sides: tuple[TokenPositions, TokenPositions]
    method: str
    """`bytes` if both sides were placed by their bytes, otherwise `offsets`"""


class Pairing:
    """Aligns two tokenizations of one document, by the steps that a method allows.

    Args:
        encoders, vocabularies: (student, teacher).
        method: that of `TokenAligner`.
        by_ids: aligns ids by their bytes, where the text does not say how they belong together.
    """

    def __init__(
        self,
        encoders: tuple[Encoder, Encoder],
        vocabularies: tuple[Vocabulary, Vocabulary],
        method: str,
        by_ids: IdAligner,
    ):
        self.method = method
        self._encoders, self._vocabularies, self._by_ids = encoders, vocabularies, by_ids
        self._same_tokenizer = vocabularies[0].hash == vocabularies[1].hash

    def pair(self, student: Tokenized, teacher: Tokenized) -> Alignment:
        """The whole alignment, as `TokenAligner.pair` returns it without limits.

        Raises:
            ValueError: as there, but for a negative limit.
        """
        if (student.spans is None) != (teacher.spans is None) or len(student.spans or ()) != len(teacher.spans or ()):
            counts = [None if side.spans is None else len(side.spans) for side in (student, teacher)]
            raise ValueError(
                f"both sides must have the same number of spans, got {counts[0]} and {counts[1]}; pair the same messages"
            )
        texts = encode(student.text), encode(teacher.text)
        if student.spans is None or teacher.spans is None:
            return self._pair_texts(student, teacher, texts)
        return self._pair_spans(student, teacher, texts)

    def _pair_texts(self, student: Tokenized, teacher: Tokenized, texts: tuple[bytes, bytes]) -> Alignment:
        """Aligns two tokenizations of one text by the first of these steps that `self.method` allows and that works.

        1. bytes, auto: both sides' tokens spell the text: chunks end where both sides end a token.
        2. bytes, auto: the sides spell the same bytes, but not those of the text (two tokenizers that make the same
           change): as in step 1, unless the tokens' positions in the text contradict a chunk.
        3. offsets, auto: positions from the tokenizers' offsets: chunks between shared positions where the tokens spell
           what they cover. With auto, a result without chunks does not count.
        4. Any method: `IdAligner.align`, without chunks that the positions contradict. With auto, the dynamic programme
           aligns the tokens between the equal bytes at both ends; with dp, all tokens; with bytes or offsets it is not
           used.

        Args:
            texts: both sides' texts in UTF-8.

        Raises:
            ValueError: the two texts differ.
        """
        if texts[0] != texts[1]:
            raise ValueError(
                f"both sides of a document must have one text, got {len(texts[0])} and {len(texts[1])} bytes; "
                "normalize it once"
            )
        ids = student.ids, teacher.ids
        by_bytes = [
            place_by_bytes(vocabulary, row, text, written_specials=False)
            for vocabulary, row, text in zip(self._vocabularies, ids, texts)
        ]
        left, right = by_bytes
        spans = np.array([[0, len(texts[0]), 0, len(texts[1])]])
        if left is not None and right is not None and self.method in ("auto", "bytes"):
            stops = pair_stops_of_spans(self._vocabularies, ids, (left, right), spans)
            return make_alignment(ids, chunks_of_places(left, right), "bytes", left.exact and right.exact, stops)

        sides = [Side.of(vocabulary, row) for vocabulary, row in zip(self._vocabularies, ids)]
        located = self._locate((student, teacher), by_bytes)
        if self.method in ("auto", "bytes"):
            same = self._by_ids.align_same_bytes(*sides)
            # Where each side spells only a part of the text, the two may be equal by coincidence.
            if same is not None and (located is None or keep_same_place(same.chunks, *located.sides) is same.chunks):
                return make_alignment(ids, same.chunks, "bytes", False, self._stops(same, ids, located, spans))

        exact = all(positions is not None and positions.exact for positions in by_bytes)
        by_position = None
        if located is not None and self.method in ("auto", "offsets"):
            by_position = self._by_positions(ids, located, spans, spans, exact)
            if by_position.num_chunks or self.method == "offsets":
                return by_position

        result = self._by_ids.align(*sides, everything_by_dp=self.method == "dp")
        chunks = result.chunks if located is None else keep_same_place(result.chunks, *located.sides)
        alignment = make_alignment(ids, chunks, result.method, exact, self._stops(result, ids, located, spans))
        if by_position is None or exact:
            return alignment
        ends = outside_of_chunks(by_position.lossy_ends, alignment.student_chunk, alignment.teacher_chunk)
        return replace(alignment, lossy_ends=ends)

    def _stops(self, result: IdAlignment, ids: IdPair, located: _Located | None, spans: np.ndarray) -> StopPairs:
        """Stop pairs by the tokens' positions in the text or, where these are unknown, by the bytes before them."""
        if located is None:
            return pair_stops(*result.sides, *ids)
        return pair_stops_of_spans(self._vocabularies, ids, located.sides, spans)

    def _pair_spans(self, student: Tokenized, teacher: Tokenized, texts: tuple[bytes, bytes]) -> Alignment:
        """Aligns only the text that both sides' spans have in common; the rest of the two texts may differ.

        Both sides must have equally many spans. Two spans that read differently make the alignment inexact; they give
        no chunks if they also differ without the white space around them. A special token that strips white space of a
        span makes it inexact, too.

        Raises:
            ValueError: a side's tokens do not spell its text, and its ids are not those that its tokenizer makes of it.
        """
        tokenized = student, teacher
        by_bytes = [
            place_by_bytes(vocabulary, side.ids, text, written_specials=True)
            for vocabulary, side, text in zip(self._vocabularies, tokenized, texts)
        ]
        equal, spans = equal_spans(tokenized, texts)
        located = self._locate(tokenized, by_bytes)
        if located is None:
            raise ValueError("ids with spans must be those of their text, got others; use the ids of tokenize_messages")
        exact = all(positions is not None and positions.exact for positions in by_bytes)
        exact = exact and np.array_equal(equal, spans)
        sides = zip(self._vocabularies, tokenized, located.sides, (spans[:, :2], spans[:, 2:]))
        exact = exact and not any(
            strips_spans(vocabulary, side.ids, positions, bounds) for vocabulary, side, positions, bounds in sides
        )
        return self._by_positions((student.ids, teacher.ids), located, equal, spans, exact)

    def _locate(
        self, tokenized: tuple[Tokenized, Tokenized], by_bytes: Sequence[TokenPositions | None]
    ) -> _Located | None:
        """Both sides' positions: those of `by_bytes` where there are any, otherwise from offsets.

        With the method `offsets`, positions always come from offsets. None if a side needs offsets and `_offsets` finds
        none.

        Args:
            by_bytes: for each side the result of `place_by_bytes`; None where the bytes do not spell the text.
        """
        sides, method = [], "bytes"
        for i, (side, positions) in enumerate(zip(tokenized, by_bytes)):
            if positions is None or self.method == "offsets":
                offsets, method = self._offsets(i, side), "offsets"
                if offsets is None:
                    return None
                positions = place_by_offsets(self._vocabularies[i], side.ids, side.text, offsets)
            sides.append(positions)
        return _Located((sides[0], sides[1]), method)

    def _by_positions(
        self, ids: IdPair, located: _Located, equal: np.ndarray, spans: np.ndarray, exact: bool
    ) -> Alignment:
        """The alignment of tokens whose positions are known: chunks inside `equal`, and stop pairs after the `spans`.

        Identical ids of two copies of one tokenizer match even where they do not spell the text.

        Args:
            equal, spans: int64 [k, 4], [l, 4], as from `equal_spans`: text that reads the same, and all spans.
            exact: passed on to the alignment.
        """
        sides = located.sides
        if self._same_tokenizer and np.array_equal(*ids):
            # Both sides lose the same text, so their tokens match even where they do not spell it.
            sides = replace(sides[0], faithful=None), replace(sides[1], faithful=None)
        chunks = chunks_by_spans(*sides, equal)
        stops = pair_stops_of_spans(self._vocabularies, ids, sides, spans)
        return make_alignment(ids, chunks, located.method, exact, stops)

    def _offsets(self, i: int, tokenized: Tokenized) -> np.ndarray | None:
        """int64 [n, 2]: the characters that each token covers; None if the ids are not the tokenizer's for this text.

        The offsets that the side brings are returned unchecked. Without any, the text is encoded again, with and
        without the special tokens around it (a chat: as a rendered text). The ids may be cut short, or be followed by
        special tokens, which cover no characters.

        Args:
            i: 0 for the student, 1 for the teacher.
        """
        if tokenized.offsets is not None:
            return tokenized.offsets
        encoder, ids = self._encoders[i], tokenized.ids
        encodings: list[Callable[[str], tuple[np.ndarray, np.ndarray]]] = [
            encoder.offsets,
            partial(encoder.offsets, add_special=False),
        ]
        if tokenized.spans is not None:
            encodings = [partial(encoder.chat, contents=tokenized.spans)]
        for encode_with_offsets in encodings:
            expected, offsets = encode_with_offsets(tokenized.text)
            size = min(len(expected), len(ids))
            rest = ids[size:]
            if np.array_equal(expected[:size], ids[:size]) and self._vocabularies[i].special[rest].all():
                return np.concatenate([offsets[:size], np.zeros((len(rest), 2), np.int64)])
        return None


def make_alignment(
    ids: Sequence[np.ndarray], chunks: Chunks, method: str, exact: bool, stop_pairs: StopPairs
) -> Alignment:
    """Puts ids (student, teacher), chunks and stop pairs into an `Alignment`; an exact one gets no `lossy_ends`."""
    return Alignment(
        student_ids=ids[0],
        teacher_ids=ids[1],
        student_chunk=chunks.student,
        teacher_chunk=chunks.teacher,
        num_chunks=chunks.count,
        method=method,
        exact=exact,
        stop_pairs=stop_pairs,
        lossy=len(chunks.lossy_ends),
        lossy_ends=chunks.lossy_ends[:0] if exact else chunks.lossy_ends,
    )
