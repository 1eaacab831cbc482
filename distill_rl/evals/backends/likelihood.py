"""Log-likelihoods of the choices of items, batched.

Shapes: R rows of a batch, P tokens of the shared prefix, S tokens of the longest row after it, N positions whose next
token is scored, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from distill_rl.evals.backends.base import Output
from distill_rl.evals.backends.encode import Choices, Encoder
from distill_rl.evals.backends.prefix_sharing import SharedPrefix
from distill_rl.evals.suites.base import Item
from distill_rl.models.families import length_limit
from distill_rl.models.rotary import row_positions


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to run, and the choices that it scores.

    A row is the context followed by all tokens of a choice but the last, which only has to be predicted. Choices that
    differ only in their last token share a row; choices of one token each share the context alone.
    """

    item_index: int
    ids: list[int]
    start: int
    """Length of the context."""
    choices: tuple[tuple[int, list[int]], ...]
    """(index of the choice, its tokens)."""


def choice_rows(item_index: int, choices: Choices) -> list[Row]:
    """The fewest rows that score every choice of an item; each choice belongs to exactly one of them."""
    bodies: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    for i, ids in enumerate(choices.continuations):
        bodies.setdefault(tuple(ids[:-1]), []).append((i, ids))
    start = len(choices.context)
    return [Row(item_index, [*choices.context, *body], start, tuple(members)) for body, members in bodies.items()]


@dataclass(slots=True)
class _Scores:
    output: Output
    num_choices: int
    by_choice: dict[int, float] = field(default_factory=dict)
    run_tokens: int = 0


class ChoiceCollector:
    """Collects the scores of an item's choices, whose rows may finish at different times."""

    def __init__(self) -> None:
        self._items: dict[int, _Scores] = {}

    def prepare(
        self, encoder: Encoder, items: Sequence[Item], positions: int | None
    ) -> tuple[list[Row], list[tuple[int, Output]]]:
        """Encodes items and registers them for `add`; returns the rows of those that fit, and (index into `items`,
        output) for those that are too long to run.

        Args:
            positions: maximum tokens of context and choice together; None: no limit.

        Raises:
            DataError: an empty prompt, a chat that the tokenizer's template rejects, or a choice that adds no token.
        """
        rows: list[Row] = []
        too_long = []
        for index, item in enumerate(items):
            choices = encoder.choices(item)
            num_context, lengths = len(choices.context), [len(ids) for ids in choices.continuations]
            if positions is not None and max(lengths) > max(positions - num_context, 0):
                too_long.append((index, Output(prompt_tokens=num_context, too_long=True)))
                continue
            output = Output(num_tokens=sum(lengths), prompt_tokens=num_context)
            self._items[index] = _Scores(output, len(lengths))
            rows += choice_rows(index, choices)
        return rows, too_long

    def add(self, item_index: int, sums: Mapping[int, float], run_tokens: int) -> Output | None:
        """Adds the scores of a row of an item that `prepare` has registered; returns the item's output, with a
        log-likelihood per choice in their order, once all of them are scored, and None until then.

        Args:
            sums: index of a choice → sum of its tokens' log-probabilities.
            run_tokens: tokens of the row that the model ran.
        """
        scores = self._items[item_index]
        scores.by_choice |= sums
        scores.run_tokens += run_tokens
        if len(scores.by_choice) < scores.num_choices:
            return None
        logprobs = tuple(scores.by_choice[i] for i in range(scores.num_choices))
        return replace(scores.output, logprobs=logprobs, run_tokens=scores.run_tokens)


@torch.no_grad()
def score(model: Any, rows: Sequence[Row], prefix: SharedPrefix) -> list[dict[int, float]]:
    """Runs a batch; returns, per row, {index of a choice: sum of its tokens' log-probabilities (natural logarithm)}.

    1. Pad the rows on the right. A causal model never attends to the right, so no mask is needed and the rows directly
       follow the shared prefix. Only a model to which the lengths of texts matter is told where the padding begins.
    2. List the N positions that predict tokens of choices: in each row from the last token of the context on.
    3. Run the model, with its head at these positions only, and take the log-softmax there in fp32.
    4. Sum the log-probabilities of each choice's tokens.

    Args:
        rows: at least one; all begin with the tokens of `prefix`, which is shorter than every context.
    """
    suffixes = [row.ids[prefix.length :] for row in rows]
    longest = max(len(ids) for ids in suffixes)
    input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in suffixes], device=model.device)
    positions = [
        (i, column - prefix.length) for i, row in enumerate(rows) for column in range(row.start - 1, len(row.ids))
    ]
    cache, told = prefix.cache(len(rows)), {}
    if length_limit(model.config) is not None:
        told["position_ids"] = row_positions(model.config, [len(ids) for ids in suffixes], longest, model.device)
    with _head_only_at(model, positions) as select:
        result = model(input_ids=input_ids, past_key_values=cache, use_cache=cache is not None, **told)
    return _sums(rows, select(result.logits).float().log_softmax(-1))


def _sums(rows: Sequence[Row], logprobs: Tensor) -> list[dict[int, float]]:
    """Sums the log-probabilities of every choice in fp64; returns {index of a choice: sum} per row.

    Args:
        logprobs: [N, V], for each row in turn the positions from the last token of its context to its end.
    """
    sums, first = [], 0
    for row in rows:
        by_choice = {}
        for i, ids in row.choices:
            column = torch.tensor(ids, device=logprobs.device)[:, None]
            by_choice[i] = float(logprobs[first : first + len(ids)].gather(1, column).sum(dtype=torch.float64))
        sums.append(by_choice)
        first += len(row.ids) - row.start + 1
    return sums


@contextmanager
def _head_only_at(model: Any, positions: Sequence[tuple[int, int]]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Restricts the model's output layer, while the block runs, to the hidden states at these positions; yields a
    function that takes the logits of a forward pass in the block and returns those at the positions, [N, V], in their
    order.

    Logits of all positions would take R·S·V numbers. Whatever a model does to its logits after the output layer, it
    does to each position separately, so the restriction does not change them. A model without a separate output layer
    computes all of them.

    Args:
        positions: (row, column) in the batch; at least one.
    """
    rows, columns = (torch.tensor(indices, device=model.device) for indices in zip(*positions))
    head = model.get_output_embeddings()
    if head is None:
        yield lambda logits: logits[rows, columns]
        return
    # Before the hooks of a layer that is split over ranks, which turn the hidden states into a DTensor.
    hook = head.register_forward_pre_hook(
        lambda _, arguments: (arguments[0][rows, columns][None], *arguments[1:]), prepend=True
    )
    try:
        yield lambda logits: logits[0]
    finally:
        hook.remove()
