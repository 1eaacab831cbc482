"""Jobs on a Slurm as clusters are: nodes with networks and memory of their own, accounts and QOS enforced, login node apart."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Material
from tests.helpers.command import distill_rl, series, until
from tests.helpers.suites import write_suite
from tests.slurm.cluster import Machine, Slurm, three_nodes, why_not_three_nodes
from tests.slurm.conftest import ROOT, START_S, Job, public_folder

STEPS = 100
APART = "ray.placement=disaggregated"
ENDLESS = (APART, "train.steps=100000", "schedule.steps=100000", "checkpoint.every=0")
TEAM = ("slurm.account=team", "slurm.partition=main", "slurm.nodes=2")
PART_OF_A_NODE = ("slurm.exclusive=false", "slurm.mem=2000M", "slurm.cpus_per_task=2")
MEBIBYTES = 2000
STORY = """\
slurm:
  account: team
  partition: main
  qos: long
  time: "02:00:00"
  constraint: fast
  comment: "a study, part=2"
  nodes: 2
  gpus_per_node: 0
  cpus_per_task: 2
  container: {wrapper}
  setup: [export RAY_OBJECT_STORE_BYTES=100000000, export RAY_INTERFACE=ib0]
  extra: ["--nice=5"]
evaluate: {{suites: [{suite}], data: {data}, final_limit: 8}}
"""
WRAPPER = """\
#!/usr/bin/env bash
echo "$(uname -n) $*" >>{record}
PATH="{prefix}/bin:$PATH" exec "$@"
"""
"""Like `apptainer exec IMAGE`, whose python3 is that of the image."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := why_not_three_nodes():
        pytest.skip(f"no Slurm with three nodes can be started here: {reason}")
    with (
        public_folder() as root,
        three_nodes(root, [ROOT, Path(sys.prefix), tmp_path_factory.getbasetemp()]) as cluster,
    ):
        yield cluster


def dry_run(config: Path, *arguments: str) -> str:
    """The command that `train --dry-run` prints for submission."""
    ended = distill_rl("train", "-c", config, "--dry-run", "--gpus-per-node", "0", *arguments)
    assert ended.code == 0, ended.err
    return ended.out.splitlines()[-1].removeprefix("submit").strip()


def submitted(cluster: Slurm, run: Path, *options: str) -> Job:
    job_id = cluster.run("sbatch", "--parsable", *options, str(run / "submit.sbatch"))
    return Job(cluster, job_id, run, run / f"slurm-{job_id}.log")


def heads(job: Job) -> list[tuple[str, int]]:
    """Address and port of the head, per start of the job."""
    return [(address, int(port)) for address, port in re.findall(r"the head is ([\d.]+):(\d+)", job.log)]


@pytest.fixture(scope="class")
def running(cluster: Slurm, material: Material, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job on two nodes without a default route, without the user's environment and with a part of the nodes' memory."""
    folder = tmp_path_factory.mktemp("running")
    dry_run(material.config(folder), *ENDLESS, *TEAM, *PART_OF_A_NODE)
    for node in cluster.nodes.values():
        node.run("ip route del default")
    try:
        script = str(folder / "runs/tiny/submit.sbatch")
        job_id = cluster.run("env", "ONLY_HERE=1", "sbatch", "--parsable", "--export=NONE", script)
        job = Job(cluster, job_id, folder / "runs/tiny", folder / f"runs/tiny/slurm-{job_id}.log")
        job.until_it_trains()
        yield job
        cluster.run("scancel", job.id)
        job.until_it_ends()
        job.assert_nothing_left()
    finally:
        cluster.clear()
        for node in cluster.nodes.values():
            node.run("ip route add default via 10.77.0.254")


def alive(job: Job) -> Iterator[tuple[str, dict[str, str]]]:
    """Command line and environment of the job's processes."""
    for process in job.seen.values():
        with contextlib.suppress(psutil.Error):
            yield " ".join(process.cmdline()), process.environ()


class TestRunningJob:
    def test_a_job_without_the_users_environment_trains(self, running):
        assert series(running.run, "train/loss")
        environments = [environment for _, environment in alive(running)]
        assert len(environments) > 10
        assert not [environment for environment in environments if "ONLY_HERE" in environment]

    def test_nodes_without_a_default_route_find_each_other(self, running):
        assert [address for address, _ in heads(running)] == ["10.77.0.1"]
        log = (running.run / "logs/latest/driver.log").read_text()
        on_nodes = re.search(r"on node (\w+) \(cpu\) is read on node (\w+)", log)
        assert on_nodes[1] != on_nodes[2], "student and teacher must run on different nodes"

    def test_ray_gets_the_memory_of_the_job(self, running):
        raylets = [line for line, _ in alive(running) if "/raylet/raylet " in line]
        assert len(raylets) == 2
        store = (MEBIBYTES << 20) * 3 // 10
        for raylet in raylets:
            assert f"object_store_memory,{store}" in raylet
            assert f",memory,{(MEBIBYTES << 20) - store}" in raylet
            assert "CPU,2" in raylet

    def test_a_second_job_in_the_run_directory_ends_with_one_line(self, running, cluster):
        steps = len(series(running.run, "train/loss"))
        second = submitted(cluster, running.run)
        assert second.until_it_ends() == 2
        (line,) = second.log.splitlines()
        assert re.fullmatch(rf"slurm.sbatch: error: {running.run} is in use \(by job {running.id} on n\[1-2\].*\): wait for it.*", line)  # fmt: skip
        assert [path.name for path in running.run.glob("logs/attempt_*")] == ["attempt_1"]
        until(lambda: len(series(running.run, "train/loss")) > steps + 1, "more steps of the first job")

    def test_the_printed_commands_follow_the_run_and_open_a_shell_beside_it(self, running, cluster):
        follow, shell = re.search(r"from the login node: (.*); a shell beside it: (.*)", running.log).groups()
        seen = cluster.run("env", f"PYTHONPATH={ROOT}", *shlex.split(follow), "--once").splitlines()
        assert seen[0].startswith("state     running, as process ")
        assert re.match(r"step      [1-9]\d* of 100000, .* left at ", seen[1])
        printed = typed(cluster, shlex.split(shell), "echo on $(uname -n): $(ls /tmp); exit")
        assert re.search(r"[\r\n]on n1: .*dr0-\d+-", printed), printed


def typed(cluster: Slurm, command: list[str], line: str) -> str:
    """What an interactive program prints in a terminal in which a line is typed."""
    ours, its = pty.openpty()
    program = [*cluster.login.enter, *command]
    with subprocess.Popen(program, stdin=its, stdout=its, stderr=its, env=cluster.environment()) as process:
        os.write(ours, f"{line}\n".encode())
        process.wait(60)
    text = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(its)
    return text


def test_jobs_with_consecutive_ids_have_their_own_ports(cluster, material, tmp_path):
    """A program on one of the nodes uses a port of the first job, which so takes the second's, until it is requeued."""
    jobs = []
    for name in ("first", "second"):
        dry_run(
            material.config(tmp_path), *ENDLESS, *TEAM, *PART_OF_A_NODE, f"run.name={name}", "slurm.constraint=fast"
        )
        jobs.append(submitted(cluster, tmp_path / "runs" / name, "--hold"))
    first, second = jobs
    assert int(second.id) == int(first.id) + 1
    own = [10000 + 100 * (int(job.id) % 60) for job in jobs]
    try:
        with listener(cluster.nodes["n2"], own[0] + 11):
            cluster.run("scontrol", "release", first.id)
            first.until_it_trains()
            first.signal("USR1")
            until(lambda: cluster.state(first.id) == "PENDING", "the first job requeued")
            cluster.run("scontrol", "hold", first.id)
            cluster.run("scontrol", "release", second.id)
            second.until_it_trains()
            cluster.run("scontrol", "release", first.id)
            cluster.start_requeued(first.id)
            first.until_it_trains(attempt=2)
            assert cluster.state(second.id) == "RUNNING"
    finally:
        cluster.clear()
    assert [port for _, port in heads(second)] == [own[1]]
    assert heads(first)[0][1] == own[1]
    assert heads(first)[1][1] not in own
    for job in jobs:
        job.assert_nothing_left()


@contextlib.contextmanager
def listener(machine: Machine, port: int) -> Iterator[None]:
    """A program on a machine that listens on a port."""
    program = f"import socket, time; s = socket.create_server(('', {port})); print(flush=True); time.sleep(3600)"
    with subprocess.Popen([*machine.enter, sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"\n"
            yield
        finally:
            process.kill()


def test_a_job_without_time_for_a_step_ends_after_three_starts(cluster, material, tmp_path):
    config = material.config(tmp_path)
    refused = distill_rl("train", "-c", config, "--dry-run", "slurm.time='2'", "slurm.signal_s=120")
    assert refused.code == 2
    assert "slurm.time: must be more than slurm.signal_s=120" in refused.err
    # Slurm looks every 30 s whether a job must be signalled, and the first step must not come before that.
    slow = '#!/usr/bin/env bash\n[[ $* != *distill_rl\\ train* ]] || sleep 110\nexec "$@"\n'
    dry_run(config, *ENDLESS, *TEAM, "slurm.nodes=1")
    container = f"CONTAINER={executable(tmp_path / 'slow', slow)}"
    job = submitted(cluster, tmp_path / "runs/tiny", "--time=2", "--signal=B:USR1@120", f"--export=ALL,{container}")
    for line in ("continues with attempt 2", "continues with attempt 3", "3 starts in a row saved nothing new"):
        try:
            until(partial(said, job, line), line, 60)
        except AssertionError:  # Slurm loses a signal that it sends in the second in which the job starts
            job.signal("USR1")
            until(partial(said, job, line), line, 60)
        if "continues" in line:
            cluster.start_requeued(job.id)
    assert job.until_it_ends() == 85, job.log
    assert job.log.count("3 starts in a row saved nothing new: not started again. Give it more time (--time)") == 1
    assert job.log.count("stopped, with nothing new to save; continues") == 2
    assert "stopped and saved" not in job.log
    job.assert_nothing_left()


def said(job: Job, line: str) -> bool:
    return line in job.log


def executable(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o755)
    return file


def test_a_chained_job_has_the_options_of_the_first_and_its_dependants(submit, cluster):
    options = ["--account=team", "--qos=long", "--constraint=fast", "--mem=3000M", "--comment=a study, part=2"]
    job = submit(*ENDLESS, options=options, REQUEUE="chain")
    waiting = cluster.run("sbatch", "--parsable", f"--dependency=afterok:{job.id}", "--output=/dev/null", "--wrap=true")
    until(lambda: "attempt 1 of" in job.log, "the start of the job")
    job.look()
    job.signal("USR1")
    until(lambda: f"job {waiting}, which waited for this one, waits for job " in job.log, "the next job")
    following = re.search(r"slurm.sbatch: job (\d+) continues with ", job.log)[1]
    told = {name: cluster.run("scontrol", "show", "job", name) for name in (job.id, following)}
    for field in ("Account", "QOS", "Features", "MinMemoryNode", "NumNodes", "TimeLimit", "Partition", "Comment"):
        # Of a job that waits, the number of nodes is told as 2-2.
        values = {re.search(rf"\b{field}=(?:\d-)?(.*?)(?: [A-Z][A-Za-z:]*=|\n)", text)[1] for text in told.values()}
        assert len(values) == 1, (field, values)
    assert "Account=team QOS=long" in told[following]
    assert "Comment=a study, part=2" in told[following]
    assert cluster.field(waiting, "Dependency").startswith(f"afterok:{following}(")
    assert job.until_it_ends() == 85
    cluster.clear()
    job.assert_nothing_left()


@pytest.mark.parametrize(
    ("harm", "mend", "cause"),
    [
        (f"mount -t tmpfs none {sys.prefix}", f"umount {sys.prefix}", r"n3: Exited with exit code \d+"),
        ("mount -o remount,ro /tmp", "mount -o remount,rw /tmp", r"n3: .*Read-only file system: '/tmp/dr1-"),
    ],
    ids=["no interpreter", "no /tmp"],
)
def test_a_bad_node_ends_the_job_at_once_and_is_named(submit, cluster, harm, mend, cause):
    cluster.nodes["n3"].run(harm)
    try:
        job = submit(options=["--nodelist=n[1,3]"], RAY_START_TIMEOUT="3000")
        assert job.until_it_ends() == 1, job.log
    finally:
        cluster.nodes["n3"].run(mend)
    assert re.search(r"ray_cluster: error: Ray('s steps ended| did not start); not ready: (n1 )?n3", job.log), job.log
    assert "submit the job again with --exclude=n3\n" in job.log
    assert re.search(rf"^    {cause}", job.log, re.MULTILINE), job.log
    assert "Traceback" not in job.log
    job.look()
    job.assert_nothing_left()


@dataclass(frozen=True)
class Story:
    job: Job
    evaluation: str
    """Its job."""
    wrapped: Path
    """What ran in the container, a line each."""
    config: Path
    saved: int
    """Steps of the first start."""


@pytest.fixture(scope="module")
def story(cluster: Slurm, material: Material, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A run from one file, submitted as the dry run says, stopped as by the time limit, requeued, finished and evaluated."""
    folder = tmp_path_factory.mktemp("story")
    record = folder / "wrapped"
    wrapper = executable(folder / "wrapper", WRAPPER.format(record=record, prefix=sys.prefix))
    config = material.config(folder)
    own = STORY.format(wrapper=wrapper, suite=write_suite(folder), data=folder)
    config.write_text(config.read_text() + own)
    run = folder / "runs/tiny"
    steps = (APART, f"train.steps={STEPS}", f"schedule.steps={STEPS}")
    evaluation = cluster.run("bash", "-c", dry_run(config, *steps, "--then", "eval")).split()[-1]
    job_id = re.match(r"afterok:(\d+)", cluster.field(evaluation, "Dependency"))[1]
    job = Job(cluster, job_id, run, run / f"slurm-{job_id}.log")
    job.until_it_trains()
    job.signal("USR1")
    cluster.start_requeued(job.id)
    job.assert_nothing_left()
    saved = series(run, "train/loss")[-1][0]
    assert cluster.state(evaluation) == "PENDING"
    assert job.until_it_ends() == 0, job.log
    until(lambda: cluster.ended(evaluation), "the evaluation", START_S)
    return Story(job, evaluation, record, config, saved)


def test_a_run_from_one_file_is_requeued_finished_and_evaluated(story, cluster):
    run = story.job.run
    assert cluster.field(story.job.id, "Restarts") == "1"
    assert "stopped and saved; continues with attempt 2 (requeue)" in story.job.log
    assert f"steps {story.saved + 1} to {STEPS}" in story.job.log
    told = cluster.run("scontrol", "show", "job", story.job.id)
    for text in ("Account=team QOS=long", "TimeLimit=02:00:00", "Features=fast", "Nice=5", "Comment=a study, part=2"):
        assert text in told
    wrapped = story.wrapped.read_text()
    for ran in ("n1 python3 -m distill_rl.workers.cluster.node ", "n2 python3 -m distill_rl.workers.cluster.node ",
                "n1 bash -c ", " python3 -m distill_rl eval --model student="):  # fmt: skip
        assert f"{ran}" in wrapped
    assert cluster.state(story.evaluation) == "COMPLETED", (run / f"eval-{story.evaluation}.log").read_text()
    assert (run / "evals/own.json").exists()
    if shellcheck := shutil.which("shellcheck"):
        scripts = [run / name for name in ("submit.sbatch", "evaluate.sbatch")]
        options = ["--severity=warning", "--exclude=SC1007,SC1083,SC2034", "--external-sources", f"--source-path={ROOT}/launch"]  # fmt: skip
        done = subprocess.run([shellcheck, *options, *scripts], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


def test_a_named_interface_counts_more_than_the_route(story):
    assert [address for address, _ in heads(story.job)] == ["10.78.0.1", "10.78.0.1"]


def test_a_requeued_run_ends_with_the_bytes_of_an_undisturbed_one(story, cluster):
    steps = (APART, f"train.steps={STEPS}", f"schedule.steps={STEPS}", "run.name=straight", "--then", "eval")
    dry_run(story.config, *steps)
    straight = submitted(cluster, story.job.run.parent / "straight")
    assert straight.until_it_ends() == 0, straight.log
    assert 0 < story.saved < STEPS
    for metric in ("train/loss", "train/kl_loss", "train/grad_norm", "validation/kl_loss"):
        assert series(story.job.run, metric) == series(straight.run, metric) != [], metric
    assert students(story.job.run) == students(straight.run)


def students(run: Path) -> dict[str, str]:
    """The hashes of the exported student's files, but for the card, which tells of the run."""
    files = [file for file in (run / "export").iterdir() if file.name != "README.md"]
    assert "model.safetensors" in [file.name for file in files]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_an_array_over_seeds_makes_runs_that_report_compares(cluster, material, tmp_path):
    command = dry_run(material.config(tmp_path), *TEAM, "slurm.nodes=1", "--array", "run.seed=0,1")
    run = tmp_path / "runs/tiny"
    job_id = cluster.run("env", "RAY_OBJECT_STORE_BYTES=100000000", "bash", "-c", command).split()[-1]
    for task in (0, 1):
        job = Job(cluster, f"{job_id}_{task}", run / f"seed-{task}", run / f"slurm-{job_id}_{task}.log")
        assert job.until_it_ends() == 0, job.log
        assert [step for step, _ in series(job.run, "train/loss")] == list(range(1, 9))
    report = distill_rl("report", run)
    assert report.code == 0, report.err
    for task in (0, 1):
        assert re.search(rf"^.*seed-{task}.*\b8\b", report.out, re.MULTILINE), report.out


def test_an_account_that_does_not_exist_is_refused_before_anything_runs(cluster, material, tmp_path):
    dry_run(material.config(tmp_path), *TEAM, "slurm.account=nobody")
    done = cluster.done("sbatch", str(tmp_path / "runs/tiny/submit.sbatch"))
    assert done.returncode == 1
    assert "Invalid account or account/partition combination specified" in done.stderr
    assert not cluster.run("squeue", "--noheader")
    assert not (tmp_path / "runs/tiny/logs").exists()
