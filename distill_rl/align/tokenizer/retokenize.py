"""Splits one tokenizer's tokens, given as byte strings, into the tokens of another tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distill_rl.align.dp.canonical import fold_of
from distill_rl.align.tokenizer.encoder import Encoder, backend_of
from distill_rl.align.tokenizer.families import byte_of_letter
from distill_rl.align.tokenizer.vocabulary import Vocabulary

BATCH = 4096
"""Byte strings per call of the tokenizer"""


class Retokenizer:
    """Spells the bytes of another tokenizer's token in this tokenizer's ids, independent of the text around it.

    The first of these ways that works is used; all but the third spell exactly the given bytes:

    1. The tokenizer's encoding of the bytes, if they are UTF-8.
    2. The encoding by its model alone, without normaliser and pre-tokeniser, of the bytes in the model's alphabet (a
       letter per byte, or ▁ for a space). Unlike 1 it puts no dummy space before a piece from the middle of a word, and
       it splits parts of characters by the merges of a byte-level BPE.
    3. For a lossy tokenizer, its encoding of the bytes if that differs only by what the tokenizer changes (the
       canonical folds) and by outer spaces.
    4. Greedily, the longest token that the remaining bytes begin with (byte-fallback pieces for parts of characters).

    Args:
        tokenizer, vocabulary, encoder: the tokenizer to spell with, its vocabulary and its encoder.
    """

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary, encoder: Encoder) -> None:
        self._encoder = encoder
        self._model = backend_of(tokenizer).model
        self._fold = fold_of([vocabulary]) if vocabulary.normalization == "lossy" else None
        self._bytes = vocabulary.spellings()
        self.ids = vocabulary.ids_by_bytes()
        self._longest = max(map(len, self.ids), default=0)
        description = encoder.description
        self._letters = (
            {byte: chr(letter) for letter, byte in byte_of_letter().items()} if description.byte_level else {}
        )
        self._space = description.metaspace or " "

    def pieces(self, spellings: list[bytes]) -> Iterator[list[int]]:
        """Yields this tokenizer's ids of each byte string, in order; an empty list if it cannot spell one.
        Deterministic.

        The four ways of the class are tried for each. Strings are encoded in batches of `BATCH`.
        """
        for begin in range(0, len(spellings), BATCH):
            batch = spellings[begin : begin + BATCH]
            texts = [_text(spelling) for spelling in batch]
            encoded = iter(self._encoder.batch([text for text in texts if text is not None]))
            for spelling, text in zip(batch, texts):
                ids = [] if text is None else [token for token in next(encoded).tolist() if self._bytes[token]]
                yield self._ids_of(spelling, text, ids)

    def _ids_of(self, spelling: bytes, text: str | None, encoded: list[int]) -> list[int]:
        """The ids of one byte string, by the first of the class's four ways that works; [] if none does.

        Args:
            text: the decoded bytes; None if they are not UTF-8.
            encoded: the tokenizer's ids of `text`, without those that spell nothing.
        """
        if self._spell(encoded) == spelling:
            return encoded
        by_model = self._by_model(spelling, text)
        if self._spell(by_model) == spelling:
            return by_model
        if self._fold is not None and text is not None:
            folded = self._fold(text).strip()
            if folded and folded == self._fold(self._spell(encoded).decode(errors="replace")).strip():
                return encoded
        return self._greedy(spelling)

    def _spell(self, ids: list[int]) -> bytes:
        """The bytes that these ids spell together."""
        return b"".join(self._bytes[token] for token in ids)

    def _by_model(self, spelling: bytes, text: str | None) -> list[int]:
        """The ids that the tokenizer's model alone makes of the bytes, without normaliser and pre-tokeniser.

        [] if the model cannot take them: bytes that are not UTF-8 without a byte map, or text that it has no piece for.
        Whether the ids spell the bytes is for the caller to check.

        Args:
            text: the decoded bytes; None if they are not UTF-8.
        """
        if self._letters:
            model_input = "".join(self._letters[byte] for byte in spelling)
        elif text is not None:
            model_input = text.replace(" ", self._space)
        else:
            return []
        try:
            return [token.id for token in self._model.tokenize(model_input)]
        except Exception:  # a model without an unknown token raises for text that it has no pieces for
            return []

    def _greedy(self, spelling: bytes) -> list[int]:
        """The ids found by repeatedly taking the longest token that the remaining bytes begin with.

        [] if no token fits at some point.
        """
        ids, done = [], 0
        while done < len(spelling):
            sizes = range(min(self._longest, len(spelling) - done), 0, -1)
            size = next((size for size in sizes if spelling[done : done + size] in self.ids), 0)
            if size == 0:
                return []
            ids.append(self.ids[spelling[done : done + size]])
            done += size
        return ids


def _text(spelling: bytes) -> str | None:
    """The decoded bytes; None if they are not UTF-8."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return None
