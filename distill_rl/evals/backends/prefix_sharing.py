"""Work on a prompt's beginning that is done once for all rows that have it: its keys and values.

Shapes: R rows, P tokens of the shared beginning.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from distill_rl.evals.backends.encode import common_length

MIN_SHARED_TOKENS = 16
"""Tokens from which on a shared beginning pays for batches of its own."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that begin with the same tokens."""

    shared: int
    """how many; 0: nothing is shared"""
    rows: list[int]
    """the longest first"""

    def batches(self, size: int) -> Iterator[list[int]]:
        for start in range(0, len(self.rows), size):
            yield self.rows[start : start + size]


def group(rows: Sequence[Sequence[int]], most: Sequence[int], prefixes: Sequence[str], *, share: bool) -> list[Group]:
    """Puts rows with the same prefix text together, the group with the longest row first.

    Args:
        rows: ids.
        most: per row how many of its first tokens may be shared.
        prefixes: per row the text in front that other rows may have too; empty: none.
        share: False puts all rows into one group.
    """
    named: dict[str, list[int]] = {}
    for row, prefix in enumerate(prefixes):
        named.setdefault(prefix if share else "", []).append(row)
    alone = named.pop("", [])
    groups = []
    for members in named.values():
        shared = min(common_length([rows[row] for row in members]), min(most[row] for row in members))
        if len(members) > 1 and shared >= MIN_SHARED_TOKENS:
            groups.append(Group(shared, members))
        else:
            alone += members
    if alone:
        groups.append(Group(0, alone))
    for each in groups:
        each.rows.sort(key=lambda row: (-len(rows[row]), row))
    return sorted(groups, key=lambda each: -len(rows[each.rows[0]]))


@dataclass(frozen=True, slots=True)
class CacheSupport:
    """What can be done with a model's cache, as far as its config and class tell."""

    plain: bool
    """the cache holds keys and values and nothing else, so that rows can be taken out of it and repeated"""
    windows: bool
    """some layers see only the last tokens, by their place in the row"""
    by_length: bool
    """positions are encoded differently in long texts, so that a beginning alone is not that of a long text"""

    @property
    def share_aligned(self) -> bool:
        """Whether rows can go on from a shared beginning that directly follows it."""
        return self.plain and not self.by_length

    @property
    def share_padded(self) -> bool:
        """Whether they can with padding in between, which a window would count."""
        return self.share_aligned and not self.windows


def abilities(model: Any) -> CacheSupport:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    config, arguments = model.config.get_text_config(), signature(model.forward).parameters
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    rope = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one per kind of layer.
    kinds = {each.get("rope_type") for each in [rope, *rope.values()] if isinstance(each, dict)}
    known = {"past_key_values", "position_ids", "logits_to_keep"} <= arguments.keys()
    chunked = getattr(config, "attention_chunk_size", None) is not None
    plain = known and not chunked and not model._is_stateful and layers <= {DynamicLayer, DynamicSlidingWindowLayer}
    return CacheSupport(plain, DynamicSlidingWindowLayer in layers, bool(kinds & {"longrope", "dynamic"}))


class SharedPrefix:
    """The cache of the tokens that the rows of a group share; None where nothing is shared.

    Args:
        ids: [P] integers.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, ids: Sequence[int]):
        self.length = len(ids)
        self._cache: Any = None
        if ids:
            row = torch.tensor([list(ids)], device=model.device)
            self._cache = model(input_ids=row, use_cache=True, logits_to_keep=1).past_key_values

    def cache(self, rows: int) -> Any:
        """A cache of its own for `rows` rows that begin so; a forward pass grows it and leaves the shared one alone."""
        if self._cache is None:
            return None
        cache = copy.copy(self._cache)
        cache.layers = [_repeat(layer, rows) for layer in self._cache.layers]
        return cache


def _repeat(layer: Any, rows: int) -> Any:
    # Growing makes new tensors, so views of the shared ones will do.
    layer = copy.copy(layer)
    layer.keys = layer.keys.expand(rows, *layer.keys.shape[1:])
    layer.values = layer.values.expand(rows, *layer.values.shape[1:])
    return layer
