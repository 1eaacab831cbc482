"""The coder's models: which there are, and what their symbols mean.

Every block starts with equally frequent symbols. Frequencies learnt from real targets would save 1 % of a block of 64
tokens, and less of longer ones.
"""

from __future__ import annotations

from functools import cache

import numpy as np

# Numbers of any size in 16 symbols: below 200 the class, with the place in it as bits; from there on the escape.
SIZE_BASE = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 40, 72, 200], np.int64)
"""The least number of each class."""
SIZE_BITS = np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 4, 5, 7, 0], np.int64)
"""Bits of the place in a class. The last class, of 2^7 numbers, would reach to 199."""
SIZES = 200
SIZE_OF = np.repeat(np.arange(15), 1 << SIZE_BITS[:15])
"""The class of each number below `SIZES`."""
ESCAPE = 15

# Where each kind of model begins. What a kind's models are chosen by is in `context`.
INDEX = 0
"""2 · 7 · 4 · 6 models: the index of an id among the candidates, by classes; `ESCAPE`: it is none"""
STEP = INDEX + 2 * 7 * 4 * 6
"""7 · 9: levels between neighbours in a row, by classes"""
KNOWN = STEP + 7 * 9
"""2: bit length, less one, of 1 + the place of an id that was no candidate before; `NEW`: it is new"""
NEW_LENGTH = KNOWN + 2
"""1: bit length, less 3, of a new id"""
FIRST = NEW_LENGTH + 1
"""1: the level of a row's first entry by 32; 15: `FIRST_LENGTH` follows"""
FIRST_FINE = FIRST + 1
"""15, by the symbol of `FIRST`: the level's next four bits; one more follows"""
FIRST_LENGTH = FIRST_FINE + 15
"""1: bit length of a first level less 480"""
STEP_LENGTH = FIRST_LENGTH + 1
"""1: bit length of a step of 200 or more"""
ROW_FULL = STEP_LENGTH + 1
"""1: whether the row has k entries (`ALL`) or fewer (`FEWER`)"""
COUNT_SIZE = ROW_FULL + 1
"""1: number of entries less one, by classes"""
COUNT_LENGTH = COUNT_SIZE + 1
"""1: its bit length, if it is 200 or more"""
REST = COUNT_LENGTH + 1
"""16, by the mass left: difference of the rest's level from the guess, folded; `REST_FAR`, `REST_NOTHING`"""
REST_LENGTH = REST + 16
"""1: bit length of half of a folded difference"""
LABEL = REST_LENGTH + 1
"""2, by whether the next token is in the row: `EQUAL` to its level, `BELOW` the row's last level, or `ANY`"""
LABEL_LENGTH = LABEL + 2
"""1: bit length of the label's level less the row's last level"""
MODELS = LABEL_LENGTH + 1

LONG_FIRST = 480
"""From this level on, a row's first level is coded by its bit length."""
MISSED_INDEX = 16
"""What an id that is no candidate counts as in the running mean of indices."""
NEW = 15
ALL, FEWER = 0, 1
REST_FAR, REST_NOTHING = 14, 15
EQUAL, BELOW, ANY = 0, 1, 2


@cache
def _first_models() -> np.ndarray:
    """int64 [MODELS, 6], what `fresh_models` copies."""
    differences = [i * ((1 << 11) - 1) for i in range(16)]
    words = [sum(differences[4 * w + j] << 16 * j for j in range(4)) for w in range(4)]
    return np.tile(np.array([*words, (1 << 15) - 16, 0], np.int64), (MODELS, 1))


def fresh_models() -> np.ndarray:
    """int64 [MODELS, 6], models for one block, as `coder` has them: all symbols equally frequent, none coded yet."""
    return _first_models().copy()
