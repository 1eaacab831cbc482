"""One Ray per test session for the tests that only need some actors; those that test starting and ending make their own."""

import pytest


@pytest.fixture(scope="session")
def ray_cluster():
    from distill_rl.config.schema import RayConfig
    from distill_rl.workers.cluster import ray, ray_session

    with ray_session(RayConfig(), num_cpus=8):
        yield ray
