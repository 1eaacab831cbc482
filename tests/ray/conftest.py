"""One Ray for all tests that only need actors. Tests of starting and ending Ray start their own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.helpers.forks import forked_actors


@contextmanager
def one_ray() -> Iterator[Any]:
    """Yields the module `ray`, initialised for eight CPUs. The environment names its token until it ends."""
    from distill_rl.config.schema import RayConfig
    from distill_rl.workers.cluster.session import ray, ray_session

    before = dict(os.environ)
    with forked_actors(), ray_session(RayConfig(), num_cpus=8):
        yield ray
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Any]:
    with one_ray() as ray:
        yield ray
