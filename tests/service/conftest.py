"""One real cluster for this test group: a head node with token authentication and its dashboard on localhost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.conftest import material  # noqa: F401  (the fixture)
from tests.helpers.forks import Refused
from tests.helpers.ray_nodes import free_port, ray_nodes


@dataclass(frozen=True)
class Cluster:
    address: str
    """host:port at which processes join."""
    url: str
    """Of the dashboard."""
    token: Path


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, port = tmp_path_factory.mktemp("cluster"), free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        # A job is run by the interpreter of the command that submitted it. That of a fork ends with the command.
        patch.setattr("tests.helpers.command.fork", _refused)
        with ray_nodes(folder, patch, nodes=1, cpus=8, dashboard=port) as address:
            patch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{port}")
            yield Cluster(address, f"http://127.0.0.1:{port}", folder / "token")


def _refused(*_: object) -> None:
    raise Refused
