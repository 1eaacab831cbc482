"""Ids as a caller gives them, read into int32 without a silent change: nothing is rounded, wrapped or parsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_INT32 = np.iinfo(np.int32)
_TEXT = (str, bytes, bytearray, memoryview)
_RULE = "ids are one row of integers: a list, a numpy array, or a torch tensor in host memory"


def read_ids(name: str, given: Any, size: int) -> np.ndarray:
    """int32 [n] of a caller's integers [n]; an int32 array is returned as it is.

    Args:
        name: what to call the ids in an error.
        size: tokens of the vocabulary, for the error's rule. Ids that int32 holds are held against it by `Side.of`,
            where a mask may hide them.

    Raises:
        ValueError: bools, floats, text, None or anything else that is no row of integers; an integer beyond int32.
    """
    if isinstance(given, np.ndarray) and given.dtype == np.int32 and given.ndim == 1:
        return np.ascontiguousarray(given)
    row = _as_array(name, given)
    if row.ndim != 1:
        raise ValueError(f"{name}: ids are one row, got an array of shape {row.shape}; align rows one by one")
    if not len(row):
        return np.zeros(0, np.int32)
    low, high = row.min(), row.max()
    if low < _INT32.min or high > _INT32.max:
        raise ValueError(_out_of_range(name, high if high > _INT32.max else low, size))
    return row.astype(np.int32)


def _as_array(name: str, given: Any) -> np.ndarray:
    """Integers of any width, or objects that are all Python's integers."""
    if given is None or isinstance(given, _TEXT):
        raise ValueError(_refusal(name, given))
    try:
        row = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        # Rows of unequal length; tensors on a GPU, of bfloat16, with a gradient.
        raise ValueError(_refusal(name, given)) from error
    if row.ndim == 1 and not len(row) and row.dtype.kind in "iuf":
        return np.zeros(0, np.int32)  # numpy takes an empty list for floats
    # numpy reads [True, 7] as [1, 7], and integers that no width holds as floats or objects.
    kinds = set(map(type, given)) if row.ndim == 1 and isinstance(given, Sequence) else {row.dtype.type}
    if row.dtype.kind in "iu" and kinds.isdisjoint((bool, np.bool_)):
        return row
    if kinds == {int} or (row.dtype.kind == "O" and row.ndim == 1 and set(map(type, row)) == {int}):
        return np.array(given, object)
    raise ValueError(_refusal(name, given))


def _refusal(name: str, given: Any) -> str:
    return f"{name}: {_RULE}, got {_described(given)}; pass the tokenizer's input_ids"


def _out_of_range(name: str, value: Any, size: int) -> str:
    return f"{name}: a token's id lies in 0 … {size - 1}, the tokenizer's, got {value}; check where it comes from"


def _described(given: Any) -> str:
    """The kind of a value, and as much of it as a line holds."""
    if given is None:
        return "None"
    kind = getattr(given, "dtype", None)
    device = str(getattr(given, "device", "cpu"))
    shown = repr(given) if kind is None else f"{given!r}".replace("\n", " ")
    shown = shown if len(shown) <= 60 else shown[:57] + "…"
    what = type(given).__name__ if kind is None else f"{kind} on {device}" if device != "cpu" else str(kind)
    return f"{what} {shown}"
