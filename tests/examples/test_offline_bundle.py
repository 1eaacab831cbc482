"""launch/offline_bundle.sh: from a bundle alone, the package and Ray are installed beside a host's torch, and run."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import distill_rl

pytestmark = pytest.mark.cli

ROOT = Path(distill_rl.__file__).parents[1]
HAS = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "llvmlite", "pyarrow", "pandas")

ONE_TASK = """
from distill_rl.config.schema import RayConfig
from distill_rl.workers.cluster.session import ray, ray_session
with ray_session(RayConfig(), num_cpus=1):
    print("a task says", ray.get(ray.remote(lambda: 6 * 7).remote()), ray.__file__)
"""


def outside(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more


def closure(names: tuple[str, ...]) -> set[str]:
    """These packages of this environment and all that they require here."""
    found: set[str] = set()
    todo = [canonicalize_name(name) for name in names]
    while todo:
        name = todo.pop()
        try:
            required = map(Requirement, distribution(name).requires or ())
        except PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            todo += [
                canonicalize_name(one.name) for one in required if not one.marker or one.marker.evaluate({"extra": ""})
            ]
    return found


def host(folder: Path) -> Path:
    """The interpreter of a new environment that has only pip and what a host with torch has."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=300)
    paths = {"base": str(folder), "platbase": str(folder)}
    site, here = Path(sysconfig.get_path("purelib", "venv", vars=paths)), Path(sysconfig.get_path("purelib"))
    (folder / "packages").mkdir()
    for name in closure(HAS):
        for top in {
            file.parts[0] for file in distribution(name).files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            (folder / "packages" / top).symlink_to(here / top)
    (site / "host.pth").write_text(f"{folder / 'packages'}\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    probe = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder / "probe", "iniconfig"]
    if subprocess.run(probe, capture_output=True, timeout=300).returncode:
        pytest.skip("needs a package registry, to fetch the wheels from")
    command = ["bash", ROOT / "launch" / "offline_bundle.sh", folder / "wheels"]
    env = outside(DISTILL_RL_PYTHON=sys.executable)
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, timeout=900)
    assert done.returncode == 0, done.stderr
    assert f"--no-index --find-links {folder / 'wheels'} 'distill_rl'" in done.stdout
    return folder / "wheels"


def test_a_bundle_installs_without_an_index_and_runs_ray(bundle: Path, tmp_path: Path) -> None:
    packed = {canonicalize_name(wheel.name.partition("-")[0]) for wheel in bundle.iterdir()}
    assert {"distill-rl", "ray", "datasets", "omegaconf"} <= packed
    assert not packed & set(HAS)
    python = host(tmp_path / "host")
    install = [python, "-m", "pip", "install", "-q", "--no-index", "--find-links", bundle, "distill_rl"]
    alone = outside(PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="", PIP_CONSTRAINT="")
    done = subprocess.run(install, capture_output=True, text=True, cwd=tmp_path, env=alone, timeout=600)
    assert done.returncode == 0, done.stderr
    helped = subprocess.run(
        [python.with_name("distill-rl"), "--help"], capture_output=True, text=True, cwd=tmp_path, env=alone, timeout=120
    )
    assert (helped.returncode, "usage: distill-rl" in helped.stdout) == (0, True), helped.stderr
    ran = subprocess.run([python, "-c", ONE_TASK], capture_output=True, text=True, cwd=tmp_path, env=alone, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert f"a task says 42 {tmp_path / 'host'}" in ran.stdout
    (ray,) = (tmp_path / "host").glob("lib/python*/site-packages/ray")
    assert not (ray / "jars").exists()
    assert os.access(ray / "core/src/ray/raylet/raylet", os.X_OK)
