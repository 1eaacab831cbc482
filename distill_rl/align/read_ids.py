"""Converts a caller's ids to int32, and rejects whatever numpy would silently round, wrap or parse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_INT32 = np.iinfo(np.int32)
_TEXT = (str, bytes, bytearray, memoryview)
_RULE = "ids must be one row of integers: a list, a numpy array, or a torch tensor in host memory"


def read_ids(name: str, ids: Any, size: int) -> np.ndarray:
    """int32 [n] from a caller's integers [n]; a contiguous int32 array is returned as it is.

    Args:
        name: what to call the ids in an error.
        size: number of tokens in the vocabulary, for the error. `Side.of` checks ids that fit int32 against the
            vocabulary, because a mask may hide them.

    Raises:
        ValueError: bools, floats, text, None or anything else that is not a row of integers; an integer beyond int32.
    """
    if isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1:
        return np.ascontiguousarray(ids)
    row = _as_array(name, ids)
    if row.ndim != 1:
        raise ValueError(f"{name}: ids must be one row, got an array of shape {row.shape}; align rows one by one")
    if not len(row):
        return np.zeros(0, np.int32)
    low, high = row.min(), row.max()
    if low < _INT32.min or high > _INT32.max:
        rule = f"a token id must lie in 0 … {size - 1}, the tokenizer's range"
        raise ValueError(f"{name}: {rule}, got {high if high > _INT32.max else low}; check where it comes from")
    return row.astype(np.int32)


def _as_array(name: str, ids: Any) -> np.ndarray:
    """The ids as an array of integers of any width, or of Python integers as objects; its shape is not checked.

    Raises:
        ValueError: anything but integers, bools included.
    """
    if ids is None or isinstance(ids, _TEXT):
        raise ValueError(_not_integers(name, ids))
    try:
        row = np.asarray(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        # Rows of unequal length; tensors on a GPU, of bfloat16, or with a gradient.
        raise ValueError(_not_integers(name, ids)) from error
    if row.ndim == 1 and not len(row) and row.dtype.kind in "iuf":
        return np.zeros(0, np.int32)  # numpy reads an empty list as floats
    # numpy reads [True, 7] as [1, 7], and integers too wide for any dtype as floats or objects.
    kinds = set(map(type, ids)) if row.ndim == 1 and isinstance(ids, Sequence) else {row.dtype.type}
    if row.dtype.kind in "iu" and kinds.isdisjoint((bool, np.bool_)):
        return row
    if kinds == {int} or (row.dtype.kind == "O" and row.ndim == 1 and set(map(type, row)) == {int}):
        return np.array(ids, object)
    raise ValueError(_not_integers(name, ids))


def _not_integers(name: str, ids: Any) -> str:
    """The message of an error for ids that are not a row of integers."""
    return f"{name}: {_RULE}, got {_describe(ids)}; pass the tokenizer's input_ids"


def _describe(value: Any) -> str:
    """A value's type, its device unless that is the CPU, and as much of it as fits on a line, for a message."""
    if value is None:
        return "None"
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        kind, shown = type(value).__name__, repr(value)
    else:
        device = str(getattr(value, "device", "cpu"))
        kind = str(dtype) if device == "cpu" else f"{dtype} on {device}"
        shown = f"{value!r}".replace("\n", " ")
    if len(shown) > 60:
        shown = shown[:57] + "…"
    return f"{kind} {shown}"
