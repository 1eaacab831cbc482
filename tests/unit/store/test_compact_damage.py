"""Damaged blocks raise ValueError, whatever was damaged and even if the checksum fits."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from distill_rl.store.compact import _checksum, decode, encode
from tests.helpers.top_k_targets import realistic

SIZE = 3000


def with_checksum(tokens: np.ndarray, block: bytes) -> bytes:
    """The block with the checksum of what it holds now."""
    return struct.pack("<I", _checksum(tokens, SIZE, block[4:])) + block[4:]


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
    for longer in (block + bytes(4), with_checksum(tokens, block + bytes(4))):
        with pytest.raises(ValueError, match=r"^block: "):
            decode(tokens, longer, vocabulary_size=SIZE)


def test_damage_behind_a_right_checksum_is_survived(case):
    """No index leaves its array: the decoder raises ValueError, or returns targets that are possible.

    The latter happens where only bits without a model were changed, such as the lowest ones of a level.
    """
    tokens, block = case
    draw = np.random.default_rng(0)
    raised = 0
    for i in range(1500):
        damaged = bytearray(block)
        if i % 4 == 0:
            damaged = damaged[: 28 + 4 * int(draw.integers((len(block) - 28) // 4))]
        elif i % 4 == 1:
            damaged[12:] = draw.bytes(len(block) - 12)
        # All but the checksum, k and n, which are tested elsewhere.
        places = [4, 5, *range(12, len(damaged))]
        for at in draw.choice(places, int(draw.integers(1, 4)), replace=False):
            damaged[at] ^= 1 << int(draw.integers(8))
        try:
            decoded = decode(tokens, with_checksum(tokens, bytes(damaged)), vocabulary_size=SIZE)
        except ValueError:
            raised += 1
            continue
        assert decoded["ids"].max() < SIZE
        assert decoded["ids"].min() >= -1
        assert not np.isnan(decoded["logprobs"]).any()
        assert (decoded["logprobs"][:, 1:] <= decoded["logprobs"][:, :-1]).all()
    assert raised >= 1400


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
