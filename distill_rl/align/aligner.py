"""`TokenAligner`: two tokenizers, one text, the chunks that both have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from distill_rl.align.alignment import Alignment, Tokenized, outside_of_chunks
from distill_rl.align.chat import Message, content_spans, render
from distill_rl.align.dp.window import WindowSolver
from distill_rl.align.given_ids import read_ids
from distill_rl.align.ids import Found, IdAligner
from distill_rl.align.place import (
    at_one_place,
    encode,
    equal_spans,
    place_by_bytes,
    place_by_offsets,
    strips_spans,
)
from distill_rl.align.side import Side
from distill_rl.align.spans import Chunks, Placed, chunks_by_spans, chunks_of_places
from distill_rl.align.stops import StopPairs, pair_stops, pair_stops_of_spans
from distill_rl.align.tokenizer.encoder import Encoder
from distill_rl.align.tokenizer.vocabulary import compose, read_vocabulary

METHODS = ("auto", "bytes", "offsets", "dp")


class TokenAligner:
    """Aligns what two tokenizers make of one text.

    Args:
        student_tokenizer, teacher_tokenizer: fast transformers tokenizers, or `tokenizers.Tokenizer`s. They are copied
            and left as they are.
        method: `bytes` finds chunks between byte positions that both sides have, which is exact; `offsets` takes the
            places that a tokenizer reports and checks what its tokens spell there; `dp` compares what tokens spell by a
            dynamic programme. `auto` takes bytes where they prove equal, then offsets, then dp, which also settles
            the unequal part of ids that come without a text.
        fast_ids: compare bytes in compiled code, and make the tables of the dynamic programme once; False does without
            either. The answers are the same.
        backend, band: of the dynamic programme: numba | numpy | cuda, and the half-width of its band in tokens.
        student_stops, teacher_stops: ids by which the models end an answer, besides eos and what the chat template
            writes after a turn: `eos_token_id` of their generation configs.

    Raises:
        ValueError: a slow tokenizer; an unknown method.
    """

    def __init__(
        self,
        student_tokenizer: Any,
        teacher_tokenizer: Any,
        method: str = "auto",
        *,
        fast_ids: bool = True,
        backend: str = "numba",
        band: int = 64,
        student_stops: Sequence[int] = (),
        teacher_stops: Sequence[int] = (),
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method is one of {', '.join(METHODS)}, got {method!r}; auto is right for nearly all")
        self.method, self.fast_ids, self.backend, self.band = method, fast_ids, backend, band
        self._tokenizers = student_tokenizer, teacher_tokenizer
        self._encoders = Encoder(student_tokenizer), Encoder(teacher_tokenizer)
        stops = student_stops, teacher_stops
        self.student, self.teacher = (read_vocabulary(*side) for side in zip(self._tokenizers, self._encoders, stops))
        self._vocabularies = self.student, self.teacher
        self._composes = "nfc" in (self.student.normalization, self.teacher.normalization)
        self._same = self.student.hash == self.teacher.hash
        self._windows = WindowSolver(self.student, self.teacher, fast_ids=fast_ids, backend=backend, band=band)
        window = self._windows if method in ("auto", "dp") else None
        self._by_ids = IdAligner(fast_ids, window)

    def normalize(self, text: str) -> str:
        """NFC if one of the tokenizers composes its text, else the text as it is; twice is as good as once."""
        return compose(text) if self._composes else text

    def align(
        self, text: str, *, max_student_tokens: int | None = None, max_teacher_tokens: int | None = None
    ) -> Alignment:
        """Tokenises a text on both sides and aligns them.

        Each side has the special tokens that its tokenizer puts around a text; what looks like one inside the text is
        text. With limits both sides end at the last boundary that they share within both of them.

        Raises:
            ValueError: a text with a lone surrogate; a negative limit.
        """
        student, teacher = self.tokenize_student(text), self.tokenize_teacher(text)
        return self.pair(student, teacher, max_student_tokens=max_student_tokens, max_teacher_tokens=max_teacher_tokens)

    def align_batch(
        self, texts: Sequence[str], *, max_student_tokens: int | None = None, max_teacher_tokens: int | None = None
    ) -> list[Alignment]:
        """`align` of each text, in order; the tokenizers' own threads may share the texts."""
        normalized = [self.normalize(text) for text in texts]
        for text in normalized:
            encode(text)
        sides = [
            [Tokenized(ids, text) for ids, text in zip(encoder.batch(normalized), normalized)]
            for encoder in self._encoders
        ]
        pairs = list(zip(*sides))
        self.solve_ahead(pairs)
        limits = {"max_student_tokens": max_student_tokens, "max_teacher_tokens": max_teacher_tokens}
        return [self.pair(student, teacher, **limits) for student, teacher in pairs]

    def solve_ahead(self, pairs: Iterable[tuple[Tokenized, Tokenized]]) -> None:
        """Lets a GPU work on the dynamic programmes of many rows at once, before `pair` is called on each; no answer
        depends on it. Backends of the CPU gain nothing and are left alone.
        """
        if self.backend == "cuda" and self.method in ("auto", "dp"):
            self._windows.ahead(partial(self.pair, student, teacher) for student, teacher in pairs)

    def warm_up(self) -> None:
        """Does at once what the first rows would wait for: code is compiled, or read from Numba's cache, once a process."""
        nothing = np.zeros(0, np.int32)
        self.align_ids(nothing, nothing)
        if self.method == "dp" or (self.method == "auto" and (self.student.lossy or self.teacher.lossy)):
            self._windows.warm_up()

    def align_ids(
        self,
        student_ids: Any,
        teacher_ids: Any,
        *,
        student_mask: Any = None,
        teacher_mask: Any = None,
    ) -> Alignment:
        """Aligns ids whose text is not at hand: each side's bytes prove the other's.

        Args:
            student_ids, teacher_ids: integers [n], [m]: lists, numpy arrays, or torch tensors in host memory.
            student_mask, teacher_mask: [n], [m], 0 at padding, whatever id stands there.

        Raises:
            ValueError: floats, bools, text or None in place of integers; an id outside of the vocabulary that no mask
                hides, or beyond 32 bits; shapes that do not fit.
        """
        sides, ids = [], []
        for name, vocabulary, given, mask in zip(
            ("student_ids", "teacher_ids"),
            self._vocabularies,
            (student_ids, teacher_ids),
            (student_mask, teacher_mask),
        ):
            row = read_ids(name, given, vocabulary.size)
            if mask is not None:
                mask = np.asarray(mask)
                if mask.shape != row.shape:
                    raise ValueError(
                        f"a mask has its ids' shape {row.shape}, got {mask.shape}; cut it as the ids are cut"
                    )
            sides.append(Side.of(vocabulary, row, mask, name=name))
            ids.append(row)
        found = self._by_ids.align(*sides, whole=self.method == "dp")
        # Of two lossy vocabularies that agree, neither proves what the text was.
        exact = found.same and not (self.student.lossy and self.teacher.lossy)
        return self._made(ids, found.chunks, found.method, exact, pair_stops(*found.sides, *ids))

    def align_messages(
        self,
        messages: Sequence[Message],
        *,
        max_student_tokens: int | None = None,
        max_teacher_tokens: int | None = None,
    ) -> Alignment:
        """Aligns a chat: each side writes it by its own template; tokens of the templates are in no chunk.

        Raises:
            ValueError: a tokenizer without a chat template; a negative limit.
        """
        student, teacher = (self.tokenize_messages(messages, side) for side in ("student", "teacher"))
        return self.pair(student, teacher, max_student_tokens=max_student_tokens, max_teacher_tokens=max_teacher_tokens)

    def tokenize_student(self, text: str, *, end: bool = False) -> Tokenized:
        """A text's tokens on the student's side; `end` appends its eos where it has one and writes none itself."""
        return self._tokenize(0, text, end)

    def tokenize_teacher(self, text: str, *, end: bool = False) -> Tokenized:
        """`tokenize_student` on the teacher's side."""
        return self._tokenize(1, text, end)

    def tokenize_messages(self, messages: Sequence[Message], side: str, *, rendered: str | None = None) -> Tokenized:
        """A chat by the template of `side` (student | teacher), with its offsets and the spans of its messages' contents.

        What looks like a special token inside a content is text; what the template writes is none.

        Args:
            rendered: what that template makes of the messages, where it is at hand.

        Raises:
            ValueError: a tokenizer without a chat template; a text with a lone surrogate.
        """
        number = ("student", "teacher").index(side)
        tokenizer = self._tokenizers[number]
        normalized = [self._normalized(message) for message in messages]
        text = self.normalize(render(tokenizer, normalized) if rendered is None else rendered)
        encode(text)
        spans = content_spans(text, normalized, lambda chat: self.normalize(render(tokenizer, chat)))
        ids, offsets = self._encoders[number].marked(text, spans)
        return Tokenized(ids, text, spans, offsets)

    def _normalized(self, message: Message) -> Mapping[str, Any]:
        content = message.get("content")
        return {**message, "content": self.normalize(content)} if isinstance(content, str) else message

    def _tokenize(self, side: int, text: str, end: bool) -> Tokenized:
        text = self.normalize(text)
        encode(text)
        vocabulary, encoder = self._vocabularies[side], self._encoders[side]
        # Where bytes seldom prove equal, offsets come with the first reading of the text.
        ids, offsets = encoder.offsets(text) if vocabulary.lossy else (encoder.ids(text), None)
        eos = vocabulary.roles.get("eos")
        ended = len(ids) > 0 and ids[-1] == eos
        if ended and eos == vocabulary.unknown and offsets is not None:
            ended = bool(offsets[-1, 0] == offsets[-1, 1])  # an unknown token covers characters
        if end and eos is not None and not ended:
            ids = np.append(ids, np.int32(eos))
            offsets = None if offsets is None else np.concatenate([offsets, np.zeros((1, 2), np.int64)])
        return Tokenized(ids, text, None, offsets)

    def pair(
        self,
        student: Tokenized,
        teacher: Tokenized,
        *,
        max_student_tokens: int | None = None,
        max_teacher_tokens: int | None = None,
    ) -> Alignment:
        """Aligns two sides' tokens of one document. With spans, only what both texts have in the i-th spans of each.

        Raises:
            ValueError: one side has spans and the other has none, or another number of them; a negative limit.
        """
        if (student.spans is None) != (teacher.spans is None) or len(student.spans or ()) != len(teacher.spans or ()):
            counts = [None if side.spans is None else len(side.spans) for side in (student, teacher)]
            raise ValueError(f"both sides have as many spans, got {counts[0]} and {counts[1]}; pair the same messages")
        texts = encode(student.text), encode(teacher.text)
        if student.spans is None or teacher.spans is None:
            made = self._pair_texts(student, teacher, texts)
        else:
            made = self._pair_spans(student, teacher, texts)
        if max_student_tokens is None and max_teacher_tokens is None:
            return made
        limits = (max_student_tokens, len(made.student_ids)), (max_teacher_tokens, len(made.teacher_ids))
        return made.cut(*(size if limit is None else limit for limit, size in limits))

    def _pair_texts(self, student: Tokenized, teacher: Tokenized, texts: tuple[bytes, bytes]) -> Alignment:
        if texts[0] != texts[1]:
            sizes = [len(text) for text in texts]
            raise ValueError(
                f"two sides of a document have one text, got {sizes[0]} and {sizes[1]} bytes; normalize it once"
            )
        tokenized = student, teacher
        ids = student.ids, teacher.ids
        known = [
            place_by_bytes(vocabulary, row, text, written_specials=False)
            for vocabulary, row, text in zip(self._vocabularies, ids, texts)
        ]
        left, right = known
        spans = np.array([[0, len(texts[0]), 0, len(texts[1])]])
        if left is not None and right is not None and self.method in ("auto", "bytes"):
            stops = pair_stops_of_spans(self._vocabularies, ids, (left, right), spans)
            return self._made(ids, chunks_of_places(left, right), "bytes", left.exact and right.exact, stops)
        sides = [Side.of(vocabulary, row) for vocabulary, row in zip(self._vocabularies, ids)]
        placed = self._places(tokenized, known)
        if self.method in ("auto", "bytes"):
            found = self._by_ids.agreeing(*sides)
            # Two sides that each spell a part of the text may spell the same by chance.
            if found is not None and (placed is None or at_one_place(found.chunks, *placed[0]) is found.chunks):
                return self._made(ids, found.chunks, "bytes", False, self._stops(found, ids, placed, spans))
        exact = all(place is not None and place.exact for place in known)
        by_places = None
        if placed is not None and self.method in ("auto", "offsets"):
            by_places = self._by_places(ids, placed, spans, spans, exact)
            if by_places.num_chunks or self.method == "offsets":
                return by_places
        found = self._by_ids.align(*sides, whole=self.method == "dp")
        chunks = found.chunks if placed is None else at_one_place(found.chunks, *placed[0])
        made = self._made(ids, chunks, found.method, exact, self._stops(found, ids, placed, spans))
        if by_places is None or exact:
            return made
        ends = outside_of_chunks(by_places.lossy_ends, made.student_chunk, made.teacher_chunk)
        return replace(made, lossy_ends=ends)

    def _stops(
        self,
        found: Found,
        ids: tuple[np.ndarray, np.ndarray],
        placed: tuple[tuple[Placed, Placed], str] | None,
        spans: np.ndarray,
    ) -> StopPairs:
        """By where tokens lie in the text, or, where that is not known, by the bytes before them."""
        if placed is None:
            return pair_stops(*found.sides, *ids)
        return pair_stops_of_spans(self._vocabularies, ids, placed[0], spans)

    def _pair_spans(self, student: Tokenized, teacher: Tokenized, texts: tuple[bytes, bytes]) -> Alignment:
        """Only what both sides' spans read alike is aligned, wherever the rest of the two texts differs."""
        tokenized = student, teacher
        known = [
            place_by_bytes(vocabulary, side.ids, text, written_specials=True)
            for vocabulary, side, text in zip(self._vocabularies, tokenized, texts)
        ]
        equal, spans = equal_spans(tokenized, texts)
        placed = self._places(tokenized, known)
        if placed is None:
            raise ValueError("ids with spans are those of their text, got others; tokenise with tokenize_messages")
        exact = all(place is not None and place.exact for place in known) and np.array_equal(equal, spans)
        sides = zip(self._vocabularies, tokenized, placed[0], (spans[:, :2], spans[:, 2:]))
        exact = exact and not any(
            strips_spans(vocabulary, side.ids, place, bounds) for vocabulary, side, place, bounds in sides
        )
        return self._by_places((student.ids, teacher.ids), placed, equal, spans, exact)

    def _places(
        self, tokenized: tuple[Tokenized, Tokenized], known: Sequence[Placed | None]
    ) -> tuple[tuple[Placed, Placed], str] | None:
        """Both sides' places, by bytes where `known` has them and by offsets where it does not, and the method's name.

        None where a side has no offsets.
        """
        places, method = [], "bytes"
        for number, (side, place) in enumerate(zip(tokenized, known)):
            if place is None or self.method == "offsets":
                offsets, method = self._offsets(number, side), "offsets"
                if offsets is None:
                    return None
                place = place_by_offsets(self._vocabularies[number], side.ids, side.text, offsets)
            places.append(place)
        return (places[0], places[1]), method

    def _by_places(
        self,
        ids: tuple[np.ndarray, np.ndarray],
        placed: tuple[tuple[Placed, Placed], str],
        equal: np.ndarray,
        spans: np.ndarray,
        exact: bool,
    ) -> Alignment:
        """Chunks inside `equal`, stops behind `spans`."""
        places, method = placed
        if self._same and np.array_equal(*ids):  # what is lost is lost alike
            places = replace(places[0], faithful=None), replace(places[1], faithful=None)
        chunks = chunks_by_spans(*places, equal)
        stops = pair_stops_of_spans(self._vocabularies, ids, places, spans)
        return self._made(ids, chunks, method, exact, stops)

    def _offsets(self, side: int, tokenized: Tokenized) -> np.ndarray | None:
        """The characters that each token covers, of ids that the tokenizer makes of this text; None of others."""
        if tokenized.offsets is not None:
            return tokenized.offsets
        encoder, ids = self._encoders[side], tokenized.ids
        ways: list[Callable[[str], tuple[np.ndarray, np.ndarray]]] = [
            encoder.offsets,
            partial(encoder.offsets, add_special=False),
        ]
        if tokenized.spans is not None:
            ways = [partial(encoder.marked, contents=tokenized.spans)]
        for way in ways:
            made, offsets = way(tokenized.text)
            size = min(len(made), len(ids))
            rest = ids[size:]
            if np.array_equal(made[:size], ids[:size]) and self._vocabularies[side].special[rest].all():
                return np.concatenate([offsets[:size], np.zeros((len(rest), 2), np.int64)])
        return None

    @staticmethod
    def _made(ids: Sequence[np.ndarray], chunks: Chunks, method: str, exact: bool, stop_pairs: StopPairs) -> Alignment:
        return Alignment(
            ids[0],
            ids[1],
            chunks.student,
            chunks.teacher,
            chunks.count,
            method,
            exact,
            (0, 0),
            stop_pairs,
            len(chunks.lossy_ends),
            chunks.lossy_ends[:0] if exact else chunks.lossy_ends,
        )
