"""One Slurm with two nodes for the session, and jobs that must leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

import distill_rl
from tests.cli.conftest import Material
from tests.helpers.command import names, series, survivors, told, until
from tests.helpers.corpus import write_corpus
from tests.helpers.guard import temporary_prefix
from tests.helpers.models import write_tiny_model
from tests.slurm.cluster import Slurm, two_nodes, why_not

ROOT = Path(distill_rl.__file__).parents[1]
START_S = 240
"""Deadline for starting Ray on two nodes and loading the models, on two cores."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Slurm]:
    if reason := why_not():
        pytest.skip(f"no Slurm can be started here: {reason}")
    with public_folder() as root:
        (root / "hidden").mkdir()
        with two_nodes(root, root / "hidden") as cluster:
            yield cluster


@contextlib.contextmanager
def public_folder() -> Iterator[Path]:
    """A temporary folder that all users may read, as munge asks of it and its parents."""
    root = Path(tempfile.mkdtemp(prefix=temporary_prefix(os.getpid()), dir="/tmp"))
    root.chmod(0o755)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    root = tmp_path_factory.mktemp("material")
    write_tiny_model(root / "teacher", hidden=32, seed=1)
    write_tiny_model(root / "student", hidden=16, seed=2)
    write_corpus(root / "corpus.jsonl", rows=80, seed=5)
    return Material(root)


@dataclass
class Job:
    """A submitted job. `seen` holds its processes and their descendants, as of every call of `look`."""

    slurm: Slurm
    id: str
    run: Path
    output: Path
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    @property
    def log(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def look(self) -> None:
        """Records all current processes of the job."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(f"slurmstepd: [{self.id}."):
                    family = process.children(recursive=True)
                    self.seen |= {child.pid: child for child in (process, *family)}

    def until_it_trains(self, attempt: int = 1) -> None:
        marks = self.run / "logs" / f"attempt_{attempt}"
        before = len(series(self.run, "train/loss")) if attempt > 1 else 0
        until(
            lambda: (marks.exists() and len(series(self.run, "train/loss")) > before) or self.slurm.ended(self.id),
            "the first step",
            START_S,
        )
        assert self.slurm.state(self.id) == "RUNNING", self.log
        self.look()
        assert len(self.seen) > 10, "two nodes of Ray, the driver, student and teacher"

    def until_it_ends(self) -> int:
        """Waits for the end of the job and returns its exit code."""
        until(lambda: self.slurm.ended(self.id), f"the end of job {self.id}", START_S)
        return self.slurm.exit_code(self.id)

    def signal(self, name: str) -> None:
        """Signals the batch script alone, as --signal=B:NAME does at the time limit."""
        self.slurm.run("scancel", "--batch", f"--signal={name}", self.id)

    def actor(self, name: str) -> psutil.Process:
        self.look()
        for process in self.seen.values():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[0].startswith(f"ray::{name}"):
                    return process
        raise AssertionError(f"no actor {name}: {names(self.seen.values())}")

    def assert_nothing_left(self) -> None:
        alive = survivors(self.seen.values(), deadline_s=60)
        assert not alive, told(alive)
        folder = str(self.run)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                texts = [*process.cmdline(), *process.environ().values()]
                assert not any(folder in text for text in texts) or "pytest" in " ".join(texts), texts
        assert not list(self.run.glob(f".ray-{self.id}.*")), "the token must be deleted"
        for tmp in self.slurm.folders("/tmp"):
            assert not [path for path in tmp.glob("dr[0-9]*-*") if self.owns(path)]

    def owns(self, folder: Path) -> bool:
        """Whether this folder was the temporary directory of the job's Ray."""
        return any(folder.name in log.read_text() for log in self.run.glob("logs/*/ray-*.log"))


@pytest.fixture
def submit(cluster: Slurm, material: Material, tmp_path: Path):
    """submit(overrides..., run=NAME, nodes=2, options=[], **variables) submits launch/slurm.sbatch and returns the job."""

    def submit_job(
        *overrides: str,
        run: str = "tiny",
        nodes: int = 2,
        folder: Path | None = None,
        options: Sequence[str] = (),
        **variables: str,
    ) -> Job:
        config = material.config(tmp_path)
        directory = (folder or tmp_path / "runs") / run
        output = tmp_path / f"{run}.log"
        settings = {"RAY_OBJECT_STORE_BYTES": "100000000", "CONFIG": str(config), "RUN_DIR": str(directory)}
        settings |= {"VENV": sys.prefix} | variables
        command = ["sbatch", "--parsable", f"--nodes={nodes}", "--gpus-per-node=0", "--time=10", f"--chdir={ROOT}"]
        script = [str(ROOT / "launch" / "slurm.sbatch"), *overrides]
        exports = ",".join(["ALL", *(f"{name}={value}" for name, value in settings.items())])
        job_id = cluster.run(*command, *options, f"--output={output}", f"--export={exports}", *script)
        return Job(cluster, job_id, directory, output)

    yield submit_job
    cluster.clear()
