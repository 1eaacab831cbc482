"""A tokenizer of the aligner's own: a copy of the caller's that reads special-looking text as text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from distill_rl.align.tokenizer.families import WHITE_SPACE, Description

CharSpan = tuple[int, int]


def backend_of(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` inside of a transformers tokenizer, or the tokenizer itself if it is one.

    Raises:
        ValueError: a slow tokenizer, which says neither what its ids stand for nor where its tokens lie.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not (hasattr(backend, "to_str") and hasattr(backend, "encode_special_tokens")):
        raise ValueError(
            f"alignment needs a fast tokenizer (one with a tokenizer.json), got {type(tokenizer).__name__}; "
            "convert it, or choose a model that ships one"
        )
    return backend


class Encoder:
    """Text → ids and character offsets. Nothing is changed on the caller's tokenizer.

    Padding and truncation that are set on the caller's tokenizer are off here.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = backend_of(tokenizer)
        written = self._backend.to_str()
        described = json.loads(written)
        # Padding and truncation come first in what is written and decide no id.
        self.decisive: str = written[max(0, written.find('"added_tokens"')) :]
        self.description = Description.read(described)
        special = {token["content"]: token["id"] for token in self.description.added if token["special"]}
        self.specials: dict[str, int] = special
        self._text = _copy(self._backend, _hide_specials(described, self.description, set(special)) or written)
        self._text.encode_special_tokens = True

    @cached_property
    def _marked(self) -> Any:
        """The copy that reads special tokens where they are written, for rendered chats."""
        made = _copy(self._backend, self._backend.to_str())
        made.encode_special_tokens = False
        return made

    @cached_property
    def _behind(self) -> Any:
        """The copy that reads text behind a special token, before which some put no space although they do at the start."""
        described = json.loads(self._text.to_str())
        split = json.dumps(described["pre_tokenizer"])
        described["pre_tokenizer"] = json.loads(split.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"'))
        made = _copy(self._text, json.dumps(described))
        made.encode_special_tokens = True
        return made

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        literals = sorted(filter(None, self.specials), key=lambda literal: (-len(literal), literal))
        return re.compile("|".join(map(re.escape, literals))) if literals else None

    def first_special(self, text: str) -> int | None:
        """The first special token that is written in a text."""
        found = self._special_pattern.search(text) if self._special_pattern else None
        return self.specials[found[0]] if found else None

    def ids(self, text: str, *, add_special: bool = True) -> np.ndarray:
        """int32 [n]: `text` as text, with the special tokens that the tokenizer itself puts around it if asked."""
        return np.array(self._text.encode_batch_fast([text], add_special_tokens=add_special)[0].ids, np.int32)

    def batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`ids` of many texts, in order; the tokenizer's own threads may share them."""
        return [np.array(encoding.ids, np.int32) for encoding in self._text.encode_batch_fast(list(texts))]

    def offsets(self, text: str, *, add_special: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """int32 [n] ids as of `ids`, and int64 [n, 2] the characters of `text` that each covers."""
        return _arrays(self._text.encode(text, add_special_tokens=add_special))

    def marked(self, text: str, contents: Sequence[CharSpan] = ()) -> tuple[np.ndarray, np.ndarray]:
        """A rendered chat: its special tokens are read as such, those that a message's content spells are text.

        Args:
            contents: character spans of the messages' contents in `text`, in order.
        Returns:
            int32 [n] ids; int64 [n, 2] character offsets. No special token is added.
        """
        pattern = self._special_pattern
        spelled = pattern and any(pattern.search(text, start, stop) for start, stop in contents)
        if not pattern or not spelled:
            return _arrays(self._marked.encode(text, add_special_tokens=False))
        ids, offsets, done = [np.empty(0, np.int32)], [np.empty((0, 2), np.int64)], 0
        for start, stop in [*self._written_specials(text, contents), (len(text), len(text))]:
            between = self._behind if done else self._text
            for reader, piece_start, piece_stop in ((between, done, start), (self._marked, start, stop)):
                piece, places = _arrays(reader.encode(text[piece_start:piece_stop], add_special_tokens=False))
                ids.append(piece)
                offsets.append(places + piece_start)
            done = stop
        return np.concatenate(ids), np.concatenate(offsets)

    def _written_specials(self, text: str, contents: Sequence[CharSpan]) -> list[CharSpan]:
        """Where the template, not a message, writes a special token; with the white space that the token swallows."""
        assert self._special_pattern is not None
        strips = self.description.strips()
        found, outside, done = [], 0, 0
        for begin, end in [*contents, (len(text), len(text))]:
            for hit in self._special_pattern.finditer(text, outside, begin):
                start, stop = hit.span()
                before, behind = strips.get(self.specials[hit[0]], (False, False))
                if before:
                    start = len(text[done:start].rstrip(WHITE_SPACE)) + done
                if behind:
                    stop = len(text) - len(text[stop:].lstrip(WHITE_SPACE))
                found.append((start, stop))
                done = stop
            outside = max(outside, end)
        return found


def _copy(backend: Any, written: str) -> Any:
    made = type(backend).from_str(written)
    made.no_padding()
    made.no_truncation()
    return made


def _arrays(encoding: Any) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(encoding.ids, np.int32)
    return ids, np.array(encoding.offsets, np.int64).reshape(len(ids), 2)


def _hide_specials(described: dict[str, Any], description: Description, special: set[str]) -> str | None:
    """The description with the model's own special pieces renamed to what no text spells; None if nothing has to be.

    Models that look up whole stretches of text (Unigram, WordPiece, BPE with `ignore_merges`) would write a special id
    for text that looks like it, however the added tokens are matched.
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
    names = {piece: f"\U0010fffe{number}\U0010ffff" for number, piece in enumerate(sorted(hidden))}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        renamed: Any = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    else:
        renamed = [[names.get(piece, piece), score] for piece, score in vocabulary]
    unknown = {"unk_token": names[model["unk_token"]]} if model.get("unk_token") in names else {}
    kept = [token for token in described["added_tokens"] if token["content"] not in hidden]
    return json.dumps({**described, "model": {**model, "vocab": renamed, **unknown}, "added_tokens": kept})
