from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import distill_rl
from distill_rl.demo.runs import SHOWN_LINES, Figures, figures
from tests.helpers.command import until

ROOT = Path(distill_rl.__file__).parents[1]
DEADLINE_S = 120

# Replaces `distill_rl` in the children: `NAME CODE [FILE]` makes the file NAME, prints, and waits until FILE exists, if there
# is one to wait for. A signal ends it with the exit code of a training, and makes the file NAME.SIGNAL.
STAND_IN = """
import signal, sys
from pathlib import Path
name, code, *wanted = sys.argv[1:]
received = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: received.append(number))
for i in range(30):
    print(f"{name} says {i}", flush=True)
Path(name).touch()
for _ in range(1000):
    if not wanted or Path(wanted[0]).exists():
        sys.exit(int(code))
    signal.sigtimedwait([], 0.05)
    if received:
        assert len(received) == 1
        Path(f"{name}.{signal.Signals(received[0]).name}").touch()
        sys.exit({signal.SIGINT: 130, signal.SIGTERM: 85}[received[0]])
sys.exit(99)
"""
PARENT = """
import json, sys
from pathlib import Path
from distill_rl.demo.runs import ChildRun, run_all
at_once, runs = json.loads(sys.argv[1])
sys.exit(run_all([ChildRun(tuple(run), f"({run[0]})", f"run {run[0]}", Path("log", run[0])) for run in runs], {}, at_once=at_once))
"""


class Demo:
    """A process that calls `run_all` for stand-ins, whose working directory is `folder`."""

    def __init__(self, folder: Path, at_once: int, *runs: str):
        (folder / "distill_rl").mkdir()
        (folder / "distill_rl" / "__init__.py").touch()
        (folder / "distill_rl" / "__main__.py").write_text(STAND_IN)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", PARENT, json.dumps([at_once, [run.split() for run in runs]])],
            cwd=folder, env=os.environ | {"PYTHONPATH": os.fspath(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def end(self) -> tuple[int, list[str], list[str]]:
        """Exit code and lines of stdout and stderr. Both close only when no child is left that writes to them."""
        try:
            out, err = self.process.communicate(timeout=DEADLINE_S)
        finally:
            self.process.kill()
        return self.process.returncode, out.splitlines(), err.splitlines()

    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir() if path.is_file()}


def said(name: str) -> list[str]:
    return [f"{name} says {i}" for i in range(30)]


def test_runs_alone_have_the_terminal_one_after_the_other(tmp_path: Path) -> None:
    code, out, err = Demo(tmp_path, 1, "a 0", "b 0").end()
    assert (code, err) == (0, [])
    assert out == ["a         (a)", *said("a"), "b         (b)", *said("b")]


def test_runs_go_on_at_once_and_the_first_keeps_the_terminal(tmp_path: Path) -> None:
    """The first waits for the third, which starts when the second is done; the third waits for nothing."""
    code, out, err = Demo(tmp_path, 2, "a 0 c", "b 0 a", "c 0").end()
    assert (code, err) == (0, [])
    assert [line for line in out if "says" in line] == said("a")
    assert "b         (b), beside (a); its output is in log/b" in out
    assert out.index("done      (b)") < out.index("c         (c), beside (a); its output is in log/c")


def test_a_run_that_starts_last_has_the_terminal_if_no_other_has_it(tmp_path: Path) -> None:
    """The second goes on until the third has begun, which is after the first has ended."""
    code, out, err = Demo(tmp_path, 2, "a 0 b", "b 0 c", "c 0").end()
    assert (code, err) == (0, [])
    assert [line for line in out if "says" in line] == said("a") + said("c")
    assert "waiting   for (b)" in out


@pytest.mark.parametrize(("runs", "shown"), [(("a 0 never", "b 7 a"), said("b")), (("a 7 b", "b 0 never"), [])])
def test_a_run_that_fails_ends_the_others(tmp_path: Path, runs: tuple[str, str], shown: list[str]) -> None:
    demo = Demo(tmp_path, 2, *runs, "c 0")
    code, out, err = demo.end()
    failed, ended = ("b", "a") if shown else ("a", "b")
    assert code == 7
    assert err == [*shown[-SHOWN_LINES:], f"distill-rl: error: run {failed} ended with exit code 7"]
    assert demo.files() == {"a", "b", f"{ended}.SIGINT"}, "the third is not started"
    assert not [line for line in out if line.startswith(("done", "c "))]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 85)])
def test_a_signal_reaches_all_runs_once_and_starts_no_other(tmp_path: Path, number: int, code: int) -> None:
    demo = Demo(tmp_path, 2, "a 0 never", "b 0 never", "c 0")
    try:
        until(lambda: {"a", "b"} <= demo.files(), "both runs can be stopped")
        demo.process.send_signal(number)
    finally:
        ended, _, err = demo.end()
    name = signal.Signals(number).name
    assert ended == code
    assert len(err) == 1
    assert demo.files() == {"a", "b", f"a.{name}", f"b.{name}"}


def write_metrics(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_figures_are_sums_over_the_steps(tmp_path: Path) -> None:
    path = write_metrics(
        tmp_path / "metrics.jsonl",
        {"step": 1, "train/tokens": 100, "timing/step": 0.5},
        {"step": 2, "train/tokens": 300, "timing/step": 1.5},
        {"step": 2, "validation/kl_loss": 1.0},
    )
    assert figures(path) == Figures(steps=2, seconds=2.0, tokens=400)
    assert figures(path).tokens_per_second == 200


def test_a_record_over_several_steps_has_their_mean_seconds(tmp_path: Path) -> None:
    records = [{"step": step, "train/tokens": 1000, "timing/step": 0.25} for step in (10, 20)]
    assert figures(write_metrics(tmp_path / "metrics.jsonl", *records)) == Figures(20, 5.0, 2000)


def test_a_run_without_steps_has_no_speed(tmp_path: Path) -> None:
    assert figures(write_metrics(tmp_path / "metrics.jsonl")).tokens_per_second == 0.0
