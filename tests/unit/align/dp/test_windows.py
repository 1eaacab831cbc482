"""Which strings the dynamic programme pairs and joins, where it searches, and which chunks it rejects."""

from __future__ import annotations

import numpy as np
import pytest

from distill_rl.align import TokenAligner
from distill_rl.align.dp import windows
from distill_rl.align.dp.problem import CanonicalTables, make_problems
from distill_rl.align.dp.windows import BACKENDS, WindowSolver, align_windows, load_backend
from tests.helpers.corpus import corpus_rows
from tests.helpers.tokenizers import tiny_tokenizer
from tests.helpers.windows import STUDENT, TEACHER, align_window, check_chunks, random_windows, same, vocabulary

CPU = [name for name in BACKENDS if name != "cuda"]


def aligned(
    student: list[str | bytes],
    teacher: list[str | bytes],
    *,
    backend: str = "numba",
    band: int = 64,
    lossy: bool = False,
    known: tuple[str, ...] = (),
) -> tuple[list[int], list[int]]:
    """Chunk indices of two lists of strings; `known` are further tokens of a lossy teacher's vocabulary."""
    sides = vocabulary(student), vocabulary([*teacher, *known], "lossy" if lossy else "none")
    ids = np.arange(len(student)), np.arange(len(teacher))
    answers = [
        align_window(*ids, CanonicalTables(*sides, fast_ids=fast), backend=backend, band=band) for fast in (True, False)
    ]
    assert same(answers[:1], answers[1:])
    return answers[0][0].tolist(), answers[0][1].tolist()


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        (["a", "b"], ["a", "b"], ([0, 1], [0, 1])),
        (["ab"], ["a", "b"], ([0], [0, 0])),
        (["1", "2", "3", "4"], ["1234"], ([0, 0, 0, 0], [0])),
        (["1", "2", "3", "4", "5"], ["12345"], ([-1] * 5, [-1])),
        (["12", "345"], ["123", "45"], ([-1, -1], [-1, -1])),
        (["x", "a", "b"], ["x", "q", "ab", "y"], ([0, 1, 1], [0, -1, 1, -1])),
        (["a", "x", "b"], ["a", "y", "b"], ([0, -1, 1], [0, -1, 1])),
        (["a", "", "b"], ["a", "b"], ([0, -1, 1], [0, 1])),
        (["a", "", "b"], ["ab"], ([-1, -1, -1], [-1])),
        ([""], [""], ([-1], [-1])),
        ([], ["a"], ([], [-1])),
        ([], [], ([], [])),
    ],
)
def test_equal_strings_pair_and_up_to_four_join(backend: str, student, teacher, expected) -> None:
    assert aligned(student, teacher, backend=backend) == expected
    assert aligned(teacher, student, backend=backend) == expected[::-1]


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize(("one", "other"), [("_", "▁"), ("\t", "\n"), (" ,", ","), ("\r\n", "\n"), ("  ", " ")])
def test_similar_strings_are_not_equal(one: str, other: str, lossy: bool) -> None:
    assert aligned(["x", one, "y"], ["x", other, "y"], lossy=lossy) == ([0, -1, 1], [0, -1, 1])


def test_parts_of_a_character_join_unfolded() -> None:
    first, second = "中".encode()[:1], "中".encode()[1:]
    assert aligned([first, second], ["中"]) == ([0, 0], [0])
    assert aligned([first, second, "É"], ["中", "e"], lossy=True) == ([0, 0, 1], [0, 1])


@pytest.mark.parametrize(
    ("known", "one", "other", "equal"),
    [
        ((), " Hello", "hello", True),
        (("World",), " Hello", "hello", False),
        ((), "Été", "ete", True),
        (("é",), "Été", "ete", False),
        (("é", "C"), "ﬁ", "fi", True),
        (("é", "C", "ﬁ"), "ﬁ", "fi", False),
    ],
)
def test_folds_follow_the_lossy_vocabulary(known, one: str, other: str, equal: bool) -> None:
    expected = ([0], [0]) if equal else ([-1], [-1])
    assert aligned([one], [other], lossy=True, known=known) == expected


def test_lossless_sides_are_not_folded() -> None:
    assert aligned(["Hello", " there"], ["hello", "there"]) == ([-1, -1], [-1, -1])


def test_optional_space_does_not_join_words() -> None:
    assert aligned(["new", " york"], ["newyork"], lossy=True) == ([-1, -1], [-1])
    assert aligned([" new", "er"], ["newer"], lossy=True) == ([0, 0], [0])


def test_hash_collision_makes_no_chunk() -> None:
    """A Thue–Morse word and its complement have the same polynomial hash mod 2⁶⁴, for any odd base."""
    word = "ab"
    while len(word) < 4096:
        word += word.translate({ord("a"): "b", ord("b"): "a"})
    other = word.translate({ord("a"): "b", ord("b"): "a"})
    half = len(word) // 2
    sides = vocabulary(["x", word[:half], word[half:], "y"]), vocabulary(["x", other, "y"])
    rows, columns = CanonicalTables(*sides).look_up(np.arange(4), np.arange(3))
    (problem,) = make_problems(columns, rows, 64)
    assert problem.row_joins[1, 0] == problem.column_joins[2, 1] != 0
    for backend in CPU:
        solve = WindowSolver(*sides, fast_ids=True, backend=backend, band=64)
        result = solve(np.arange(4), np.arange(3))
        assert [side.tolist() for side in result] == [[0, -1, -1, 1], [0, -1, 1]]


def test_padding_ids_spell_nothing() -> None:
    for fast in (True, False):
        tables = CanonicalTables(vocabulary(["a", "b"]), vocabulary(["b"]), fast_ids=fast)
        result = align_window(np.array([7, 1]), np.array([0, 1, -1]), tables)
        assert [side.tolist() for side in result] == [[-1, 0], [0, -1, -1]]


def test_backends_agree_for_narrow_and_wide_bands() -> None:
    windows = random_windows(0, 150, 40)
    tables = CanonicalTables(vocabulary(STUDENT), vocabulary(TEACHER))
    for band in (1, 2, 7, 64):
        answers = [align_windows(windows, tables, backend=backend, band=band) for backend in CPU]
        assert same(*answers)
        for window, chunks in zip(windows, answers[0]):
            spelled = [[side[i].encode() for i in ids] for side, ids in zip((STUDENT, TEACHER), window)]
            check_chunks(*spelled, chunks)
    assert max(int(chunks[0].max(initial=-1)) for chunks in answers[0]) > 10


@pytest.mark.parametrize(("student", "teacher"), [(300, 2), (2, 300), (300, 150), (1, 1)])
@pytest.mark.parametrize("kind", ["repeats", "nothing in common", "spell nothing"])
def test_sides_of_any_lengths_are_aligned(student: int, teacher: int, kind: str) -> None:
    tokens = {"repeats": ("a", "a"), "nothing in common": ("a", "b"), "spell nothing": ("", "b")}[kind]
    tables = CanonicalTables(vocabulary(tokens[:1]), vocabulary(tokens[1:]))
    window = np.zeros(student, np.int32), np.zeros(teacher, np.int32)
    answers = [align_windows([window], tables, backend=backend, band=1) for backend in CPU]
    assert same(*answers)
    pairs = min(student, teacher) if kind == "repeats" else 0
    assert [int((side >= 0).sum()) for side in answers[0][0]] == [pairs, pairs]


def test_strip_follows_the_bytes() -> None:
    """One side cuts the first half finely, the other one the second half: they meet 700 tokens off the diagonal."""
    student = [*"abcdefgh" * 100, "x", *["ijklmnop"] * 100, "x"]
    teacher = [*["abcdefgh"] * 100, "x", *"ijklmnop" * 100, "x"]
    result = aligned(student, teacher, band=1)
    assert (result[0][800], result[0][-1]) == (result[1][100], result[1][-1]) == (0, 1)
    assert [max(side[:100]) for side in result] == [-1, -1]


@pytest.mark.parametrize("band", [1, 8])
def test_strip_follows_a_side_that_ends_early(band: int) -> None:
    words = [f" {number}" for number in range(400)]
    for kept in (150, 399):
        result = aligned(words, words[:kept], band=band)
        assert result == ([*range(kept), *[-1] * (400 - kept)], list(range(kept)))


def test_strip_follows_dropped_white_space() -> None:
    """600 line breaks in the first half and none in the second; the other side has no white space at all."""
    lines = [part for number in range(200) for part in (f"{number}", "\n", "\n", "\n")]
    words = [f" {number}" for number in range(200, 400)]
    result = aligned([*lines, *words], [str(number) for number in range(400)], band=4, lossy=True)
    assert result[1] == list(range(400))
    assert [place for place, number in enumerate(result[0]) if number < 0] == [
        place for place, part in enumerate(lines) if part == "\n"
    ]


@pytest.mark.parametrize(("student", "teacher"), [(2048, 2048), (2048, 1), (4096, 512), (65536, 40000)])
def test_cells_grow_linearly(student: int, teacher: int) -> None:
    tables = CanonicalTables(vocabulary(["a", "aaaaaaa", ""]), vocabulary(["a", "aaa", ""]))
    draw = np.random.default_rng(0)
    sides = sorted(tables.look_up(draw.integers(0, 3, student), draw.integers(0, 3, teacher)), key=len)
    problems = make_problems(*sides, 64)
    assert len(problems) <= 2
    for problem in problems:
        assert problem.offsets[-1] <= (len(sides[0]) + 1) * (2 * 64 + 1) + len(sides[1])
        assert problem.low[0] == 0
        assert problem.high[-1] == len(sides[1])
        assert (problem.low[1:] <= problem.high[:-1]).all()


def test_bad_settings_are_rejected() -> None:
    tables = CanonicalTables(vocabulary(["a"]), vocabulary(["a"]))
    with pytest.raises(ValueError, match=r"one of numba, numpy, cuda; it is 'torch'"):
        load_backend("torch")
    with pytest.raises(ValueError, match=r"at least 1 token; it is 0"):
        align_window(np.array([0]), np.array([0]), tables, band=0)


def test_other_occurrence_of_a_word_is_not_paired() -> None:
    """The second student token and the last teacher token are both " to", but at different places of the text."""
    student = ["We", " to", "go to", " the", " sea"]
    teacher = ["We", " ", "togo", " to", " the sea"]
    assert aligned(student, teacher) == ([0, -1, -1, 1, 1], [0, -1, -1, -1, 1])
    # An added space makes no difference; with a different letter, the right pair is unknown.
    assert aligned([" We", *student[1:]], teacher)[0] == [-1, -1, -1, 0, 0]
    assert aligned(["Me", *student[1:]], teacher)[0] == [-1, 0, -1, 1, 1]


TEXTS = [row["text"] for row in corpus_rows(6, seed=3)]


@pytest.fixture
def aligner() -> TokenAligner:
    return TokenAligner(tiny_tokenizer(320), tiny_tokenizer(600, seed=7), "dp", backend="numpy")


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """Number of windows in each call of the backend."""
    seen: list[int] = []
    whole = windows.align_windows
    monkeypatch.setattr(
        windows,
        "align_windows",
        lambda asked, *rest, **more: (seen.append(len(asked)), whole(asked, *rest, **more))[1],
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
