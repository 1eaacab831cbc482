"""One tokenizer: what its pieces stand for, and a copy of it that reads special tokens in a text as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from distill_rl.align.chats import CharSpan

# What the pieces of a tokenizer stand for, read from its tokenizer.json, for each family of tokenizers.

METASPACE = "▁"
"""U+2581, which SentencePiece writes in place of a space"""

WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
"""The characters that an added token strips: Unicode's White_Space, which is fewer than Python's `str.isspace`"""

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_CHANGING_NORMALIZERS = {
    "BertNormalizer",
    "Lowercase",
    "StripAccents",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",
    "Strip",
}
_REMOVING_PRE_TOKENIZERS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"}


@cache
def byte_of_letter() -> dict[int, int]:
    """GPT-2's byte map, letter (code point) → byte.

    Printable Latin-1 stands for itself, the letters from U+0100 on for the other 68 bytes.
    """
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(kept))
    return {byte: byte for byte in kept} | {0x100 + i: byte for i, byte in enumerate(others)}


@dataclass(frozen=True)
class Description:
    """The parts of a tokenizer.json that decide what an id stands for."""

    model: Mapping[str, Any]
    added: tuple[Mapping[str, Any], ...]
    normalizers: tuple[Mapping[str, Any], ...]
    pre_tokenizers: tuple[Mapping[str, Any], ...]
    decoders: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, described: Mapping[str, Any]) -> Description:
        """From a parsed tokenizer.json, with nested sequences of normalizers, pre-tokenizers and decoders flattened."""
        return cls(
            described["model"],
            tuple(described.get("added_tokens") or ()),
            *(tuple(_parts(described.get(key))) for key in ("normalizer", "pre_tokenizer", "decoder")),
        )

    @property
    def pieces(self) -> dict[str, int]:
        """The model's own pieces → ids, without the added tokens."""
        vocabulary = self.model.get("vocab") or {}
        if isinstance(vocabulary, Mapping):
            return dict(vocabulary)
        return {piece: i for i, (piece, _) in enumerate(vocabulary)}

    @property
    def unknown(self) -> int | None:
        """The id that the model produces for text that it has no piece for; None if it has no such id."""
        if self.model.get("unk_id") is not None:
            return int(self.model["unk_id"])
        return self.pieces.get(self.model.get("unk_token") or "")

    @property
    def family(self) -> str:
        """The tokenizer's family: byte_level | tiktoken | sentencepiece | bpe | unigram | wordpiece | wordlevel.

        The first four are BPE: by bytes; by bytes and looking up whole words first; with ▁ or byte fallback; any other.
        Files without a model type are classified by what the model holds.
        """
        kind = self.model.get("type")
        if not kind:
            # Older files leave the type out: only BPE has merges, and only Unigram has a list of pieces.
            if "merges" in self.model:
                kind = "BPE"
            else:
                kind = "Unigram" if isinstance(self.model["vocab"], list) else "WordPiece"
        if kind != "BPE":
            return str(kind).lower()
        if self.byte_level:
            return "tiktoken" if self.model.get("ignore_merges") else "byte_level"
        return "sentencepiece" if self.metaspace or self.model.get("byte_fallback") else "bpe"

    @property
    def byte_level(self) -> bool:
        """Whether pieces are written in GPT-2's byte map, one letter per byte."""
        return any(part["type"] == "ByteLevel" for part in (*self.normalizers, *self.pre_tokenizers, *self.decoders))

    @property
    def metaspace(self) -> str:
        """The letter that stands for a space in this tokenizer's pieces, usually ▁; empty if there is none."""
        for part in (*self.pre_tokenizers, *self.decoders):
            if part["type"] == "Metaspace":
                return str(part.get("replacement") or METASPACE)
        replaces = any(part["type"] == "Replace" and part["content"] == METASPACE for part in self.normalizers)
        return METASPACE if replaces else ""

    def changes_text(self) -> str | None:
        """A name for the first part of the pipeline that changes or drops text, for messages; None if there is none.

        Only parts known to do so count; neither NFC nor the replacement of spaces by ▁ does.
        """
        for part in self.normalizers:
            if part["type"] in _CHANGING_NORMALIZERS:
                return str(part["type"])
            if part["type"] == "Replace" and part["content"] != self.metaspace:
                return f"Replace by {part['content']!r}"
        for part in self.pre_tokenizers:
            removes = part["type"] in ("Split", "Punctuation") and part.get("behavior") == "Removed"
            if removes or part["type"] in _REMOVING_PRE_TOKENIZERS:
                return str(part["type"])
        return "an end-of-word mark" if self.model.get("end_of_word_suffix") else None

    def strips(self) -> dict[int, tuple[bool, bool]]:
        """Added token → whether it strips the white space (before it, behind it) where it is written.

        Tokens that strip neither are left out.
        """
        sides = {token["id"]: (bool(token.get("lstrip")), bool(token.get("rstrip"))) for token in self.added}
        return {token: strips for token, strips in sides.items() if any(strips)}

    def composes(self) -> bool:
        """Whether a normalizer brings the text into NFC."""
        return any(part["type"] == "NFC" for part in self.normalizers)

    def can_be_unknown(self) -> bool:
        """Whether the tokenizer may have no piece for some text, by its settings.

        True if its pieces are not written in the byte map and it has no byte fallback.
        """
        return not (self.byte_level or self.model.get("byte_fallback"))

    def speller(self) -> Callable[[str], tuple[bytes, bool]]:
        """A function: piece of the model → (the bytes that it stands for, whether it is a byte-fallback piece).

        A byte-fallback piece is one such as <0x0A>. The function undoes the byte map or ▁, and takes off the marks of
        word parts (`##`) and word ends. It must not be used for added tokens, which are written literally.
        """
        prefix = self.model.get("continuing_subword_prefix") or ""
        suffix = self.model.get("end_of_word_suffix") or ""
        fallback, byte_level, metaspace = bool(self.model.get("byte_fallback")), self.byte_level, self.metaspace
        letters = _Letters(byte_of_letter())

        def spell(piece: str) -> tuple[bytes, bool]:
            """The bytes of a piece, and whether it is a byte-fallback piece."""
            if fallback and (match := _FALLBACK.match(piece)):
                return bytes([int(match[1], 16)]), True
            piece = piece.removeprefix(prefix).removesuffix(suffix)
            if byte_level:
                try:
                    return piece.translate(letters).encode("latin-1"), False
                except UnicodeEncodeError:
                    pass  # a letter outside the byte map: the decoder, too, takes such a piece literally
            elif metaspace:
                piece = piece.replace(metaspace, " ")
            return piece.encode(errors="surrogatepass"), False

        return spell


class _Letters(dict[int, int]):
    """For `str.translate`: letters outside the byte map become one that Latin-1 cannot encode."""

    def __missing__(self, letter: int) -> int:
        """0xFFFF, for every letter outside the byte map."""
        return 0xFFFF


def _parts(component: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yields the parts of a normalizer, pre-tokenizer or decoder, in order and with nested sequences flattened."""
    if component is None:
        return
    inner = next((component[key] for key in ("normalizers", "pretokenizers", "decoders") if key in component), None)
    if inner is None:
        yield component
        return
    for part in inner:
        yield from _parts(part)


# The aligner's copy of a caller's tokenizer, which reads text that looks like a special token as text.


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


class TextEncoder:
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
        """A copy that reads no special tokens, for the text after one."""
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
        """Character spans of the special tokens that the template writes, in order."""
        # A span includes the white space that its token strips. The tokenizer must have special tokens.
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
    """The serialized tokenizer with the model's special pieces renamed to strings that no text contains."""
    # Models that look up whole stretches of text (Unigram, WordPiece, BPE with `ignore_merges`) would otherwise
    # produce a special id for text that looks like it, however added tokens are matched. Renamed tokens are no longer
    # added tokens; pieces that merges mention are left alone. None for other models, and for one without special
    # pieces.
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
