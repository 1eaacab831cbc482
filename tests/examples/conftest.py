"""The Ray cluster that the runs of this folder join, their tiny models and corpus, and the reference run."""

from pathlib import Path

import pytest

from tests.cli.conftest import cluster, material, straight

__all__ = ["cluster", "material", "straight"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("long_run")
