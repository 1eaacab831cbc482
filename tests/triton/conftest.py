"""The tests of this folder interpret the kernels on CPU tensors, which Triton is told before it is imported."""

import importlib.util
import os
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("triton") is None
    for item in items:
        if not item.path.is_relative_to(Path(__file__).parent):
            continue
        # The kernels compute with masked columns and drop what comes of it, which NumPy reports and a GPU does not.
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"))
        if missing:
            item.add_marker(pytest.mark.skip(reason="triton is not installed: bash launch/test.sh triton"))
