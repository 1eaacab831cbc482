"""`distill-rl eval` killed or stopped: no item is lost or repeated, and the same command continues."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cli.test_eval import COUNT, arguments, items, judged, model, result, suite, whole
from tests.helpers.command import (
    Ended,
    actor_pid,
    distill_rl,
    leftovers,
    running,
    shared_memory,
    survivors,
    temporary,
    until,
)

__all__ = ["model", "suite", "whole"]

pytestmark = pytest.mark.cli

ROOT = Path(__file__).parents[2]


@contextmanager
def evaluating(command: list[str], out: Path, log: Path) -> Iterator[psutil.Popen]:
    """Starts an evaluation and yields once some items are judged. Afterwards, asserts that it left nothing behind."""
    before = shared_memory()
    with running(*command, log=log) as process:
        until(lambda: judged(out) >= 8 or process.poll() is not None, "the first items")
        assert process.poll() is None, log.read_text()
        children = leftovers(process.pid)
        assert len(children) > 3
        yield process
    assert not survivors(children.values(), deadline_s=30)
    until(lambda: shared_memory() <= before, "shared memory given back")


def assert_resumes(whole: Path, command: list[str], out: Path) -> Ended:
    """Runs the command again and asserts that every item is there once, equal to that of the whole evaluation."""
    before = judged(out)
    assert 0 < before < COUNT
    assert not (out / "own.json").exists()
    ended = distill_rl(*command)
    assert ended.code == 0, ended.err
    assert f"{before} of {COUNT} items are already done" in ended.out
    assert items(out) == items(whole)
    assert result(out)["resumed_items"] == before
    assert {key: result(out)[key] for key in ("score", "interval", "outcomes", "per_task")} == {
        key: result(whole)[key] for key in ("score", "interval", "outcomes", "per_task")
    }
    return ended


def test_sigkill_loses_no_item_and_repeats_none(whole: Path, model: Path, suite: Path, tmp_path: Path) -> None:
    command = arguments(model, suite, tmp_path / "out", "--shards", "2")
    with evaluating(command, tmp_path / "out", tmp_path / "log") as process:
        process.kill()
    assert_resumes(whole, command, tmp_path / "out")


def test_sigterm_keeps_judged_items_and_exits_85(whole: Path, model: Path, suite: Path, tmp_path: Path) -> None:
    command = arguments(model, suite, tmp_path / "out")
    with evaluating(command, tmp_path / "out", tmp_path / "log") as process:
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == 85, (tmp_path / "log").read_text()
        assert not temporary(process.pid)
    assert "the same command continues" in (tmp_path / "log").read_text()
    assert_resumes(whole, [*command, "--shards", "0"], tmp_path / "out")


def test_a_killed_actor_is_one_error_line_and_the_command_resumes(
    whole: Path, model: Path, suite: Path, tmp_path: Path
) -> None:
    command = arguments(model, suite, tmp_path / "out")
    with evaluating(command, tmp_path / "out", tmp_path / "log") as process:
        os.kill(actor_pid(process.pid, "EvalWorker"), signal.SIGKILL)
        assert process.wait(timeout=60) == 1, (tmp_path / "log").read_text()
    (error,) = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("distill-rl: error:")]
    assert "evaluator-0: its process died during running the model" in error
    assert "give the same command again" in error
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert_resumes(whole, [*command, "--shards", "0"], tmp_path / "out")


def test_the_batch_script_forwards_the_signal_and_requeues(model: Path, suite: Path, tmp_path: Path) -> None:
    """A stand-in for `scontrol` records the requeue."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/scontrol-arguments\n')
    (tmp_path / "scontrol").chmod(0o755)
    out, log = tmp_path / "out", tmp_path / "log"
    variables = {"MODELS": f"tiny={model}", "SUITES": str(suite), "DATA": str(suite.parent), "OUT": str(out)}
    variables |= {"EXTRA": "--batch-size 4", "SLURM_JOB_ID": "77", "DISTILL_RL_ROOT": str(ROOT)}
    variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with log.open("wb") as file:
        script = psutil.Popen(
            ["bash", ROOT / "launch" / "eval.sbatch"], env=os.environ | variables, stdout=file, stderr=file
        )
    until(lambda: judged(out) >= 8 or script.poll() is not None, "the first items")
    script.send_signal(signal.SIGUSR1)
    assert script.wait(timeout=60) == 85, log.read_text()
    assert (tmp_path / "scontrol-arguments").read_text() == "requeue 77\n"
    assert 0 < judged(out) < COUNT
