"""`TokenAligner`: aligns the two token sequences that two tokenizers make of one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from distill_rl.align.alignment import Alignment, TokenChunks, Tokenized, TokenPositions, chunks_by_spans, writable
from distill_rl.align.chats import Message, find_texts, quoted_spans, render
from distill_rl.align.dp.windows import WindowSolver
from distill_rl.align.ids import IdAligner, IdAlignment, IdPair, IdRow, StopPairs, as_pairs, pair_stops_of_spans
from distill_rl.align.place import (
    equal_spans,
    join_spans,
    keep_equal_specials,
    keep_same_place,
    place_in_chat,
    positions_by_offsets,
    strips_spans,
)
from distill_rl.align.vocabulary import TextEncoder, compose, encode, read_vocabulary, words_of

# Converts a caller's ids to int32, and rejects whatever numpy would silently round, wrap or parse.

_INT32 = np.iinfo(np.int32)
_TEXT = (str, bytes, bytearray, memoryview)
_RULE = "ids must be one row of integers: a list, a numpy array, or a torch tensor in host memory"


def read_ids(name: str, ids: Any, size: int) -> np.ndarray:
    """int32 [n] from a caller's integers [n]; a contiguous int32 array is returned as it is.

    Args:
        name: what to call the ids in an error.
        size: number of tokens in the vocabulary, for the error. `TokenSide.of` checks ids that fit int32 against the
            vocabulary, because a mask may hide them.

    Raises:
        ValueError: bools, floats, text, None or anything else that is not a row of integers; an integer beyond int32.
    """
    if isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1:
        return np.ascontiguousarray(ids)
    row = _as_array(ids)
    if row is None:
        raise ValueError(f"{name}: {_RULE}, got {_describe(ids)}; pass the tokenizer's input_ids")
    if row.ndim != 1:
        raise ValueError(f"{name}: ids must be one row, got an array of shape {row.shape}; align rows one by one")
    if not len(row):
        return np.zeros(0, np.int32)
    low, high = row.min(), row.max()
    if low < _INT32.min or high > _INT32.max:
        rule = f"a token id must lie in 0 … {size - 1}, the tokenizer's range"
        raise ValueError(f"{name}: {rule}, got {high if high > _INT32.max else low}; check where it comes from")
    return row.astype(np.int32)


def _as_array(ids: Any) -> np.ndarray | None:
    """The ids as an array of integers of any width, or of Python integers as objects, of any shape; None if they are none."""
    if ids is None or isinstance(ids, _TEXT):
        return None
    try:
        row = np.asarray(ids)
    except (TypeError, ValueError, RuntimeError):
        return None  # rows of unequal length; tensors on a GPU, of bfloat16, or with a gradient
    if row.ndim == 1 and not len(row) and row.dtype.kind in "iuf":
        return np.zeros(0, np.int32)  # numpy reads an empty list as floats
    # numpy reads [True, 7] as [1, 7], and integers too wide for any dtype as floats or objects.
    kinds = set(map(type, ids)) if row.ndim == 1 and isinstance(ids, Sequence) else {row.dtype.type}
    if row.dtype.kind in "iu" and kinds.isdisjoint((bool, np.bool_)):
        return row
    is_wide = kinds == {int} or (row.dtype.kind == "O" and row.ndim == 1 and set(map(type, row)) == {int})
    return np.array(ids, object) if is_wide else None


def _describe(value: Any) -> str:
    """A value's type, its device unless that is the CPU, and as much of it as fits on a line, for a message."""
    if value is None:
        return "None"
    dtype, device = getattr(value, "dtype", None), str(getattr(value, "device", "cpu"))
    kind = type(value).__name__ if dtype is None else f"{dtype}{'' if device == 'cpu' else f' on {device}'}"
    shown = f"{value!r}".replace("\n", " ")
    return f"{kind} {shown if len(shown) <= 60 else f'{shown[:57]}…'}"


class _Located(NamedTuple):
    """Positions of both sides' tokens in their texts."""

    sides: tuple[TokenPositions, TokenPositions]
    method: str
    """`bytes` if both sides were placed by their bytes, otherwise `offsets`"""


def make_alignment(
    ids: Sequence[np.ndarray], chunks: TokenChunks, method: str, exact: bool, stop_pairs: StopPairs
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


METHODS = ("auto", "bytes", "offsets", "dp")
_SIDES = ("student", "teacher")


class TokenAligner:
    """Aligns the tokens of two tokenizers on the same text.

    Args:
        student_tokenizer, teacher_tokenizer: fast transformers tokenizers or `tokenizers.Tokenizer`s. They are copied
            and never modified.
        method: `bytes` cuts chunks at the byte positions where both sides end a token, which is exact. `offsets` uses
            the character offsets that a tokenizer reports and checks them against what its tokens spell. `dp` compares
            what the tokens spell by dynamic programming. `auto` tries bytes, then offsets, then dp; for ids without a
            text there are no offsets, and dp aligns only the part in which the bytes of the two sides differ. Chats are
            always aligned by bytes or offsets.
        fast_ids: compare the bytes of ids without a text in compiled code, and build the tables of the dynamic programme
            once. With False neither is done; the results are the same.
        backend, band: options of the dynamic programme: numba | numpy | cuda, and the half-width of its band in tokens.
            They are checked when it is first used.
        student_stops, teacher_stops: ids that end an answer in addition to eos and to what the chat template writes
            after a turn: `eos_token_id` of the models' generation configs.

    Raises:
        ValueError: a slow tokenizer; a tokenizer without tokens; an unknown method.
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
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}; auto suits nearly all pairs")
        self.method, self.fast_ids, self.backend, self.band = method, fast_ids, backend, band
        self._tokenizers = student_tokenizer, teacher_tokenizer
        self._encoders = TextEncoder(student_tokenizer), TextEncoder(teacher_tokenizer)
        stops = student_stops, teacher_stops
        self.student, self.teacher = (read_vocabulary(*side) for side in zip(self._tokenizers, self._encoders, stops))
        self._vocabularies = self.student, self.teacher
        self._composes = "nfc" in (self.student.normalization, self.teacher.normalization)
        self._windows = WindowSolver(self.student, self.teacher, fast_ids=fast_ids, backend=backend, band=band)
        self._by_ids = IdAligner(fast_ids, self._windows if method in ("auto", "dp") else None)

    def normalize(self, text: str) -> str:
        """Returns the text in NFC if NFC is all that one of the tokenizers does to a text, otherwise unchanged.

        That is, if `Vocabulary.normalization` of either side is "nfc". Normalising twice changes nothing more.
        """
        return compose(text) if self._composes else text

    def align(
        self, text: str, *, max_student_tokens: int | None = None, max_teacher_tokens: int | None = None
    ) -> Alignment:
        """Normalises a text (`normalize`), tokenises it with both tokenizers and aligns the results.

        Each side includes the special tokens that its tokenizer puts around a text; no eos is appended. Text that
        merely looks like a special token is tokenised as text. With limits, both sides are cut as by `Alignment.cut`.

        Raises:
            ValueError: a text with a lone surrogate; a negative limit.
        """
        student, teacher = self.tokenize_student(text), self.tokenize_teacher(text)
        return self.pair(student, teacher, max_student_tokens=max_student_tokens, max_teacher_tokens=max_teacher_tokens)

    def align_batch(
        self, texts: Sequence[str], *, max_student_tokens: int | None = None, max_teacher_tokens: int | None = None
    ) -> list[Alignment]:
        """`align` for each text, in order, with both limits applied to every text.

        The tokenizers may spread the texts over their own threads; a GPU backend solves all of them in one call. The
        result is the same as that of `align`, also for an empty sequence (an empty list).

        Raises:
            ValueError: a text with a lone surrogate; a negative limit.
        """
        normalized = [self.normalize(text) for text in texts]
        for text in normalized:
            encode(text)
        rows = zip(normalized, *(encoder.batch(normalized) for encoder in self._encoders))
        pairs = [(Tokenized(student, text), Tokenized(teacher, text)) for text, student, teacher in rows]
        self.solve_ahead(pairs)
        limits = {"max_student_tokens": max_student_tokens, "max_teacher_tokens": max_teacher_tokens}
        return [self.pair(student, teacher, **limits) for student, teacher in pairs]

    def solve_ahead(self, pairs: Iterable[tuple[Tokenized, Tokenized]]) -> None:
        """Solves the dynamic programmes of many rows in one GPU call, before `pair` is called on each of them.

        The solutions are kept until the next call of `solve_ahead`; no result depends on them. With a CPU backend, or a
        method without dynamic programming, there is nothing to gain, and the call does nothing. Rows that cannot be
        paired are ignored here, since `pair` raises their error again.

        Args:
            pairs: (student, teacher) of each row.

        Raises:
            ValueError: the backend is cuda and cannot run here, or the band is below 1.
        """
        if self.backend == "cuda" and self.method in ("auto", "dp"):
            self._windows.solve_ahead(partial(self.pair, student, teacher) for student, teacher in pairs)

    def warm_up(self) -> None:
        """Compiles, or loads from Numba's cache, what the first rows would otherwise wait for.

        Takes seconds, once per process, and may use the GPU if the backend is cuda. Calling it is optional, and no
        result depends on it. The dynamic programme is prepared only if the method is dp, or auto with a lossy
        tokenizer.

        Raises:
            ValueError: the dynamic programme is prepared, but its backend is unknown or cannot run here, or the band is
                below 1.
        """
        no_ids = np.zeros(0, np.int32)
        self.align_ids(no_ids, no_ids)
        nothing = Tokenized(no_ids, "", (), np.zeros((0, 2), np.int64))
        self.pair(nothing, nothing)
        self.pair(replace(nothing, spans=None), replace(nothing, spans=None))
        lossy = bool(self.student.lossy or self.teacher.lossy)
        if lossy or self.method == "offsets":
            positions_by_offsets(self.student, no_ids, "", np.zeros((0, 2), np.int64))
        if self.method == "dp" or (self.method == "auto" and lossy):
            self._windows.warm_up()

    def align_ids(
        self, student_ids: Any, teacher_ids: Any, *, student_mask: Any = None, teacher_mask: Any = None
    ) -> Alignment:
        """Aligns ids without their text, by comparing the bytes that the two sides spell.

        The result has one entry per given position, padding included; a masked position is in no chunk. Tokens whose
        bytes differ on the two sides are aligned only by the methods auto and dp; with the others, only the equal bytes
        at the beginning are aligned.

        Args:
            student_ids, teacher_ids: integers [n], [m]: lists, numpy arrays, or torch tensors in host memory.
            student_mask, teacher_mask: [n], [m], 0 at padding, whatever the id at that position; None: no padding.

        Raises:
            ValueError: floats, bools, text or None instead of integers; an id that lies outside of the vocabulary and
                is not masked, or that does not fit into 32 bits; a mask whose shape is not that of its ids.
        """
        student = self._read(0, student_ids, student_mask)
        teacher = self._read(1, teacher_ids, teacher_mask)
        result = self._by_ids.align(student, teacher, everything_by_dp=self.method == "dp")
        # Two lossy vocabularies may agree with each other and still both differ from the text.
        exact = result.same_bytes and not (self.student.lossy and self.teacher.lossy)
        return make_alignment((student.ids, teacher.ids), result.chunks, result.method, exact, result.stops)

    def _read(self, i: int, ids: Any, mask: Any) -> IdRow:
        """One side's ids, checked, and without those whose mask is 0."""
        name, vocabulary = f"{_SIDES[i]}_ids", self._vocabularies[i]
        row = read_ids(name, ids, vocabulary.size)
        if mask is None:
            return IdRow(vocabulary, row, name=name)
        keep = np.asarray(mask)
        if keep.shape != row.shape:
            rule = f"a mask must have the shape of its ids, {row.shape}, got {keep.shape}"
            raise ValueError(f"{rule}; cut it where the ids are cut")
        return IdRow(vocabulary, row, keep.astype(bool), name)

    def align_messages(
        self,
        messages: Sequence[Message],
        *,
        max_student_tokens: int | None = None,
        max_teacher_tokens: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Alignment:
        """Aligns a chat that each side renders with its own template. Tokens of the templates are in no chunk.

        Only the messages' texts are aligned (contents, reasoning, names and arguments of tool calls); end-of-turn
        tokens are paired in `Alignment.stop_pairs`. With limits, both sides are cut as in `align`.

        Args:
            options: what both templates get besides the messages, such as `tools`.

        Raises:
            ValueError: a tokenizer without a chat template; a text with a lone surrogate; a negative limit.
            jinja2.TemplateError: a chat that a template rejects.
        """
        student, teacher = (self.tokenize_messages(messages, side, options=options) for side in _SIDES)
        return self.pair(student, teacher, max_student_tokens=max_student_tokens, max_teacher_tokens=max_teacher_tokens)

    def tokenize_student(self, text: str, *, end: bool = False, with_specials: bool = False) -> Tokenized:
        """Normalises a text and tokenises it for the student, with the special tokens that its tokenizer writes.

        Args:
            end: append eos, if the student has one and it is not the last token already.
            with_specials: the text of a special token is that token, which is compared only with one of the other side; the
                text is then one span. Both sides must be tokenised in the same way.

        Raises:
            ValueError: a lone surrogate.
        """
        return self._tokenize(0, text, end, with_specials)

    def tokenize_teacher(self, text: str, *, end: bool = False, with_specials: bool = False) -> Tokenized:
        """Normalises a text and tokenises it for the teacher, as `tokenize_student` does for the student."""
        return self._tokenize(1, text, end, with_specials)

    def has_specials(self, text: str) -> bool:
        """Whether a text has the text of a special token of either side."""
        return any(encoder.first_special(text) is not None for encoder in self._encoders)

    def tokenize_messages(
        self,
        messages: Sequence[Message],
        side: str,
        *,
        rendered: str | None = None,
        options: Mapping[str, Any] | None = None,
        special_tokens_in_text: bool = False,
    ) -> Tokenized:
        """Tokenises a chat rendered with the template of `side` (student | teacher).

        All texts of the messages and the rendered text are normalised first; the messages are not modified. Text in a message that looks
        like a special token is tokenised as text; what the template writes is not. No special token is added to what
        the template writes.

        Args:
            rendered: the template's output for these messages; None: it is rendered here.
            options: what the template gets besides the messages, such as `tools`.
            special_tokens_in_text: tokenise text in a message that looks like a special token as that token.

        Returns:
            the tokens with their offsets and the spans of the messages' texts (`find_texts`).
        Raises:
            ValueError: without `rendered`, a tokenizer that has no chat template; a text with a lone surrogate; another
                name of a side.
            jinja2.TemplateError: without `rendered`, a chat that the template rejects.
        """
        i = _SIDES.index(side)
        tokenizer = self._tokenizers[i]
        normalized: list[Message] = [self.normalize_all(message) for message in messages]
        options = options or {}
        text = self.normalize(render(tokenizer, normalized, **options) if rendered is None else rendered)
        encode(text)

        def write(chat: list[dict[str, Any]]) -> str:
            return self.normalize(render(tokenizer, chat, **options))

        found = find_texts(text, normalized, write)
        encoder = self._encoders[i]
        quoted = () if special_tokens_in_text else quoted_spans(text, normalized, write, encoder.special_pattern)
        ids, offsets = encoder.chat(text, quoted)
        return Tokenized(ids, text, found.spans, offsets, found.complete)

    def normalize_all(self, value: Any) -> Any:
        """A value with every text in it normalised: a message, a list of tools; dicts and lists are copied."""
        if isinstance(value, str):
            return self.normalize(value)
        if isinstance(value, Mapping):
            return {key: self.normalize_all(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.normalize_all(item) for item in value]
        return value

    def _tokenize(self, i: int, text: str, end: bool, with_specials: bool) -> Tokenized:
        """Normalises a text and tokenises it for the student (`i` = 0) or the teacher (1)."""
        # Offsets are filled in only if the tokens may not spell the text (`Vocabulary.lossy` is set). With `end`, eos
        # is appended if the tokenizer has one and did not write it as the last token; an eos that was appended covers
        # no characters.
        text = self.normalize(text)
        encode(text)
        vocabulary, encoder = self._vocabularies[i], self._encoders[i]
        # A lossy tokenizer will usually need offsets, so get them in the same pass.
        offsets: np.ndarray | None
        if with_specials:
            ids, offsets = encoder.with_specials(text)
        else:
            ids, offsets = encoder.offsets(text) if vocabulary.lossy else (encoder.ids(text), None)
        eos = vocabulary.roles.get("eos")
        ended = len(ids) > 0 and ids[-1] == eos
        if ended and eos == vocabulary.unknown and offsets is not None:
            # eos and the unknown token share an id; only the unknown token covers characters.
            ended = bool(offsets[-1, 0] == offsets[-1, 1])
        if end and eos is not None and not ended:
            ids = np.append(ids, np.int32(eos))
            offsets = None if offsets is None else np.concatenate([offsets, np.zeros((1, 2), np.int64)])
        return Tokenized(ids, text, ((0, len(text)),) if with_specials else None, offsets)

    def pair(
        self,
        student: Tokenized,
        teacher: Tokenized,
        *,
        max_student_tokens: int | None = None,
        max_teacher_tokens: int | None = None,
    ) -> Alignment:
        """Aligns the two sides' tokens of one document.

        Without spans both sides must have the same text. With spans, each side's i-th span is aligned with the other's,
        provided that both read the same, possibly after white space around them is stripped. With limits, the result is
        cut as by `Alignment.cut`; None is no limit on that side.

        Raises:
            ValueError: different texts without spans; only one side has spans, or the sides have different numbers of
                them; ids with spans that are not those of their text; a lone surrogate; a negative limit.
        """
        if (student.spans is None) != (teacher.spans is None) or len(student.spans or ()) != len(teacher.spans or ()):
            one, other = (None if side.spans is None else len(side.spans) for side in (student, teacher))
            rule = "both sides must have the same number of spans"
            raise ValueError(f"{rule}, got {one} and {other}; pair the same messages")
        text = encode(student.text)
        texts = text, text if teacher.text == student.text else encode(teacher.text)
        align = self._pair_texts if student.spans is None else self._pair_spans
        alignment = align(student, teacher, texts)
        most = len(alignment.student_ids) if max_student_tokens is None else max_student_tokens
        return alignment.cut(most, max_teacher_tokens)

    def _pair_texts(self, student: Tokenized, teacher: Tokenized, texts: tuple[bytes, bytes]) -> Alignment:
        """Aligns two tokenizations of one text by the first of these steps that `self.method` allows and that works."""
        if texts[0] != texts[1]:
            got = f"{len(texts[0])} and {len(texts[1])} bytes"
            raise ValueError(f"both sides of a document must have one text, got {got}; normalize it once")
        from distill_rl.align.compiled import align_text  # imports Numba

        # 1. Both sides' tokens spell the text: chunks end where both sides end a token.
        ids, size = (student.ids, teacher.ids), len(texts[0])
        chunk = np.empty(len(ids[0]), np.int32), np.empty(len(ids[1]), np.int32)
        places = np.empty(len(ids[0]) + 1, np.int64), np.empty(len(ids[1]) + 1, np.int64)
        left, right = ((vocabulary.table, writable(row)) for vocabulary, row in zip(self._vocabularies, ids))
        *sizes, count, stops = align_text(*left, *right, words_of(texts[0]), *places, *chunk)
        if count >= 0 and self.method in ("auto", "bytes"):
            return make_alignment(ids, TokenChunks(*chunk, count), "bytes", min(sizes) == size, as_pairs(stops))

        by_bytes = [
            TokenPositions(place[:-1], place[1:], None, spelled == size) if spelled >= 0 else None
            for place, spelled in zip(places, sizes)
        ]
        spans = np.array([[0, size, 0, size]])
        rows = [IdRow(vocabulary, row) for vocabulary, row in zip(self._vocabularies, ids)]
        located = self._locate((student, teacher), by_bytes)
        # 2. The sides spell the same bytes, but not those of the text: two tokenizers that make the same change.
        if self.method in ("auto", "bytes"):
            same = self._by_ids.align_same_bytes(*rows)
            # Where each side spells only a part of the text, the two may be equal by coincidence.
            if same is not None and (located is None or keep_same_place(same.chunks, *located.sides) is same.chunks):
                return make_alignment(ids, same.chunks, "bytes", False, self._stops(same, ids, located, spans))

        # 3. Offsets: chunks between shared positions where the tokens spell what they cover.
        exact = all(positions is not None and positions.exact for positions in by_bytes)
        by_position = None
        if located is not None and self.method in ("auto", "offsets"):
            by_position = self._by_positions(ids, located, spans, spans, exact)
            if by_position.num_chunks or self.method == "offsets":
                return by_position

        # 4. Equal bytes at both ends, with the dynamic programme in between; without chunks that the positions contradict.
        result = self._by_ids.align(*rows, everything_by_dp=self.method == "dp")
        chunks = result.chunks if located is None else keep_same_place(result.chunks, *located.sides)
        alignment = make_alignment(ids, chunks, result.method, exact, self._stops(result, ids, located, spans))
        if by_position is None or exact:
            return alignment
        return replace(alignment, lossy_ends=alignment.outside_of_chunks(by_position.lossy_ends))

    def _stops(self, result: IdAlignment, ids: IdPair, located: _Located | None, spans: np.ndarray) -> StopPairs:
        """Stop pairs by the tokens' positions in the text or, where these are unknown, by the bytes before them."""
        if located is None:
            return result.stops
        return pair_stops_of_spans(self._vocabularies, ids, located.sides, spans)

    def _pair_spans(self, student: Tokenized, teacher: Tokenized, texts: tuple[bytes, bytes]) -> Alignment:
        """Aligns only the text that both sides' spans have in common; the rest of the two texts may differ."""
        # Both sides must have equally many spans. Two spans that read differently make the alignment inexact; they
        # give no chunks if they also differ without the white space around them. A special token that strips white
        # space of a span makes it inexact, too.
        tokenized = student, teacher
        sides_and_texts = zip(self._vocabularies, tokenized, texts)
        by_bytes = [place_in_chat(vocabulary, side.ids, text) for vocabulary, side, text in sides_and_texts]
        equal, spans, complete = equal_spans(tokenized, texts)
        located = self._locate(tokenized, by_bytes)
        if located is None:
            raise ValueError("ids with spans must be those of their text, got others; use the ids of tokenize_messages")
        exact = all(positions is not None and positions.exact for positions in by_bytes)
        exact = exact and complete and np.array_equal(equal, spans)
        ids = student.ids, teacher.ids
        sides = zip(self._vocabularies, ids, located.sides, (spans[:, :2], spans[:, 2:]))
        exact = exact and not any(strips_spans(*side) for side in sides)
        return self._by_positions(ids, located, join_spans(equal), spans, exact)

    def _locate(
        self, tokenized: tuple[Tokenized, Tokenized], by_bytes: Sequence[TokenPositions | None]
    ) -> _Located | None:
        """Both sides' positions: those of `by_bytes` where there are any, otherwise from offsets."""
        # With the method `offsets`, positions always come from offsets. None if a side needs offsets and `_offsets`
        # finds none.
        sides, method = [], "bytes"
        for i, (side, positions) in enumerate(zip(tokenized, by_bytes)):
            if positions is None or self.method == "offsets":
                offsets, method = self._offsets(i, side), "offsets"
                if offsets is None:
                    return None
                positions = positions_by_offsets(self._vocabularies[i], side.ids, side.text, offsets)
            sides.append(positions)
        return _Located((sides[0], sides[1]), method)

    def _by_positions(
        self, ids: IdPair, located: _Located, equal: np.ndarray, spans: np.ndarray, exact: bool
    ) -> Alignment:
        """The alignment of tokens whose positions are known: chunks inside `equal`, and stop pairs after the `spans`."""
        # Identical ids of two copies of one tokenizer match even where they do not spell the text.
        sides = located.sides
        if self.student.hash == self.teacher.hash and np.array_equal(*ids):
            # Both sides lose the same text, so their tokens match even where they do not spell it.
            sides = replace(sides[0], faithful=None), replace(sides[1], faithful=None)
        chunks = keep_equal_specials(chunks_by_spans(*sides, equal), self._vocabularies, ids)
        stops = pair_stops_of_spans(self._vocabularies, ids, sides, spans)
        return make_alignment(ids, chunks, located.method, exact, stops)

    def _offsets(self, i: int, tokenized: Tokenized) -> np.ndarray | None:
        """int64 [n, 2]: the characters that each token covers; None if the ids are not the tokenizer's for this text."""
        # The offsets that the side brings are returned unchecked. Without any, the text is encoded again, with and
        # without the special tokens around it (a chat: as a rendered text). The ids may be cut short, or be followed
        # by special tokens, which cover no characters.
        if tokenized.offsets is not None:
            return tokenized.offsets
        encoder, ids = self._encoders[i], tokenized.ids
        text = tokenized.text
        if tokenized.spans is not None:
            encodings = iter([encoder.chat(text, sorted(tokenized.spans))])
        else:
            encodings = (encoder.offsets(text, add_special=add_special) for add_special in (True, False))
        for expected, offsets in encodings:
            size = min(len(expected), len(ids))
            rest = ids[size:]
            if np.array_equal(expected[:size], ids[:size]) and self._vocabularies[i].special[rest].all():
                return np.concatenate([offsets[:size], np.zeros((len(rest), 2), np.int64)])
        return None
