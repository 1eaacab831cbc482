"""The aligner's copy of a caller's tokenizer, which reads text that looks like a special token as text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from distill_rl.align.chats.rendering import CharSpan
from distill_rl.align.tokenizer.families import WHITE_SPACE, Description


def backend_of(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` inside a transformers tokenizer, or the tokenizer itself if it is one.

    Raises:
        ValueError: a slow tokenizer, which gives neither the bytes of its ids nor the offsets of its tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not (hasattr(backend, "to_str") and hasattr(backend, "encode_special_tokens")):
        raise ValueError(
            f"alignment needs a fast tokenizer (one with a tokenizer.json), got {type(tokenizer).__name__}; "
            "convert it, or choose a model that ships one"
        )
    return backend


class Encoder:
    """Text → ids and character offsets. The caller's tokenizer is not modified.

    Its padding and truncation are off here. Special tokens are read in three ways, each by a copy of the tokenizer:

    - `_plain`: never, so whatever a text contains is text;
    - `_with_specials`: wherever they are written, as in what a chat template produces;
    - `_after_special`: never, for text that follows a special token: some tokenizers put a dummy space only before the
      beginning of the whole text.

    Raises:
        ValueError: a slow tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = backend_of(tokenizer)
        serialized = self._backend.to_str()
        described = json.loads(serialized)
        # Padding and truncation come first in the serialized form and decide no id.
        self.identity: str = serialized[max(0, serialized.find('"added_tokens"')) :]
        """The part of the serialized tokenizer that decides ids and bytes"""
        self.description = Description.read(described)
        self.specials: dict[str, int] = {
            token["content"]: token["id"] for token in self.description.added if token["special"]
        }
        hidden = _hide_specials(described, self.description, set(self.specials))
        self._plain = _copy(self._backend, hidden or serialized)
        self._plain.encode_special_tokens = True

    @cached_property
    def _with_specials(self) -> Any:
        """A copy of the caller's tokenizer that reads special tokens wherever they are written."""
        copy = _copy(self._backend, self._backend.to_str())
        copy.encode_special_tokens = False
        return copy

    @cached_property
    def _after_special(self) -> Any:
        """A copy that reads no special tokens, for the text after one.

        It puts no dummy space where the tokenizer puts one only before a whole text.
        """
        described = json.loads(self._plain.to_str())
        split = json.dumps(described["pre_tokenizer"])
        described["pre_tokenizer"] = json.loads(split.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"'))
        copy = _copy(self._plain, json.dumps(described))
        copy.encode_special_tokens = True
        return copy

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        """Matches any special token's text, the longest one first; None for a tokenizer without special tokens."""
        literals = sorted(filter(None, self.specials), key=lambda literal: (-len(literal), literal))
        return re.compile("|".join(map(re.escape, literals))) if literals else None

    def first_special(self, text: str) -> int | None:
        """The id of the first special token that is written in a text; None if there is none."""
        match = self._special_pattern.search(text) if self._special_pattern else None
        return self.specials[match[0]] if match else None

    def ids(self, text: str, *, add_special: bool = True) -> np.ndarray:
        """int32 [n]: `text` as text; with `add_special`, between the special tokens that the tokenizer adds."""
        return np.array(self._plain.encode_batch_fast([text], add_special_tokens=add_special)[0].ids, np.int32)

    def batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 [n] each: `ids` of many texts, in order, with the special tokens that the tokenizer puts around each.

        The tokenizer may spread the texts over its own threads.
        """
        return [np.array(encoding.ids, np.int32) for encoding in self._plain.encode_batch_fast(list(texts))]

    def offsets(self, text: str, *, add_special: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """int32 [n]: ids as from `ids`; int64 [n, 2]: the characters of `text` that each of them covers."""
        return _arrays(self._plain.encode(text, add_special_tokens=add_special))

    def chat(self, text: str, contents: Sequence[CharSpan] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a rendered chat: special tokens count as such where the template writes them, not inside a message.

        If no content contains the text of a special token, the chat is encoded in one piece. Otherwise it is divided at
        the special tokens that the template writes, and the text between them is encoded without special tokens.

        Args:
            contents: character spans of the messages' contents in `text`, in order.
        Returns:
            int32 [n] ids; int64 [n, 2] character offsets. No special token is added.
        """
        pattern = self._special_pattern
        if not pattern or not any(pattern.search(text, start, stop) for start, stop in contents):
            return _arrays(self._with_specials.encode(text, add_special_tokens=False))
        ids, offsets, done = [np.empty(0, np.int32)], [np.empty((0, 2), np.int64)], 0
        for start, stop in [*self._written_specials(text, contents), (len(text), len(text))]:
            plain = self._after_special if done else self._plain
            for reader, piece_start, piece_stop in ((plain, done, start), (self._with_specials, start, stop)):
                piece, places = _arrays(reader.encode(text[piece_start:piece_stop], add_special_tokens=False))
                ids.append(piece)
                offsets.append(places + piece_start)
            done = stop
        return np.concatenate(ids), np.concatenate(offsets)

    def _written_specials(self, text: str, contents: Sequence[CharSpan]) -> list[CharSpan]:
        """Character spans of the special tokens that the template writes, in order.

        A span includes the white space that its token strips. The tokenizer must have special tokens.

        Args:
            contents: spans of the messages' contents in `text`, in order; special tokens inside them are not reported.
        """
        assert self._special_pattern is not None
        strips = self.description.strips()
        spans, outside, done = [], 0, 0
        for begin, end in [*contents, (len(text), len(text))]:
            for match in self._special_pattern.finditer(text, outside, begin):
                start, stop = match.span()
                before, behind = strips.get(self.specials[match[0]], (False, False))
                if before:
                    start = len(text[done:start].rstrip(WHITE_SPACE)) + done
                if behind:
                    stop = len(text) - len(text[stop:].lstrip(WHITE_SPACE))
                spans.append((start, stop))
                done = stop
            outside = max(outside, end)
        return spans


def _copy(backend: Any, serialized: str) -> Any:
    """A new tokenizer of the same class from its serialized form, without padding and truncation."""
    copy = type(backend).from_str(serialized)
    copy.no_padding()
    copy.no_truncation()
    return copy


def _arrays(encoding: Any) -> tuple[np.ndarray, np.ndarray]:
    """int32 [n], int64 [n, 2]: the ids and character offsets of an encoding."""
    ids = np.array(encoding.ids, np.int32)
    return ids, np.array(encoding.offsets, np.int64).reshape(len(ids), 2)


def _hide_specials(described: dict[str, Any], description: Description, special: set[str]) -> str | None:
    """The serialized tokenizer with the model's special pieces renamed to strings that no text contains.

    Models that look up whole stretches of text (Unigram, WordPiece, BPE with `ignore_merges`) would otherwise produce a
    special id for text that looks like it, however added tokens are matched. Renamed tokens are no longer added tokens;
    pieces that merges mention are left alone. None for other models, and for one without special pieces.

    Args:
        described: the parsed tokenizer.json, not modified.
        special: the texts of the special tokens.
    """
    model = described["model"]
    hidden = special & description.pieces.keys()
    if not hidden or (description.family in ("byte_level", "sentencepiece", "bpe") and not model.get("ignore_merges")):
        return None
    in_merges = {
        piece
        for merge in model.get("merges") or ()
        for piece in (merge.split(" ") if isinstance(merge, str) else merge)
        if piece in hidden
    }
    hidden -= in_merges
    names = {piece: f"\U0010fffe{i}\U0010ffff" for i, piece in enumerate(sorted(hidden))}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        renamed: Any = {names.get(piece, piece): token for piece, token in vocabulary.items()}
    else:
        renamed = [[names.get(piece, piece), score] for piece, score in vocabulary]
    unknown = {"unk_token": names[model["unk_token"]]} if model.get("unk_token") in names else {}
    kept = [token for token in described["added_tokens"] if token["content"] not in hidden]
    return json.dumps({**described, "model": {**model, "vocab": renamed, **unknown}, "added_tokens": kept})
