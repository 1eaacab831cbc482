"""The last lines of a run that Ctrl-C ended."""

import sys

import pytest

from distill_rl.run import run
from distill_rl.types import RunPaths

COMMAND = ["distill-rl", "train", "-c", "my run.yaml"]
AGAIN = "go on     distill-rl train -c 'my run.yaml'"


@pytest.mark.parametrize(
    ("saved", "began", "trained", "resume", "stopped", "mode"),
    [
        ((), 0, None, None, "no step was trained, nothing is lost", ""),
        ((), 0, 0, "auto", "no step was trained, nothing is lost", ""),
        ((), 0, 1, None, "no checkpoint is saved, step 1 is lost; checkpoint.every", " --resume auto"),
        ((), 0, 7, "auto", "no checkpoint is saved, steps 1 to 7 are lost; checkpoint.every", " --resume auto"),
        ((4, 12), 0, 12, None, "the checkpoint of step 12 is saved, nothing is lost", " --resume"),
        ((4, 12), 4, 15, "latest", "the checkpoint of step 12 is saved, steps 13 to 15 are lost", " --resume"),
        ((12,), 0, None, "latest", "the checkpoint of step 12 is saved, nothing is lost", " --resume"),
        ((), 9, 9, "old/step-9", "no step was trained, nothing is lost", " --resume old/step-9"),
        ((), 9, 11, "old/step-9", "no checkpoint is saved, steps 10 to 11 are lost", " --resume old/step-9"),
    ],
)
def test_lines_say_what_is_saved_lost_and_how_to_go_on(tmp_path, saved, began, trained, resume, stopped, mode):
    for step in saved:
        (tmp_path / f"step-{step}").mkdir()
    (tmp_path / ".tmp-step-99-ab").mkdir()
    first, second = run.last_lines(tmp_path, COMMAND, began=began, trained=trained, resume=resume)
    assert first.startswith(f"stopped   {stopped}")
    assert second == AGAIN + mode


@pytest.mark.parametrize(
    ("saved", "trained", "resume", "line"),
    [
        ((), 0, None, "no step is recorded: start it again"),
        ((), 0, "auto", "no step is recorded: start it again"),
        ((), 3, None, "no checkpoint is saved: --resume auto begins again"),
        ((), 0, "old/step-9", "no checkpoint is saved: --resume old/step-9 begins again from there"),
        ((), 3, "old/step-9", "no checkpoint is saved: --resume old/step-9 begins again from there"),
        ((4, 12), 15, "latest", "--resume continues from the checkpoint of step 12"),
        ((12,), 0, None, "--resume continues from the checkpoint of step 12"),
    ],
)
def test_a_run_that_failed_goes_on_from_what_is_there(tmp_path, saved, trained, resume, line):
    paths = RunPaths(tmp_path)
    (tmp_path / ".lock").touch()
    paths.metrics.write_text("".join(f'{{"step": {step + 1}}}\n' for step in range(trained)))
    for step in saved:
        (paths.checkpoints / f"step-{step}").mkdir(parents=True)
    assert run.way_on(paths, resume) == line


def test_command_is_that_which_started_the_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["distill-rl"])
    overrides = ["a=1", "checkpoint.resume=latest", "b=[1, 2]"]
    assert run.command_line("x.yaml", overrides) == ["distill-rl", "train", "-c", "x.yaml", "a=1", "b=[1, 2]"]
    monkeypatch.setattr(sys, "argv", ["/opt/venv/bin/distill-rl"])
    assert run.command_line("x.yaml", [])[0] == "/opt/venv/bin/distill-rl"
    monkeypatch.setattr(sys, "argv", ["/somewhere/distill_rl/__main__.py"])
    assert run.command_line("x.yaml", [])[:3] == [sys.executable, "-m", "distill_rl"]
