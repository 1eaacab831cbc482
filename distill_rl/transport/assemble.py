"""Re-sharding: which slots, and which tokens in them, make up the rows that a student rank needs.

Teacher and student may split a global batch over different numbers of ranks and micro-batches. Rows keep their global
numbers, so the pieces follow from intervals of row numbers. For a student that needs rows 2 to 6:

    teacher micro-batches    [0 1 2] [3 4 5] [6 7 8]
    student rows                 [2   3 4 5   6]
    pieces                       2 of the first, 3 4 5 of the second, 6 of the third
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `stop` of the source with index `source`."""

    source: int
    start: int
    stop: int


def readers_of(layout: Layout, first_row: int, num_rows: int, *, dp: int, per_row: int) -> tuple[int, ...]:
    """The student ranks that read some row of `layout`, ascending.

    The `num_rows` rows from `first_row` are divided evenly, in order, over `dp` data-parallel ranks, so `num_rows` must
    be a multiple of `dp`, and the layout's rows must lie among them. Each data-parallel rank is `per_row` neighbouring
    ranks, sequence-parallel and tensor-parallel ones, which all read its rows.
    """
    rows_per_rank = num_rows // dp
    start = layout.first_row - first_row
    stop = start + layout.num_rows
    dp_ranks = range(start // rows_per_rank, -(-stop // rows_per_rank))
    return tuple(dp_rank * per_row + i for dp_rank in dp_ranks for i in range(per_row))


def plan(layouts: Sequence[Layout], first_row: int, num_rows: int) -> list[Piece]:
    """The pieces that make up the `num_rows` rows from `first_row`, in row order.

    Args:
        layouts: of the sources, in any order; a piece names its source by the index here. Those without a needed row
            are ignored.

    Raises:
        TransportError: a row is in no source, or in two.
    """
    pieces: list[Piece] = []
    row, end = first_row, first_row + num_rows
    for source in sorted(range(len(layouts)), key=lambda i: layouts[i].first_row):
        layout = layouts[source]
        start, stop = max(first_row, layout.first_row), min(end, layout.first_row + layout.num_rows)
        if start >= stop:
            continue
        if start != row:
            raise _not_once(min(start, row), "none or two")
        offset, width = layout.first_row, layout.tokens_per_row
        pieces.append(Piece(source, (start - offset) * width, (stop - offset) * width))
        row = stop
    if row != end:
        raise _not_once(row, "none")
    return pieces


def _not_once(row: int, sources: str) -> TransportError:
    """The error for a row of which teachers sent no or several targets."""
    return TransportError(f"row {row} of a batch", "must come from exactly one teacher micro-batch", sources)


def assemble(
    content: Callable[[Handle], Mapping[str, Tensor]], handles: Sequence[Handle], first_row: int, num_rows: int
) -> dict[str, Tensor]:
    """Returns the tensors of the `num_rows` global rows from `first_row`, by name, each `[num_rows · S, …]`.

    They are views if one slot holds all of the rows, otherwise copies. All slots must have the same tensors and S.

    Args:
        content: gives the tensors of a handle's slot, which must stay open while the result is used if that is a view.

    Raises:
        TransportError: a row is in no slot, or in two.
    """
    parts = []
    for piece in plan([handle.layout for handle in handles], first_row, num_rows):
        tensors = content(handles[piece.source])
        parts.append({name: tensor[piece.start : piece.stop] for name, tensor in tensors.items()})
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
