"""What the code under test makes of a chat with a template, compared with what must come of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from distill_rl.config.schema import DataConfig
from distill_rl.data.batch.tokenization import Encoded, Tokenization
from distill_rl.data.reading.layouts import VARIABLES
from distill_rl.errors import DataError
from tests.chats.kinds import KINDS, Chat, Kind
from tests.chats.oracle import Expected, expected, labels
from tests.chats.templates import TEMPLATES, Template
from tests.chats.tokenizers import BYTE_LEVEL, TOKENIZERS, byte_spans, special_ids

RIGHT = {
    "right": "the labels are those of the turns",
    "said": "the same, with a note that the template leaves out something that is not trained on",
    "template": "refused: the template itself refuses the chat",
    "left out": "refused: the template does not write a part of what is trained on",
    "no stop": "refused: nothing ends a turn",
}
"""What can become of a chat, with what it means"""


@dataclass(frozen=True, slots=True)
class Cell:
    """A template, a kind of chats and a tokenizer."""

    template: Template
    kind: Kind
    tokenizer: str
    """A key of `TOKENIZERS`"""

    def outcome(self, tokenizer: Any) -> str:
        """A key of `RIGHT`, or what is wrong.

        Args:
            tokenizer: of this cell.
        """
        chat = self.kind.chat(self.template)
        wanted = expected(tokenizer, self.template, chat)
        try:
            encoded = _encode(tokenizer, self.template, chat)
        except DataError as error:
            return _outcome_of_refusal(error, wanted)
        if wanted.refused is not None:
            return f"not refused: {wanted.refused}"
        wrong = (
            self._wrong_tokens(tokenizer, chat, wanted, encoded)
            if self.tokenizer in BYTE_LEVEL
            else self._wrong_by_offsets(tokenizer, wanted, encoded)
        )
        return wrong or ("said" if encoded.left_out else "right")

    def _wrong_tokens(self, tokenizer: Any, chat: Chat, wanted: Expected, encoded: Encoded) -> str:
        """What is wrong with the tokens of a byte-level tokenizer; empty for nothing."""
        ids = encoded.input_ids.tolist()
        whole, learnt = wanted.text, wanted.learnt
        if wanted.open:
            ends = {end: tokenizer.convert_tokens_to_ids(end) for end in self.template.ends}
            end = next((end for end, id in ends.items() if ids[-1] == id), None)
            if end is None:
                return "no stop behind the last turn"
            whole, learnt = whole + end, (*learnt, *[True] * len(end))
        spelt, spans = byte_spans(tokenizer, ids)
        if spelt != whole.encode():
            return "another text"
        if not chat.quoted and ids != _ids(tokenizer, whole):
            return "other tokens"
        if chat.quoted:
            harmless = whole.replace(f"qa{chat.quoted}", "qa")
            special = special_ids(tokenizer)
            if sum(id in special for id in ids) != sum(id in special for id in _ids(tokenizer, harmless)):
                return "a quoted token became a special one"
        ends_of_characters = list(accumulate(len(character.encode()) for character in whole))
        sizes = np.diff([0, *ends_of_characters])
        return _wrong_labels(labels(spans, np.repeat(learnt, sizes).tolist()), encoded)

    def _wrong_by_offsets(self, tokenizer: Any, wanted: Expected, encoded: Encoded) -> str:
        """What is wrong with the tokens of another tokenizer, by the offsets that it reports; empty for nothing."""
        tokens = tokenizer(wanted.text, add_special_tokens=False, return_offsets_mapping=True)
        if encoded.input_ids.tolist() != tokens["input_ids"]:
            return "other tokens"
        return _wrong_labels(labels(tokens["offset_mapping"], wanted.learnt), encoded)


def tokenizers_of(template: Template) -> list[str]:
    """The byte-level tokenizers that a template is tried with: a turn that ends with a token needs one that knows it."""
    return [name for name in BYTE_LEVEL if name == "special" or not template.ends]


@cache
def outcomes(tokenizer: str, template: str) -> dict[str, str]:
    """Kind → `Cell.outcome` for one template and one kind of tokenizer."""
    made = TOKENIZERS[tokenizer](TEMPLATES[template])
    kinds = [kind for kind in KINDS.values() if tokenizer in BYTE_LEVEL or not kind.name.startswith("quoted")]
    return {kind.name: Cell(TEMPLATES[template], kind, tokenizer).outcome(made) for kind in kinds}


def tokenization_of(tokenizer: Any, template: Template, unrendered: Literal["fail", "warn"] = "fail") -> Tokenization:
    """The tokenisation of chats with a template, which trains on the assistant's turns."""
    added = tokenizer.get_added_vocab()
    stops = (*template.ends, *([] if template.no_stop else [template.stop]))
    return Tokenization(
        tokenizer,
        DataConfig(
            loss_on="assistant",
            max_length=100_000,
            unrendered=unrendered,
            stops="none" if template.stop not in added and not template.no_stop else "required",
        ),
        format="messages",
        stops=[added[stop] for stop in stops if stop in added],
    )


def document_of(template: Template, chat: Chat) -> dict[str, Any]:
    """A chat as the code under test reads it."""
    document = {"row": 0, "messages": copy.deepcopy(chat.messages), VARIABLES: dict(template.variables)}
    return document | ({"tools": copy.deepcopy(chat.tools)} if chat.tools else {})


def _encode(tokenizer: Any, template: Template, chat: Chat) -> Encoded:
    """The tokens and labels of a chat, by the code under test."""
    return tokenization_of(tokenizer, template).encode_all(document_of(template, chat))


def _outcome_of_refusal(error: DataError, wanted: Expected) -> str:
    """The outcome for a chat that was refused.

    A chat that has to be refused is so for the oracle's reason, whatever the message says; but a template that refuses a
    chat itself has to be named as the one that does.
    """
    of_template = "accepts" in error.rule
    if wanted.refused == "template":
        return "template" if of_template else f"refused as if the template accepted it: {error}"
    if wanted.refused is not None:
        return wanted.refused
    if of_template:
        return f"refused without need: the template fails ({error.value})"
    return f"refused without need: {error.value}"


def _wrong_labels(wanted: np.ndarray, encoded: Encoded) -> str:
    """Which labels are wrong, in words; empty for none."""
    missing, extra = int((wanted & ~encoded.label_mask).sum()), int((encoded.label_mask & ~wanted).sum())
    counts = [f"{missing} missing"] * bool(missing) + [f"{extra} too many"] * bool(extra)
    return f"labels: {', '.join(counts)}" if counts else ""


def _ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]
