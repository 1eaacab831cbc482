"""A token that a model was trained to find before every text, and that its tokenizer does not write."""

from __future__ import annotations

import re
from typing import Any

ADVICE = "docs/models.md#the-first-token-of-a-text"
"""Says how a tokenizer is made to write it."""
_BEGINS = re.compile(r"\bbos\b|begin|start.?of.?(text|sentence)|^<s>$", re.IGNORECASE)
"""Names of tokens that do nothing but begin a text. Others, such as <|im_start|> or <|endoftext|>, are named as the first token
by models that were not trained with one."""


def unwritten_beginning(tokenizer: Any) -> int | None:
    """The id of the token that begins a text by its name, if the tokenizer has one and does not write it; otherwise None.

    Conversions of a model, such as to GGUF and back, can lose that a tokenizer writes it.
    """
    token, number = tokenizer.bos_token, tokenizer.bos_token_id
    if token is None or number in (tokenizer.eos_token_id, tokenizer.pad_token_id) or not _BEGINS.search(token):
        return None
    return None if tokenizer("a", verbose=False)["input_ids"][:1] == [number] else number


def write_beginning(tokenizer: Any) -> None:
    """Lets a tokenizer write its first token before every text, as the published one does."""
    from tokenizers.processors import TemplateProcessing

    begin, number = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin}:0 $A:0", pair=f"{begin}:0 $A:0 {begin}:1 $B:1", special_tokens=[(begin, number)]
    )
