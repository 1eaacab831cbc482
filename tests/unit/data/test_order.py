"""The order of large data by example; tests/properties/test_mixture.py has properties for random sizes."""

from __future__ import annotations

import hashlib

import numpy as np

from distill_rl.data.order import Blocks, WindowedOrder

FEW = Blocks(np.array([3, 3, 7, 9, 12]), np.array([40, 10, 50, 30, 90]))
EXPECTED = [4, 6, 7, 3, 8, 5, 1, 9, 2, 0, 11, 10, 5, 4, 8, 6, 3, 7, 11, 10, 9, 1, 2, 0]
SHA256 = "0d918c008b2eddbda7a53853acc339adb292864034b57359aaae6a47bc8bbfc8"


def test_the_windowed_order_is_the_same_on_all_versions_and_machines():
    """Checkpoints store a cursor into this order, so these values must never change."""
    order = WindowedOrder(7, FEW, window_bytes=100)
    assert [order(i) for i in range(24)] == EXPECTED
    ends = np.cumsum(np.arange(1000) % 13)
    many = WindowedOrder(7, Blocks(ends, np.arange(1, 1001) % 97 * 10), (2,), window_bytes=5000)
    rows = int(ends[-1])
    second = np.array([many(i) for i in range(rows, 2 * rows)], dtype="<i8")
    assert hashlib.sha256(second.tobytes()).hexdigest() == SHA256


def test_seeds_epochs_and_sources_give_different_orders():
    orders = [WindowedOrder(seed, FEW, member, window_bytes=100) for seed, member in ((0, ()), (1, ()), (0, (1,)))]
    found = [tuple(order(i) for i in range(12)) for order in orders] + [tuple(orders[0](i) for i in range(12, 24))]
    assert len(set(found)) == 4


def test_a_window_has_as_many_blocks_as_fit_or_two():
    """Blocks of 40 bytes: two in windows of 79 bytes or less, two in one of 119, three in one of 120."""
    blocks = Blocks(np.arange(1, 13), np.full(12, 40))
    for window_bytes, expected in ((1, 2), (79, 2), (119, 2), (120, 3)):
        windows: list[np.ndarray] = []
        order = WindowedOrder(0, blocks, window_bytes=window_bytes, entered=windows.append)
        for i in range(12):
            order(i)
        assert {len(window) for window in windows} == {expected}
