"""What all benchmarks share: exit codes, turns, and the records of a run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.bench import harness


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


def measure(
    folder: Path, *, sizes: tuple[int, ...] = (1, 2), depth: int | None = None, fast: bool = False
) -> dict[str, Any]:
    """Measures nothing.

    Args:
        sizes: of what is measured.
        depth: of the tree.
        fast: skip it.
    """
    assert list(folder.iterdir()) == []
    if depth == 0:
        raise harness.Refused("a depth is needed")
    return {"sizes": list(sizes), "fast": fast, "depths": {str(depth): {"seconds": 0.123456, "share": {"max": None}}}}


def test_options_are_the_keywords_of_the_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    main = harness.program("x", measure, lambda figures: ["too slow"])
    assert main(["--sizes", "3", "4", "--depth", "5", "--fast", "--out", str(out)]) == 1
    written = json.loads(out.read_text())
    assert (written["sizes"], written["fast"], list(written["depths"])) == ([3, 4], True, ["5"])
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("sizes: 3 4", "seconds", "0.1235", "share.max", "–", f"written: {out}"))
    assert printed.splitlines()[-1] == "too slow"
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(text in shown for text in ("of what is measured; default: (1, 2)", "of the tree --fast skip it"))


def test_a_refused_benchmark_says_why_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert harness.program("x", measure)(["--depth", "0"]) == 2
    assert capsys.readouterr() == ("", "x: error: a depth is needed\n")


def test_columns_choose_what_a_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    harness.print_figures({"cases": [{"name": "a", "name_of": 1, "parts": {"b": 2}}]}, ("name", "parts"))
    printed = capsys.readouterr().out
    assert "parts.b" in printed
    assert "name_of" not in printed


def test_a_failed_run_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "train/logs/latest/driver.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    failed = subprocess.CompletedProcess([], 1, "the output\n", "")
    monkeypatch.setattr(harness.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit) as caught:
        harness.train(tmp_path / "train.yaml", tmp_path / "train", environment={})
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["the output", "the run train failed; the end of its log:"]
    assert lines[2:] == [f"line {i}" for i in range(50, 100)]
    assert harness.failure(tmp_path / "never").splitlines() == ["the run never failed; the end of its log:", "(none)"]


def test_names_of_benchmarks_are_unique() -> None:
    """launch/bench.sh finds a benchmark in either folder by the name of its file."""
    names = [path.stem for path in Path(harness.__file__).parent.rglob("*.py") if path.stem != "__init__"]
    assert len(names) == len(set(names))
