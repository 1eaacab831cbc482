"""Greedy completions of a batch, one forward pass per token for all rows that still write.

Shapes: R rows of a batch, P tokens of the shared beginning, S tokens of the longest row after it, T columns so far.
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

_SILENT = 8
"""Tokens without text of their own that may stand inside a stop text."""


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt that is gone on from."""

    index: int
    """of the item"""
    ids: list[int]
    room: int
    """tokens that may be written; at least 1"""


class StopDetector:
    """Tells when a completion has come to its end.

    Args:
        stop: texts that end it, too.
    """

    def __init__(self, encoder: Encoder, stop: Sequence[str]):
        self._encoder, self._stop = encoder, tuple(stop)
        # A token that has text has a byte of it at least.
        self._tail = max((len(text.encode()) for text in stop), default=0) + _SILENT

    def output(self, row: Row, written: Sequence[int]) -> Output | None:
        """What the row has become; None while it goes on. Must be asked after every token."""
        ended = written[-1] in self._encoder.stop_ids
        full = len(written) >= row.room
        seen = self._stop and any(text in self._encoder.decode(written[-self._tail :]) for text in self._stop)
        if not (ended or full or seen):
            return None
        whole = self._encoder.decode(written[:-1] if ended else written)
        places = [whole.find(text) for text in self._stop if text in whole]
        if not (ended or full or places):
            return None
        text = whole[: min(places)] if places else whole
        return Output(text, len(written), len(row.ids), truncated=not ended and not places)

    def first(self, row: Row, written: Sequence[int]) -> Output | None:
        """The output of the first end in tokens that are all there already."""
        counts = range(1, len(written) + 1) if self._stop else [len(written)]
        outputs = (self.output(row, written[:count]) for count in counts)
        return next((output for output in outputs if output is not None), None)


@torch.inference_mode()
def write(model: Any, rows: Sequence[Row], beginning: SharedPrefix, ending: StopDetector) -> Iterator[tuple[int, Output]]:
    """Completions as they end. A row that has ended leaves the batch, so that it neither costs work nor runs on past
    the model's positions.

    Args:
        model: one whose cache is `plain` (`sharing.CacheSupport`).
    """
    live, written = list(rows), [[] for _ in rows]  # type: list[Row], list[list[int]]
    ids, mask = _pad([row.ids[beginning.length :] for row in rows], beginning.length, model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, beginning.length :]
    cache = beginning.cache(len(rows))
    while True:
        made = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, tokens = made.past_key_values, made.logits[:, -1].argmax(-1)
        staying = []
        for place, token in enumerate(tokens.tolist()):
            written[place].append(token)
            output = ending.output(live[place], written[place])
            if output is None:
                staying.append(place)
            else:
                yield live[place].index, output
        if not staying:
            return
        if len(staying) < len(live):
            live, written = [live[place] for place in staying], [written[place] for place in staying]
            chosen = torch.tensor(staying, device=ids.device)
            cache.reorder_cache(chosen)
            tokens, mask, positions = tokens[chosen], mask[chosen], positions[chosen]
        ids = tokens[:, None]
        mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
        positions = positions[:, -1:] + 1


@torch.inference_mode()
def generate_with_transformers(model: Any, rows: Sequence[Row], ending: StopDetector) -> Iterator[tuple[int, Output]]:
    """The same by transformers' own `generate`, for models that keep a state of another kind; all rows run until the
    last has ended."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    ids, mask = _pad([row.ids for row in rows], 0, model.device)
    outputs: list[Output | None] = [None] * len(rows)

    class ProcessMonitor(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
            for place, written in enumerate(input_ids[:, ids.shape[1] :].tolist()):
                if outputs[place] is None:
                    outputs[place] = ending.output(rows[place], written)
            return torch.tensor([output is not None for output in outputs], device=input_ids.device)

    longest = max(row.room for row in rows)
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=longest,
        use_cache=True,
        stopping_criteria=StoppingCriteriaList([ProcessMonitor()]),
    )
    for row, output in zip(rows, outputs):
        assert output is not None, "the longest row decides when all stop"
        yield row.index, output


def _pad(rows: Sequence[Sequence[int]], before: int, device: Any) -> tuple[Tensor, Tensor]:
    """Ids [R, S] that end together, and the mask [R, before + S] of what is no padding.

    What fills a row is masked, so any id will do.
    """
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[1] * before + [0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
