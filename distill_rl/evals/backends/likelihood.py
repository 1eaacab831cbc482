"""Log-likelihoods of the choices of items, batched.

Shapes: R rows of a batch, P tokens of the shared beginning, S tokens of the longest row after it, N places whose
next token is asked for, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distill_rl.evals.backends.base import Output
from distill_rl.evals.backends.encode import Choices
from distill_rl.evals.backends.prefix_sharing import SharedPrefix


@dataclass(frozen=True, slots=True)
class Row:
    """One row of ids, and the choices whose tokens, all but the last, stand at its end.

    Choices of one token each share a row: the context alone.
    """

    index: int
    """of the item"""
    ids: list[int]
    start: int
    """length of the context"""
    choices: tuple[tuple[int, list[int]], ...]
    """(number of the choice, its tokens)"""


def rows_of(index: int, choices: Choices) -> list[Row]:
    """As few rows as give every choice's log-likelihood."""
    bodies: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    for number, ids in enumerate(choices.continuations):
        bodies.setdefault(tuple(ids[:-1]), []).append((number, ids))
    start = len(choices.context)
    return [Row(index, [*choices.context, *body], start, tuple(members)) for body, members in bodies.items()]


class ChoiceCollector:
    """Puts the choices of an item together, whose rows may come apart."""

    def __init__(self) -> None:
        self._outputs: dict[int, Output] = {}
        self._expected: dict[int, int] = {}
        self._found: dict[int, dict[int, float]] = {}

    def expect(self, index: int, choices: Choices) -> None:
        tokens = sum(len(ids) for ids in choices.continuations)
        self._outputs[index] = Output(num_tokens=tokens, prompt_tokens=len(choices.context))
        self._expected[index] = len(choices.continuations)
        self._found[index] = {}

    def add(self, index: int, sums: Mapping[int, float]) -> Output | None:
        """The output of an item once all of its choices are known."""
        found = self._found[index]
        found |= sums
        if len(found) < self._expected[index]:
            return None
        return replace(self._outputs[index], logprobs=tuple(found[number] for number in range(len(found))))


@torch.inference_mode()
def score(model: Any, rows: Sequence[Row], beginning: SharedPrefix) -> list[dict[int, float]]:
    """Per row {number of a choice: sum of its tokens' log-probabilities}.

    Rows are padded on the right, where causal models do not look, so that they need no mask and follow the shared
    beginning directly.
    """
    suffixes = [row.ids[beginning.length :] for row in rows]
    longest = max(len(ids) for ids in suffixes)
    input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in suffixes], device=model.device)
    places = [
        (number, column - beginning.length)
        for number, row in enumerate(rows)
        for column in range(row.start - 1, len(row.ids))
    ]
    cache = beginning.cache(len(rows))
    with _head_only_at(model, places) as pick:
        made = model(input_ids=input_ids, past_key_values=cache, use_cache=cache is not None)
    return _sums(rows, pick(made.logits).float().log_softmax(-1))


def _sums(rows: Sequence[Row], logprobs: Tensor) -> list[dict[int, float]]:
    """Of logprobs [N, V], row by row."""
    sums, first = [], 0
    for row in rows:
        own = {
            number: float(logprobs[first : first + len(ids)].gather(1, _column(ids, logprobs)).sum(dtype=torch.float64))
            for number, ids in row.choices
        }
        sums.append(own)
        first += len(row.ids) - row.start + 1
    return sums


def _column(ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(ids, device=like.device)[:, None]


@contextmanager
def _head_only_at(model: Any, places: Sequence[tuple[int, int]]) -> Iterator[Any]:
    """Lets the output layer see only the hidden states at (row, column); gives what finds the logits [N, V] there.

    Logits of all places would take R·S·V numbers. What models do with logits afterwards, they do to each by itself.
    """
    rows, columns = (torch.tensor(each, device=model.device) for each in zip(*places))
    head = model.get_output_embeddings()
    if head is None:
        yield lambda logits: logits[rows, columns]
        return
    hook = head.register_forward_pre_hook(lambda _, arguments: (arguments[0][rows, columns][None], *arguments[1:]))
    try:
        yield lambda logits: logits[0]
    finally:
        hook.remove()
