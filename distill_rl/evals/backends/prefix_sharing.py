"""Runs the shared prefix of several rows once, and reuses its keys and values for all of them.

Shapes: R rows, P tokens of the shared prefix.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from distill_rl.evals.backends.encode import common_start
from distill_rl.models.families import length_limit

MIN_SHARED_TOKENS = 16
"""Minimum length of a shared prefix for which separate batches pay off."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows that begin with the same tokens."""

    shared: int
    """Number of shared tokens; 0: nothing is shared."""
    rows: list[int]
    """Row indices, the longest row first."""

    def batches(self, size: int) -> Iterator[list[int]]:
        """Yields the row indices in batches of `size`, the longest rows first; the last batch may be smaller."""
        for start in range(0, len(self.rows), size):
            yield self.rows[start : start + size]


def group_by_prefix(
    rows: Sequence[Sequence[int]], max_shared: Sequence[int], prefixes: Sequence[str], *, share: bool
) -> list[PrefixGroup]:
    """Groups rows with the same prefix text; the group with the longest row comes first. Every row is in exactly one
    group.

    A group shares the tokens that all of its rows have in common at the start, up to the smallest `max_shared` of its
    rows. Rows whose group would share fewer than MIN_SHARED_TOKENS, or has one row only, form one group without
    sharing.

    Args:
        rows: ids.
        max_shared: per row, how many of its first tokens may be shared.
        prefixes: per row, the prefix text that other rows may have too; empty: none.
        share: False puts all rows into one group without sharing.
    """
    by_prefix: dict[str, list[int]] = {}
    for row, prefix in enumerate(prefixes):
        by_prefix.setdefault(prefix if share else "", []).append(row)
    unshared = by_prefix.pop("", [])
    groups = []
    for members in by_prefix.values():
        shared = min(len(common_start([rows[row] for row in members])), min(max_shared[row] for row in members))
        if len(members) > 1 and shared >= MIN_SHARED_TOKENS:
            groups.append(PrefixGroup(shared, members))
        else:
            unshared += members
    if unshared:
        groups.append(PrefixGroup(0, unshared))
    for group in groups:
        group.rows.sort(key=lambda row: (-len(rows[row]), row))
    return sorted(groups, key=lambda group: -len(rows[group.rows[0]]))


@dataclass(frozen=True, slots=True)
class CacheSupport:
    """What a model's cache supports, according to its config and class."""

    plain: bool
    """The cache holds only keys and values, so that its rows can be selected and repeated."""
    share_aligned: bool
    """Rows can continue a shared prefix directly after it. Not if the position encoding depends on the length of the
    text, because a prefix run alone then differs from the same prefix in a long text."""
    share_padded: bool
    """Rows can continue a shared prefix after padding. Not if some layers attend to the last tokens only, because such a
    window would count the padding."""


def cache_support(model: Any) -> CacheSupport:
    """Determines from a loaded model's config, class and cache layers how its rows may share a prefix and be removed
    from a batch."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    config, arguments = model.config.get_text_config(), signature(model.forward).parameters
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    takes_cache = {"past_key_values", "position_ids", "logits_to_keep"} <= arguments.keys()
    is_chunked = getattr(config, "attention_chunk_size", None) is not None
    has_plain_layers = layers <= {DynamicLayer, DynamicSlidingWindowLayer}
    plain = takes_cache and not is_chunked and not model._is_stateful and has_plain_layers
    aligned = plain and length_limit(config) is None
    return CacheSupport(plain, aligned, share_padded=aligned and DynamicSlidingWindowLayer not in layers)


class SharedPrefix:
    """The keys and values of the tokens that the rows of a group share, computed by one forward pass at construction.

    Args:
        ids: [P] token ids; empty: nothing is shared, and nothing is run.
    """

    @torch.no_grad()
    def __init__(self, model: Any, ids: Sequence[int]):
        self.length = len(ids)
        self._cache: Any = None
        if ids:
            row = torch.tensor([list(ids)], device=model.device)
            self._cache = model(input_ids=row, use_cache=True, logits_to_keep=1).past_key_values

    def cache(self, rows: int) -> Any:
        """A cache for `rows` rows that start with the prefix; None if nothing is shared. A forward pass extends it
        without changing the shared one."""
        if self._cache is None:
            return None
        cache = copy.copy(self._cache)
        cache.layers = [_repeat(layer, rows) for layer in self._cache.layers]
        return cache


def _repeat(layer: Any, rows: int) -> Any:
    """A cache layer of one row, repeated for `rows` rows without copying keys and values; the original is not
    changed."""
    # Views suffice, because extending a cache allocates new tensors.
    layer = copy.copy(layer)
    layer.keys = layer.keys.expand(rows, *layer.keys.shape[1:])
    layer.values = layer.values.expand(rows, *layer.values.shape[1:])
    return layer
