"""The aligner's dynamic programme on a CUDA device."""

from __future__ import annotations

import numpy as np
import pytest

from distill_rl.align.dp.backends import align_windows
from distill_rl.align.dp.canonical import CanonicalTables
from tests.helpers.windows import STUDENT, TEACHER, random_windows, same, vocabulary

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def tables() -> CanonicalTables:
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("Numba finds no CUDA toolkit")
    return CanonicalTables(vocabulary(STUDENT), vocabulary(TEACHER))


@pytest.mark.parametrize("band", [1, 8, 64])
def test_many_windows_match_numpy(tables: CanonicalTables, band: int) -> None:
    windows = random_windows(band, 1000, 120)
    results, expected = (align_windows(windows, tables, backend=name, band=band) for name in ("cuda", "numpy"))
    assert same(results, expected)


def test_long_windows_and_several_launches(tables: CanonicalTables, monkeypatch: pytest.MonkeyPatch) -> None:
    from distill_rl.align.dp import cuda as dp_cuda

    draw = np.random.default_rng(0)
    windows = [
        (draw.integers(0, len(STUDENT), size), draw.integers(0, len(TEACHER), 4096 - size))
        for size in (2048, 4000, 96, 1500, 3)
    ]
    expected = align_windows(windows, tables, backend="numpy")
    assert same(align_windows(windows, tables, backend="cuda"), expected)
    monkeypatch.setattr(dp_cuda, "SCRATCH_BYTES", 300_000)
    assert same(align_windows(windows, tables, backend="cuda"), expected)
