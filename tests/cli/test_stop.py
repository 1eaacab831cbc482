"""Ctrl-C: exit code, message, nothing left. Signals of schedulers and errors of workers: tests/faults/test_stop.py."""

import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.command import (
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
