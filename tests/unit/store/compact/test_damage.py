"""Damaged blocks raise ValueError, whatever was damaged and even if the checksum fits."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from distill_rl.store.compact import codec, decode, encode
from tests.helpers.top_k_targets import realistic

SIZE = 3000


def with_checksum(tokens: np.ndarray, block: bytes) -> bytes:
    """The block with the checksum of what it holds now."""
    return struct.pack("<I", codec._checksum(tokens, SIZE, block[4:])) + block[4:]


@pytest.fixture(scope="module", params=[None, 0.8])
def case(request) -> tuple[np.ndarray, bytes]:
    tokens, targets = realistic(30, SIZE, 12)
    return tokens, encode(tokens, targets, vocabulary_size=SIZE, mass=request.param)


def test_any_flipped_bit_is_found(case):
    tokens, block = case
    for at in range(0, 8 * len(block), 7):
        damaged = bytearray(block)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(ValueError, match=r"^block: "):
            decode(tokens, bytes(damaged), vocabulary_size=SIZE)


def test_any_end_is_found(case):
    tokens, block = case
    for length in range(len(block)):
        with pytest.raises(ValueError, match=r"^block: "):
            decode(tokens, block[:length], vocabulary_size=SIZE)
    with pytest.raises(ValueError, match=r"^block: "):
        decode(tokens, block + bytes(4), vocabulary_size=SIZE)


def test_damage_behind_a_right_checksum_is_survived(case):
    """The decoder raises ValueError, or returns targets that are possible: no crash, no id outside the vocabulary."""
    tokens, block = case
    draw = np.random.default_rng(0)
    raised = 0
    for _ in range(1500):
        damaged = bytearray(block)
        kind = draw.integers(4)
        if kind == 0:
            damaged = damaged[: 28 + 4 * int(draw.integers((len(block) - 28) // 4))]
        elif kind == 1:
            damaged[12:] = draw.bytes(len(block) - 12)
        for _ in range(int(draw.integers(1, 4))):
            at = int(draw.integers(5, len(damaged)))
            if at not in (6, 7, 8, 9, 10, 11):  # k and n are tested below
                damaged[at] ^= 1 << int(draw.integers(8))
        try:
            decoded = decode(tokens, with_checksum(tokens, bytes(damaged)), vocabulary_size=SIZE)
        except ValueError as error:
            assert str(error).startswith("block: ")
            raised += 1
            continue
        assert decoded["ids"].max() < SIZE
        assert decoded["ids"].min() >= -1
    # The states must end where the encoder began, which random contents do with a probability of 2^-62.
    assert raised >= 1490


@pytest.mark.parametrize("k", [0, 1, 11, 13, 300, 65535])
def test_wrong_k_behind_a_right_checksum_is_found(case, k):
    tokens, block = case
    damaged = block[:6] + struct.pack("<H", k) + block[8:]
    with pytest.raises(ValueError, match=r"^block: "):
        decode(tokens, with_checksum(tokens, damaged), vocabulary_size=SIZE)


def test_other_tokens_and_vocabularies_are_found(case):
    tokens, block = case
    with pytest.raises(ValueError, match="other tokens"):
        decode(tokens + 1, block, vocabulary_size=SIZE)
    with pytest.raises(ValueError, match="other tokens"):
        decode(tokens, block, vocabulary_size=SIZE + 1)
    with pytest.raises(ValueError, match="a row per token"):
        decode(tokens[:-1], block, vocabulary_size=SIZE)
