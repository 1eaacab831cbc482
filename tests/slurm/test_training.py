"""launch/slurm.sbatch on a real two-node Slurm: completed, stopped and killed, with no process left behind."""

import hashlib
import re
import signal
from pathlib import Path

import pytest

from tests.helpers.command import distill_rl, records, series, until
from tests.slurm.conftest import Job

APART = "ray.placement=disaggregated"
ENDLESS = (APART, "train.steps=100000", "schedule.steps=100000", "checkpoint.every=0")
METRICS = ("train/loss", "train/kl_loss", "train/grad_norm", "validation/kl_loss")
STEPS = 150


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def attempts(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "logs").iterdir() if path.name.startswith("attempt_"))


def test_a_preempted_job_ends_like_an_undisturbed_one(submit, tmp_path):
    steps = (APART, f"train.steps={STEPS}", f"schedule.steps={STEPS}")
    straight = submit(*steps, run="straight")
    straight.until_it_trains()
    assert re.search(r"^step +1/", straight.log, re.MULTILINE), "the driver's lines must arrive while it runs"
    assert straight.until_it_ends() == 0, straight.log
    straight.assert_nothing_left()
    assert attempts(straight.run) == ["attempt_1"]
    assert {"driver.log", "ray-n1.log", "ray-n2.log"} <= {
        path.name for path in (straight.run / "logs/latest").iterdir()
    }
    on_nodes = re.search(
        r"on node (\w+) \(cpu\) is read on node (\w+)", (straight.run / "logs/latest/driver.log").read_text()
    )
    assert on_nodes[1] != on_nodes[2], "student and teacher must run on different nodes"

    stopped = submit(*steps, run="stopped")
    stopped.until_it_trains()
    stopped.signal("USR1")
    stopped.slurm.start_requeued(stopped.id)
    stopped.assert_nothing_left()
    saved = series(stopped.run, "train/loss")[-1][0]
    assert 0 < saved < STEPS
    assert stopped.until_it_ends() == 0, stopped.log
    stopped.assert_nothing_left()
    assert attempts(stopped.run) == ["attempt_1", "attempt_2"]
    assert (stopped.run / "logs/latest").readlink() == Path("attempt_2")
    assert f"steps {saved + 1} to {STEPS}" in stopped.log
    for metric in METRICS:
        assert series(stopped.run, metric) == series(straight.run, metric) != [], metric
    assert digest(stopped.run / "export") == digest(straight.run / "export")


def test_a_dry_run_script_resumes_after_its_time_limit(cluster, material, tmp_path):
    config = material.config(tmp_path)
    dry_run = distill_rl("train", "-c", config, "--dry-run", "--gpus-per-node", "0", *ENDLESS)
    assert dry_run.code == 0, dry_run.err
    run = tmp_path / "runs" / "tiny"
    # Slurm counts in whole minutes, and may send the signal up to a minute early.
    command = [
        "sbatch",
        "--parsable",
        "--time=2",
        "--signal=B:USR1@10",
        "--export=ALL,RAY_OBJECT_STORE_BYTES=100000000",
    ]
    job_id = cluster.run(*command, str(run / "submit.sbatch"))
    job = Job(cluster, job_id, run, run / f"slurm-{job_id}.log")
    try:
        job.until_it_trains()
        cluster.start_requeued(job.id)
        job.assert_nothing_left()
        assert "stopped and saved; continues with attempt 2 (requeue)" in job.log
        saved = len(series(run, "train/loss"))
        job.until_it_trains(attempt=2)
        assert [step for step, _ in series(run, "train/loss")][: saved + 1] == list(range(1, saved + 2))
    finally:
        cluster.clear()


@pytest.mark.parametrize(
    ("grace_s", "message"), [(90, "continues with attempt 2 (requeue)"), (0, "Slurm has requeued the job")]
)
def test_a_job_yields_to_a_more_urgent_one_and_resumes(submit, cluster, grace_s, message):
    cluster.run("scontrol", "update", "PartitionName=main", f"GraceTime={grace_s}")
    job = submit(*ENDLESS)
    job.until_it_trains()
    urgent = cluster.run("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=true")
    cluster.start_requeued(job.id)
    job.assert_nothing_left()
    assert "stopped and saved; " in job.log
    assert message in job.log
    saved = len(series(job.run, "train/loss"))
    until(lambda: cluster.ended(urgent), "the end of the urgent job", 60)
    assert cluster.exit_code(urgent) == 0
    job.until_it_trains(attempt=2)
    assert series(job.run, "train/loss")[saved][0] == saved + 1, "no step is lost or repeated"


def test_a_cancelled_job_is_not_restarted_but_can_be_resumed(submit):
    job = submit(*ENDLESS)
    job.until_it_trains()
    job.slurm.run("scancel", job.id)
    job.until_it_ends()
    assert job.slurm.state(job.id) == "CANCELLED"
    job.assert_nothing_left()
    assert attempts(job.run) == ["attempt_1"]
    assert "not started again" in job.log
    last = series(job.run, "train/loss")[-1][0]
    assert [path.name for path in (job.run / "checkpoints").glob("step-*")] == [f"step-{last}"]


def test_a_killed_rank_that_may_not_be_restarted_fails_the_job_and_is_named(submit):
    job = submit(*ENDLESS, "faults.student_restarts=0")
    job.until_it_trains()
    job.actor("StudentWorker").send_signal(signal.SIGKILL)
    assert job.until_it_ends() == 1, job.log
    assert job.slurm.state(job.id) == "FAILED"
    (error,) = [line for line in job.log.splitlines() if line.startswith("distill-rl: error: ")]
    assert "student-dp0-tp0" in error
    assert "ended with exit code 1" in job.log
    job.assert_nothing_left()
    assert list((job.run / "logs/attempt_1").glob("ray-n*/raylet*")), "the logs of Ray's processes are kept"


def test_a_job_is_chained_and_a_second_signal_ends_it_at_once(submit):
    job = submit(*ENDLESS, REQUEUE="chain")
    job.until_it_trains()
    job.signal("USR1")
    assert job.until_it_ends() == 85, job.log
    job.assert_nothing_left()
    (following,) = job.slurm.run("squeue", "--noheader", "--format=%i").split() or [job.log]
    saved = len(series(job.run, "train/loss"))
    job.id = following  # the next job writes to the same file
    job.until_it_trains(attempt=2)
    assert series(job.run, "train/loss")[saved][0] == saved + 1
    # This step cannot end. The first signal waits for it, the second does not.
    job.actor("TeacherWorker").suspend()
    job.signal("USR1")
    before = len(records(job.run))
    job.signal("USR1")  # within a second it counts as the same signal
    until(lambda: _ended_after_another_signal(job), "the end", 120)
    assert job.slurm.exit_code(job.id) == 130, job.log
    assert len(records(job.run)) <= before + 2
    assert not job.slurm.run("squeue", "--noheader"), "no third job is submitted"
    job.assert_nothing_left()


def _ended_after_another_signal(job) -> bool:
    if not job.slurm.ended(job.id):
        job.slurm.run("scancel", "--batch", "--signal=USR1", job.id, check=False)
    return job.slurm.ended(job.id)


def test_a_failed_ray_start_names_nodes_and_last_lines(submit):
    job = submit(RAY_OBJECT_STORE_BYTES="1000")
    assert job.until_it_ends() == 1
    assert "ray_cluster: error: Ray did not start; not ready: n1 n2" in job.log
    assert "exit code 1" in job.log
    assert re.search(r"n1: .*object.store", job.log), job.log
    assert not (job.run / "metrics.jsonl").exists()
    job.look()
    job.assert_nothing_left()


def test_a_run_directory_not_shared_by_all_nodes_is_refused(submit, cluster):
    job = submit(folder=cluster.hidden)
    assert job.until_it_ends() == 1
    (error,) = [line for line in job.log.splitlines() if "must be on a file system that all nodes share" in line]
    assert "node n2 does not see" in error
    assert not list(job.run.glob("logs/attempt_1/ray-*"))
    job.assert_nothing_left()


@pytest.mark.parametrize("missing", ["CONFIG", "RUN_DIR"])
def test_a_missing_variable_is_named_at_once(submit, missing):
    job = submit(**({"CONFIG": ""} if missing == "CONFIG" else {"RUN_DIR": ""}))
    assert job.until_it_ends() == 2
    assert f"slurm.sbatch: error: {missing} must be set" in job.log
