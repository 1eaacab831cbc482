"""The aligner's dynamic programme on a device against NumPy's, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from unittest import SkipTest

import numpy as np
import torch

from distill_rl.align.dp.backends import align_windows
from distill_rl.align.dp.canonical import CanonicalTables
from distill_rl.align.dp.device import missing_for_cuda
from distill_rl.align.tokenizer.vocabulary import Vocabulary

STUDENT = ("", "a", "b", "c", "ab", "bc", "abc", " a", "aa", "aaa", "cab")
TEACHER = ("b", "a", "", "ca", "bb", "cab", "abc", "aaaa", "c", "aab", " ")
"""Short strings over few letters, so that many tokens and joins are equal. "" stands for a special token."""


def check(device: torch.device, tiny: bool) -> dict[str, float]:
    """Aligns random windows of tokens with Numba's kernel for this device and with NumPy, and requires equal chunks.

    Every window is aligned with three widths of the band. `tiny` uses fewer and shorter windows.

    Returns:
        `windows`, the number of comparisons, and `tokens_matched`, the number of student tokens in chunks; both over
        all bands.

    Raises:
        AssertionError: a window's chunk numbers differ from NumPy's, or no window has a chunk.
        SkipTest: Numba is missing, or has no CUDA target for a GPU.
    """
    if find_spec("numba") is None:
        raise SkipTest("needs numba, which is not installed")
    if device.type == "cuda" and (missing := missing_for_cuda()):
        raise SkipTest(f"{missing.rule}; {missing.remedy}")
    tables = CanonicalTables(vocabulary(STUDENT), vocabulary(TEACHER))
    draw = np.random.default_rng(0)
    count, longest = (40, 24) if tiny else (1000, 120)
    windows = [
        tuple(draw.integers(0, len(side), draw.integers(0, longest)).astype(np.int32) for side in (STUDENT, TEACHER))
        for _ in range(count)
    ]
    backend, matched = "cuda" if device.type == "cuda" else "numba", 0
    for band in (1, 8, 64):
        results, expected = (align_windows(windows, tables, backend=name, band=band) for name in (backend, "numpy"))  # type: ignore[arg-type]
        for i, (sides, expected_sides) in enumerate(zip(results, expected)):
            same = all(np.array_equal(side, truth) for side, truth in zip(sides, expected_sides))
            assert same, f"window {i}, band {band}: {backend} and numpy align it differently"
            matched += int((expected_sides[0] >= 0).sum())
    assert matched > 0, "no window had anything in common"
    return {"windows": 3.0 * count, "tokens_matched": float(matched)}


def vocabulary(tokens: Sequence[str | bytes]) -> Vocabulary:
    """A vocabulary whose token i spells the i-th string, in UTF-8, or bytes; an empty one is a special token."""
    spellings = [token.encode() if isinstance(token, str) else token for token in tokens]
    lengths = np.array([len(token) for token in spellings], np.int32)
    return Vocabulary(
        flat=np.frombuffer(b"".join(spellings), np.uint8),
        starts=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
        lengths=lengths,
        special=lengths == 0,
        byte_fallback=np.zeros(len(spellings), bool),
        roles={},
        normalization="none",
        lossy=None,
        family="byte_level",
        hash="",
    )
