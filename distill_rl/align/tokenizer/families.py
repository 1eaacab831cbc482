"""What the pieces of a tokenizer stand for, read from its tokenizer.json, for each family of tokenizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

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
    """Yields the parts of a normalizer, pre-tokenizer or decoder, in order and with nested sequences flattened.

    Nothing for None.
    """
    if component is None:
        return
    inner = next((component[key] for key in ("normalizers", "pretokenizers", "decoders") if key in component), None)
    if inner is None:
        yield component
        return
    for part in inner:
        yield from _parts(part)
