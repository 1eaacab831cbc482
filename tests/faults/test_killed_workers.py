"""A worker that is killed and not replaced ends the run with one line, and nothing is left."""

import os
import signal

import pytest

pytestmark = pytest.mark.cli

SETTINGS = (
    "train.steps=100000", "aligner.workers=0", "transport=shared_memory", "prefetch.slots=2",
    "faults.teacher_restarts=0", "faults.student_restarts=0",
)  # fmt: skip


@pytest.mark.parametrize("name", ["student-dp0-tp0", "big/dp0-tp0"])
def test_a_killed_worker_ends_the_run_with_one_error(disturb, name):
    with disturb(*SETTINGS) as run:
        os.kill(run.actors[name], signal.SIGKILL)
        assert run.end() == 1, run.text
    (error,) = run.errors
    assert name in error
    assert "died" in error
    assert error.endswith("no checkpoint is saved: --resume auto begins again")
    assert "Traceback" not in run.text
