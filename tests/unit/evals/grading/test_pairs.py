"""Pairs of a gold answer and an answer, judged by reading, and graded by the suites in grading processes.

`pairs.jsonl` has ten pairs of each of twenty kinds, half of them unequal, and pairs that users reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distill_rl.evals.grading.grader import Grader
from distill_rl.evals.suites.base import Item

PAIRS = [json.loads(line) for line in Path(__file__).with_name("pairs.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader() as pool:
        yield pool


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['kind']}: {pair['gold']} | {pair['answer']}"[:80])
def test_a_pair_is_graded_as_it_reads(pair: dict[str, Any], grader: Grader) -> None:
    completion = f"So it is \\boxed{{{pair['answer']}}}." if pair["suite"] == "math" else pair["answer"]
    graded = grader.submit(pair["suite"], Item("1", "", pair["gold"]), completion).result(timeout=600)
    assert graded.verdict is not None, graded
    assert (graded.verdict.score == 1) is pair["equal"]
