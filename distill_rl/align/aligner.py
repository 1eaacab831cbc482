"""`TokenAligner`: aligns the two token sequences that two tokenizers make of one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from distill_rl.align.alignment import Alignment, Tokenized
from distill_rl.align.chats.rendering import Message, content_spans, render
from distill_rl.align.chats.stops import pair_stops
from distill_rl.align.dp.window import WindowSolver
from distill_rl.align.ids import IdAligner
from distill_rl.align.pairing import Pairing, make_alignment
from distill_rl.align.place import encode
from distill_rl.align.read_ids import read_ids
from distill_rl.align.side import Side
from distill_rl.align.tokenizer.encoder import Encoder
from distill_rl.align.tokenizer.vocabulary import compose, read_vocabulary

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
        fast_ids: compare bytes in compiled code, and build the tables of the dynamic programme once. With False neither
            is done; the results are the same.
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
        self._encoders = Encoder(student_tokenizer), Encoder(teacher_tokenizer)
        stops = student_stops, teacher_stops
        self.student, self.teacher = (read_vocabulary(*side) for side in zip(self._tokenizers, self._encoders, stops))
        self._vocabularies = self.student, self.teacher
        self._composes = "nfc" in (self.student.normalization, self.teacher.normalization)
        self._windows = WindowSolver(self.student, self.teacher, fast_ids=fast_ids, backend=backend, band=band)
        self._by_ids = IdAligner(fast_ids, self._windows if method in ("auto", "dp") else None)
        self._pairing = Pairing(self._encoders, self._vocabularies, method, self._by_ids)

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
        sides = [
            [Tokenized(ids, text) for ids, text in zip(encoder.batch(normalized), normalized)]
            for encoder in self._encoders
        ]
        pairs = list(zip(*sides))
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
        if self.method == "dp" or (self.method == "auto" and (self.student.lossy or self.teacher.lossy)):
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
        left, student = self._read(0, student_ids, student_mask)
        right, teacher = self._read(1, teacher_ids, teacher_mask)
        ids = left, right
        result = self._by_ids.align(student, teacher, everything_by_dp=self.method == "dp")
        # Two lossy vocabularies may agree with each other and still both differ from the text.
        exact = result.same_bytes and not (self.student.lossy and self.teacher.lossy)
        return make_alignment(ids, result.chunks, result.method, exact, pair_stops(*result.sides, *ids))

    def _read(self, i: int, ids: Any, mask: Any) -> tuple[np.ndarray, Side]:
        """One side's ids, checked: as int32 [n] with padding, and as the `Side` without the tokens whose mask is 0.

        Args:
            i: 0 for the student, 1 for the teacher.
            mask: [n], 0 at padding; None: nothing is padding.

        Raises:
            ValueError: as for `align_ids`.
        """
        name, vocabulary = f"{_SIDES[i]}_ids", self._vocabularies[i]
        row = read_ids(name, ids, vocabulary.size)
        if mask is not None:
            mask = np.asarray(mask)
            if mask.shape != row.shape:
                rule = f"a mask must have the shape of its ids, {row.shape}, got {mask.shape}"
                raise ValueError(f"{rule}; cut it where the ids are cut")
        return row, Side.of(vocabulary, row, mask, name=name)

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

    def tokenize_student(self, text: str, *, end: bool = False) -> Tokenized:
        """Normalises a text and tokenises it for the student, with the special tokens that its tokenizer writes.

        Args:
            end: append eos, if the student has one and it is not the last token already.

        Raises:
            ValueError: a lone surrogate.
        """
        return self._tokenize(0, text, end)

    def tokenize_teacher(self, text: str, *, end: bool = False) -> Tokenized:
        """Normalises a text and tokenises it for the teacher, as `tokenize_student` does for the student."""
        return self._tokenize(1, text, end)

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
            the tokens with their offsets and the spans of the messages' texts (`message_spans`).
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
        spans = content_spans(text, normalized, lambda chat: self.normalize(render(tokenizer, chat, **options)))
        ids, offsets = self._encoders[i].chat(text, () if special_tokens_in_text else spans)
        return Tokenized(ids, text, spans, offsets)

    def normalize_all(self, value: Any) -> Any:
        """A value with every text in it normalised: a message, a list of tools; dicts and lists are copied."""
        if isinstance(value, str):
            return self.normalize(value)
        if isinstance(value, Mapping):
            return {key: self.normalize_all(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.normalize_all(item) for item in value]
        return value

    def _tokenize(self, i: int, text: str, end: bool) -> Tokenized:
        """Normalises a text and tokenises it for the student (`i` = 0) or the teacher (1).

        Offsets are filled in only if the tokens may not spell the text (`Vocabulary.lossy` is set). With `end`, eos is
        appended if the tokenizer has one and did not write it as the last token; an eos that was appended covers no
        characters.

        Raises:
            ValueError: a lone surrogate.
        """
        text = self.normalize(text)
        encode(text)
        vocabulary, encoder = self._vocabularies[i], self._encoders[i]
        # A lossy tokenizer will usually need offsets, so get them in the same pass.
        ids, offsets = encoder.offsets(text) if vocabulary.lossy else (encoder.ids(text), None)
        eos = vocabulary.roles.get("eos")
        ended = len(ids) > 0 and ids[-1] == eos
        if ended and eos == vocabulary.unknown and offsets is not None:
            # eos and the unknown token share an id; only the unknown token covers characters.
            ended = bool(offsets[-1, 0] == offsets[-1, 1])
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
        """Aligns the two sides' tokens of one document.

        Without spans both sides must have the same text. With spans, each side's i-th span is aligned with the other's,
        provided that both read the same, possibly after white space around them is stripped. With limits, the result is
        cut as by `Alignment.cut`; None is no limit on that side.

        Raises:
            ValueError: different texts without spans; only one side has spans, or the sides have different numbers of
                them; ids with spans that are not those of their text; a lone surrogate; a negative limit.
        """
        alignment = self._pairing.pair(student, teacher)
        if max_student_tokens is None and max_teacher_tokens is None:
            return alignment
        return alignment.cut(
            len(alignment.student_ids) if max_student_tokens is None else max_student_tokens,
            len(alignment.teacher_ids) if max_teacher_tokens is None else max_teacher_tokens,
        )
