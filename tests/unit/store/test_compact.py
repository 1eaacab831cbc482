"""Blocks of the compact format: what comes back, and which bytes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.store.compact import decode, encode, error_bound
from tests.helpers.top_k_targets import realistic

ANY_FLOAT = st.floats(width=32, allow_nan=True, allow_infinity=True)
LOGPROB = st.one_of(st.floats(-30, 0, width=32), st.just(-np.inf), st.sampled_from([0.0, -1.5, -999.5, -5000.0]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, np.ndarray], int]:
    """(tokens, targets, vocabulary's size): any targets of the wire form, with ties, −inf and extreme ids."""
    n, k = draw(st.integers(0, 12)), draw(st.integers(1, 9))
    size = draw(st.sampled_from([k, k + 1, 200, 151_669, 1 << 31]))
    some_id = st.one_of(st.integers(0, size - 1), st.integers(max(size - k, 0), size - 1))
    rows = [draw(st.lists(some_id, min_size=k, max_size=k, unique=True)) for _ in range(n)]
    repeated = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    for i in range(1, n):
        rows[i] = rows[i - 1] if repeated[i] else rows[i]
    logprobs = [sorted(draw(st.lists(LOGPROB, min_size=k, max_size=k)), reverse=True) for _ in range(n)]
    targets = {
        "ids": np.array(rows, np.int32).reshape(n, k),
        "logprobs": np.array(logprobs, np.float32).reshape(n, k),
        "rest_logprob": np.array(draw(st.lists(LOGPROB, min_size=n, max_size=n)), np.float32),
        "label_logprob": np.array(draw(st.lists(ANY_FLOAT, min_size=n, max_size=n)), np.float32),
    }
    tokens = draw(st.lists(st.sampled_from([0, 1, 2, size - 1, *(row[0] for row in rows)]), min_size=n, max_size=n))
    return np.array(tokens, np.int32), targets, size


def assert_near(stored: np.ndarray, exact: np.ndarray) -> None:
    """Each value is within its bound; those above 0 count as 0, those below −1000 as −inf, and NaN is kept."""
    exact = np.where(exact < -1000, -np.inf, np.minimum(exact.astype(np.float64), 0))
    same = (stored == exact) | (np.isnan(stored) & np.isnan(exact))
    with np.errstate(invalid="ignore"):
        assert (same | (np.abs(stored - exact) <= error_bound(exact))).all()


@settings(max_examples=150, deadline=None)
@given(cases())
def test_round_trip(case):
    tokens, targets, size = case
    block = encode(tokens, targets, vocabulary_size=size)
    decoded = decode(tokens, block, vocabulary_size=size)
    assert list(decoded) == list(targets)
    assert (decoded["ids"] == targets["ids"]).all()
    for name, array in decoded.items():
        assert array.shape == targets[name].shape
        assert array.dtype == targets[name].dtype
        if name != "ids":
            assert_near(array, targets[name])
    assert encode(tokens, decoded, vocabulary_size=size) == block


@settings(max_examples=100, deadline=None)
@given(cases(), st.floats(0.01, 1))
def test_mass_keeps_the_fewest_entries(case, mass):
    tokens, targets, size = case
    block = encode(tokens, targets, vocabulary_size=size, mass=mass)
    decoded = decode(tokens, block, vocabulary_size=size)
    assert decoded["ids"].shape == targets["ids"].shape
    probabilities = np.exp(targets["logprobs"].astype(np.float64))
    for i in range(len(tokens)):
        kept = int((decoded["ids"][i] >= 0).sum())
        assert kept >= 1
        assert (decoded["ids"][i, :kept] == targets["ids"][i, :kept]).all()
        assert (decoded["ids"][i, kept:] == -1).all()
        assert (decoded["logprobs"][i, kept:] == -np.inf).all()
        sums = np.cumsum(probabilities[i])
        assert kept == 1 or sums[kept - 2] < mass
        assert kept == probabilities.shape[1] or sums[kept - 1] >= mass
        with np.errstate(divide="ignore"):
            rest = np.log(np.exp(targets["rest_logprob"][i].astype(np.float64)) + probabilities[i, kept:].sum())
        near_zero = rest < -700  # exp of it underflows, so that it becomes −inf here or there
        if kept < probabilities.shape[1] and not near_zero:
            assert_near(decoded["rest_logprob"][i], rest)
    assert encode(tokens, decoded, vocabulary_size=size) == block


@pytest.mark.parametrize("absent", [["rest_logprob"], ["label_logprob"], ["rest_logprob", "label_logprob"]])
def test_rest_and_label_may_be_absent(absent):
    tokens, targets = realistic(20, 500, 8)
    for name in absent:
        del targets[name]
    block = encode(tokens, targets, vocabulary_size=500)
    decoded = decode(tokens, block, vocabulary_size=500)
    assert list(decoded) == list(targets)
    assert (decoded["ids"] == targets["ids"]).all()


def test_many_rows_and_entries():
    """Rows of 300 entries, in which classes and bit lengths of every size occur."""
    tokens, targets = realistic(150, 20_000, 300)
    targets["logprobs"][::7, 200:] = -np.inf
    block = encode(tokens, targets, vocabulary_size=20_000)
    decoded = decode(tokens, memoryview(block), vocabulary_size=20_000)
    assert (decoded["ids"] == targets["ids"]).all()
    assert_near(decoded["logprobs"], targets["logprobs"])
    assert_near(decoded["rest_logprob"], targets["rest_logprob"])
    again = decode(tokens, np.frombuffer(block, np.uint8), vocabulary_size=20_000)
    assert all((again[name] == decoded[name]).all() for name in decoded)


def test_repeated_rows_cost_next_to_nothing():
    _, targets = realistic(1, 20_000, 64)
    repeated = {name: np.repeat(array, 500, axis=0) for name, array in targets.items()}
    block = encode(np.full(500, 3, np.int32), repeated, vocabulary_size=20_000)
    assert len(block) < 500 * 40


def test_bytes_are_those_of_the_format():
    """The bytes of a block are a contract: if this fails, `VERSION` must change, too.

    The targets are integers and dyadic fractions, so no library's random numbers or exponentials have a say.
    """
    n, k, size = 60, 16, 150_000
    row, place = np.meshgrid(np.arange(n), np.arange(k), indexing="ij")
    targets = {
        "ids": ((row * row % 7 * 977 + place * (place + row % 3) * 131) % size).astype(np.int32),
        "logprobs": (-(place * (place + 3) + row % 5) / 16).astype(np.float32),
        "rest_logprob": (-(np.arange(n) % 9) / 4).astype(np.float32),
        "label_logprob": (-(np.arange(n) % 11) / 2).astype(np.float32),
    }
    block = encode((np.arange(n) % 13).astype(np.int32), targets, vocabulary_size=size)
    assert hashlib.sha256(block).hexdigest()[:16] == "1b6ae891befdcf91"


def test_another_process_makes_the_same_bytes():
    program = (
        "import hashlib\nfrom distill_rl.store.compact import encode\nfrom tests.helpers.top_k_targets import realistic\n"
        "tokens, targets = realistic(40, 900, 16)\n"
        "print(hashlib.sha256(encode(tokens, targets, vocabulary_size=900, mass=0.9)).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    tokens, targets = realistic(40, 900, 16)
    block = encode(tokens, targets, vocabulary_size=900, mass=0.9)
    assert done.stdout.strip() == hashlib.sha256(block).hexdigest()


def _changed(name: str, value: Any) -> dict[str, Any]:
    tokens, targets = realistic(4, 50, 3)
    return {"tokens": tokens, "targets": targets | {name: value(targets[name].copy())}}


def _set(place: Any, value: float):
    def change(array: np.ndarray) -> np.ndarray:
        array[place] = value
        return array

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ids", _set((1, 1), 50), "ids: must be from 0 to 49"),
        ("ids", _set((1, 1), -2), "ids: must be from 0 to 49"),
        ("ids", _set((1, 1), -1), "ids: must begin"),
        ("ids", _set(1, -1), "ids: must begin"),
        ("ids", lambda array: array[:, :0], "ids, logprobs: must have shape"),
        ("ids", lambda array: array.astype(np.float32), "ids: must be integers"),
        ("ids", lambda array: array.astype(np.int64) + (1 << 32), "ids: must fit into int32"),
        ("ids", lambda array: array[0], "ids: must be integers in 2 dimensions"),
        ("logprobs", _set((2, 0), -99), "logprobs: must descend"),
        ("logprobs", _set((2, 1), np.nan), "logprobs: must descend"),
        ("logprobs", lambda array: array[:2], "ids, logprobs: must have shape"),
        ("rest_logprob", _set(0, np.nan), "rest_logprob: must not be NaN"),
        ("label_logprob", lambda array: array[:2], "label_logprob: must have shape"),
    ],
)
def test_impossible_targets_are_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        encode(**_changed(name, change), vocabulary_size=50)


def test_missing_targets_are_named():
    tokens, targets = realistic(4, 50, 3)
    with pytest.raises(ValueError, match="logprobs missing"):
        encode(tokens, {"ids": targets["ids"]}, vocabulary_size=50)


@pytest.mark.parametrize("mass", [0, -0.1, 1.01, float("nan")])
def test_impossible_mass_is_refused(mass):
    tokens, targets = realistic(4, 50, 3)
    with pytest.raises(ValueError, match="mass: must be above 0"):
        encode(tokens, targets, vocabulary_size=50, mass=mass)
