"""Pretrained models, fetched as `distill-rl quickstart --real` does. Tests skip if they cannot be had."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distill_rl.demo import real
from distill_rl.errors import ConfigError
from distill_rl.parallel.mesh import World, close_world, open_world

ROOT = Path(".cache/quickstart")


def made(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ConfigError as error:
        pytest.skip(f"no pretrained model: {error}")


@pytest.fixture(scope="session")
def material() -> real.RealMaterial:
    return made(lambda: real.make_real(ROOT.absolute()))


@pytest.fixture(scope="session")
def gemma() -> Path:
    """Only for those who have accepted Gemma's terms."""
    accepted = os.environ.get("ACCEPT_GEMMA_TERMS") == "1"
    return made(lambda: real.make_gemma(ROOT.absolute(), accepted=accepted))


@pytest.fixture(scope="session", params=["smollm2", "gemma"])
def folder(request: pytest.FixtureRequest) -> Path:
    """Each pretrained model."""
    if request.param == "gemma":
        return request.getfixturevalue("gemma")
    return request.getfixturevalue("material").smollm2


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    opened = open_world(rank=0, dp=1, tp=1)
    yield opened
    close_world(opened)


@pytest.fixture(scope="session", autouse=True)
def threads() -> Iterator[None]:
    """All cores: launch/environment.sh allows one."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)
