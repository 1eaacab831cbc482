"""The correctness parts of the GPU check at full size, each in its own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.check.parts import PARTS, Part
from tests.gpu.check.process import OK, SKIPPED, Call, run_part

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "part", [part for part in PARTS if part.function.startswith("check")], ids=lambda part: part.name
)
def test_a_part_of_the_gpu_check_passes(part: Part, tmp_path: Path) -> None:
    call = Call("cuda", False, tmp_path, tmp_path / "log")
    outcome = run_part(part, call, part.limit_s)
    if outcome.status == SKIPPED:
        pytest.skip(outcome.reason)
    assert outcome.status == OK, f"{outcome.reason}\n{call.log.read_text()}"
