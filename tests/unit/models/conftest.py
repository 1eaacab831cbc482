from __future__ import annotations

from collections.abc import Iterator

import pytest

from distill_rl.parallel.mesh import World, close_world, open_world


@pytest.fixture
def world() -> Iterator[World]:
    world = open_world(rank=0, dp=1, tp=1)
    yield world
    close_world(world)
