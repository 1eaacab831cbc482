"""The dynamic programme on random windows: optimal, and equal for every backend and with the sides swapped."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.align.dp.problem import CanonicalTables, make_problems
from distill_rl.align.dp.windows import align_windows, load_backend
from tests.helpers.windows import STUDENT, TEACHER, align_window, best_score, check_chunks, same, score, vocabulary

LEFT, RIGHT = vocabulary(STUDENT), vocabulary(TEACHER)
TABLES, SWAPPED, SLOW = (
    CanonicalTables(LEFT, RIGHT),
    CanonicalTables(RIGHT, LEFT),
    CanonicalTables(LEFT, RIGHT, fast_ids=False),
)
LONGEST = 14


def ids(tokens: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.integers(0, tokens - 1), max_size=LONGEST).map(lambda drawn: np.array(drawn, np.int32))


windows = st.tuples(ids(len(STUDENT)), ids(len(TEACHER)))


@settings(max_examples=300, deadline=None)
@given(windows)
def test_score_is_optimal_when_the_band_holds_all_cells(window) -> None:
    student, teacher = ([side[i].encode() for i in part] for side, part in zip((STUDENT, TEACHER), window))
    if not (student and teacher):
        return
    problem = make_problems(*TABLES.look_up(*window), LONGEST)[0]
    for backend in ("numba", "numpy"):
        *marks, count = load_backend(backend)([problem])[0]
        chunks = [np.where(side < 0, -1, count - 1 - side) for side in marks]
        assert score(*chunks) == best_score(student, teacher)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from("aabbc "), max_size=20).map("".join), st.randoms(use_true_random=False), st.integers(1, 20)
)
def test_chunks_of_one_text_lie_at_the_same_bytes(text, draw, band) -> None:
    """Both sides cut the same text: a chunk has the same number of bytes before it on both sides, even if words repeat."""

    def cut(tokens: list[str]) -> list[int]:
        ids, done = [], 0
        while done < len(text):
            ids.append(draw.choice([i for i, token in enumerate(tokens) if token and text.startswith(token, done)]))
            done += len(tokens[ids[-1]])
        return ids

    student, teacher = (["", *"abc ", *side] for side in (STUDENT, TEACHER))
    window = np.array(cut(student), np.int32), np.array(cut(teacher), np.int32)
    chunks = align_window(*window, CanonicalTables(vocabulary(student), vocabulary(teacher)), band=band)
    spelled = [[side[i].encode() for i in ids] for side, ids in zip((student, teacher), window)]
    check_chunks(*spelled, chunks)
    before = [np.cumsum([0, *map(len, side)]) for side in spelled]
    for chunk in range(int(chunks[0].max(initial=-1)) + 1):
        assert before[0][np.argmax(chunks[0] == chunk)] == before[1][np.argmax(chunks[1] == chunk)]


@settings(max_examples=300, deadline=None)
@given(windows, st.integers(1, LONGEST))
def test_backends_and_tables_give_the_same_result(window, band) -> None:
    answer = align_windows([window], TABLES, band=band)
    assert same(align_windows([window], TABLES, backend="numpy", band=band), answer)
    assert same(align_windows([window], SLOW, band=band), answer)
    check_chunks(*([side[i].encode() for i in part] for side, part in zip((STUDENT, TEACHER), window)), answer[0])


@settings(max_examples=300, deadline=None)
@given(windows, st.integers(1, LONGEST))
def test_swapping_the_sides_swaps_the_result(window, band) -> None:
    student, teacher = align_window(*window, TABLES, band=band)
    assert same([align_window(*window[::-1], SWAPPED, band=band)], [(teacher, student)])


@settings(max_examples=100, deadline=None)
@given(st.lists(windows, max_size=6))
def test_batch_equals_its_windows_one_by_one(batch) -> None:
    assert same(align_windows(batch, TABLES), [align_window(*window, TABLES) for window in batch])


@settings(max_examples=100, deadline=None)
@given(ids(len(STUDENT)), st.integers(1, LONGEST))
def test_window_with_itself_is_all_equal_pairs(side, band) -> None:
    chunks = align_window(side, side, CanonicalTables(LEFT, LEFT), band=band)
    spelled = np.array([STUDENT[i] != "" for i in side], bool)
    expected = np.where(spelled, np.cumsum(spelled) - 1, -1)
    assert np.array_equal(chunks[0], expected)
    assert np.array_equal(chunks[1], expected)
