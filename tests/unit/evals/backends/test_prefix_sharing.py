from __future__ import annotations

import pytest

from distill_rl.evals.backends.hf import MIN_SHARED_TOKENS, PrefixGroup, group_by_prefix

LONG = list(range(100, 100 + MIN_SHARED_TOKENS))
OTHER = list(range(300, 310 + MIN_SHARED_TOKENS))


def grouped(rows: list[list[int]], prefixes: list[str], *, share: bool = True) -> list[PrefixGroup]:
    return group_by_prefix(rows, [len(row) - 1 for row in rows], prefixes, share=share)


def test_rows_with_one_prefix_are_grouped_longest_first() -> None:
    rows = [[*LONG, 1], [*OTHER, 1, 2, 3], [*LONG, 2, 3], [*OTHER, 4], [7, 8, 9]]
    assert grouped(rows, ["a", "b", "a", "b", ""]) == [
        PrefixGroup(len(OTHER), [1, 3]),
        PrefixGroup(len(LONG), [2, 0]),
        PrefixGroup(0, [4]),
    ]


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
    (whole,) = grouped(rows, prefixes)
    assert whole.shared == 0
    assert sorted(whole.rows) == [0, 1]


def test_a_model_that_cannot_share_gets_one_group() -> None:
    rows = [[*LONG, 1], [*LONG, 2, 3], [*LONG, 4]]
    assert grouped(rows, ["a"] * 3, share=False) == [PrefixGroup(0, [1, 0, 2])]


def test_no_row_shares_more_than_allowed() -> None:
    rows = [[*OTHER, 1], [*OTHER, 2]]
    assert (
        group_by_prefix(rows, [len(OTHER), MIN_SHARED_TOKENS + 1], ["a", "a"], share=True)[0].shared
        == MIN_SHARED_TOKENS + 1
    )


def test_batches_hold_every_row_once() -> None:
    assert list(PrefixGroup(0, [4, 1, 3, 0, 2]).batches(2)) == [[4, 1], [3, 0], [2]]
    assert grouped([], []) == []
