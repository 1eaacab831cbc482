"""What all benchmarks share: exit codes, turns, and the records of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distill_rl.bench import harness


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["too slow"], 1)])
def test_problems_are_printed_and_set_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], problems: list[str], code: int
) -> None:
    out = tmp_path / "out.json"
    assert harness.finish("x", {"speed": 1}, out, problems, device="cpu") == code
    assert json.loads(out.read_text())["speed"] == 1
    assert capsys.readouterr().out.splitlines() == [f"written: {out}", *problems]


def test_runs_take_turns_and_the_warm_up_is_extra() -> None:
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    best, results = harness.best_times(runs, 2, warm_up=True)
    assert calls == ["a", "b"] * 3
    assert results == {"a": 5, "b": 6}
    assert all(0 <= seconds < float("inf") for seconds in best.values())


def test_half_a_line_and_other_records_are_no_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert harness.step_records(path) == []
    path.write_text('{"train/loss": 1.0}\n{"validation/loss": 2.0}\n{"train/lo')
    assert harness.step_records(path) == [{"train/loss": 1.0}]


def test_names_of_benchmarks_are_unique() -> None:
    """launch/bench.sh finds a benchmark in either folder by the name of its file."""
    names = [path.stem for path in Path(harness.__file__).parent.rglob("*.py") if path.stem != "__init__"]
    assert len(names) == len(set(names))
