"""Windows of many rows reach the backend together, and no result depends on it."""

from __future__ import annotations

import numpy as np
import pytest

from distill_rl.align import TokenAligner
from distill_rl.align.dp import backends
from tests.helpers.corpus import corpus_rows
from tests.helpers.tokenizers import tiny_tokenizer

TEXTS = [row["text"] for row in corpus_rows(6, seed=3)]


@pytest.fixture
def aligner() -> TokenAligner:
    return TokenAligner(tiny_tokenizer(320), tiny_tokenizer(600, seed=7), "dp", backend="numpy")


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """Number of windows in each call of the backend."""
    seen: list[int] = []
    whole = backends.align_windows
    monkeypatch.setattr(
        backends,
        "align_windows",
        lambda windows, *rest, **more: (seen.append(len(windows)), whole(windows, *rest, **more))[1],
    )
    return seen


def rows(aligner: TokenAligner) -> list:
    return [(aligner.tokenize_student(text), aligner.tokenize_teacher(text)) for text in TEXTS]


def test_windows_of_all_rows_are_solved_in_one_call(aligner, sizes):
    pairs = rows(aligner)
    expected = [aligner.pair(*pair) for pair in pairs]
    assert sizes == [1] * len(TEXTS)
    sizes.clear()
    aligner.backend = "cuda"  # solve_ahead works only for cuda; the solver itself still uses numpy
    aligner.solve_ahead(pairs)
    assert sizes == [len(TEXTS)]
    for pair, wanted_row in zip(pairs, expected):
        result = aligner.pair(*pair)
        assert np.array_equal(result.student_chunk, wanted_row.student_chunk)
        assert np.array_equal(result.teacher_chunk, wanted_row.teacher_chunk)
        assert result.num_chunks == wanted_row.num_chunks > 0
    assert sizes == [len(TEXTS)]


def test_failing_row_raises_later_and_alone(aligner, sizes):
    good = rows(aligner)[0]
    bad = (good[0], aligner.tokenize_teacher("another text"))
    aligner.backend = "cuda"
    aligner.solve_ahead([bad, good])
    assert sizes == [1]
    assert aligner.pair(*good).num_chunks > 0
    with pytest.raises(ValueError, match="have one text"):
        aligner.pair(*bad)


def test_cpu_backend_solves_nothing_ahead(aligner, sizes):
    aligner.solve_ahead(rows(aligner))
    assert sizes == []
