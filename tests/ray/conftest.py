"""One Ray for all tests that only need actors. Tests of starting and ending Ray start their own."""

import os

import pytest


@pytest.fixture(scope="package")
def ray_cluster():
    from distill_rl.config.schema import RayConfig
    from distill_rl.workers.cluster.session import ray, ray_session

    before = dict(os.environ)
    with ray_session(RayConfig(), num_cpus=8):
        yield ray
    os.environ.clear()  # it names a token that no longer exists
    os.environ.update(before)
