"""launch/examples/served-teacher.sh with a Slurm that runs its jobs here: a server, and a training that finds it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import distill_rl
from tests.helpers.command import until
from tests.helpers.served import StandIn

ROOT = Path(distill_rl.__file__).parents[1]
SCRIPT = ROOT / "launch" / "examples" / "served-teacher.sh"

# `sbatch` keeps each job's script and runs nothing; a job is in the queue while its file `running` exists. Slurm does not answer while
# there is a file `away`.
FAKES = {
    "sbatch": """\
count=$(ls -d "$JOBS"/job-* 2>/dev/null | wc -l)
mkdir "$JOBS/job-$count"
cat >"$JOBS/job-$count/script"
printf '%s\\n' "$@" >"$JOBS/job-$count/arguments"
touch "$JOBS/job-$count/running"
echo "$count"
""",
    "scontrol": """\
echo "$*" >>"$JOBS/scontrol"
[[ $1 == release ]] || echo 127.0.0.1
""",
    "squeue": """\
job=${2#--jobs=}
echo "$job" >>"$JOBS/asked"
[[ ! -e $JOBS/away ]] || exit 1
[[ ! -e $JOBS/job-$job/running ]] || echo "$job"
""",
    "scancel": 'echo "$*" >>"$JOBS/cancelled"',
    "srun": 'echo "$*" >>"$JOBS/srun"; exec sleep 600',
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who submits."""
    tools, jobs = tmp_path / "bin", tmp_path / "jobs"
    tools.mkdir()
    jobs.mkdir()
    for name, body in FAKES.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{body}")
        (tools / name).chmod(0o755)
    repository = tmp_path / "repository"
    (repository / "launch" / "examples").mkdir(parents=True)
    (repository / "launch" / "examples" / SCRIPT.name).write_text(SCRIPT.read_text())
    (repository / "launch" / "slurm.sbatch").write_text('printf "%s\\n" "$@" >"$JOBS/trained"\n')
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    settings = {"MODEL": "/models/big", "CONFIG": "my.yaml", "RUN_DIR": str(tmp_path / "run"), "POLL_S": "0.1"}
    return os.environ | settings | {"PATH": path, "JOBS": str(jobs), "HERE": str(repository)}


def submit(slurm: dict[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", f"{slurm['HERE']}/launch/examples/{SCRIPT.name}", *overrides]
    return subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=60)


def job_environment(slurm: dict[str, str], **more: str) -> dict[str, str]:
    """What sbatch hands on: the variables that the script exported."""
    run = Path(slurm["RUN_DIR"])
    exported = {
        "DISTILL_RL_ROOT": slurm["HERE"], "TOKENIZER": "/models/big", "TOP_K": "64", "MAX_LENGTH": "4096", "START_S": "60",
        "VLLM": "vllm", "GPUS_PER_NODE": "8", "URLS": str(run / ".servers"), "TRAIN_JOB": "0", "SLURM_JOB_NODELIST": "n",
    }  # fmt: skip
    return slurm | exported | more


def test_what_is_missing_is_said(slurm):
    del slurm["CONFIG"]
    done = submit(slurm)
    assert done.returncode == 2
    assert "CONFIG must be set" in done.stderr


def test_two_jobs_find_each_other_and_end_together(slurm):
    jobs = Path(slurm["JOBS"])
    done = submit(slurm, "train.steps=9")
    assert done.returncode == 0, done.stderr
    assert "--hold" in (jobs / "job-0" / "arguments").read_text()
    assert (jobs / "job-0" / "arguments").read_text().splitlines()[-1] == "train.steps=9"
    assert (jobs / "scontrol").read_text() == "release 0\n"
    with StandIn() as server:
        environment = job_environment(slurm, PORT=str(server.port))
        serving = subprocess.Popen(["bash", jobs / "job-1" / "script"], env=environment)
        try:
            command = ["bash", jobs / "job-0" / "script", "train.steps=9"]
            subprocess.run(command, env=environment, check=True, timeout=60)
            asked = jobs / "asked"
            (jobs / "away").touch()
            before = asked.stat().st_size
            until(lambda: asked.stat().st_size >= before + 6, "questions without an answer")
            (jobs / "away").unlink()
            assert serving.poll() is None
            (jobs / "job-0" / "running").unlink()
            assert serving.wait(60) == 0
        finally:
            serving.kill()
    assert (jobs / "trained").read_text().splitlines() == [
        f"teachers.0.endpoint.url=[{server.url}]", "teachers.0.model=/models/big", "teachers.0.tokenizer=/models/big",
        "loss.top_k=64", "data.max_length=4096", "train.steps=9",
    ]  # fmt: skip
    served = (jobs / "srun").read_text()
    assert "--max-logprobs 64 --max-model-len 4097" in served
    assert not Path(slurm["RUN_DIR"], ".servers").exists()


def test_a_server_that_does_not_come_ends_the_training_job(slurm):
    assert submit(slurm).returncode == 0
    command = ["bash", Path(slurm["JOBS"]) / "job-0" / "script"]
    done = subprocess.run(
        command, env=job_environment(slurm, PORT="9", START_S="1"), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "not every server answers after START_S=1" in done.stderr
    assert not Path(slurm["JOBS"], "trained").exists()
