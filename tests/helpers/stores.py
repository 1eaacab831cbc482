"""Small stores of teacher targets whose numbers tell which position of which record they are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from distill_rl.data.batch.tokenization import name_of
from distill_rl.store.store import Column, Found, Manifest, Record, Store, StoreWriter, write_manifest
from distill_rl.types import PieceRef, RankBatch
from tests.helpers.engines import rank_batch, token_rows

ENTRIES = 3
MANIFEST = Manifest(
    format="exact",
    kind="topk",
    entries=ENTRIES,
    temperature=1.0,
    wire_dtype="fp32",
    dtype="fp32",
    model="org/teacher",
    revision=None,
    weights="a" * 64,
    tokenizer="b" * 64,
    vocabulary_size=320,
)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def target_columns(count: int, *, first: float = 0.0, dtype: str = "F32") -> dict[str, Column]:
    """Targets of `count` positions; `label_logprob` counts down from -`first`, and each position retains another mass."""
    place = first + np.arange(count)
    retained = np.linspace(0.3, 0.99, max(count, 1))[:count]
    logprobs = np.log(retained / ENTRIES)[:, None] - 0.01 * np.arange(ENTRIES)
    stored = {"F32": logprobs.astype("<f4"), "F16": logprobs.astype("<f2")}
    stored["BF16"] = (stored["F32"].view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
    rest = np.log1p(-np.exp(logprobs).sum(axis=1))
    return {
        "ids": Column("I32", (place[:, None] + np.arange(ENTRIES)).astype("<i4")),
        "logprobs": Column(dtype, stored[dtype]),
        "rest_logprob": Column("F32", rest.astype("<f4")),
        "label_logprob": Column("F32", -place.astype("<f4")),
    }


def piece_of(
    text: str, tokens: Sequence[int] | np.ndarray, *, first: int = 0, prefix: int = 0, whole: bool = True
) -> PieceRef:
    return PieceRef(name_of(text), first, prefix, len(tokens), whole)


def record_of(
    text: str, tokens: Sequence[int] | np.ndarray, *, number: float = 0.0, dtype: str = "F32", **extent: Any
) -> Record:
    """A record with `target_columns(…, first=number)`."""
    tokens = np.asarray(tokens, np.int32)
    return Record(piece_of(text, tokens, **extent), tokens, target_columns(len(tokens), first=number, dtype=dtype))


def make_store(folder: Path, *shards: Sequence[Record], **changes: Any) -> Store:
    """A store with one shard for each of these lists of records; `changes` are of the manifest."""
    write_manifest(folder, replace(MANIFEST, **changes))
    store = Store(folder)
    writer = StoreWriter(store, write_every_s=float("inf"))
    for records in shards:
        for record in records:
            writer.add(record.piece, record.tokens, record.targets)
        writer.flush()
    return Store(folder)


def labels(store: Store, found: Found | None) -> list[float] | None:
    """`label_logprob` of what was found, which shows the record and the positions in it."""
    return None if found is None else store.targets(found)["label_logprob"].values.tolist()


def batch_of(rows_of_documents: Sequence[Sequence[np.ndarray]], width: int, index: int = 0) -> RankBatch:
    """A rank's part of a batch whose rows hold these whole documents, which are named by their tokens."""
    pieces = tuple(tuple(piece_of(str(tokens.tolist()), tokens) for tokens in row) for row in rows_of_documents)
    return replace(rank_batch(token_rows(rows_of_documents, width), index=index), pieces=pieces)


def is_of_pieces(batch: RankBatch) -> np.ndarray:
    """bool [N]: the positions of a batch that belong to a piece, row after row; the others are padding."""
    filled = [sum(piece.length for piece in row) for row in batch.pieces]
    return (np.arange(batch.rows.shape[1]) < np.array(filled)[:, None]).reshape(-1)
