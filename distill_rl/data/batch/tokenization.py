"""Documents → tokens: one tokenizer's ids, and which of them are trained on."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

import numpy as np

from distill_rl.align.chats import CharSpan, any_of, quoted_spans
from distill_rl.align.vocabulary import TextEncoder
from distill_rl.config.schema import DataConfig
from distill_rl.data.batch.chat import TemplateCoverage, render, render_document, roles_to_train_on
from distill_rl.data.reading.layouts import template_options
from distill_rl.errors import DataError
from distill_rl.system.template_budget import LIMITED
from distill_rl.types import NAME_BYTES


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document's tokens."""

    input_ids: np.ndarray
    """int32 [n]"""
    label_mask: np.ndarray
    """bool [n]; True if token j is trained on, as the label of position j - 1"""
    truncated: bool = False
    """Whether tokens of the document are left out."""
    left_out: tuple[str, ...] = ()
    """Words for the parts of a chat that a chat template does not write."""
    name: bytes = b""
    """Of the document (`name_of`); empty for one that is not from `Tokenization`."""

    @property
    def has_labels(self) -> bool:
        """Whether any token but the first, which nothing predicts, is trained on."""
        return bool(self.label_mask[1:].any())

    def part(self, start: int, stop: int, prefix: np.ndarray) -> Encoded:
        """The tokens from `start` up to `stop`, behind a prefix that is not trained on.

        Args:
            prefix: int32 [k]
        """
        ids = np.concatenate([prefix, self.input_ids[start:stop]])
        mask = np.concatenate([np.zeros(len(prefix), dtype=bool), self.label_mask[start:stop]])
        return replace(self, input_ids=ids, label_mask=mask)

    def cut(self, length: int) -> Encoded:
        """The first `length` tokens; `truncated` if any were cut off, now or before."""
        ids, mask, truncated = self.input_ids[:length], self.label_mask[:length], len(self.input_ids) > length
        return replace(self, input_ids=ids, label_mask=mask, truncated=truncated or self.truncated)


@dataclass(frozen=True, slots=True)
class KnownIds:
    """The ids of a tokenizer that a model knows: 0 to `count` - 1."""

    count: int
    model: str
    """The model in words, as in `the student`."""
    by_tokenizer: bool = False
    """Whether its own tokenizer has no more; otherwise its embedding table has no more rows."""

    def __str__(self) -> str:
        return f"the {self.count:,} {'token ids' if self.by_tokenizer else 'embedding rows'} of {self.model}"


def unknown_token(what: str, ids: Iterable[int], known: Sequence[KnownIds], tokenizer: Any) -> DataError | None:
    """The error for the first of a text's ids that some model does not know; None if all models know all ids.

    Args:
        what: the text, by the name that the user knows.
    """
    least = min(each.count for each in known)
    first = next((id for id in ids if id >= least), None)
    if first is None:
        return None
    lacking = [each for each in known if each.count <= first]
    remedy = "give the model a row for it (resize_token_embeddings)"
    if all(each.by_tokenizer for each in lacking):
        remedy = "set teachers[].loss=hybrid"
    rule = f"{' and '.join(map(str, lacking))} must include every token of the text"
    value = f"{tokenizer.convert_ids_to_tokens(first)} (id {first})"
    return DataError(what, rule, value, f"leave this token out, or {remedy}")


class Tokenization:
    """Turns documents into tokens with one tokenizer.

    Text gets the special tokens that the tokenizer adds, and an end-of-text token if the tokenizer has one. Chat
    messages are rendered by the tokenizer's chat template, which writes its own special tokens.

    Args:
        tokenizer: a fast transformers tokenizer.
        data: which turns are trained on, and how documents are read and cut.
        format: what the rows hold; `data.format` may leave that open. Only "text" matters here, which does not go with
            turns to train on; each document is read by what it holds.
        stops: ids at which generation stops, besides the tokenizer's eos: the student's, `models.stops.stops_of`.

    Raises:
        DataError: a slow tokenizer; turns to train on with `format` "text".
    """

    def __init__(self, tokenizer: Any, data: DataConfig, *, format: str, stops: Collection[int] = ()):
        if not tokenizer.is_fast:
            rule = "a fast tokenizer (tokenizer.json), which reports the offsets of its tokens"
            raise DataError("student.tokenizer", rule, type(tokenizer).__name__)
        self.tokenizer, self.max_length, self.unrendered = tokenizer, data.max_length, data.unrendered
        self.roles = roles_to_train_on(data.loss_on, data.loss_roles)
        """The roles whose turns are trained on; empty: all tokens are."""
        self.stops, self._requires_stops = StopTokens.of(tokenizer, stops), data.stops == "required"
        self.special_tokens_in_text = data.special_tokens_in_text
        self._teaches_stops: bool | None = None
        self._coverage = TemplateCoverage(tokenizer, "the student's tokenizer")
        if format == "text" and self.roles:
            raise self._no_turns("rows of text")

    def encode(self, document: Mapping[str, Any]) -> Encoded:
        """The tokens of one document (`encode_all`), cut at `max_length`.

        Raises:
            DataError: as for `encode_all`.
        """
        return self.encode_all(document).cut(self.max_length)

    def encode_all(self, document: Mapping[str, Any]) -> Encoded:
        """Tokenises one document: `{"row": int, "text": str}`, or a chat (`RowLayout.document`).

        Text gets eos unless it ends in it already or there is none. `label_mask` is True for all tokens or, if only some
        turns are trained on, for theirs.

        Raises:
            DataError: text although only some turns are trained on; a chat that cannot be rendered in full, or whose
                turns cannot be found; names the document's row.
        """
        if "messages" in document:
            text, spans, left_out = self.render(document)
            tokens, offsets = self.tokens(document, text)
            mask = self.labels(document, spans, tokens, offsets)
            return Encoded(tokens, mask, left_out=left_out, name=name_of(text))
        self.require_text_allowed(document)
        ids = self.tokenizer(document["text"], return_attention_mask=False, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        if end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        return replace(_encoded(ids), name=name_of(document["text"]))

    @LIMITED
    def render(self, document: Mapping[str, Any]) -> tuple[str, list[CharSpan] | None, tuple[str, ...]]:
        """A chat's text, the character spans of the turns that are trained on (None: all of it), and what the template
        leaves out.

        Raises:
            DataError: as for `encode`.
        """
        text, spans, written = render_document(
            self.tokenizer,
            document,
            roles=self.roles,
            stops=self.stops.texts,
            stops_in_text=self.special_tokens_in_text,
        )
        return text, spans, self._coverage.check(document, written, self.unrendered)

    def labels(
        self, document: Mapping[str, Any], spans: Sequence[CharSpan] | None, ids: np.ndarray, offsets: np.ndarray
    ) -> np.ndarray:
        """bool [n]: which tokens of a chat are trained on.

        Args:
            spans: of the turns that are; None: everything is.
            ids: int32 [n].
            offsets: int64 [n, 2], the characters that each token holds.

        Raises:
            DataError: no stop is ever learnt with this template.
        """
        if spans is None:
            return np.ones(len(ids), dtype=bool)
        mask = holding(spans, offsets)
        if "assistant" in self.roles and self._requires_stops and mask.any():
            self._require_stop(document, int(ids[mask.nonzero()[0][-1]]))
        return mask

    def tokens(self, document: Mapping[str, Any], text: str) -> tuple[np.ndarray, np.ndarray]:
        """A rendered chat's ids, int32 [n], and the characters that each holds, int64 [n, 2]."""
        if not self.special_tokens_in_text and self.stops.quoted_in(document["messages"]):
            options = template_options(document)
            write = partial(render, self.tokenizer, **options)
            quoted = quoted_spans(text, document["messages"], write, self._encoder.special_pattern)
            return self._encoder.chat(text, quoted)
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False
        )
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoded["input_ids"], dtype=np.int32), offsets

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer)

    def _require_stop(self, document: Mapping[str, Any], last: int) -> None:
        """Raises DataError if the last token that is trained on is no stop, and never is with this template."""
        if last in self.stops.ids:
            self._teaches_stops = True
        elif self._teaches_stops is None:
            self._teaches_stops = self._teaches_a_stop()
        if not self._teaches_stops:
            shown = self.tokenizer.decode([last])
            stops = ", ".join(map(repr, self.stops.texts)) or "no token"
            rule = f"an answer must end in a token at which generation stops; the student's stops at {stops}"
            remedy = (
                "add the token that ends a turn to eos_token_id of the student's generation_config.json, use a template that "
                "writes a stop, or set data.stops=none"
            )
            raise DataError(f"row {document['row']}", rule, f"turns that end in {shown!r}", remedy)

    def _teaches_a_stop(self) -> bool:
        """Whether an answer to a question ends in a stop; also if the template does not take them."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
        document = {"row": 0, "messages": chat}
        try:
            text, spans, _ = render_document(self.tokenizer, document, roles=("assistant",), stops=self.stops.texts)
        except DataError:
            return True
        ids, offsets = self.tokens(document, text)
        labelled = ids[holding(spans or (), offsets)]
        return len(labelled) == 0 or int(labelled[-1]) in self.stops.ids

    def require_text_allowed(self, document: Mapping[str, Any]) -> None:
        """Raises DataError, naming the row, for a document of text if only some turns are trained on."""
        if self.roles:
            raise self._no_turns(f"text in row {document['row']}")

    def _no_turns(self, found: str) -> DataError:
        setting = "data.loss_on=assistant" if self.roles == ("assistant",) else "data.loss_roles"
        return DataError(setting, "chat messages", found, "use data.loss_on=all or data.format=messages")


@dataclass(frozen=True, slots=True)
class StopTokens:
    """The special tokens of a tokenizer, and those at which generation stops."""

    ids: frozenset[int]
    """Of the stops."""
    texts: tuple[str, ...]
    """What the stops are written as."""
    special: re.Pattern[str] | None
    """Matches the text of any special token."""

    @classmethod
    def of(cls, tokenizer: Any, stops: Collection[int]) -> StopTokens:
        """Those of a tokenizer.

        Args:
            stops: ids besides the tokenizer's eos.
        """
        added = tokenizer.added_tokens_decoder
        eos = tokenizer.eos_token_id
        ids = frozenset([*stops, *([] if eos is None else [eos])])
        texts = tuple(
            str(added[token]) if token in added else tokenizer.convert_ids_to_tokens(token) for token in sorted(ids)
        )
        special = any_of({str(token) for token in added.values() if token.special})
        return cls(ids, tuple(text for text in texts if text), special)

    def quoted_in(self, value: Any) -> bool:
        """Whether a text in the value, such as a chat's messages, contains what a special token is written as."""
        if isinstance(value, str):
            return self.special is not None and self.special.search(value) is not None
        if isinstance(value, Mapping):
            return any(map(self.quoted_in, value.values()))
        return isinstance(value, list | tuple) and any(map(self.quoted_in, value))


def holding(spans: Sequence[CharSpan], offsets: np.ndarray) -> np.ndarray:
    """bool [n]: which tokens hold a character of one of the spans; one without characters, if it stands inside.

    Args:
        spans: (first, stop), in characters of the text, `stop` excluded.
        offsets: int64 [n, 2], the characters that each token holds.
    """
    starts, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    mask = np.zeros(len(offsets), dtype=bool)
    for first, stop in spans:
        mask |= (starts < stop) & (ends > first) & (first < stop)
    return mask


def _encoded(ids: Sequence[int]) -> Encoded:
    """A document of these ids, all of which are trained on."""
    return Encoded(np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=bool))


NO_TOKENS = _encoded([])
"""An empty document; keeps the place of one that is left out."""


def name_of(text: str) -> bytes:
    """The name of a document, 16 bytes: BLAKE2b of its text in Unicode's form NFC, as UTF-8.

    Args:
        text: as the tokenizer gets it; of a chat, what the chat template makes of it. Lone surrogates are allowed.
    """
    normalised = unicodedata.normalize("NFC", text)
    return blake2b(normalised.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES).digest()
