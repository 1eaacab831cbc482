"""Rows that could not be read and are left out (`data.bad_rows: skip`): listed in a file, and never more than the budget."""

from __future__ import annotations

import logging
from pathlib import Path

from distill_rl.errors import DataError
from distill_rl.system.files import append_json_lines, read_json_lines
from distill_rl.types import DocumentBatch

log = logging.getLogger(__name__)

BY_DATA = "data"
"""The stage by which a row is listed; rows that an aligner leaves out have another budget and no stage."""


class SkippedRows:
    """The rows that a run has left out; a row that is met again in a later epoch counts once.

    Args:
        path: JSON lines with source, row, reason and stage, to which rows are appended; what earlier attempts of the
            run have listed counts, too.
        budget: most rows that may be listed.
    """

    def __init__(self, path: Path, budget: int):
        self._path, self._budget = path, budget
        self._rows = {
            (entry["source"], entry["row"]) for entry in read_json_lines(path) if entry.get("stage") == BY_DATA
        }

    def add(self, batch: DocumentBatch) -> int:
        """Lists the rows that a batch lacks, and returns their number.

        Raises:
            DataError: more rows than the budget are now listed. They are listed all the same.
        """
        new = [bad for bad in batch.bad_rows if (batch.source, bad.row) not in self._rows]
        if new:
            entries = (
                {"source": batch.source, "row": bad.row, "reason": bad.reason[:500], "stage": BY_DATA} for bad in new
            )
            append_json_lines(self._path, entries)
            last = new[-1]
            log.warning(
                "%d rows (%s) are left out; the last, row %s: %s", len(new), batch.source, last.row, last.reason
            )
            self._rows.update((batch.source, bad.row) for bad in new)
            if len(self._rows) > self._budget:
                rule = f"no more than data.max_bad_rows={self._budget} may be left out"
                remedy = f"fix or remove the rows listed in {self._path}, or raise data.max_bad_rows"
                raise DataError("data rows that cannot be read", rule, f"{len(self._rows)}", remedy)
        return len(batch.bad_rows)
