"""The formats of a store: how targets become the columns of a record, and back.

exact     the tensors of the wire format as they are: a run from the store has the bits of a live one
compact   ids entropy-coded, log-probs quantised (`store.compact`): a tenth of the bytes, for top-k targets
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from distill_rl.errors import StoreError
from distill_rl.store.manifest import Manifest
from distill_rl.store.shard import BLOCKS, REMEDY, Column, Shard

_DTYPES = {"ids": "I32", "logprobs": "F32", "rest_logprob": "F32", "label_logprob": "F32"}
"""Of what a compact block decodes to."""


def encoded(manifest: Manifest, tokens: np.ndarray, targets: Mapping[str, Column]) -> Mapping[str, Column]:
    """The columns that a store keeps of a piece's targets.

    Args:
        tokens: int32 [n], of the piece.
        targets: the wire format's tensors, [n, …]; for `compact` a top k in fp32.
    """
    if manifest.format == "exact":
        return targets
    from distill_rl.store.compact import encode

    arrays = {name: column.values for name, column in targets.items()}
    block = encode(tokens, arrays, vocabulary_size=manifest.vocabulary_size, mass=manifest.mass)
    return {BLOCKS: Column("U8", np.frombuffer(block, np.uint8))}


def decoded(manifest: Manifest, shard: Shard, record: int) -> dict[str, Column]:
    """The targets of a record in the wire format, [n, …]; read-only.

    Raises:
        StoreError: the record is damaged.
    """
    columns = shard.targets(record)
    if manifest.format == "exact":
        return columns
    from distill_rl.store.compact import decode

    try:
        block = columns[BLOCKS].values
        targets = decode(shard.tokens(record), block, vocabulary_size=manifest.vocabulary_size)
    except (KeyError, ValueError) as error:
        rule = f"record {record} must be targets in the format compact"
        raise StoreError(f"{shard.path}", rule, str(error), REMEDY) from error
    return {name: Column(_DTYPES[name], values) for name, values in targets.items()}
