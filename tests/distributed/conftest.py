"""Marks the tests of layouts on four ranks, which the default suite leaves to the test group `layouts`."""

import pytest

KEPT = "test_student_reference_run"
"""A module whose four ranks stay in the default suite: whole training runs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        if values.get("dp", 1) * values.get("sp", 1) * values.get("tp", 1) > 2 and KEPT not in item.nodeid:
            item.add_marker("four_ranks")
