"""Ctrl-C, and an exception in a worker: exit code, message, nothing left. Signals of schedulers: tests/faults."""

import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.command import (
    distill_rl,
    leftovers,
    running,
    series,
    shared_memory,
    survivors,
    temporary,
    until,
)

pytestmark = pytest.mark.cli

PROMISE_S = 30
"""A run promises to end this soon after an error. The tests wait twice as long, because the machine is shared."""


@contextmanager
def training(material, folder: Path, *overrides: str):
    """Starts a long run and yields in its first steps. Afterwards, asserts that it left nothing behind."""
    before, log = shared_memory(), folder / "log"
    config, run = material.config(folder), folder / "runs" / "tiny"
    steps = len(series(run, "train/loss"))
    with running("train", "-c", config, "train.steps=100000", "aligner.workers=0", *overrides, log=log) as process:
        until(lambda: len(series(run, "train/loss")) > steps or process.poll() is not None, "a step")
        assert process.poll() is None, log.read_text()
        children = leftovers(process.pid)
        assert temporary(process.pid)
        assert len(children) > 3
        yield process, run, log
    assert not survivors(children.values())
    until(lambda: shared_memory() <= before, "shared memory given back")
    assert not temporary(process.pid)


def test_ctrl_c_exits_cleanly_with_130(material, tmp_path):
    with training(material, tmp_path) as (process, _, log):
        os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal does
        assert process.wait(timeout=2 * PROMISE_S) == 130, log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_worker_exception_ends_the_run_with_name_and_cause(material, cluster, tmp_path):
    settings = ("optimizer.lr=1e30", "schedule.warmup_steps=0", "aligner.workers=0")
    ended = distill_rl("train", "-c", material.config(tmp_path), *settings, cluster=cluster)
    assert ended.code == 1
    assert len(ended.errors) == 1
    assert "student-dp0-tp0" in ended.errors[0]
    assert "must be finite" in ended.errors[0]
    assert "Traceback" not in ended.err
    assert "Traceback" in (tmp_path / "runs" / "tiny" / "logs" / "latest" / "driver.log").read_text()
