"""Rows of documents for tests that have one tokenizer and no batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distill_rl.data.batch.collate import BatchPlan, arrange, lay_out
from distill_rl.data.batch.tokenization import Encoded
from distill_rl.types import TokenRows


def laid_out(encoded: Sequence[Encoded], plan: BatchPlan) -> TokenRows:
    """The documents as rows, in their order; all rows have one width.

    Raises:
        ValueError: with packing, a document longer than `plan.max_length`.
    """
    members = arrange([encoded], [plan.max_length], plan)
    members.sort(key=lambda row: row or [len(encoded)])  # those that only fill the batch come last
    return replace(lay_out(encoded, plan, members), widths=None)
