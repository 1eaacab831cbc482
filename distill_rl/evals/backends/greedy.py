"""Greedy completions of a batch, with one forward pass per token for all rows that are not finished.

Shapes: R rows of a batch, P tokens of the shared prefix, S tokens of the longest row after it, T columns so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill_rl.evals.backends.base import Output
from distill_rl.evals.backends.encode import Encoder
from distill_rl.evals.backends.prefix_sharing import SharedPrefix
from distill_rl.evals.suites.base import Item
from distill_rl.models.families import length_limit

_MAX_TEXTLESS_TOKENS = 8
"""Tokens without text of their own that may occur inside a stop text."""


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt to be completed."""

    item_index: int
    ids: list[int]
    max_new_tokens: int
    """At least 1."""


def prompt_rows(
    encoder: Encoder, items: Sequence[Item], max_new_tokens: int, positions: int | None
) -> tuple[list[Row], list[tuple[int, Output]]]:
    """Encodes prompts; returns the rows of those that fit, and (index into `items`, output) for those that are too
    long.

    Args:
        max_new_tokens: limit of every completion.
        positions: maximum tokens of prompt and completion together, which also limits a completion; None: no limit.

    Raises:
        DataError: an empty prompt, or a chat that the tokenizer's template rejects.
    """
    rows, too_long = [], []
    for index, item in enumerate(items):
        ids = encoder.encode(item)
        if positions is None:
            rows.append(Row(index, ids, max_new_tokens))
        elif len(ids) >= positions:
            too_long.append((index, Output(prompt_tokens=len(ids), too_long=True)))
        else:
            rows.append(Row(index, ids, min(max_new_tokens, positions - len(ids))))
    return rows, too_long


class StopDetector:
    """Detects the end of a completion: a stop token, the token limit or a stop text.

    Args:
        stop: the stop texts.
    """

    def __init__(self, encoder: Encoder, stop: Sequence[str]):
        self._encoder, self._stop = encoder, tuple(stop)
        # A token with text has at least one byte of it, so this many tokens cover every stop text.
        self._tail = max((len(text.encode()) for text in stop), default=0) + _MAX_TEXTLESS_TOKENS

    def output(self, row: Row, written: Sequence[int]) -> Output | None:
        """The output of a row that has ended with its last token, by a stop token, the token limit or a stop text; None
        while it continues. Call it after every token.

        The text ends before the first stop text. Decoding the last tokens only finds a possible stop text; decoding the
        whole completion confirms it, because text at the start of a decoded tail can differ.

        Args:
            written: all generated ids of the row so far; at least one.
        """
        ended = written[-1] in self._encoder.stop_ids
        full = len(written) >= row.max_new_tokens
        may_stop = self._stop and any(text in self._encoder.decode(written[-self._tail :]) for text in self._stop)
        if not (ended or full or may_stop):
            return None
        whole = self._encoder.decode(written[:-1] if ended else written)
        starts = [whole.find(text) for text in self._stop if text in whole]
        if not (ended or full or starts):
            return None
        text = whole[: min(starts)] if starts else whole
        return Output(text, len(written), len(row.ids), truncated=not ended and not starts)

    def first(self, row: Row, written: Sequence[int]) -> Output | None:
        """The output at the first end in a complete sequence of generated ids, as if `output` had been called after
        every token; None if it does not end. For engines that may run past a stop text.

        Without stop texts only the end of the sequence is examined, so no earlier token may be a stop token.
        """
        counts = range(1, len(written) + 1) if self._stop else [len(written)]
        outputs = (self.output(row, written[:count]) for count in counts)
        return next((output for output in outputs if output is not None), None)


@torch.no_grad()
def generate(
    model: Any, rows: Sequence[Row], prefix: SharedPrefix, stops: StopDetector
) -> Iterator[tuple[int, Output]]:
    """Yields (`Row.item_index`, output) for greedy completions of one batch, as they end.

    1. Pad the rows on the left, so that all of them continue in the same column, and mask the padding.
    2. Run the model on the new columns and append the likeliest token to each row.
    3. Yield the rows that ended, and remove them from tokens, mask, positions and cache: they cost no more work and
       never exceed the model's positions.
    4. Repeat with one new column until no row is left. When a row becomes longer than the texts of the pretraining, and
       the model's rotary frequencies depend on that, the keys in the cache are of the shorter text: all rows are run anew.

    Args:
        model: a model with a `plain` cache (`prefix_sharing.CacheSupport`).
        rows: at least one; all begin with the tokens of `prefix` and are longer.
        prefix: what the rows share; it is not changed. Its length may be 0.
        stops: decides when a row has ended.
    """
    live, written = list(rows), [[] for _ in rows]  # type: list[Row], list[list[int]]
    ids, mask = _pad([row.ids[prefix.length :] for row in rows], prefix.length, model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, prefix.length :]
    cache, limit = prefix.cache(len(rows)), length_limit(model.config)
    while True:
        result = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, tokens = result.past_key_values, result.logits[:, -1].argmax(-1)
        continuing = []
        for i, token in enumerate(tokens.tolist()):
            written[i].append(token)
            output = stops.output(live[i], written[i])
            if output is None:
                continuing.append(i)
            else:
                yield live[i].item_index, output
        if not continuing:
            return
        if len(continuing) < len(live):
            live, written = [live[i] for i in continuing], [written[i] for i in continuing]
            kept = torch.tensor(continuing, device=ids.device)
            cache.reorder_cache(kept)
            tokens, mask, positions = tokens[kept], mask[kept], positions[kept]
        ids = tokens[:, None]
        mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
        positions = positions[:, -1:] + 1
        if limit is not None and (positions == limit.length).any():
            ids, mask = _pad([[*row.ids, *more] for row, more in zip(live, written)], 0, model.device)
            positions, cache = (mask.cumsum(-1) - 1).clamp(min=0), None


@torch.no_grad()
def generate_with_transformers(model: Any, rows: Sequence[Row], stops: StopDetector) -> Iterator[tuple[int, Output]]:
    """Yields (`Row.item_index`, output) for the completions of one batch, like `generate` but by transformers' own
    `generate`, for models whose cache is not plain. All rows run until the last one has ended; only then is the first
    one yielded.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    ids, mask = _pad([row.ids for row in rows], 0, model.device)
    outputs: list[Output | None] = [None] * len(rows)

    class RowsEnded(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
            for i, written in enumerate(input_ids[:, ids.shape[1] :].tolist()):
                if outputs[i] is None:
                    outputs[i] = stops.output(rows[i], written)
            return torch.tensor([output is not None for output in outputs], device=input_ids.device)

    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(row.max_new_tokens for row in rows),
        use_cache=True,
        stopping_criteria=StoppingCriteriaList([RowsEnded()]),
    )
    for row, output in zip(rows, outputs):
        assert output is not None, "generation stops only when every row has ended"
        yield row.item_index, output


def _pad(rows: Sequence[Sequence[int]], num_prefix: int, device: Any) -> tuple[Tensor, Tensor]:
    """Ids [R, S], padded with 0 on the left, and the mask [R, num_prefix + S] of real tokens, both int64.

    Args:
        rows: ids of each row after the prefix.
        num_prefix: tokens of the shared prefix, which the mask counts as real.
    """
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[1] * num_prefix + [0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
