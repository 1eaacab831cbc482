"""Rows that are left out: listed once, counted against the budget, over attempts of a run."""

from __future__ import annotations

import json

import pytest

from distill_rl.errors import DataError
from distill_rl.run.steps import SkippedRows
from distill_rl.types import BadRow, Cursor, DocumentBatch
from distill_rl.workers.pipeline.aligner_pool import BadRows


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


@pytest.mark.parametrize("torn", ['{"source": "tra', '{"row": 5, "source": "train"}\nnot JSON'])
def test_a_line_that_a_kill_cut_off_harms_no_later_one(tmp_path, torn):
    path = tmp_path / "bad_rows.jsonl"
    SkippedRows(path, 4).add(batch(1))
    with path.open("a") as file:
        file.write(torn)
    SkippedRows(path, 4).add(batch(1, 2))
    BadRows(path, 4).add("train", BadRow(7, "cannot be aligned"))
    assert SkippedRows(path, 2).add(batch(1, 2)) == 2
    assert ("train", 7) in BadRows(path, 4).rows


def test_a_joined_text_is_known_by_all_of_its_rows(tmp_path):
    """Its first row may be in another text in the next epoch, which is not to be left out."""
    path = tmp_path / "bad_rows.jsonl"
    BadRows(path, 4).add("train", BadRow((3, 9), "cannot be aligned"))
    known = BadRows(path, 4)
    texts = [{"row": 3, "rows": rows, "text": "a"} for rows in ((3, 9), (3, 4), (3,))]
    assert known.of("train", texts) == ((3, 9),)
    assert known.others("train", texts) == texts[1:]
