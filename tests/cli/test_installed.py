"""The package outside the repository: a wheel, made from the source distribution, in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import distill_rl
from tests.helpers.command import Ended, environment
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.suites import write_suite

pytestmark = pytest.mark.cli

REPOSITORY = Path(distill_rl.__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(what: str, source: Path, out: Path) -> Path:
    """The file that setuptools builds of a folder, as pip and `python -m build` have it built."""
    command = [sys.executable, "-c", BUILD, f"build_{what}", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy: setuptools writes into the folder that it builds."""
    root = tmp_path_factory.mktemp("sdist")
    copy = root / "repository"
    copy.mkdir()
    for name in ("distill_rl", "tests", "configs", "launch", "docs", "pyproject.toml", "README.md"):
        subprocess.run(["cp", "-a", REPOSITORY / name, copy / name], check=True)
    return build("sdist", copy, root)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(root, filter="data")
    return build("wheel", root / sdist.name.removesuffix(".tar.gz"), root)


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel. It sees the packages of this one, but not the package under development."""
    root = tmp_path_factory.mktemp("environment") / "installed"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    python = root / "bin" / "python"
    paths = {"base": str(root), "platbase": str(root)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(command, check=True)
    return python


def run(python: Path, folder: Path, *arguments: str | Path, program: tuple[str, ...] = ()) -> Ended:
    """Runs `distill-rl` of the environment, or its interpreter with `program`, in a folder."""
    variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    command = [*((python, *program) if program else (python.parent / "distill-rl",)), *map(os.fspath, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=variables)
    return Ended(done.returncode, done.stdout, done.stderr)


def test_wheel_has_code_data_and_licence_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info/"
    assert f"{info}licenses/docs/LICENSE" in names
    files = {name for name in names if not name.startswith(info)}
    expected = {str(file.relative_to(REPOSITORY)) for file in REPOSITORY.glob("distill_rl/**/*.py")}
    assert {name for name in files if name.endswith(".py")} == {name for name in expected if "/launch/" not in name}
    outside = [
        name for name in files if not name.startswith("distill_rl/") or {"bench", "gpu_check"} & {*Path(name).parts}
    ]
    assert outside == [], "measurements and checks belong to the repository"
    for data in ("launch/slurm.sbatch", "evals/fewshot/gsm8k.json", "observe/report/templates/report.html.jinja"):
        assert f"distill_rl/{data}" in files
    shipped = {name.removeprefix("distill_rl/") for name in files if name.startswith("distill_rl/configs/")}
    assert {name for name in shipped if name.endswith(".yaml")} == {
        str(file.relative_to(REPOSITORY)) for file in REPOSITORY.glob("configs/**/*.yaml")
    }


def test_it_is_the_installed_package_that_runs(python: Path, tmp_path: Path) -> None:
    version = f"distill-rl {distill_rl.__version__}\n"
    assert run(python, tmp_path, "--version").out == version
    assert run(python, tmp_path, "--version", program=("-m", "distill_rl")).out == version
    where = run(python, tmp_path, program=("-c", "import distill_rl; print(distill_rl.__file__)")).out
    assert Path(where.strip()).is_relative_to(python.parents[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With models, data and `my.yaml`."""
    for name, seed in (("teacher", 1), ("student", 2)):
        write_tiny_model(tmp_path / name, hidden=16, seed=seed)
    write_corpus(tmp_path / "corpus.jsonl", rows=20, seed=5)
    (tmp_path / "my.yaml").write_text(
        "student: {model: student}\nteachers: [{model: teacher}]\ndata: {path: corpus.jsonl, max_length: 32}\n"
        "loss: {top_k: 8}\naligner: {workers: 0}\ntrain: {steps: 2, global_batch_size: 4, micro_batch_size: 2}\nrun: {name: my}\n"
    )
    return tmp_path


def test_a_run_trains_exports_and_reports(python: Path, folder: Path) -> None:
    ended = run(python, folder, "train", "-c", "my.yaml")
    assert ended.code == 0, ended.err
    assert (folder / "runs/my/export/model.safetensors").is_file()
    assert "<html" in (folder / "runs/my/report.html").read_text()


def test_a_batch_script_uses_the_environment_and_the_installed_files(python: Path, folder: Path) -> None:
    ended = run(python, folder, "train", "-c", "my.yaml", "--dry-run", "--gpus-per-node", "0")
    assert ended.code == 0, ended.err
    values: dict[str, str] = {}
    for line in (folder / "runs/my/submit.sbatch").read_text().splitlines():
        if line.startswith(("VENV=", "DISTILL_RL_ROOT=")):
            values.setdefault(*line.partition(" ")[0].split("=", 1))
    assert values["VENV"] == str(python.parents[1])
    assert (Path(values["DISTILL_RL_ROOT"]) / "launch" / "ray_cluster.sh").is_file()
    assert Path(values["DISTILL_RL_ROOT"]).is_relative_to(python.parents[1])


def test_a_batch_script_of_an_evaluation_runs_outside_the_repository(python: Path, folder: Path) -> None:
    suite = write_suite(folder, count=4)
    asked = ("--model", "student", "--suites", str(suite), "--data", str(suite.parent), "--out", "scores")
    ended = run(python, folder, "eval", *asked, "--dry-run", "--slurm", "gpus_per_node=0")
    assert ended.code == 0, ended.err
    # Outside of a job it evaluates as well: the installed files suffice.
    done = subprocess.run(
        ["bash", folder / "scores/submit.sbatch"], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert list((folder / "scores").rglob("*.items.jsonl"))


def test_the_quickstart_finds_its_configuration(python: Path, tmp_path: Path) -> None:
    ended = run(python, tmp_path, "quickstart", "run.seed=1")
    assert ended.code == 2
    assert ended.err == "distill-rl: error: run.seed=1: is set by --seed; use --seed\n"
