"""Re-sharding: which slots, and which tokens of them, make up the rows a student wants.

Teacher and student may split a global batch over different numbers of ranks and micro-batches; rows keep
their global numbers, so the rest is interval arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `stop` of source number `source`."""

    source: int
    start: int
    stop: int


def readers_of(layout: Layout, first_row: int, num_rows: int, *, dp: int, tp: int) -> tuple[int, ...]:
    """The student ranks that read some row of `layout`, where `dp` x `tp` of them share `num_rows` rows from `first_row`:
    every data-parallel rank as many as the others, in order, and all its tensor-parallel ranks the same."""
    size = num_rows // dp
    start = layout.first_row - first_row
    stop = start + layout.num_rows
    return tuple(rank * tp + t for rank in range(start // size, -(-stop // size)) for t in range(tp))


def plan(layouts: Sequence[Layout], first_row: int, num_rows: int) -> list[Piece]:
    """The pieces that make up rows `first_row … first_row + num_rows`, in row order.

    Raises:
        TransportError: some row is covered by no source, or by two.
    """
    pieces: list[Piece] = []
    row, end = first_row, first_row + num_rows
    for source in sorted(range(len(layouts)), key=lambda i: layouts[i].first_row):
        layout = layouts[source]
        start, stop = max(first_row, layout.first_row), min(end, layout.first_row + layout.num_rows)
        if start >= stop:
            continue
        if start != row:
            raise TransportError(
                f"row {min(start, row)} of a batch", "must come from exactly one teacher micro-batch", "none or two"
            )
        offset, width = layout.first_row, layout.tokens_per_row
        pieces.append(Piece(source, (start - offset) * width, (stop - offset) * width))
        row = stop
    if row != end:
        raise TransportError(f"row {row} of a batch", "must come from exactly one teacher micro-batch", "none")
    return pieces


@contextmanager
def fetch_rows(
    fetch: Callable[[Handle], AbstractContextManager[dict[str, Tensor]]],
    handles: Sequence[Handle],
    first_row: int,
    num_rows: int,
) -> Iterator[dict[str, Tensor]]:
    """The tensors of these global rows, `[num_rows · S, …]`; views where one slot holds them all.

    Args:
        fetch: a transport's, or one that knows which transport a handle is of.
    """
    pieces = plan([handle.layout for handle in handles], first_row, num_rows)
    with ExitStack() as stack:
        parts = []
        for piece in pieces:
            tensors = stack.enter_context(fetch(handles[piece.source]))
            parts.append({name: tensor[piece.start : piece.stop] for name, tensor in tensors.items()})
        yield parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
