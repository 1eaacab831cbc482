"""What the pieces of a tokenizer stand for, read from its own description (tokenizer.json), family by family."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

METASPACE = "▁"
"""U+2581, which SentencePiece writes for a space"""

WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
"""what an added token that strips takes with it: Unicode's White_Space, which is less than Python's `str.isspace`"""

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
    """The GPT-2 byte map, letter → byte: printable Latin-1 stands for itself, the other 68 bytes are U+0100 onwards."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(kept))
    return {byte: byte for byte in kept} | {0x100 + place: byte for place, byte in enumerate(others)}


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
        return cls(
            described["model"],
            tuple(described.get("added_tokens") or ()),
            *(tuple(_parts(described.get(key))) for key in ("normalizer", "pre_tokenizer", "decoder")),
        )

    @property
    def pieces(self) -> dict[str, int]:
        """The model's own pieces, without those that were added."""
        vocabulary = self.model.get("vocab") or {}
        if isinstance(vocabulary, Mapping):
            return dict(vocabulary)
        return {piece: number for number, (piece, _) in enumerate(vocabulary)}

    @property
    def unknown(self) -> int | None:
        """The id that the model writes for what it cannot spell."""
        if self.model.get("unk_id") is not None:
            return int(self.model["unk_id"])
        return self.pieces.get(self.model.get("unk_token") or "")

    @property
    def family(self) -> str:
        """byte_level | tiktoken | sentencepiece | bpe | unigram | wordpiece | wordlevel"""
        # older files leave the model's type out: only Unigram lists its pieces, only BPE has merges
        kind = self.model.get("type") or (
            "BPE" if "merges" in self.model else "Unigram" if isinstance(self.model["vocab"], list) else "WordPiece"
        )
        if kind != "BPE":
            return str(kind).lower()
        if self.byte_level:
            return "tiktoken" if self.model.get("ignore_merges") else "byte_level"
        return "sentencepiece" if self.metaspace or self.model.get("byte_fallback") else "bpe"

    @property
    def byte_level(self) -> bool:
        return any(part["type"] == "ByteLevel" for part in (*self.normalizers, *self.pre_tokenizers, *self.decoders))

    @property
    def metaspace(self) -> str:
        """The letter that stands for a space in this tokenizer's pieces; empty where none does."""
        for part in (*self.pre_tokenizers, *self.decoders):
            if part["type"] == "Metaspace":
                return str(part.get("replacement") or METASPACE)
        replaces = any(part["type"] == "Replace" and part["content"] == METASPACE for part in self.normalizers)
        return METASPACE if replaces else ""

    def changes_text(self) -> str | None:
        """The part of the pipeline that changes or drops what it reads, if there is one."""
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
        """Added token → whether it swallows the white space (before it, behind it) where it is written."""
        sides = {token["id"]: (bool(token.get("lstrip")), bool(token.get("rstrip"))) for token in self.added}
        return {number: both for number, both in sides.items() if any(both)}

    def composes(self) -> bool:
        return any(part["type"] == "NFC" for part in self.normalizers)

    def can_be_unknown(self) -> bool:
        return not (self.byte_level or self.model.get("byte_fallback"))

    def speller(self) -> Callable[[str], tuple[bytes, bool]]:
        """One of the model's own pieces → its bytes, and whether it is a byte-fallback one."""
        prefix = self.model.get("continuing_subword_prefix") or ""
        suffix = self.model.get("end_of_word_suffix") or ""
        fallback, byte_level, metaspace = bool(self.model.get("byte_fallback")), self.byte_level, self.metaspace
        letters = _Letters(byte_of_letter())

        def spell(piece: str) -> tuple[bytes, bool]:
            if fallback and (found := _FALLBACK.match(piece)):
                return bytes([int(found[1], 16)]), True
            piece = piece.removeprefix(prefix).removesuffix(suffix)
            if byte_level:
                try:
                    return piece.translate(letters).encode("latin-1"), False
                except UnicodeEncodeError:
                    pass  # a letter that is no byte: the decoder, too, takes such a piece as it is written
            elif metaspace:
                piece = piece.replace(metaspace, " ")
            return piece.encode(errors="surrogatepass"), False

        return spell


class _Letters(dict[int, int]):
    """For `str.translate`: what is no letter of the byte map becomes one that Latin-1 cannot write."""

    def __missing__(self, letter: int) -> int:
        return 0xFFFF


def _parts(component: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The parts of a normalizer, pre-tokenizer or decoder, sequences taken apart."""
    if component is None:
        return
    inner = next((component[key] for key in ("normalizers", "pretokenizers", "decoders") if key in component), None)
    if inner is None:
        yield component
        return
    for part in inner:
        yield from _parts(part)
