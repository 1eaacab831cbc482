"""The runner: parts do not affect each other, the budget is kept, and the record is written after every part."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from time import monotonic

import pytest

from tests.gpu.check import run as runner
from tests.gpu.check.page import JSON, TEXT, Record
from tests.gpu.check.parts import PARTS, RAY_PARTS, Part, named
from tests.gpu.check.process import Call


def part(name: str, **more) -> Part:
    return Part(name, f"what {name} shows", "tests.helpers.gpu_check_parts", name, **more)


def run(out: Path, *parts: Part, budget_s: float = 300.0, began: float | None = None) -> dict:
    record = Record(out, {"device": "cpu"}, parts)
    runner.run_parts(record, Call("cpu", True, out, out / "log"), monotonic() if began is None else began, budget_s)
    record.state = "done"
    record.write()
    return json.loads((out / JSON).read_text())


def test_later_parts_run_after_a_failed_one(tmp_path, capsys):
    content = run(tmp_path, part("wrong"), part("crashes"), part("hangs", limit_s=5), part("skips"), part("well"))
    assert [part["status"] for part in content["parts"]] == ["failed", "failed", "timed out", "skipped", "ok"]
    assert content["failures"] == ["wrong", "crashes", "hangs"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1].split()[0] for line in lines] == ["wrong", "crashes", "hangs", "skips", "well"]
    page = (tmp_path / TEXT).read_text()
    assert "1 of 5 parts ok, 3 not ok (wrong, crashes, hangs), 1 skipped" in page.splitlines()[0]
    assert "the gradient is off by 3.0e-01" in page


def test_a_part_gets_the_budget_less_the_reserve(tmp_path):
    content = run(
        tmp_path, part("well"), part("budgeted", takes_budget=True, limit_s=290, reserve_s=60),
        began=monotonic() - 235, budget_s=300,
    )  # fmt: skip
    first, second = content["parts"]
    assert first["status"] == "not run", "5 seconds are left beside the 60 that are reserved"
    assert second["status"] == "ok"
    assert 0 < second["figures"]["budget"] < 65
    assert content["failures"] == ["well"]


def test_the_record_is_written_after_each_part(tmp_path, monkeypatch):
    statuses = []
    monkeypatch.setattr(runner, "run_part", lambda *_: statuses.append(_statuses(tmp_path)) or runner.Outcome("ok"))
    run(tmp_path, part("well"), part("skips"), part("wrong"))
    assert statuses == [None, ["ok", "waiting", "waiting"], ["ok", "ok", "waiting"]]


def _statuses(out: Path) -> list[str] | None:
    path = out / JSON
    return [part["status"] for part in json.loads(path.read_text())["parts"]] if path.exists() else None


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--only", "student,novelty"], "--only: must be among environment, "),
        (["--only", "pipeline"], "got 'pipeline'"),
        (["--budget-s", "0"], "--budget-s: must be above 0 seconds; got 0"),
        (["--out", "/proc/nobody/can"], "--out /proc/nobody/can: must be a folder that can be written to; "),
    ],
)
def test_bad_input_exits_2_with_one_line(arguments, line, capsys):
    assert runner.main(arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("gpu_check: error: ")
    assert line in error


@pytest.mark.parametrize("arguments", [["--device", "tpu"], ["--novelty"], ["--budget-s", "long"]])
def test_unknown_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        runner.main(arguments)
    assert exit.value.code == 2


def test_selected_parts_keep_the_order_of_the_table():
    chosen = named(["kernels", "student"], PARTS)
    assert [part.name for part in chosen] == ["student", "kernels"]


def test_part_names_are_unique():
    parts = (*PARTS, *RAY_PARTS)
    assert len({part.name for part in parts}) == len(parts)


def test_every_part_of_the_table_exists():
    assert [part.name for part in PARTS if find_spec(part.module) is None] == []


def test_the_reserve_leaves_time_for_other_parts():
    assert sum(part.reserve_s for part in PARTS) < runner.BUDGET_S / 2
    assert all(part.reserve_s <= part.limit_s for part in PARTS)
