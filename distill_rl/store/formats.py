"""The formats of a store: how targets become the columns of a record, and back.

exact     the tensors of the wire format as they are: a run from the store has the bits of a live one
compact   ids entropy-coded, log-probs quantised (`store.compact`)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from distill_rl.store.manifest import Manifest
from distill_rl.store.shard import Column, Shard


def encoded(manifest: Manifest, tokens: np.ndarray, targets: Mapping[str, Column]) -> Mapping[str, Column]:
    """The columns that a store keeps of a piece's targets.

    Args:
        tokens: int32 [n], of the piece.
        targets: the wire format's tensors, [n, …].
    """
    return targets


def decoded(manifest: Manifest, shard: Shard, record: int) -> dict[str, Column]:
    """The targets of a record in the wire format, [n, …]; read-only.

    Raises:
        StoreError: the record is damaged.
    """
    return shard.targets(record)
