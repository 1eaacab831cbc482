from __future__ import annotations

from collections.abc import Iterator

import pytest

from distill_rl.parallel.mesh import World, close_world, open_world


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A world of one rank on the CPU."""
    opened = open_world(rank=0, dp=1, tp=1)
    yield opened
    close_world(opened)
