"""All parts of launch/gpu_check.sh without a GPU."""

import json
import subprocess

import pytest

from tests.cli.test_gpu_check import DEADLINE_S, SCRIPT, bare
from tests.gpu.check import PARTS

__all__ = ["bare"]
pytestmark = pytest.mark.cli


def test_all_parts_run_without_a_gpu_and_ray(bare, tmp_path):
    command = ["bash", str(SCRIPT), "--device", "cpu", "--tiny", "--out", str(tmp_path / "out")]
    command += ["--budget-s", str(3 * DEADLINE_S)]  # the machine may be busy
    done = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=4 * DEADLINE_S)
    assert done.returncode == 0, done.stdout + (tmp_path / "out" / "gpu_check.log").read_text()
    record = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert (record["state"], record["failures"]) == ("done", [])
    parts = {part["name"]: part for part in record["parts"]}
    assert list(parts) == [part.name for part in PARTS]
    for name, part in parts.items():
        assert part["status"] == "ok", (name, part)
        assert part["figures"]
    assert 0 < parts["student"]["figures"]["gradient, packed"] < 2e-5
    assert parts["resume"]["figures"]["tensors"] > 0
    page = (tmp_path / "out" / "gpu_check.txt").read_text()
    assert max(map(len, page.splitlines())) <= 118
    assert all(name in page for name in parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "it writes only into its own folder"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "gpu_check.json", "gpu_check.log", "gpu_check.txt",
    ]  # fmt: skip
    assert done.stdout.splitlines()[-2] == page.splitlines()[0]
