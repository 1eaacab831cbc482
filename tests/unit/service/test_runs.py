import json
from pathlib import Path

import pytest
from ray.job_submission import JobDetails

from distill_rl.errors import ConfigError
from distill_rl.service import runs


def job(
    submission: str, name: str | None, *, attempt: int = 1, status: str = "RUNNING", folder: Path = Path("/no"), **more
):
    metadata = {
        runs.NAME: name,
        runs.RUN: str(folder),
        runs.ATTEMPT: str(attempt),
        runs.STEPS: "1200",
        runs.PYTHON: "/bin/py",
    }
    return JobDetails(
        type="SUBMISSION", submission_id=submission, status=status, entrypoint="x", metadata=metadata if name else {}, **more
    )  # fmt: skip


def test_name_is_its_newest_submission_and_foreign_jobs_are_ignored():
    jobs = [
        job("a.10", "a", attempt=10, status="PENDING"),
        job("a", "a", status="FAILED"),
        job("b", "b", status="SUCCEEDED"),
        job("a.2", "a", attempt=2, status="STOPPED"),
        job("raysubmit_x", None),
    ]
    assert [(run.name, run.submission_id, run.state) for run in runs.runs(jobs).values()] == [
        ("a", "a.10", "waiting"),
        ("b", "b", "done"),
    ]
    assert runs.find(jobs, "b").steps == 1200
    with pytest.raises(ConfigError, match=r"run c: was not submitted to this cluster; existing runs: a, b"):
        runs.find(jobs, "c")
    with pytest.raises(ConfigError, match="there are no runs on this cluster"):
        runs.find([], "c")


def test_active_name_is_rejected_and_ended_one_gets_the_next_number():
    assert runs.next_submission([], "a") == ("a", 1)
    assert runs.next_submission([job("a", "a", status="FAILED")], "a") == ("a.2", 2)
    for status in ("PENDING", "RUNNING"):
        with pytest.raises(ConfigError, match=r"is already (waiting|running) on this cluster.*distill-rl stop a"):
            runs.next_submission([job("a", "a", status=status)], "a")
    # a run that is named like a later submission of another
    taken = [job("a", "a", status="STOPPED"), job("a.2", "a.2", status="RUNNING")]
    assert runs.next_submission(taken, "a") == ("a.3", 3)


@pytest.mark.parametrize(
    ("status", "code", "state"),
    [
        ("PENDING", None, "waiting"),
        ("RUNNING", None, "running"),
        ("SUCCEEDED", 0, "done"),
        ("STOPPED", None, "stopped"),
        ("FAILED", 85, "saved"),
        ("FAILED", 130, "stopped"),
        ("FAILED", 2, "refused"),
        ("FAILED", 1, "failed"),
        ("FAILED", -9, "failed"),
        ("FAILED", None, "failed"),
    ],
)
def test_state_follows_from_status_and_exit_code(status, code, state):
    run = runs.find([job("a", "a", status=status, driver_exit_code=code)], "a")
    assert run.state == state
    assert run.ended == (status not in ("PENDING", "RUNNING"))


@pytest.mark.parametrize(
    ("code", "log", "expected"),
    [
        (0, "", 0),
        (None, f"step 3\n{runs.ENDED}85\n", 85),
        (None, f"{runs.ENDED}0\nkilled in the end", 0),
        (-9, "nothing", 1),
        (None, "", 1),
        (3, "", 3),
        (None, f"{runs.ENDED}nonsense", 1),
        (None, f"the run prints {runs.ENDED}0", 1),
    ],
)
def test_exit_code_is_read_from_the_log_first(code, log, expected):
    status = "SUCCEEDED" if code == 0 else "STOPPED"
    run = runs.find([job("a", "a", status=status, driver_exit_code=code)], "a")
    assert runs.exit_code(run, log) == expected


def test_table_reads_progress_from_reachable_run_directories(tmp_path):
    records = [{"step": 3, "time": 1.0, "train/kl_loss": 0.5}, {"step": 1000, "time": 2.0, "train/kl_loss": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 10')
    known = [job("near", "near", folder=tmp_path, start_time=1_700_000_000_000), job("far", "far", status="SUCCEEDED")]
    title, far, near = runs.table(runs.runs(known).values())
    assert title.split() == ["run", "state", "step", "KD", "since"]
    assert far.split() == ["far", "done", "?/1,200"]
    assert near.split()[:4] == ["near", "running", "1,000/1,200", "0.2500"]
    assert near.split()[4].startswith("2023-11-1")


@pytest.mark.parametrize(
    ("written", "state"), [('{"place": 2}', "queued, 2"), ('{"place', "running"), ("[]", "running")]
)
def test_table_shows_the_place_of_a_run_that_waits(tmp_path, written, state):
    (tmp_path / "queue.json").write_text(written)
    known = [job("a", "a", folder=tmp_path), job("b", "b", folder=tmp_path, status="FAILED", driver_exit_code=1)]
    _, waiting, ended = runs.table(runs.runs(known).values())
    assert " ".join(waiting.split()[1:]).startswith(f"{state} ?")
    assert ended.split()[1] == "failed"


@pytest.mark.parametrize("name", ["a", "gsm8k-7b_v1.2", "0"])
def test_usual_names_can_be_submitted(name):
    assert runs.require_usable(name) is None, "it raises for a name that cannot"


@pytest.mark.parametrize("name", ["a b", "a;rm", "ü", "-rf", ".x", "a/b", "$(x)", "a" * 200, "", "a\nb"])
def test_names_unfit_for_a_url_are_rejected(name):
    with pytest.raises(ConfigError, match=r"run\.name"):
        runs.require_usable(name)
