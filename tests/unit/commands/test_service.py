import shlex
import subprocess
import sys

import pytest

from distill_rl.cli import main
from distill_rl.commands.service import _environment, _require_no_secret, _show, entrypoint
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError
from tests.unit.test_security import SECRET


def test_the_entrypoint_survives_a_shell_and_the_shell_becomes_the_process():
    hostile = "/data/a b'; touch /tmp/owned; $(id)/x.yaml"
    program = "import os, sys; print(os.getpid()); print(sys.argv[1], end='')"
    shell = subprocess.Popen(
        entrypoint([sys.executable, "-c", program, hostile]), shell=True, stdout=subprocess.PIPE, text=True
    )
    pid, _, argument = shell.communicate(timeout=60)[0].partition("\n")
    assert (int(pid), argument) == (shell.pid, hostile)
    assert shlex.split(entrypoint(["python", hostile])) == ["exec", "python", hostile]


def test_the_environment_of_a_job_holds_no_secret_and_leaves_time_to_save(monkeypatch):
    for name in (*SECRET, "DISTILL_RL_ATTEMPT"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("HF_HOME", "/shared/hf")
    config = Config()
    passed = _environment(config)
    assert "hunter2" not in passed.values()
    assert passed["HF_HOME"] == "/shared/hf"
    assert int(passed["RAY_JOB_STOP_WAIT_TIME_S"]) >= 2 * config.ray.step_timeout_s


def test_a_configuration_with_a_secret_is_not_handed_on():
    config = Config()
    config.student.model, config.data.path = "s", "https://me:hunter2@host/x"
    with pytest.raises(ConfigError, match="must not hold a secret") as caught:
        _require_no_secret(config)
    assert "hunter2" not in str(caught.value)
    config.data.path = "https://host/x"
    _require_no_secret(config)


def test_what_a_run_printed_cannot_paint_the_terminal(capsys):
    _show("step 1\n\x1b[2Jred\na\tb")
    assert capsys.readouterr().out == "step 1\n\\x1b[2Jred\na       b\n"


@pytest.mark.parametrize("command", ["submit", "status", "logs", "stop"])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "--address" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["logs"], ["stop"], ["submit"], ["status", "a", "b"], ["stop", "a", "--deadline", "soon"]]
)
def test_arguments_that_are_missing_or_too_many_are_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_configuration_is_checked_here_before_a_cluster_is_asked(tmp_path, capsys):
    assert main(["submit", "-c", str(tmp_path / "absent.yaml"), "--address", "http://127.0.0.1:1"]) == 2
    err = capsys.readouterr().err
    assert "absent.yaml: no such file" in err
    assert "dashboard" not in err
