"""A real run seen from outside: its processes' environments and command lines, and its files."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Material
from tests.helpers.command import command_lines, leftovers, running, series, temporary, told, until
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.unit.test_security import SECRET

pytestmark = [pytest.mark.ray, pytest.mark.cli]

SETTINGS = ("train.steps=100000", "checkpoint.every=1", "aligner.workers=0", "student.parallel.dp=2")
LOOPBACK = ("127.0.0.1", "::1")
HIDDEN = [name for name in SECRET if not name.startswith("RAY_")]


def holding(text: str, *folders: Path) -> list[Path]:
    """The regular files that contain the text."""
    files = []
    for file in (file for folder in folders for file in folder.rglob("*")):
        with contextlib.suppress(OSError):
            if stat.S_ISREG(file.lstat().st_mode) and text.encode() in file.read_bytes():
                files.append(file)
    return files


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """The addresses and ports on which a process listens."""
    with contextlib.suppress(psutil.Error):
        sockets = process.net_connections("tcp")
        return {(socket.laddr.ip, socket.laddr.port) for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return set()


def test_secrets_do_not_leak_and_the_dashboard_is_local(tmp_path, monkeypatch):
    write_tiny_model(tmp_path / "teacher", hidden=32, seed=1)
    write_tiny_model(tmp_path / "student", hidden=16, seed=2)
    write_corpus(tmp_path / "corpus.jsonl", rows=80, seed=5)
    for name in HIDDEN:
        monkeypatch.setenv(name, "hunter2-in-the-environment")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_urlsafe(32))  # must reach Ray's processes as a file
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # must be ignored: without ray.address a run starts its own Ray
    config, log = Material(tmp_path).config(tmp_path), tmp_path / "log"
    with running("train", "-c", config, *SETTINGS, log=log) as process:
        run = tmp_path / "runs" / "tiny"
        until(lambda: series(run, "train/loss") or process.poll() is not None, "the first step")
        assert process.poll() is None, log.read_text()
        (private,) = temporary(process.pid)
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert stat.S_IMODE((private / "token").stat().st_mode) == 0o600
        token = (private / "token").read_text()
        assert token == os.environ["RAY_AUTH_TOKEN"]
        assert not [line for line in command_lines() if token in line or "hunter2" in line]
        assert holding(token, private, run) == [private / "token"]
        assert not holding("hunter2", private, run)

        family = leftovers(process.pid).values()
        environments = {}
        for child in family:
            with contextlib.suppress(psutil.Error):
                environments[" ".join(child.cmdline())[:60]] = child.environ()
        actors = [name for name in environments if name.startswith("ray::")]
        assert len(actors) >= 2, sorted(environments)
        assert not [(title, name) for title, variables in environments.items() for name in SECRET if name in variables]
        dashboards = [child for child, line in zip(family, told(family), strict=True) if "dashboard.py" in line]
        assert dashboards
        assert all(ip in LOOPBACK for process in dashboards for ip, _ in listening(process))
        workers = [child for child, line in zip(family, told(family), strict=True) if line.startswith("ray::")]
        assert len(workers) >= 3
        for worker in workers:  # the one port is Ray's, which asks for the token
            assert len([place for place in listening(worker) if place[0] not in LOOPBACK]) <= 1
    assert "hunter2" not in log.read_text()
