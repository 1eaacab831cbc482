from __future__ import annotations

from distill_rl.system.memory import peak_gib


def test_peak_grows_with_what_was_held_and_stays():
    before = peak_gib()
    held = bytearray(b"x" * 2**28)
    during = peak_gib()
    del held
    assert 0 < before <= during
    assert during >= 0.25  # a quarter of a GiB was resident
    assert peak_gib() >= during - 1e-3  # the kernel counts pages of a process in batches
