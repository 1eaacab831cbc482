"""Tokenizers for the chat templates: with special tokens, without any, and of other kinds than byte-level BPE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.chats.kinds import KINDS, say
from tests.chats.oracle import expected
from tests.chats.templates import TEMPLATES, Template
from tests.helpers.align import family
from tests.helpers.tokenizers import seeded_words

PLAIN_EOS = "<plain eos>"
"""The eos of tokenizers that know no token of any template"""
_ROLES = ("user", "assistant", "system", "tool", "model", "name", "arguments", "yes", "no")
_BYTES = pre_tokenizers.ByteLevel.alphabet()


def special(template: Template) -> PreTrainedTokenizerFast:
    """A byte-level BPE in which the template's special tokens are special."""
    return _with_template(template, _byte_level(), template.eos, _added(template))


def plain(template: Template) -> PreTrainedTokenizerFast:
    """A byte-level BPE that knows no token of the template: its headers are text, and tokens reach across borders.

    Its pieces are not split at words, so that merges such as `\\nans` of a header and an answer are among its tokens.
    """
    return _with_template(template, _across_borders(), PLAIN_EOS, [_special(PLAIN_EOS)])


def metaspace(template: Template) -> PreTrainedTokenizerFast:
    """A BPE as of SentencePiece, which writes blanks as `▁` and puts one before every stretch between special tokens."""
    return _with_template(template, _of_family("spm_always"), template.eos, _added(template))


def wordpiece(template: Template) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer, which lowers capitals and drops white space."""
    return _with_template(template, _of_family("wordpiece"), template.eos, _added(template))


TOKENIZERS: dict[str, Callable[[Template], PreTrainedTokenizerFast]] = {
    "special": special,
    "plain": plain,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}
BYTE_LEVEL = ("special", "plain")


def byte_spans(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> tuple[bytes, list[tuple[int, int]]]:
    """What the ids of a byte-level tokenizer spell, and each token's first and stop byte in it."""
    to_byte = _byte_of_character()
    added = tokenizer.get_added_vocab()
    spelt, spans = b"", []
    for token in tokenizer.convert_ids_to_tokens(ids):
        piece = token.encode() if token in added else bytes(to_byte[character] for character in token)
        spans.append((len(spelt), len(spelt) + len(piece)))
        spelt += piece
    return spelt, spans


def special_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """The ids of the special tokens."""
    return {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}


def _with_template(template: Template, tokenizer: Tokenizer, eos: str, added: list[AddedToken]) -> Any:
    """A transformers tokenizer with this template and these further tokens."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token=eos, clean_up_tokenization_spaces=False
    )
    fast.add_tokens([token for token in added if token.special], special_tokens=True)
    fast.add_tokens([token for token in added if not token.special])
    fast.chat_template = template.text
    return fast


def _added(template: Template) -> list[AddedToken]:
    """The tokens of a template."""
    return [_special(token) for token in dict.fromkeys((*template.special, template.eos))] + [
        AddedToken(token, special=False, normalized=False) for token in template.added
    ]


def _special(token: str) -> AddedToken:
    return AddedToken(token, special=True, normalized=False)


@cache
def _byte_level() -> Tokenizer:
    """A byte-level BPE that splits texts at words."""
    words = [*seeded_words(0, 2000), *(say(what, 1) for what in ("ans", "usr", "sys")), *_ROLES * 20]
    return _train([" ".join(words[i : i + 20]) for i in range(0, len(words), 20)], 600, use_regex=True)


@cache
def _across_borders() -> Tokenizer:
    """A byte-level BPE that joins any two neighbours, trained on chats of all templates."""
    return _train(list(_chats()), 2400, use_regex=False)


def _chats() -> Iterator[str]:
    """Texts of all templates, and answers right behind their headers."""
    for template in TEMPLATES.values():
        tokenizer = special(template)
        for kind in ("two turns", "thoughts", "call answer"):
            yield expected(tokenizer, template, KINDS[kind].chat(template)).text
        yield from [template.header + say("ans", 1)] * 5


def _train(texts: list[str], size: int, *, use_regex: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(_BYTES), show_progress=False, max_token_length=None if use_regex else 6
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _of_family(name: str) -> Tokenizer:
    """A copy of a tokenizer of `tests.helpers.align`."""
    return Tokenizer.from_str(family(name).backend_tokenizer.to_str())


@cache
def _byte_of_character() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
