"""launch/gpu_check.sh runs where torch, transformers, numpy, safetensors, pytest, rich and numba are installed, and no more.

A run of all parts: tests/examples/test_gpu_check.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import distill_rl
from tests.gpu.check import LOG, PARTS, RAY_PARTS
from tests.helpers.command import leftovers, survivors, until

pytestmark = pytest.mark.cli

SCRIPT = Path(distill_rl.__file__).parents[1] / "launch" / "gpu_check.sh"
BLOCKED = (
    "ray",
    "omegaconf",
    "datasets",
    "pyarrow",
    "hypothesis",
    "xdist",
    "pytest_timeout",
    "jinja2",
    "psutil",
    "tensorboard",
)
DEADLINE_S = 400
# Every Python that has this file on its path runs it first. The blocked packages then look as if not installed.
SITE = f"""\
from importlib import machinery
find = machinery.PathFinder.find_spec
def find_spec(_, name, path=None, target=None):
    return None if name.partition(".")[0] in {BLOCKED!r} else find(name, path, target)
machinery.PathFinder.find_spec = classmethod(find_spec)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict[str, str]:
    """Environment variables under which only the packages that the GPU check needs can be imported."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITE)
    return os.environ | {"DISTILL_RL_PYTHON": sys.executable, "PYTHONPATH": str(folder)}


def test_the_blocked_packages_cannot_be_imported(bare):
    program = "import importlib.util as u; print([n for n in {!r} if u.find_spec(n)])"
    command = [sys.executable, "-c", program.format(BLOCKED)]
    assert subprocess.run(command, env=bare, capture_output=True, text=True, check=True).stdout == "[]\n"
    done = subprocess.run([sys.executable, "-c", "import omegaconf"], env=bare, capture_output=True, text=True)
    assert "No module named 'omegaconf'" in done.stderr


def test_a_missing_gpu_is_bad_input(bare, tmp_path):
    command = ["bash", str(SCRIPT), "--device", "cuda", "--out", str(tmp_path / "out")]
    environment = bare | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu_check: error: --device cuda: needs a GPU; torch ")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_python_without_torch_is_bad_input(bare, tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.replace("'ray', ", "'ray', 'torch', 'safetensors', "))
    environment = bare | {"PYTHONPATH": str(folder)}
    done = subprocess.run(["bash", str(SCRIPT)], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "torch, safetensors not found; set DISTILL_RL_PYTHON" in done.stderr


def test_the_parts_import_only_what_the_check_needs(bare):
    files = {test.partition("::")[0] for part in PARTS for test in part.tests if not test.startswith("-")}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *sorted(files)]
    variables = bare | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout


def test_the_parts_are_listed(bare):
    done = subprocess.run(["bash", str(SCRIPT), "--list"], env=bare, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [part.name for part in (*PARTS, *RAY_PARTS)]


@pytest.mark.parametrize(
    ("number", "code", "before"), [(signal.SIGTERM, 143, ["environment"]), (signal.SIGINT, 130, [])]
)
def test_a_stopped_check_leaves_its_record_and_no_process(bare, tmp_path, number, code, before):
    """Stopped in the part `resume`, after others or as the only one."""
    command = [
        "bash",
        str(SCRIPT),
        "--device",
        "cpu",
        "--tiny",
        "--out",
        str(tmp_path),
        "--only",
        ",".join([*before, "resume"]),
    ]
    log = tmp_path / LOG
    process = subprocess.Popen(command, env=bare, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for name in before:
            assert f"{name}  ok" in process.stdout.readline()
        until(lambda: log.exists() and "== resume" in log.read_text() and leftovers(process.pid), "the part")
        children = leftovers(process.pid)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, rest
    assert survivors(children.values()) == []
    record = json.loads((tmp_path / "gpu_check.json").read_text())
    assert record["state"] == f"stopped by {number.name}"
    assert [part["status"] for part in record["parts"]] == [*["ok"] * len(before), "waiting"]
    assert "1 not done" in (tmp_path / "gpu_check.txt").read_text().splitlines()[0]
