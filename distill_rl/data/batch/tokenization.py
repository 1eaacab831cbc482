"""Documents → tokens: one tokenizer's ids, and which of them are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from distill_rl.align.chats.rendering import CharSpan
from distill_rl.config.schema import DataConfig
from distill_rl.data.batch.chat import render_document, roles_to_train_on
from distill_rl.data.batch.naming import name_of
from distill_rl.data.batch.unrendered import TemplateCoverage
from distill_rl.errors import DataError


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
    """Of the document (`naming`); empty for one that is not from `Tokenization`."""

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
        truncated = self.truncated or len(self.input_ids) > length
        return replace(
            self, input_ids=self.input_ids[:length], label_mask=self.label_mask[:length], truncated=truncated
        )


class Tokenization:
    """Turns documents into tokens with one tokenizer.

    Text gets the special tokens that the tokenizer adds, and an end-of-text token if the tokenizer has one. Chat
    messages are rendered by the tokenizer's chat template, which writes its own special tokens.

    Args:
        tokenizer: a fast transformers tokenizer.
        format: `data.format`. Only "text" matters here, which does not go with `loss_on` "assistant"; each document is
            then read by what it holds.
        loss_on: "all", or "assistant" to train only on the assistant's turns, including their end-of-turn tokens.
        max_length: most tokens of a document, for `encode`.
        loss_roles: roles to train on in place of `loss_on`; empty: `loss_on` decides.
        unrendered: `data.unrendered`.

    Raises:
        DataError: a slow tokenizer; turns to train on with `format` "text".
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        format: str,
        loss_on: str,
        max_length: int,
        loss_roles: Sequence[str] = (),
        unrendered: Literal["fail", "warn"] = "fail",
    ):
        if not tokenizer.is_fast:
            rule = "a fast tokenizer (tokenizer.json), which reports the offsets of its tokens"
            raise DataError("student.tokenizer", rule, type(tokenizer).__name__)
        self.tokenizer, self.max_length, self.unrendered = tokenizer, max_length, unrendered
        self.roles = roles_to_train_on(loss_on, loss_roles)
        """The roles whose turns are trained on; empty: all tokens are."""
        self._coverage = TemplateCoverage(tokenizer, "the student's tokenizer")
        if format == "text" and self.roles:
            raise self._no_turns("rows of text")

    @classmethod
    def of(cls, tokenizer: Any, data: DataConfig, *, format: str) -> Tokenization:
        """The tokenisation of a run's documents.

        Args:
            format: what the rows hold; `data.format` may leave that open.
        """
        return cls(
            tokenizer,
            format=format,
            loss_on=data.loss_on,
            max_length=data.max_length,
            loss_roles=data.loss_roles,
            unrendered=data.unrendered,
        )

    def encode(self, document: Mapping[str, Any]) -> Encoded:
        """The tokens of one document (`encode_all`), cut at `max_length`.

        Raises:
            DataError: as for `encode_all`.
        """
        return self.encode_all(document).cut(self.max_length)

    def encode_all(self, document: Mapping[str, Any]) -> Encoded:
        """Tokenises one document: `{"row": int, "text": str}`, or a chat (`Layout.document`).

        Text gets eos unless it ends in it already or there is none. `label_mask` is True for all tokens or, if only some
        turns are trained on, for theirs.

        Raises:
            DataError: text although only some turns are trained on; a chat that cannot be rendered in full, or whose
                turns cannot be found; names the document's row.
        """
        if "messages" in document:
            return self._encode_chat(document)
        self.require_text_allowed(document)
        ids = self.tokenizer(document["text"], return_attention_mask=False, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        if end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        return replace(_encoded(ids), name=name_of(document["text"]))

    def _encode_chat(self, document: Mapping[str, Any]) -> Encoded:
        """The tokens of a chat, with the mask of those to train on.

        Raises:
            DataError: a chat that cannot be rendered, or whose assistant turns cannot be found; names the row.
        """
        text, spans, left_out = self.render(document)
        encoded = self.tokenizer(
            text,
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=bool(self.roles),
            verbose=False,
        )
        mask = None
        if self.roles:
            starts = np.asarray([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
            mask = starts_within(spans, starts)
        return replace(_encoded(encoded["input_ids"], mask), left_out=left_out, name=name_of(text))

    def render(self, document: Mapping[str, Any]) -> tuple[str, list[CharSpan], tuple[str, ...]]:
        """A chat's text, the character spans of the turns that are trained on, and what the template leaves out.

        Without `roles`, all tokens are trained on and there are no spans.

        Raises:
            DataError: as for `encode`.
        """
        text, spans = render_document(self.tokenizer, document, roles=self.roles)
        return text, spans, self._coverage.check(document, text, self.unrendered)

    def require_text_allowed(self, document: Mapping[str, Any]) -> None:
        """Raises DataError, naming the row, for a document of text if only some turns are trained on."""
        if self.roles:
            raise self._no_turns(f"text in row {document['row']}")

    def _no_turns(self, found: str) -> DataError:
        """The error for rows without turns to train on, for the caller to raise.

        Args:
            found: what there is in place of chat messages.
        """
        setting = "data.loss_on=assistant" if self.roles == ("assistant",) else "data.loss_roles"
        return DataError(setting, "chat messages", found, "use data.loss_on=all or data.format=messages")


def starts_within(spans: Sequence[tuple[int, int]], starts: np.ndarray) -> np.ndarray:
    """bool [n]: which tokens start inside one of the spans.

    Args:
        spans: (first, stop), in characters of the text, `stop` excluded.
        starts: int [n], each token's first character.
    """
    mask = np.zeros(len(starts), dtype=bool)
    for first, stop in spans:
        mask |= (starts >= first) & (starts < stop)
    return mask


def _encoded(ids: Sequence[int], mask: np.ndarray | None = None) -> Encoded:
    """A document of these ids; without a mask, all of its tokens are trained on."""
    if mask is None:
        mask = np.ones(len(ids), dtype=bool)
    return Encoded(np.asarray(ids, dtype=np.int32), mask)


NO_TOKENS = _encoded([])
"""An empty document; keeps the place of one that is left out."""
