"""Which values `align_ids` accepts as ids, and that it rejects what numpy would change silently."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distill_rl.align import TokenAligner
from tests.helpers.align import family

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
