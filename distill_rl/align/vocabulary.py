"""One tokenizer: the exact bytes that each of its ids stands for, and a copy of it that reads special tokens in a text as text."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from distill_rl.align.chats import CharSpan, any_of, render

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
            other = "Unigram" if isinstance(self.model["vocab"], list) else "WordPiece"
            kind = "BPE" if "merges" in self.model else other
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

    def speller(self) -> Callable[[str], tuple[bytes, bool]]:
        """A function: piece of the model → (the bytes that it stands for, whether it is a byte-fallback piece).

        A byte-fallback piece is one such as <0x0A>. The function undoes the byte map or ▁, and takes off the marks of
        word parts (`##`) and word ends. It must not be used for added tokens, which are written literally.
        """
        prefix = self.model.get("continuing_subword_prefix") or ""
        suffix = self.model.get("end_of_word_suffix") or ""
        fallback, byte_level, metaspace = bool(self.model.get("byte_fallback")), self.byte_level, self.metaspace
        letters = byte_of_letter()

        def spell(piece: str) -> tuple[bytes, bool]:
            """The bytes of a piece, and whether it is a byte-fallback piece."""
            if fallback and (match := _FALLBACK.match(piece)):
                return bytes([int(match[1], 16)]), True
            piece = piece.removeprefix(prefix).removesuffix(suffix)
            if byte_level:
                try:
                    return bytes([letters[ord(letter)] for letter in piece]), False
                except KeyError:
                    pass  # a letter outside the byte map: the decoder, too, takes such a piece literally
            elif metaspace:
                piece = piece.replace(metaspace, " ")
            return piece.encode(errors="surrogatepass"), False

        return spell


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


class TextEncoder:
    """Text → ids and character offsets. The caller's tokenizer is not modified.

    Its padding and truncation are off here. Special tokens are read in three ways, each by a copy of the tokenizer:

    - `_plain`: never, so whatever a text contains is text;
    - `_with_specials`: wherever they are written, as in what a chat template produces;
    - `_after_special`: never, for text that follows a special token: some tokenizers put a dummy space only before the
      beginning of the whole text.

    Raises:
        ValueError: a slow tokenizer, which gives neither the bytes of its ids nor the offsets of its tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        """The `tokenizers.Tokenizer` inside a transformers tokenizer, or the tokenizer itself if it is one."""
        if not (hasattr(self.backend, "to_str") and hasattr(self.backend, "encode_special_tokens")):
            rule = f"alignment needs a fast tokenizer (one with a tokenizer.json), got {type(tokenizer).__name__}"
            raise ValueError(f"{rule}; convert it, or choose a model that ships one")
        serialized = self.backend.to_str()
        described = json.loads(serialized)
        # Padding and truncation come first in the serialized form and decide no id.
        self.identity: str = serialized[max(0, serialized.find('"added_tokens"')) :]
        """The part of the serialized tokenizer that decides ids and bytes"""
        self.description = Description.read(described)
        added = self.description.added
        self.specials: dict[str, int] = {token["content"]: token["id"] for token in added if token["special"]}
        hidden = _hide_specials(described, self.description, set(self.specials))
        self._plain = _copy(self.backend, hidden or serialized)
        self._plain.encode_special_tokens = True

    @cached_property
    def _with_specials(self) -> Any:
        """A copy of the caller's tokenizer that reads special tokens wherever they are written."""
        copy = _copy(self.backend, self.backend.to_str())
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
    def special_pattern(self) -> re.Pattern[str] | None:
        """Matches any special token's text, the longest one first; None for a tokenizer without special tokens."""
        return any_of(self.specials)

    def first_special(self, text: str) -> int | None:
        """The id of the first special token that is written in a text; None if there is none."""
        match = self.special_pattern.search(text) if self.special_pattern else None
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

    def with_specials(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """As `offsets`, but the text of a special token is that token."""
        return _arrays(self._with_specials.encode(text))

    def chat(self, text: str, quoted: Sequence[CharSpan] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a rendered chat: special tokens count as such where the template writes them, not inside a message.

        If no message contains the text of a special token, the chat is encoded in one piece. Otherwise it is divided at
        the special tokens that the template writes, and the text between them is encoded without special tokens.

        Args:
            quoted: character spans in `text`, in order, in which what looks like a special token is text.
        Returns:
            int32 [n] ids; int64 [n, 2] character offsets. No special token is added.
        """
        pattern = self.special_pattern
        if not pattern or not any(pattern.search(text, start, stop) for start, stop in quoted):
            return _arrays(self._with_specials.encode(text, add_special_tokens=False))
        ids, offsets, done = [np.empty(0, np.int32)], [np.empty((0, 2), np.int64)], 0
        for start, stop in [*self._written_specials(text, quoted), (len(text), len(text))]:
            plain = self._after_special if done else self._plain
            for reader, piece_start, piece_stop in ((plain, done, start), (self._with_specials, start, stop)):
                piece, places = _arrays(reader.encode(text[piece_start:piece_stop], add_special_tokens=False))
                ids.append(piece)
                offsets.append(places + piece_start)
            done = stop
        return np.concatenate(ids), np.concatenate(offsets)

    def _written_specials(self, text: str, quoted: Sequence[CharSpan]) -> list[CharSpan]:
        """Character spans of the special tokens that the template writes, in order."""
        # A span includes the white space that its token strips. The tokenizer must have special tokens.
        assert self.special_pattern is not None
        strips = self.description.strips()
        spans, outside, done = [], 0, 0
        for begin, end in [*quoted, (len(text), len(text))]:
            for match in self.special_pattern.finditer(text, outside, begin):
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
    for merge in model.get("merges") or ():
        hidden.difference_update(merge.split(" ") if isinstance(merge, str) else merge)
    names = {piece: f"\U0010fffe{i}\U0010ffff" for i, piece in enumerate(sorted(hidden))}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        renamed: Any = {names.get(piece, piece): token for piece, token in vocabulary.items()}
    else:
        renamed = [[names.get(piece, piece), score] for piece, score in vocabulary]
    unknown = {"unk_token": names[model["unk_token"]]} if model.get("unk_token") in names else {}
    kept = [token for token in described["added_tokens"] if token["content"] not in hidden]
    return json.dumps({**described, "model": {**model, "vocab": renamed, **unknown}, "added_tokens": kept})


# The exact bytes that each id of a tokenizer stands for, and the ids that two vocabularies have in common.

# Finds out what a tokenizer does to a text by encoding test strings rather than by looking at its class.

# Texts that some tokenizers change: case, composition, compatibility forms, white space, control characters.
_PROBES = (
    "Hello World",
    "hello world",
    "\u00e9",
    "\ufb01 \u2460",
    "a  b",
    " a",
    "a\nb\tc\r\nd",
    "a\u00a0b",
    "a\u200bb",
    "a\x07b",
    "中 \U0001f600",
)


def _spell(encoder: TextEncoder, table: list[bytes], text: str) -> tuple[np.ndarray, bytes]:
    """Encodes a text without the special tokens around it: the ids, int32 [n], and the bytes that they spell."""
    ids = encoder.ids(text, add_special=False)
    return ids, b"".join(table[token] for token in ids.tolist())


def probe_normalization(encoder: TextEncoder, table: list[bytes], unknown: int | None) -> tuple[str, str | None]:
    """The values of `Vocabulary.normalization` (none | nfc | lossy) and `Vocabulary.lossy`, by encoding test strings.

    The second is why the tokens may not spell a text, or None. It may be set for a tokenizer that is not "lossy": if
    its only loss are characters that it does not know.

    Args:
        table: bytes of each id.
        unknown: id of the unknown token; test strings that contain it are skipped. None: there is none.
    """
    description = encoder.description
    _, composed = _spell(encoder, table, "e\u0301")
    composes = any(part["type"] == "NFC" for part in description.normalizers) or composed.endswith("\u00e9".encode())
    lossless = "nfc" if composes else "none"
    part = description.changes_text()
    for probe in _PROBES:
        ids, spelled = _spell(encoder, table, probe)
        if unknown is not None and unknown in ids:
            continue
        if spelled not in (probe.encode(), b" " + probe.encode()):
            changed = spelled.decode(errors="replace")
            return "lossy", f"{part or 'the tokenizer'} changes the text: {probe!r} is spelled {changed!r}"
    if part:
        return "lossy", f"{part} changes or drops some texts"
    if not (description.byte_level or description.model.get("byte_fallback")):
        return lossless, "characters outside its vocabulary become the unknown token"
    return lossless, None


def probe_spaces(encoder: TextEncoder, table: list[bytes]) -> tuple[bool, bool, bool]:
    """The values of `dummy`, `dummy_after_special` and `drops_spaces` of `Vocabulary`, by encoding a letter.

    All False if the tokenizer knows none of a few letters of several scripts; only its first eight special tokens are
    tried.

    Args:
        table: bytes of each id.
    """
    known_letters = (letter for letter in "ax1.e中" if _spell(encoder, table, letter)[1].strip() == letter.encode())
    letter = next(known_letters, None)
    if letter is None:
        return False, False, False
    spelling = letter.encode()
    dummy = _spell(encoder, table, letter)[1] == b" " + spelling
    two_words = _spell(encoder, table, f"{letter} {letter}")[1]
    specials = list(encoder.specials)[:8]
    after_special = dummy and any(_adds_space_after(encoder, table, literal, letter) for literal in specials)
    return dummy, after_special, two_words == spelling * 2


def _adds_space_after(encoder: TextEncoder, table: list[bytes], literal: str, letter: str) -> bool:
    """Whether the tokenizer puts a dummy space between the special token written as `literal` and a letter behind it."""
    ids = encoder.chat(letter + literal + letter)[0].tolist()
    if encoder.specials[literal] not in ids:
        return False
    after = ids[ids.index(encoder.specials[literal]) + 1 :]
    return b"".join(table[token] for token in after) == b" " + letter.encode()


def end_of_turn(tokenizer: Any, encoder: TextEncoder) -> int | None:
    """The id of the first special token that the chat template writes after an assistant's answer.

    None if there is none: no template, one that fails on a simple chat, or nothing special behind the answer.
    """
    question, answer = "\ue000question\ue001", "\ue000answer\ue001"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        text = render(tokenizer, messages)
    except Exception:  # no template, or one that rejects this chat; templates raise errors of many kinds
        return None
    rest = text.rpartition(answer)[2] if answer in text else ""
    return encoder.first_special(rest)


ROLES = ("bos", "eos", "pad", "unk")
STOPS = ("eos", "end_of_turn")
SPACE = 0x20


def words_of(text: bytes) -> np.ndarray:
    """uint64 [bytes]: the eight bytes from each byte on, with zeros after the last one; all share one copy of them."""
    return np.ndarray(len(text), np.uint64, text + bytes(8), strides=(1,))


class Table(NamedTuple):
    """A `Vocabulary` as compiled code reads it; −1 for a role that it does not have."""

    words: np.ndarray
    """`words_of` the bytes of all tokens"""
    starts: np.ndarray
    lengths: np.ndarray
    special: np.ndarray
    stops: np.ndarray
    bos: int
    unknown: int
    dummy: bool
    dummy_after_special: bool
    drops_spaces: bool


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Id → exact bytes for one tokenizer, and what it does to a text."""

    flat: np.ndarray
    """uint8: the bytes of all tokens, one token after another"""
    starts: np.ndarray
    """int64 [size + 1]: token i spells `flat[starts[i]:starts[i + 1]]`"""
    lengths: np.ndarray
    """int32 [size]: number of bytes; 0 for special ids and for ids that do not exist"""
    special: np.ndarray
    """bool [size]: added tokens with `special=True`, and the tokenizer's bos, eos, pad and unk"""
    byte_fallback: np.ndarray
    """bool [size]: pieces such as <0x0A>"""
    roles: Mapping[str, int]
    """bos | eos | end_of_turn | pad | unk → id, for the roles that the tokenizer has"""
    normalization: str
    """none | nfc | lossy"""
    lossy: str | None
    """Why the tokens do not always spell the text, or None"""
    family: str
    """byte_level | tiktoken | sentencepiece | bpe | unigram | wordpiece | wordlevel"""
    hash: str
    """SHA-256 of everything that decides ids and bytes"""
    dummy: bool = False
    """Whether the first token of a text may begin with a space that is not in the text, a dummy space"""
    dummy_after_special: bool = False
    """The same for the first token behind a special token inside a text"""
    drops_spaces: bool = False
    """Whether no token spells the space between two words"""
    unknown: int | None = None
    """The id that stands for any text that the model has no piece for"""
    literals: Mapping[int, bytes] = field(default_factory=dict)
    """Special id → the text that it is written as"""
    strips: Mapping[int, tuple[bool, bool]] = field(default_factory=dict)
    """Added id → whether it strips the white space (before it, behind it) where it is written; other ids strip none"""
    stops: tuple[int, ...] = ()
    """Ids that may end an answer, ascending: eos, end_of_turn, and further ids at which the model stops"""

    @property
    def size(self) -> int:
        """The highest id + 1, added tokens included."""
        return len(self.lengths)

    @cached_property
    def table(self) -> Table:
        """What compiled code reads of this vocabulary."""
        return Table(
            words_of(self.flat.tobytes()),
            self.starts,
            self.lengths,
            self.special,
            np.array(self.stops, np.int64),
            self.roles.get("bos", -1),
            -1 if self.unknown is None else self.unknown,
            self.dummy,
            self.dummy_after_special,
            self.drops_spaces,
        )

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Vocabulary:
        """Reads the vocabulary of a fast transformers tokenizer or of a `tokenizers.Tokenizer`.

        Of the latter only the unknown token's role is known. Test strings are encoded to see what the tokenizer does to
        a text. The tokenizer is not modified.

        Raises:
            ValueError: a slow tokenizer; a tokenizer without tokens.
        """
        return read_vocabulary(tokenizer, TextEncoder(tokenizer))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token spells; empty for a special token, and for an id below `size` that does not exist."""
        return self.flat[self.starts[token_id] : self.starts[token_id + 1]].tobytes()

    def spellings(self) -> list[bytes]:
        """The bytes that each id spells, by id; empty for special ids and for ids that do not exist."""
        flat = self.flat.tobytes()
        return [flat[start:stop] for start, stop in pairwise(self.starts.tolist())]

    def ids_by_bytes(self) -> dict[bytes, int]:
        """Bytes → the id that spells them, for all ids that spell any.

        Of several ids, plain pieces take precedence over byte-fallback ones, then lower ids over higher.
        """
        spellings = self.spellings()
        ids: dict[bytes, int] = {}
        for fallback in (False, True):
            for token in np.flatnonzero((self.byte_fallback == fallback) & (self.lengths > 0)).tolist():
                ids.setdefault(spellings[token], token)
        return ids

    def literal(self, token_id: int) -> bytes:
        """The UTF-8 bytes of the text that a special token is written as; empty for other tokens."""
        return self.literals.get(int(token_id), b"")

    def opens_with_space(self, token_id: int) -> bool:
        """Whether the bytes that a token spells begin with a space."""
        return bool(self.lengths[token_id] and self.flat[self.starts[token_id]] == SPACE)


def read_vocabulary(tokenizer: Any, encoder: TextEncoder, stops: Iterable[int] = ()) -> Vocabulary:
    """`Vocabulary.from_tokenizer`, given the tokenizer's encoder and, if known, further stop tokens.

    Args:
        tokenizer: gives the roles, by its attributes `bos_token_id` etc., and the chat template; a
            `tokenizers.Tokenizer` has neither.
        stops: further ids that end an answer, such as those of the model's generation config. Ids that spell text or do
            not exist are ignored, and so is the unknown token's.

    Raises:
        ValueError: a tokenizer without tokens.
    """
    description = encoder.description
    roles = {role: token for role in ROLES if (token := getattr(tokenizer, f"{role}_token_id", None)) is not None}
    unknown = description.unknown
    named = {*roles.values(), *([] if unknown is None else [unknown])}
    table, fallback, special, literals = _read_table(description, named)
    lengths = np.fromiter(map(len, table), np.int32, len(table))
    starts = np.zeros(len(table) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    if unknown is not None:
        roles.setdefault("unk", unknown)
    if (turn := end_of_turn(tokenizer, encoder)) is not None:
        roles["end_of_turn"] = turn
    normalization, lossy = probe_normalization(encoder, table, unknown)
    dummy, dummy_after_special, drops_spaces = probe_spaces(encoder, table)
    return Vocabulary(
        flat=np.frombuffer(b"".join(table), np.uint8),
        starts=starts,
        lengths=lengths,
        special=special,
        byte_fallback=fallback,
        roles=roles,
        normalization=normalization,
        lossy=lossy,
        family=description.family,
        hash=hashlib.sha256(encoder.identity.encode(errors="surrogatepass")).hexdigest(),
        dummy=dummy,
        dummy_after_special=dummy_after_special,
        drops_spaces=drops_spaces,
        unknown=unknown,
        literals=literals,
        strips=description.strips(),
        stops=_stops(roles, special, stops),
    )


def _stops(roles: Mapping[str, int], special: np.ndarray, more: Iterable[int]) -> tuple[int, ...]:
    """The ids that may end an answer, ascending: eos, end_of_turn and the special ones among `more`."""
    # The unknown token is never taken from `more`.
    stops = {roles[role] for role in STOPS if role in roles}
    stops |= {token for token in more if 0 <= token < len(special) and special[token]} - {roles.get("unk", -1)}
    return tuple(sorted(stops))


def _read_table(
    description: Description, named: set[int]
) -> tuple[list[bytes], np.ndarray, np.ndarray, dict[int, bytes]]:
    """(bytes of each id, bool: byte fallback, bool: special, special id → the text that it is written as)."""
    pieces = description.pieces
    size = 1 + max([*pieces.values(), *(added["id"] for added in description.added), *named], default=-1)
    if size == 0:
        raise ValueError("alignment needs a tokenizer with tokens, got an empty one; load the model's own tokenizer")
    table, literals = [b""] * size, {}
    fallback, special = np.zeros(size, bool), np.zeros(size, bool)
    spell = description.speller()
    for piece, token in pieces.items():
        table[token], fallback[token] = spell(piece)
    model_ids = set(pieces.values())
    for added in description.added:
        token, content = added["id"], added["content"]
        # A run of ▁ that is also a piece of the model stands for as many spaces.
        spaces = description.metaspace and token in model_ids and not content.strip(description.metaspace)
        table[token] = (" " * len(content) if spaces else content).encode()
        fallback[token] = False
        special[token] = added["special"]
        if added["special"] or token in named:
            literals[token] = content.encode()
    special[list(named)] = True
    for token in np.flatnonzero(special).tolist():
        table[token] = b""
    return table, fallback, special, literals


def common_vocabulary(student: Vocabulary, teacher: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """The ids that two vocabularies have in common, paired one to one.

    1. Ids that spell the same bytes; of several such ids the one of `Vocabulary.ids_by_bytes`.
    2. eos with eos, end_of_turn with end_of_turn, bos with bos, if both ids are still unpaired.
    3. Special tokens that are written alike, if both are still unpaired and either both or neither end an answer.

    Two copies of one tokenizer have every id in common.

    Returns:
        int32 [n]: student ids, those of step 1 in ascending order; int32 [n]: teacher ids.
    """
    if student.hash == teacher.hash:
        return np.arange(student.size, dtype=np.int32), np.arange(teacher.size, dtype=np.int32)
    student_ids, teacher_ids = student.ids_by_bytes(), teacher.ids_by_bytes()
    common = student_ids.keys() & teacher_ids.keys()
    pairs = sorted((student_ids[spelling], teacher_ids[spelling]) for spelling in common)
    matched = [left for left, _ in pairs], [right for _, right in pairs]
    for student_id, teacher_id in _special_pairs(student, teacher):
        if student_id not in matched[0] and teacher_id not in matched[1]:
            matched[0].append(student_id)
            matched[1].append(teacher_id)
    return np.array(matched[0], np.int32), np.array(matched[1], np.int32)


def _special_pairs(student: Vocabulary, teacher: Vocabulary) -> Iterator[tuple[int, int]]:
    """Candidate pairs (student id, teacher id) of tokens without bytes, best first; an id may occur in several."""
    for role in (*STOPS, "bos"):
        if role in student.roles and role in teacher.roles:
            yield student.roles[role], teacher.roles[role]
    teacher_id_of = {literal: token for token, literal in sorted(teacher.literals.items(), reverse=True)}
    for student_id, literal in sorted(student.literals.items()):
        teacher_id = teacher_id_of.get(literal)
        # Unknown tokens are never paired: what is unknown to one tokenizer need not be unknown to the other.
        if teacher_id is None or student_id == student.unknown or teacher_id == teacher.unknown:
            continue
        if (student_id in student.stops) == (teacher_id in teacher.stops):
            yield student_id, teacher_id


def encode(text: str) -> bytes:
    """The text's UTF-8 bytes.

    Raises:
        ValueError: a lone surrogate, which UTF-8 cannot encode.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        rule = f"a text must consist of Unicode characters, got a lone surrogate at character {error.start}"
        raise ValueError(f"{rule}; decode the data again") from error


def compose(text: str) -> str:
    """The text in NFC."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)
