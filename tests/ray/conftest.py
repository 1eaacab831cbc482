"""One Ray for the tests that only need some actors; those that test starting and ending make their own."""

import os

import pytest


@pytest.fixture(scope="package")
def ray_cluster():
    from distill_rl.config.schema import RayConfig
    from distill_rl.workers.cluster.session import ray, ray_session

    before = dict(os.environ)
    with ray_session(RayConfig(), num_cpus=8):
        yield ray
    os.environ.clear()  # of its token, which is gone
    os.environ.update(before)
