"""What follows from a teacher's settings."""

import pytest

from distill_rl.config.schema import StudentConfig, TeacherConfig
from distill_rl.config.schema.backends import StoreConfig


@pytest.mark.parametrize(
    ("settings", "may"),
    [
        ({}, False),
        ({"backend": "vllm"}, True),
        ({"backend": "endpoint"}, True),
        ({"backend": "store"}, True),
        ({"backend": "store", "store": StoreConfig(missing="live")}, False),
        ({"quantization": "as_stored"}, True),
    ],
)
def test_weights_that_the_run_does_not_read_may_be_quantized(settings, may):
    assert TeacherConfig(**settings).may_be_quantized is may
    assert not StudentConfig().may_be_quantized
