import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from distill_rl.cli import main
from distill_rl.commands import service
from distill_rl.commands.service import _environment, _show, entrypoint, submission_file
from distill_rl.config.save import require_no_secret
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError, WorkerError
from tests.unit.test_security import SECRET


def test_entrypoint_survives_a_shell_and_replaces_it():
    hostile = "/data/a b'; touch /tmp/owned; $(id)/x.yaml"
    program = "import os, sys; print(os.getpid()); print(sys.argv[1], end='')"
    shell = subprocess.Popen(
        entrypoint([sys.executable, "-c", program, hostile]), shell=True, stdout=subprocess.PIPE, text=True
    )
    pid, _, argument = shell.communicate(timeout=60)[0].partition("\n")
    assert (int(pid), argument) == (shell.pid, hostile)
    assert shlex.split(entrypoint(["python", hostile])) == ["exec", "python", hostile]


def test_job_environment_holds_no_secret_and_leaves_time_to_save(monkeypatch):
    for name in (*SECRET, "DISTILL_RL_ATTEMPT"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("HF_HOME", "/shared/hf")
    config = Config()
    variables = _environment(config)
    assert "hunter2" not in variables.values()
    assert variables["HF_HOME"] == "/shared/hf"
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) >= 2 * config.ray.step_timeout_s


def test_configuration_with_a_secret_is_rejected():
    config = Config()
    config.student.model, config.data.path = "s", "https://me:hunter2@host/x"
    with pytest.raises(ConfigError, match="must not hold a secret") as caught:
        require_no_secret(config)
    assert "hunter2" not in str(caught.value)
    config.data.path = "https://host/x"
    require_no_secret(config)


def test_simultaneous_submissions_write_different_files(tmp_path):
    config = Config()
    config.run.dir = str(tmp_path)
    files = {submission_file(config, "name.2") for _ in range(9)}
    assert len(files) == 9
    assert all(file.parent == tmp_path / ".submitted" and file.name.startswith("name.2.") for file in files)


def test_cluster_problems_are_reported_with_all_others(tmp_path, capsys):
    path = tmp_path / "x.yaml"
    path.write_text("{train: {steps: -1}, data: {path: 'https://me:hunter2@host/x'}}")
    assert main(["submit", "-c", str(path), "run.name=a b", "--address", "http://127.0.0.1:1"]) == 2
    err = capsys.readouterr().err
    for words in ("train.steps: ", "run.name: of a submitted run", "must not hold a secret", "student.model: "):
        assert err.count(words) == 1, err
    assert "hunter2" not in err
    assert main(["submit", "-c", str(path), "run.name=a/b", "--address", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.count("run.name: ") == 1


class Refusing:
    """A cluster that answers a submission with `error`.

    Args:
        accepts: it runs the job anyway; otherwise it has another job of this name.
        answers: it answers further requests.
    """

    def __init__(self, error: Exception, *, accepts: bool = False, answers: bool = True):
        self.error, self.accepts, self.answers = error, accepts, answers
        self.jobs_there = []

    def jobs(self):
        if self.jobs_there and not self.answers:
            raise self.error
        return self.jobs_there

    def submit(self, entrypoint, submission_id, **details):
        if not self.accepts:
            entrypoint = "exec another"
        self.jobs_there.append(SimpleNamespace(submission_id=submission_id, entrypoint=entrypoint, metadata={}))
        raise self.error


@pytest.mark.parametrize(
    ("cluster", "files"),
    [
        (Refusing(ConfigError("job tiny", "was just submitted by someone else")), 0),
        (Refusing(WorkerError("the Ray cluster", "must carry out the request"), accepts=True), 1),
        (Refusing(ConfigError("--address", "no Ray cluster answers there"), answers=False), 1),
    ],
    ids=["rejected", "accepted, but the answer was lost", "unknown"],
)
def test_failed_submission_keeps_only_files_a_job_may_need(material, tmp_path, monkeypatch, capsys, cluster, files):
    monkeypatch.setattr(service, "Service", lambda address: cluster)
    assert main(["submit", "-c", str(material.config(tmp_path))]) == cluster.error.exit_code
    assert str(cluster.error) in capsys.readouterr().err
    assert len(list((tmp_path / "runs" / ".submitted").iterdir())) == files


def test_control_sequences_in_a_log_are_escaped(capsys):
    _show("step 1\n\x1b[2Jred\na\tb")
    assert capsys.readouterr().out == "step 1\n\\x1b[2Jred\na       b\n"


def test_log_is_polled_less_often_while_idle_and_shown_once(monkeypatch, capsys):
    texts = ["a\n", "a\nb", "a\nb\n", *["a\nb\n"] * 9, "a\nb\nc\n", "a\nb\nc\nended     exit code 85\n"]
    metadata = {service.runs.NAME: "x", service.runs.RUN: "/runs/x"}
    logs, pauses = iter(texts), []

    class Cluster:
        def job(self, submission_id):
            status = "STOPPED" if len(pauses) == len(texts) - 1 else "RUNNING"
            times = {"start_time": 1, "end_time": 2}
            return SimpleNamespace(submission_id=submission_id, metadata=metadata, status=status, **times)

        def logs(self, submission_id):
            return next(logs)

    monkeypatch.setattr(service.time, "sleep", pauses.append)
    assert service._follow(Cluster(), service.runs.runs([Cluster().job("x")])["x"]) == 85
    assert capsys.readouterr().out == "a\nb\nc\nended     exit code 85\n"
    assert (pauses[0], pauses[2], pauses[-2], pauses[-1]) == (0.5, 0.5, 5.0, 0.5)
    assert pauses[2:-1] == sorted(pauses[2:-1])


@pytest.mark.parametrize("command", ["submit", "status", "logs", "stop"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "--address" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["logs"], ["stop"], ["submit"], ["status", "a", "b"], ["stop", "a", "--deadline", "soon"]]
)
def test_missing_or_extra_arguments_are_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_configuration_is_checked_before_contacting_a_cluster(tmp_path, capsys):
    assert main(["submit", "-c", str(tmp_path / "absent.yaml"), "--address", "http://127.0.0.1:1"]) == 2
    err = capsys.readouterr().err
    assert "absent.yaml: no such file" in err
    assert "dashboard" not in err
