"""The aligner's dynamic programme on a device against NumPy's, window by window."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distill_rl.align.dp.problem import CanonicalTables
from distill_rl.align.dp.windows import align_windows, missing_for_cuda
from tests.gpu.conftest import Figures
from tests.helpers.windows import STUDENT, TEACHER, random_windows, same, vocabulary

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def backend(device: torch.device) -> str:
    pytest.importorskip("numba")
    if device.type == "cpu":
        return "numba"
    if missing := missing_for_cuda():
        pytest.skip(f"{missing.rule}; {missing.remedy}")
    return "cuda"


@pytest.fixture(scope="module")
def tables() -> CanonicalTables:
    return CanonicalTables(vocabulary(STUDENT), vocabulary(TEACHER))


@pytest.mark.parametrize("band", [1, 8, 64])
def test_many_windows_match_numpy(
    backend: str, tables: CanonicalTables, tiny: bool, figures: Figures, band: int
) -> None:
    windows = random_windows(band, *((40, 24) if tiny else (1000, 120)))
    results, expected = (align_windows(windows, tables, backend=name, band=band) for name in (backend, "numpy"))
    for i, pair in enumerate(zip(results, expected, strict=True)):
        assert same([pair[0]], [pair[1]]), f"window {i}, band {band}: {backend} and numpy align it differently"
    matched = sum(int((student >= 0).sum()) for student, _ in expected)
    assert matched > 0, "no window had anything in common"
    figures["windows"] = figures.get("windows", 0) + len(windows)
    figures["tokens matched"] = figures.get("tokens matched", 0) + matched


def test_long_windows_and_several_launches(
    backend: str, tables: CanonicalTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend != "cuda":
        pytest.skip("launches are CUDA's")
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
