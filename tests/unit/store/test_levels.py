"""Quantisation of log-probabilities."""

from __future__ import annotations

import numpy as np

from distill_rl.store.compact import (
    COUNT,
    LEAST,
    MASS_BITS,
    MINUS_INFINITY,
    NOT_A_NUMBER,
    error_bound,
    logprob_table,
    mass_table,
    to_levels,
)


def test_error_is_within_the_bound():
    logprobs = -np.concatenate([np.linspace(0, 12, 100_001), np.linspace(0, LEAST, 100_001)]).astype(np.float32)
    stored = logprob_table()[to_levels(logprobs)]
    error = np.abs(stored.astype(np.float64) - logprobs)
    assert (error <= error_bound(logprobs)).all()
    assert (error[(logprobs > -2)] <= 1 / 256).all()
    assert (error >= 0.99 * error_bound(logprobs)).any()


def test_levels_are_their_own_levels():
    assert (to_levels(logprob_table()) == np.arange(COUNT)).all()
    finite = logprob_table()[:MINUS_INFINITY]
    assert (np.diff(finite) < 0).all()
    assert finite[0] == 0
    assert finite[-1] == -LEAST


def test_every_float_has_a_level():
    given = np.array([1e-7, 3.0, np.inf, -1000.01, -np.inf, np.nan, np.finfo(np.float32).min], np.float32)
    assert to_levels(given).tolist() == [0, 0, 0, *[MINUS_INFINITY] * 2, NOT_A_NUMBER, MINUS_INFINITY]


def test_masses_are_the_exponentials_rounded_down():
    exact = np.exp(logprob_table()[:MINUS_INFINITY].astype(np.float64)) * 2**MASS_BITS
    masses = mass_table()
    # The table is made in integers; fp64 has an error of about 1e-7 at 2^30, which is 1e-16 relative.
    assert (masses[:MINUS_INFINITY] <= exact + 1e-6).all()
    assert (masses[:MINUS_INFINITY] > exact - 1 - 1e-6).all()
    assert (masses[MINUS_INFINITY:] == 0).all()
    assert (np.diff(masses) <= 0).all()
