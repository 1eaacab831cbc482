"""R5: the disk of the checkpoints fills up during a run. Smaller cases: tests/unit/run/test_saver.py."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from distill_rl.run import checkpoints
from distill_rl.system.files import size_of
from tests.helpers.command import environment

pytestmark = pytest.mark.cli

RUN = """\
mount -t tmpfs -o "size=$1" tmpfs "$2/checkpoints" || exit 77
shift
"$@"
code=$?
cp -a "$1/checkpoints" "$1/kept"
exit $code
"""
"""Arguments: size, run directory, command. Copies the checkpoints before the small file system goes away."""


def test_a_full_disk_ends_the_run_and_keeps_the_old_checkpoint(material, undisturbed, tmp_path):
    whole = undisturbed("checkpoint.every=4")
    size = size_of(whole / "checkpoints" / "step-4")
    config, run = material.config(tmp_path), tmp_path / "runs" / "tiny"
    (run / "checkpoints").mkdir(parents=True)
    script = RUN.replace('"$@"', f'"{sys.executable}" -m distill_rl "${{@:2}}"')
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "bash", "-c", script, "bash", str(int(1.5 * size)), run,
         "train", "-c", config, "checkpoint.every=4", "--resume", "auto"],
        capture_output=True, text=True, timeout=240, env=environment(),
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 1, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("distill-rl: error:")]
    assert "saving step 8: must succeed; older checkpoints are intact" in error
    needed, free = map(int, re.search(r"needs (\d+) bytes of free space; got (\d+) bytes", error).groups())
    assert free < needed <= size
    assert "Traceback" not in done.stderr
    assert [path.name for path in (run / "kept").iterdir()] == ["step-4"]
    assert checkpoints.read(run / "kept" / "step-4").state.train.step == 4
