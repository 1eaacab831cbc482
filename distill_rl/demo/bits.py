"""Bits per byte: how many bits of information a model lacks about each byte of a text.

Shapes: R rows of a batch, S tokens of the longest, N positions whose next token is counted, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from distill_rl.align.chats import text_of
from distill_rl.config.schema import DataConfig
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.models import forward
from distill_rl.models.families import family_of
from distill_rl.models.forward import row_positions

BATCH_TOKENS = 4096
"""Positions of a batch, padding included, unless a single row has more."""
CHUNK_BYTES = 128 * 2**20
"""Of the fp32 logits that are made at once."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A document as one model reads it."""

    ids: np.ndarray
    """int64 [n]"""
    counted: np.ndarray
    """bool [n]: tokens whose log-probability counts; never the first, which nothing predicts."""
    num_bytes: int
    """UTF-8 bytes of the text that they spell."""


def encode(tokenizer: Any, document: Mapping[str, Any], data: DataConfig) -> EncodedText:
    """The tokens of a held-out document, and the bytes that they stand for.

    Of a text all tokens count but special ones. If the tokenizer writes none before the text, its first token is not
    predicted, and its bytes do not count either. Of a chat the tokens that training counts do (`data.loss_on`), with the
    ends of turns; the bytes are those of the contents alone, so that they are the same whatever a template writes.
    """
    if "messages" in document:
        return _encode_chat(tokenizer, document, data)
    text = document["text"]
    read = tokenizer(text, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    ids = np.array(read["input_ids"], dtype=np.int64)
    ends = np.array(read["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    counted = ends[:, 1] > ends[:, 0]
    unpredicted = 0
    if counted[:1].any():
        unpredicted, counted[0] = int(ends[0, 1]), False
    return EncodedText(ids, counted, len(text[unpredicted:].encode("utf-8", "surrogatepass")))


def begun(document: EncodedText, token: int) -> EncodedText:
    """The document with a token before it; as before, its own first token does not count."""
    ids, counted = np.insert(document.ids, 0, token), np.insert(document.counted, 0, False)
    return EncodedText(ids, counted, document.num_bytes)


def beginning(tokenizer: Any, document: Mapping[str, Any], longest: int | None) -> Mapping[str, Any]:
    """A document with at most `longest` tokens of its text; a chat, or without a limit any document, as it is."""
    if longest is None or "text" not in document:
        return document
    text = document["text"]
    read = tokenizer(text, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    ends = [end for _, end in read["offset_mapping"]]
    return document if len(ends) <= longest else {**document, "text": text[: max(ends[:longest])]}


def _encode_chat(tokenizer: Any, document: Mapping[str, Any], data: DataConfig) -> EncodedText:
    tokenization = Tokenization(
        tokenizer,
        replace(data, unrendered="warn", stops="none", special_tokens_in_text=False),
        format="messages",
    )
    encoded = tokenization.encode_all(document)
    counted = encoded.label_mask.copy()
    counted[:1] = False
    roles = tokenization.roles
    contents = [text_of(message) for message in document["messages"] if not roles or message["role"] in roles]
    num_bytes = sum(len(content.encode("utf-8", "surrogatepass")) for content in contents)
    return EncodedText(encoded.input_ids.astype(np.int64), counted, num_bytes)


@dataclass(frozen=True, slots=True)
class _Window:
    document: int
    ids: np.ndarray
    """int64 [s]: what the model reads."""
    targets: np.ndarray
    """int64 [s]: the token after each position."""
    counted: np.ndarray
    """bool [s]: of the targets."""


@dataclass(frozen=True, slots=True)
class BitsBatch:
    """Rows of documents, padded on the right, where causal attention does not look."""

    ids: Tensor
    """int64 [R, S]: what the model reads."""
    counted: Tensor
    """bool [R, S]: positions whose next token counts."""
    targets: Tensor
    """int64 [N]: the next tokens of these positions."""
    documents: np.ndarray
    """int64 [N]: index of the document of each."""
    lengths: tuple[int, ...]
    """[R]: tokens of each row."""


def batches(documents: Sequence[EncodedText], length: int) -> Iterator[BitsBatch]:
    """Yields the documents in rows of at most `length` tokens, and about BATCH_TOKENS positions at a time."""
    for rows in _batches(sorted(_windows(documents, length), key=lambda window: -len(window.ids))):
        ids = pad_sequence([torch.from_numpy(row.ids) for row in rows], batch_first=True)
        counted = pad_sequence([torch.from_numpy(row.counted) for row in rows], batch_first=True)
        targets = np.concatenate([row.targets[row.counted] for row in rows])
        owners = np.repeat([row.document for row in rows], counted.sum(dim=1).numpy())
        yield BitsBatch(ids, counted, torch.from_numpy(targets), owners, tuple(len(row.ids) for row in rows))


def _windows(documents: Sequence[EncodedText], length: int) -> Iterator[_Window]:
    """Yields the documents as rows of at most `length` tokens, in which every token but the first is predicted once."""
    # A document that is longer goes on in another row, which begins with the last token that the one before it
    # predicts. Rows without a counted token are left out.
    for i, document in enumerate(documents):
        last = len(document.ids) - 1
        for start in range(0, last, length):
            stop = min(start + length, last)
            counted = document.counted[start + 1 : stop + 1]
            if counted.any():
                yield _Window(i, document.ids[start:stop], document.ids[start + 1 : stop + 1], counted)


@torch.no_grad()
def bits(model: Any, documents: Sequence[EncodedText], length: int) -> np.ndarray:
    """fp64 [documents]: the sum over the counted tokens of each document of −log2 of their probability.

    Probabilities are computed in fp32 over all columns of the output layer, and summed in fp64.

    Args:
        model: a causal language model of Transformers, in evaluation mode.
        length: most tokens that it reads at once.
    """
    total = np.zeros(len(documents), dtype=np.float64)
    for batch in batches(documents, length):
        np.add.at(total, batch.documents, _nats(model, batch))
    return total / math.log(2)


def _batches(rows: Sequence[_Window]) -> Iterator[list[_Window]]:
    """Rows that come after one another, the longest first, in batches of at most BATCH_TOKENS positions."""
    batch: list[_Window] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(batch[0].ids) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _nats(model: Any, batch: BitsBatch) -> np.ndarray:
    """−log p of every counted token of a batch, fp64 [N]."""
    read, mask, wanted = (part.to(model.device) for part in (batch.ids, batch.counted, batch.targets))
    positions = row_positions(model.config, batch.lengths, read.shape[1], read.device)
    if family_of(model.config).proven:
        hidden = forward.body(model, read, positions)[mask]
        rows = max(1, CHUNK_BYTES // (4 * model.config.vocab_size))
        parts = [
            _chosen(forward.head(model, hidden[start : start + rows]), wanted[start : start + rows])
            for start in range(0, len(hidden), rows)
        ]
        logprobs = torch.cat(parts)
    else:  # only its own forward can make the logits
        logprobs = _chosen(forward.logits(model, read, positions)[mask], wanted)
    return -logprobs.double().cpu().numpy()


def _chosen(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
