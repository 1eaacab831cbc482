from __future__ import annotations

import pytest

from distill_rl.evals.backends.base import PromptRow
from distill_rl.evals.backends.hf import MIN_SHARED_TOKENS, group_by_prefix

LONG = list(range(100, 100 + MIN_SHARED_TOKENS))
OTHER = list(range(300, 310 + MIN_SHARED_TOKENS))


def grouped(rows: list[list[int]], prefixes: list[str], *, share: bool = True) -> list[tuple[int, list[int]]]:
    """(shared tokens, indices of the rows) of every group."""
    prompts = [PromptRow(i, prefix, ids, len(ids), 1) for i, (ids, prefix) in enumerate(zip(rows, prefixes))]
    groups = group_by_prefix(prompts, share=share)
    return [(shared, [row.item_index for row in members]) for shared, members in groups]


def test_rows_with_one_prefix_are_grouped_longest_first() -> None:
    rows = [[*LONG, 1], [*OTHER, 1, 2, 3], [*LONG, 2, 3], [*OTHER, 4], [7, 8, 9]]
    assert grouped(rows, ["a", "b", "a", "b", ""]) == [(len(OTHER), [1, 3]), (len(LONG), [2, 0]), (0, [4])]


@pytest.mark.parametrize(
    ("rows", "prefixes"),
    [
        ([[*LONG, 1], [*LONG, 2]], ["", ""]),  # no prefix text
        ([[*LONG, 1], [*OTHER, 2]], ["a", "a"]),  # the same text, but different tokens
        ([LONG, [*LONG, 1]], ["a", "a"]),  # the last token of a row cannot be shared, which leaves too few
        ([[*LONG, 1], [*OTHER, 1]], ["a", "b"]),  # one row each
    ],
)
def test_prefixes_that_save_nothing_are_not_shared(rows: list[list[int]], prefixes: list[str]) -> None:
    ((shared, members),) = grouped(rows, prefixes)
    assert shared == 0
    assert sorted(members) == [0, 1]


def test_a_model_that_cannot_share_gets_one_group() -> None:
    rows = [[*LONG, 1], [*LONG, 2, 3], [*LONG, 4]]
    assert grouped(rows, ["a"] * 3, share=False) == [(0, [1, 0, 2])]


def test_no_row_shares_more_than_its_prompt_without_the_last_token() -> None:
    starts = len(OTHER), MIN_SHARED_TOKENS + 2
    rows = [PromptRow(i, "a", [*OTHER, i], start, 1) for i, start in enumerate(starts)]
    assert group_by_prefix(rows, share=True) == [(MIN_SHARED_TOKENS + 1, rows)]


def test_no_rows_make_no_groups() -> None:
    assert grouped([], []) == []
