"""The table of traps: what is said of this library holds."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.losses import traps


def test_this_library_is_right_or_refuses_in_every_case(tmp_path: Path) -> None:
    out = tmp_path / "traps.json"
    assert traps.main(["--out", str(out)]) == 0
    cases = json.loads(out.read_text())["cases"]
    assert cases.keys() == traps.CASES.keys()
    for name, found in cases.items():
        answer = found["distill_rl"]
        if name in ("teacher overwritten before backward", "gradient penalty"):
            assert answer.startswith("refused")
        elif answer != "loss 0, gradient 0":
            assert float(answer.removeprefix("gradient off by ")) < 1e-6, name


def test_a_case_tells_right_from_wrong() -> None:
    plain = traps.plain_torch()
    assert traps.answer(traps.CASES["NaN in an ignored row of the student"], plain) == "gradient NaN in 2 of 6 rows"
    assert traps.answer(traps.CASES["columns masked on both sides"], plain).startswith("loss nan")
    assert traps.answer(traps.CASES["no row counts"], plain) == "loss nan, gradient NaN"
