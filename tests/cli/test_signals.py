"""Ctrl-C: exit code, message, nothing left. Signals of schedulers and errors of workers: tests/faults/test_signals.py."""

import os
import re
import shlex
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from distill_rl.run.checkpoints import newest_step
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


def test_ctrl_c_says_what_is_saved_and_how_to_go_on(material, cluster, tmp_path):
    """First before any checkpoint; then the printed command, after one, on another Ray."""
    with training(material, tmp_path) as (process, run, log):
        os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal does
        assert process.wait(timeout=2 * PROMISE_S) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    *_, stopped, again, last = log.read_text().splitlines()
    trained = series(run, "train/loss")[-1][0]
    assert stopped.startswith("stopped   no checkpoint is saved, ")
    assert re.search(r"(step 1 is|steps 1 to \d+ are) lost; checkpoint.every saves on the way", stopped)
    assert f" {trained} " in stopped
    assert last == "distill-rl: interrupted"
    words = shlex.split(again.removeprefix("go on     "))
    assert words == [sys.executable, "-m", "distill_rl", "train", "-c", str(tmp_path / "tiny.yaml"),
                     "train.steps=100000", "aligner.workers=0", "--resume", "auto"]  # fmt: skip

    with running(*words[3:], *cluster.settings, "checkpoint.every=2", log=log, cluster=cluster) as process:
        until(lambda: newest_step(run / "checkpoints") or process.poll() is not None, "a checkpoint")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=2 * PROMISE_S) == 130, log.read_text()
    *_, stopped, again, last = log.read_text().splitlines()
    saved, trained = newest_step(run / "checkpoints"), series(run, "train/loss")[-1][0]
    assert f"the checkpoint of step {saved} is saved, " in stopped
    assert ("nothing is lost" in stopped) == (saved == trained)
    assert again.endswith(" checkpoint.every=2 --resume")
