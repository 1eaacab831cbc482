"""The frozen files, in a folder of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distill_rl.parallel.mesh import World
from tests.frozen import record
from tests.frozen.past import PASTS, Past, copied


@pytest.fixture(scope="module", params=PASTS)
def past(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    copy = copied(request.param, tmp_path_factory.mktemp("frozen") / request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(copy.folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield copy


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with record.one_thread() as world:
        yield world
