"""Chunks of the dynamic programme are kept only if both sides spell the same bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from distill_rl.align import TokenAligner, Vocabulary
from distill_rl.align.ids import same_spelling
from tests.helpers.align import SENTENCES, family

Side = tuple[np.ndarray, np.ndarray]


def one_by_one(vocabularies: tuple[Vocabulary, Vocabulary], sides: tuple[Side, Side]) -> list[bool]:
    """Whether each chunk spells the same on both sides, computed one chunk at a time."""
    count = 1 + max(int(numbers.max(initial=-1)) for _, numbers in sides)
    spelled = [
        [b"".join(vocabulary.token_bytes(token) for token in ids[numbers == chunk].tolist()) for chunk in range(count)]
        for vocabulary, (ids, numbers) in zip(vocabularies, sides)
    ]
    left_may = vocabularies[0].drops_spaces or vocabularies[1].dummy
    right_may = vocabularies[1].drops_spaces or vocabularies[0].dummy
    return [
        left == right or (left_may and b" " + left == right) or (right_may and left == b" " + right)
        for left, right in zip(*spelled)
    ]


def drawn(draw: random.Random, vocabularies: tuple[Vocabulary, Vocabulary]) -> tuple[Side, Side]:
    """Random chunks of one or two short tokens, about half of them equal, with tokens in no chunk between them."""
    short = [np.flatnonzero((side.lengths > 0) & (side.lengths < 3)).tolist() for side in vocabularies]
    ids_of = [{side.token_bytes(token): token for token in tokens} for side, tokens in zip(vocabularies, short)]
    both = sorted(ids_of[0].keys() & ids_of[1].keys())
    rows: tuple[list[tuple[int, int]], ...] = ([], [])
    for chunk in range(draw.randrange(8)):
        equal = draw.sample(both, 2) if draw.random() < 0.6 else None
        for row, tokens, known in zip(rows, short, ids_of):
            chosen = draw.choices(tokens, k=draw.randint(1, 2)) if equal is None else [known[part] for part in equal]
            if draw.random() < 0.2 and b" " in known:
                chosen = [known[b" "], *chosen]
            row += [(token, chunk) for token in chosen]
            row += [(draw.choice(tokens), -1)] * draw.randrange(2)
    left, right = (np.array(row, np.int32).reshape(-1, 2).T for row in rows)
    return (left[0], left[1]), (right[0], right[1])


@pytest.mark.parametrize("student", ["byte_level", "wordpiece", "spm_prepend"])
@pytest.mark.parametrize("teacher", ["tiktoken", "unigram", "wordpiece"])
def test_kept_chunks_spell_the_same_bytes(student, teacher):
    aligner = TokenAligner(family(student), family(teacher))
    vocabularies = aligner.student, aligner.teacher
    draw = random.Random(f"{student} {teacher}")
    seen = set()
    for _ in range(200):
        sides = drawn(draw, vocabularies)
        expected = one_by_one(vocabularies, sides)
        (left, left_chunks), (right, right_chunks) = sides
        result = same_spelling(vocabularies, (left, right), (left_chunks, right_chunks))
        renumbered = np.append(np.where(expected, np.cumsum(expected) - 1, -1), -1)
        assert np.array_equal(result[0], renumbered[left_chunks])
        assert np.array_equal(result[1], renumbered[right_chunks])
        assert result[0].dtype == result[1].dtype == np.int32
        seen |= set(expected)
    assert seen == {False, True}


def test_lossy_row_has_no_python_loop_over_tokens(monkeypatch):
    """Looking up each token's bytes separately would take a third of the time of a row of 2,000 tokens."""
    aligner = TokenAligner(family("byte_level"), family("wordpiece"))
    text = " ".join(SENTENCES)
    ids = aligner.tokenize_student(text).ids, aligner.tokenize_teacher(text).ids

    def fail(self: Vocabulary, token_id: int) -> bytes:
        raise AssertionError(f"looked up the bytes of token {token_id} alone")

    monkeypatch.setattr(Vocabulary, "token_bytes", fail)
    result = aligner.align_ids(*ids)
    assert result.method == "dp"
    assert result.num_chunks


ALIGNER = TokenAligner(family("byte_level"), family("tiktoken"))


@pytest.mark.parametrize(
    "values",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        [np.int64(1), 2],
        np.array([1, 2], np.int32),
        np.array([1, 2], np.uint8),
        np.array([1, 2], ">i8"),
        np.arange(5, dtype=np.int32)[1:3],
        torch.tensor([1, 2]),
        torch.tensor([1, 2], dtype=torch.int32),
    ],
    ids=lambda values: f"{type(values).__name__} {getattr(values, 'dtype', '')}",
)
def test_integers_of_any_kind_are_ids(values):
    result = ALIGNER.align_ids(values, [])
    assert result.student_ids.dtype == np.int32
    assert result.student_ids.tolist() == [1, 2]


@pytest.mark.parametrize("values", [[], (), np.array([]), torch.tensor([])], ids=lambda values: type(values).__name__)
def test_empty_ids_are_a_row(values):
    assert len(ALIGNER.align_ids(values, []).student_ids) == 0


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([1.0, 2.0], "list [1.0, 2.0]"),
        (np.array([1.5]), "float64 array([1.5])"),
        (torch.ones(2), "torch.float32 tensor([1., 1.])"),
        (torch.ones(1, dtype=torch.bfloat16), "torch.bfloat16"),
        (torch.ones(1, requires_grad=True), "torch.float32"),
        (torch.ones(1, dtype=torch.int64, device="meta"), "torch.int64 on meta"),
        ([True, False], "list [True, False]"),
        ([True, 7], "list [True, 7]"),
        (np.array([True]), "bool array([ True])"),
        (torch.tensor([True]), "torch.bool tensor([True])"),
        (b"ab", "bytes b'ab'"),
        (bytearray(b"ab"), "bytearray"),
        ("12", "str '12'"),
        (["1", "2"], "list ['1', '2']"),
        (None, "None"),
        ([1, None], "list [1, None]"),
        ([[1], [1, 2]], "list [[1], [1, 2]]"),
        ({1, 2}, "set {1, 2}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("side", ["student_ids", "teacher_ids"])
def test_non_integers_are_rejected_in_one_line(values, shown, side):
    ids = {"student_ids": [1], "teacher_ids": [1]} | {side: values}
    with pytest.raises(ValueError, match="one row of integers") as caught:
        ALIGNER.align_ids(**ids)
    line = str(caught.value)
    assert line.startswith(f"{side}: ids must be one row of integers")
    assert f"got {shown}" in line
    assert line.endswith("pass the tokenizer's input_ids")
    assert "\n" not in line


@pytest.mark.parametrize("value", [2**32 + 5, 2**31, -(2**31) - 1, 2**63, 2**70, -(2**70)])
@pytest.mark.parametrize("read", [list, np.array])
def test_integers_beyond_32_bits_are_not_wrapped(value, read):
    with pytest.raises(ValueError, match=f"teacher_ids: a token id must lie in 0 … .*, got {value}; check"):
        ALIGNER.align_ids([1], read([value]))
    if -(2**63) <= value < 2**63:
        with pytest.raises(ValueError, match=f"got {value}"):
            ALIGNER.align_ids([1], torch.tensor([value]))
    with pytest.raises(ValueError, match=f"got {value}"):  # even as padding, since int32 cannot hold it
        ALIGNER.align_ids([1], read([value]), teacher_mask=[0])


def test_out_of_range_id_names_its_side():
    with pytest.raises(ValueError, match=f"teacher_ids: a token id must lie in 0 … {ALIGNER.teacher.size - 1}"):
        ALIGNER.align_ids([1], [ALIGNER.teacher.size])
