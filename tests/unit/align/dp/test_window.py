"""Windows of many rows reach the engine together, and no answer depends on it."""

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
    """How many windows each call of the engine was given."""
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


def test_all_windows_are_solved_in_one_call_and_kept_for_their_rows(aligner, sizes):
    pairs = rows(aligner)
    wanted = [aligner.pair(*pair) for pair in pairs]
    assert sizes == [1] * len(TEXTS)
    sizes.clear()
    aligner.backend = "cuda"  # what asks for it; the engine stays numpy
    aligner.solve_ahead(pairs)
    assert sizes == [len(TEXTS)]
    for pair, one in zip(pairs, wanted):
        found = aligner.pair(*pair)
        assert np.array_equal(found.student_chunk, one.student_chunk)
        assert np.array_equal(found.teacher_chunk, one.teacher_chunk)
        assert found.num_chunks == one.num_chunks > 0
    assert sizes == [len(TEXTS)]


def test_a_row_that_fails_ahead_fails_again_by_itself_and_takes_no_other_with_it(aligner, sizes):
    good = rows(aligner)[0]
    bad = (good[0], aligner.tokenize_teacher("another text"))
    aligner.backend = "cuda"
    aligner.solve_ahead([bad, good])
    assert sizes == [1]
    assert aligner.pair(*good).num_chunks > 0
    with pytest.raises(ValueError, match="have one text"):
        aligner.pair(*bad)


def test_on_a_cpu_nothing_is_done_twice(aligner, sizes):
    aligner.solve_ahead(rows(aligner))
    assert sizes == []
