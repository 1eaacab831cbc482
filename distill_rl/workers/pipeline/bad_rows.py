"""What is left out of the run: rows that no aligner can process, and parts of chats that templates do not write."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill_rl.errors import AlignmentError
from distill_rl.system.files import append_json_lines, read_json_lines
from distill_rl.types import BadRow, BatchInfo, Row, row_of

log = logging.getLogger(__name__)


class BadRows:
    """Rows left out of the run: listed in a file, and never more of them than the budget.

    Raises:
        AlignmentError: an earlier part of the run has listed more than the budget.
    """

    def __init__(self, path: Path, budget: int):
        """Reads the rows that earlier parts of the run have listed in `path`, if it exists.

        Args:
            path: JSON lines with source, row (of a joined text a list) and reason; rows are appended to it.
            budget: most rows that may be listed.

        Raises:
            AlignmentError: more than the budget are listed already.
        """
        self._path, self._budget = path, budget
        self.rows: set[tuple[str, Row]] = set()
        """(`train` or `validation`, row)"""
        for entry in read_json_lines(path):
            if "stage" not in entry:  # rows that the data left out have a budget of their own
                row = entry["row"]
                self.rows.add((entry["source"], tuple(row) if isinstance(row, list) else row))
        self._check("see there")

    def of(self, source: str, documents: Sequence[Mapping[str, Any]]) -> tuple[Row, ...]:
        """Returns the rows of those documents that are known to be bad, in the order of the documents.

        Args:
            source: `train` or `validation`.
        """
        return tuple(row for row in map(row_of, documents) if (source, row) in self.rows)

    def others(self, source: str, documents: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns the documents without those that are known to be bad; `source` as for `of`."""
        return [document for document in documents if (source, row_of(document)) not in self.rows]

    def add(self, source: str, bad: BadRow) -> None:
        """Lists a row as left out, in the file and in memory, and logs why. Does nothing if it is listed already.

        Args:
            source: `train` or `validation`.

        Raises:
            AlignmentError: more rows than the budget are now listed. The row is listed all the same.
        """
        if (source, bad.row) in self.rows:
            return
        self.rows.add((source, bad.row))
        append_json_lines(self._path, [{"source": source, "row": bad.row, "reason": bad.reason[:500]}])
        log.warning("row %s (%s) is left out: %s", bad.row, source, bad.reason)
        self._check(f"the last: {bad.reason}")

    def _check(self, detail: str) -> None:
        """Raises an AlignmentError if more rows are listed than the budget allows; `detail` ends its message."""
        if len(self.rows) > self._budget:
            rule = f"no more than aligner.max_bad_rows={self._budget} may be left out"
            remedy = f"fix or remove the rows listed in {self._path}, or raise aligner.max_bad_rows"
            raise AlignmentError("data rows that cannot be aligned", rule, f"{len(self.rows)}, {detail}", remedy)


class LeftOutLog:
    """Says what chat templates leave out of the documents: once per part, and again each time it is ten times as many."""

    def __init__(self) -> None:
        self._documents: Counter[str] = Counter()

    def add(self, source: str, info: BatchInfo) -> None:
        """Counts what was left out of one batch of `train` or `validation` documents, and logs what is due."""
        for part in info.left_out:
            before = self._documents[part.what]
            self._documents[part.what] = count = before + part.documents
            if not before:
                log.warning("chats are read without %s, for instance row %s (%s)", part.what, part.row, source)
            elif len(str(count)) > len(str(before)):
                log.warning("chats are read without %s: %d so far", part.what, count)
