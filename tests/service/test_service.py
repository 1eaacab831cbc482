"""Submitting, following, stopping and resuming runs by name on a real cluster."""

import os
import shutil
from pathlib import Path

import psutil
import pytest

from tests.helpers.command import Ended, command_lines, distill_rl, series, until
from tests.helpers.ray_nodes import in_use

pytest.importorskip("aiohttp", reason="Ray's dashboard is not installed: bash launch/test.sh service")


def row(name: str) -> list[str]:
    """The words of the line that `status` prints about a run; empty if there is none."""
    for line in distill_rl("status").out.splitlines():
        if line.split()[0] == name:
            return line.split()
    return []


def wait_for_first_step(run: Path, name: str) -> None:
    until(lambda: series(run, "train/loss"), "the first step")
    assert row(name)[1] == "running", distill_rl("logs", name).out


def assert_refused(ended: Ended, *words: str) -> None:
    assert ended.code == 2, ended.err
    assert len(ended.errors) == 1, ended.err
    assert all(word in ended.errors[0] for word in words), ended.errors


def test_a_run_with_relative_paths_is_submitted_and_followed(cluster, material, tmp_path):
    assert distill_rl("status").out.startswith("no runs since this cluster was started")
    shutil.copytree(material.root, tmp_path, dirs_exist_ok=True)
    text = material.config(tmp_path / "x").read_text()
    (tmp_path / "first.yaml").write_text(text.replace(f"{material.root}/", "").replace(f"{tmp_path}/x/", ""))
    ended = distill_rl("submit", "-c", "first.yaml", "train.steps=2", "--follow", cwd=tmp_path)
    assert ended.code == 0, ended.out + ended.err
    assert "submitted first" in ended.out
    assert "exported" in ended.out
    assert (tmp_path / "runs" / "first" / "export" / "model.safetensors").is_file()
    assert row("first")[:3] == ["first", "done", "2/2"]
    assert "exported" in distill_rl("logs", "first").out
    assert distill_rl("logs", "first", "--follow").code == 0
    assert "has already ended: done" in distill_rl("stop", "first").out


def test_a_stopped_run_is_saved_and_resumed_beside_another_run(cluster, material, tmp_path):
    config, runs = material.config(tmp_path), tmp_path / "runs"
    for name in ("long", "other"):
        ended = distill_rl("submit", "-c", config, "train.steps=100000", f"run.name={name}")
        assert ended.code == 0, ended.err
    wait_for_first_step(runs / "long", "long")
    wait_for_first_step(runs / "other", "other")
    assert row("long")[2].endswith("/100,000")
    again = distill_rl("submit", "-c", config, "run.name=long", "run.dir=elsewhere", cwd=tmp_path)
    assert_refused(again, "run long: is already running on this cluster", "distill-rl stop long")

    stopped = distill_rl("stop", "long")
    assert stopped.code == 0, stopped.err
    assert "saved" in stopped.out
    last = series(runs / "long", "train/loss")[-1][0]
    assert [path.name for path in (runs / "long" / "checkpoints").iterdir()] == [f"step-{last}"]
    assert distill_rl("logs", "long", "--follow").code == 85
    assert row("other")[1] == "running"

    ended = distill_rl("stop", "other", "--now")
    assert ended.code == 0, ended.err
    assert "exit code 130" in ended.out
    assert not list((runs / "other").glob("checkpoints/step-*"))

    resumed = distill_rl(
        "submit", "-c", config, f"train.steps={last + 2}", "run.name=long", "--resume", "auto", "--follow"
    )
    assert resumed.code == 0, resumed.out
    assert "submission 2" in resumed.out
    assert [step for step, _ in series(runs / "long", "train/loss")] == list(range(1, last + 3))
    assert row("long")[:3] == ["long", "done", f"{last + 2:,}/{last + 2:,}"]
    until(lambda: in_use(cluster.address) == "0 8.0", "the cluster to be empty", 30)


def test_a_run_waits_for_the_one_before_it_and_shows_its_place(cluster, material, tmp_path):
    config, runs = material.config(tmp_path), tmp_path / "runs"
    submit = "submit", "-c", config, "aligner.workers=4"  # more than half of the cluster
    assert distill_rl(*submit, "train.steps=100000", "run.name=early").code == 0
    wait_for_first_step(runs / "early", "early")
    assert distill_rl(*submit, "train.steps=2", "run.name=late").code == 0
    until(lambda: row("late")[1:3] == ["queued,", "1"], "the second run to wait")
    assert "waiting   number 1 in the queue; at work: early (" in distill_rl("logs", "late").out
    assert distill_rl("stop", "early").code == 0
    ended = distill_rl("logs", "late", "--follow")
    assert ended.code == 0, ended.out
    assert row("late")[1] == "done"


def test_a_run_stopped_by_ray_itself_is_saved_too(cluster, material, tmp_path, monkeypatch):
    from ray.job_submission import JobSubmissionClient

    config = material.config(tmp_path)
    assert distill_rl("submit", "-c", config, "train.steps=100000", "run.name=by-ray").code == 0
    wait_for_first_step(tmp_path / "runs" / "by-ray", "by-ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    JobSubmissionClient(cluster.url).stop_job("by-ray")
    assert distill_rl("logs", "by-ray", "--follow").code == 85
    assert list((tmp_path / "runs" / "by-ray" / "checkpoints").glob("step-*"))


def test_bad_input_is_reported_locally_and_not_submitted(cluster, material, tmp_path):
    config = material.config(tmp_path)
    ended = distill_rl("submit", "-c", config, "optimizer.learning_rat=1", "data.path=/no/such", "run.name=bad")
    assert ended.code == 2
    assert len(ended.errors) == 2
    assert row("bad") == []
    assert not (tmp_path / "runs").exists()
    assert_refused(distill_rl("logs", "bad"), "run bad: was not submitted to this cluster")
    assert_refused(distill_rl("submit", "-c", config, "run.name=a b"), "run.name", "letters, digits")
    failed = distill_rl("submit", "-c", config, "run.name=toobig", "student.parallel.dp=4", "train.micro_batch_size=1",
                        "teachers.0.parallel.dp=8", "ray.placement_timeout_s=2", "--follow")  # fmt: skip
    assert failed.code == 2, failed.out
    assert "CPU: asked" in failed.out
    assert row("toobig")[1] == "refused"


def test_the_cluster_needs_its_token_which_is_not_exposed(cluster, tmp_path, monkeypatch):
    token = cluster.token.read_text()
    wrong = tmp_path / "wrong"
    wrong.touch(mode=0o600)
    wrong.write_text("another")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", os.fspath(wrong))
    assert_refused(distill_rl("status"), "rejects your token", "RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", os.fspath(tmp_path / "none"))
    assert_refused(distill_rl("status"), "must be a file that you can read")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert_refused(distill_rl("status"), "rejects your token")
    assert not [line for line in command_lines() if token in line]


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:1", "127.0.0.1:8265", "http://me:pw@127.0.0.1:8265", "http://x:99999999"]
)
def test_an_address_without_a_cluster_is_one_error_line(cluster, address):
    ended = distill_rl("status", "--address", address)
    assert_refused(ended, "--address")
    assert "pw" not in ended.err


def test_the_dashboard_listens_on_localhost_only(cluster):
    dashboards = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "dashboard.py" in " ".join(process.info["cmdline"] or [])
    ]
    assert dashboards
    addresses = {
        socket.laddr.ip
        for process in dashboards
        for socket in process.net_connections("tcp")
        if socket.status == psutil.CONN_LISTEN and f":{socket.laddr.port}" in cluster.url
    }
    assert addresses == {"127.0.0.1"}
