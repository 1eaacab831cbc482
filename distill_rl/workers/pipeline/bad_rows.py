"""What is left out of the run: rows that no aligner can process, and parts of chats that templates do not write."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill_rl.errors import AlignmentError
from distill_rl.types import BadRow, BatchInfo

log = logging.getLogger(__name__)


class BadRows:
    """Rows left out of the run: listed in a file, and never more of them than the budget.

    Raises:
        AlignmentError: an earlier part of the run has listed more than the budget.
    """

    def __init__(self, path: Path, budget: int):
        """Reads the rows that earlier parts of the run have listed in `path`, if it exists.

        Args:
            path: JSON lines with source, row and reason; rows are appended to it.
            budget: most rows that may be listed.

        Raises:
            AlignmentError: more than the budget are listed already.
        """
        self._path, self._budget = path, budget
        self.rows: set[tuple[str, int]] = set()
        """(`train` or `validation`, row)"""
        for line in path.read_text("utf-8").splitlines(keepends=True) if path.exists() else ():
            if line.endswith("\n"):  # a line that a kill cut off is ignored: its row will be found and listed again
                entry = json.loads(line)
                if "stage" not in entry:  # rows that the data left out have a budget of their own
                    self.rows.add((entry["source"], entry["row"]))
        self._check("see there")

    def of(self, source: str, documents: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Returns the row numbers of those documents that are known to be bad, sorted.

        Args:
            source: `train` or `validation`.
        """
        numbers = {int(document["row"]) for document in documents}
        return tuple(sorted({row for listed, row in self.rows if listed == source} & numbers))

    def others(self, source: str, documents: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns the documents without those that are known to be bad; `source` as for `of`."""
        bad = self.of(source, documents)
        return [document for document in documents if int(document["row"]) not in bad]

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
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"source": source, "row": bad.row, "reason": bad.reason[:500]}) + "\n")
        log.warning("row %d (%s) is left out: %s", bad.row, source, bad.reason)
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
                log.warning("chats are read without %s, for instance row %d (%s)", part.what, part.row, source)
            elif len(str(count)) > len(str(before)):
                log.warning("chats are read without %s: %d so far", part.what, count)
