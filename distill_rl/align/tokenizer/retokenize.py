"""A byte string in the pieces of another tokenizer, for byte strings that are pieces of some tokenizer themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from distill_rl.align.dp.canonical import fold_of
from distill_rl.align.tokenizer.encoder import Encoder, backend_of
from distill_rl.align.tokenizer.families import byte_of_letter
from distill_rl.align.tokenizer.vocabulary import Vocabulary

BATCH = 4096


class Retokenizer:
    """The pieces in which a tokenizer spells what another tokenizer's token spells, wherever that stands in a text.

    Taken in this order, and only if the pieces spell exactly the bytes:

    1. the tokenizer's own encoding, where the bytes are UTF-8;
    2. its model alone, without normaliser and pre-tokeniser, on the bytes written in its alphabet (a letter per byte,
       or ▁ for a space). This gives no dummy prefix to the middle of a word, and splits halves of characters by the
       merges of a byte-level BPE;
    3. for a lossy tokenizer, its own encoding if it spells the same but for what the tokenizer changes (canonical
       folds) and for outer spaces;
    4. the longest token that the remaining bytes begin with, again and again (half a character in byte-fallback
       pieces).

    Args:
        tokenizer, vocabulary, encoder: the tokenizer whose pieces are wanted, and what was made of it.
    """

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary, encoder: Encoder) -> None:
        self._encoder = encoder
        self._model = backend_of(tokenizer).model
        self._fold = fold_of([vocabulary]) if vocabulary.normalization == "lossy" else None
        flat, starts = vocabulary.flat.tobytes(), vocabulary.starts.tolist()
        self._bytes = [flat[start:stop] for start, stop in pairwise(starts)]
        self.ids = preferred_ids(vocabulary)
        self._longest = max(map(len, self.ids), default=0)
        description = self._encoder.description
        self._letters = (
            {byte: chr(letter) for letter, byte in byte_of_letter().items()} if description.byte_level else {}
        )
        self._space = description.metaspace or " "

    def pieces(self, spellings: list[bytes]) -> Iterator[list[int]]:
        """The ids for each, in order; empty where the tokenizer cannot spell it. Deterministic."""
        for begin in range(0, len(spellings), BATCH):
            batch = spellings[begin : begin + BATCH]
            texts = [_text(spelling) for spelling in batch]
            encoded = iter(self._encoder.batch([text for text in texts if text is not None]))
            for spelling, text in zip(batch, texts):
                yield self._pieces(spelling, text, [] if text is None else self._spelling_ids(next(encoded)))

    def _pieces(self, spelling: bytes, text: str | None, own: list[int]) -> list[int]:
        if self._spelled(own) == spelling:
            return own
        alone = self._by_model(spelling, text)
        if self._spelled(alone) == spelling:
            return alone
        if self._fold is not None and text is not None:
            meant, got = (self._fold(part).strip() for part in (text, self._spelled(own).decode(errors="replace")))
            if meant == got != "":
                return own
        return self._greedy(spelling)

    def _spelling_ids(self, ids: np.ndarray) -> list[int]:
        return [number for number in ids.tolist() if self._bytes[number]]

    def _spelled(self, ids: list[int]) -> bytes:
        return b"".join(self._bytes[number] for number in ids)

    def _by_model(self, spelling: bytes, text: str | None) -> list[int]:
        if self._letters:
            written = "".join(self._letters[byte] for byte in spelling)
        elif text is not None:
            written = text.replace(" ", self._space)
        else:
            return []
        try:
            return [token.id for token in self._model.tokenize(written)]
        except Exception:  # a model without an unknown token refuses a text that it has no pieces for
            return []

    def _greedy(self, spelling: bytes) -> list[int]:
        found, done = [], 0
        while done < len(spelling):
            sizes = range(min(self._longest, len(spelling) - done), 0, -1)
            size = next((size for size in sizes if spelling[done : done + size] in self.ids), 0)
            if size == 0:
                return []
            found.append(self.ids[spelling[done : done + size]])
            done += size
        return found


def preferred_ids(vocabulary: Vocabulary) -> dict[bytes, int]:
    """Bytes → the id that stands for them: a plain piece before a byte-fallback one, then the lowest id."""
    flat, starts = vocabulary.flat.tobytes(), vocabulary.starts.tolist()
    ids: dict[bytes, int] = {}
    for fallback in (False, True):
        for number in np.flatnonzero((vocabulary.byte_fallback == fallback) & (vocabulary.lengths > 0)).tolist():
            ids.setdefault(flat[starts[number] : starts[number + 1]], number)
    return ids


def _text(spelling: bytes) -> str | None:
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return None
