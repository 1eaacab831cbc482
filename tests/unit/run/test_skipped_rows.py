"""Rows that are left out: listed once, counted against the budget, over attempts of a run."""

from __future__ import annotations

import json

import pytest

from distill_rl.errors import DataError
from distill_rl.run.skipped_rows import SkippedRows
from distill_rl.types import BadRow, Cursor, DocumentBatch
from distill_rl.workers.pipeline.bad_rows import BadRows


def batch(*rows: int, source: str = "train") -> DocumentBatch:
    return DocumentBatch(0, (), Cursor(), source, tuple(BadRow(row, f"row {row} is bad") for row in rows))


def test_rows_are_listed_once_over_attempts_and_epochs(tmp_path):
    path = tmp_path / "bad_rows.jsonl"
    assert SkippedRows(path, 4).add(batch()) == 0
    assert not path.exists()
    assert SkippedRows(path, 4).add(batch(1, 2)) == 2
    again = SkippedRows(path, 4)
    assert again.add(batch(2, 3)) == 2
    again.add(batch(3, source="validation"))
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(entry["source"], entry["row"]) for entry in entries] == [
        ("train", 1), ("train", 2), ("train", 3), ("validation", 3),
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"data\.max_bad_rows=4 may be left out; got 5"):
        SkippedRows(path, 4).add(batch(9))


def test_aligners_and_data_have_budgets_of_their_own(tmp_path):
    path = tmp_path / "bad_rows.jsonl"
    SkippedRows(path, 9).add(batch(1, 2, 3))
    aligners = BadRows(path, 1)
    aligners.add("train", BadRow(7, "cannot be aligned"))
    data = SkippedRows(path, 3)
    data.add(batch(1))
    with pytest.raises(DataError):
        data.add(batch(4))
