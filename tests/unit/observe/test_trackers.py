"""R22: a tracker that is down, silent or slow neither stops nor slows a run, and leaves no process behind."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from distill_rl.config.schema import Config
from distill_rl.observe.metrics import Metric
from distill_rl.observe.sinks import open_observer, read_records
from distill_rl.observe.trackers import RunId, TrackerSink, flat, metric_name, open_trackers
from distill_rl.types import RunPaths
from tests.helpers.command import survivors, told, until
from tests.helpers.socket_tracker import Server, command


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "distill_rl")
    return caplog


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = set(psutil.Process().children(recursive=True))  # other tests may leave processes for the session
    yield tmp_path
    left = told(set(psutil.Process().children(recursive=True)) - before)
    assert not [command for command in left if "tracker" in command], "no process is left"


def sink(folder: Path, port: int, *, host: str = "127.0.0.1", **options: Any) -> TrackerSink:
    return TrackerSink(
        "socket", command(port, host), {"name": "a"}, log_file=folder / "socket.log", **{"close_s": 1.0, **options}
    )


def warnings(messages: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in messages.records if record.levelno == logging.WARNING]


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_tracker_gets_start_records_in_order_and_end(folder: Path, messages: pytest.LogCaptureFixture) -> None:
    with Server("takes").serving() as server:
        tracker = sink(folder, server.port, close_s=60.0)
        for step in range(1, 51):
            tracker.write(step, {"train/loss": 1.0 / step})
        until(lambda: len(server.messages) > 5, "the tracker is reached")
        tracker.close()
    first, *records, last = server.messages
    assert first == {"name": "a"}
    assert records == [{"step": step, "metrics": {"train/loss": 1.0 / step}} for step in range(1, 51)]
    assert last == {"closed": True}
    assert tracker.missing == 0
    assert warnings(messages) == []


def test_silent_tracker_is_warned_about_once_and_killed(folder: Path, messages: pytest.LogCaptureFixture) -> None:
    with Server("hangs").serving() as server:
        tracker = sink(folder, server.port, size=10)
        child = psutil.Process(tracker.pid)
        until(lambda: server.messages, "the tracker is contacted")
        for step in range(1, 3001):  # far more than the pipe to the child holds
            tracker.write(step, {f"train/{i}": 0.0 for i in range(10)})
        tracker.close()
        assert not child.is_running()
    assert tracker.missing == 3000
    slow, lost = warnings(messages)
    assert slow.startswith("socket: is too slow: 10 records are waiting, and new ones are dropped; the run continues")
    assert lost == "socket did not receive 3000 of 3000 records; metrics.jsonl has all of them"


def test_failing_tracker_is_tried_with_every_record(folder: Path, messages: pytest.LogCaptureFixture) -> None:
    with Server("closes").serving() as server:
        tracker = sink(folder, server.port)
        for step in range(1, 4):
            tracker.write(step, {})
        until(lambda: "step 3:" in messages.text, "every record is tried")
        tracker.close()
    assert tracker.missing == 3
    assert len(warnings(messages)) == 2, "the first failure and the summary"


@pytest.mark.parametrize("host", ["127.0.0.1", "tracker.invalid"], ids=["closed port", "unknown name"])
def test_unreachable_tracker_is_warned_about_once(folder: Path, messages: pytest.LogCaptureFixture, host: str) -> None:
    tracker = sink(folder, closed_port(), host=host)
    tracker.write(1, {"train/loss": 1.0})
    until(lambda: messages.text.count("cannot be reached") > 1, "it is tried again")
    tracker.close()
    assert tracker.missing == 1
    unreachable, lost = warnings(messages)
    assert "socket: cannot be reached: " in unreachable
    assert "1 of 1 records" in lost


def test_tracker_that_starts_late_gets_waiting_records(folder: Path, messages: pytest.LogCaptureFixture) -> None:
    server = Server("takes")  # it listens, but does not answer yet
    tracker = sink(folder, server.port, close_s=60.0)
    tracker.write(1, {"train/loss": 1.0})
    with server.serving():
        until(lambda: "connected" in messages.text, "the tracker is reached")
        tracker.close()
    assert [message.get("step") for message in server.messages] == [None, 1, None]
    assert tracker.missing == 0


def test_child_that_dies_at_once_does_not_block_close(folder: Path, messages: pytest.LogCaptureFixture) -> None:
    tracker = TrackerSink(
        "socket", [sys.executable, "-c", "1 / 0"], {}, log_file=folder / "socket.log", size=2, close_s=1.0
    )
    until(lambda: "its process has ended" in messages.text, "the end is noticed")
    tracker.write(1, {})
    until(lambda: "socket_feed" not in {thread.name for thread in threading.enumerate()}, "the feeding thread ends")
    for step in range(2, 6):  # more than the queue holds
        tracker.write(step, {})
    tracker.close()
    assert "did not finish in time" not in messages.text, "nothing is waited for"
    assert tracker.missing == 5
    assert "ZeroDivisionError" in (folder / "socket.log").read_text()


@pytest.mark.parametrize("behaviour", ["hangs", "down"])
def test_killed_driver_leaves_no_child(folder: Path, behaviour: Any) -> None:
    program = (
        "import sys, threading, pathlib\n"
        "from tests.helpers.socket_tracker import command\n"
        "from distill_rl.observe.trackers import TrackerSink\n"
        "tracker = TrackerSink('socket', command(int(sys.argv[1])), {}, log_file=pathlib.Path(sys.argv[2]))\n"
        "print(tracker.pid, flush=True)\n"
        "threading.Event().wait()"
    )
    with Server("hangs").serving() as server:
        port = server.port if behaviour == "hangs" else closed_port()
        arguments = [sys.executable, "-c", program, str(port), str(folder / "socket.log")]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            child = psutil.Process(int(driver.stdout.readline()))
            until(lambda: server.messages or behaviour == "down", "the tracker is contacted")
            driver.kill()
        assert not survivors([child], 30), "the child ends by itself"


def test_broken_tracker_does_not_affect_metrics_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture
) -> None:
    broken = folder / "broken" / "mlflow"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    paths, config = RunPaths(folder), Config()
    config.observe.mlflow = True
    observer = open_observer(config, paths, total_steps=1)
    observer.log(1, {"train/loss": Metric(2.0)})
    until(lambda: "RuntimeError: broken" in messages.text, "the failure is reported")
    observer.close()
    assert read_records(paths.metrics)[0]["train/loss"] == 2.0


def test_trackers_are_off_by_default(tmp_path: Path) -> None:
    assert open_trackers(Config(), RunPaths(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_run_id_is_stored_in_the_run_directory(tmp_path: Path) -> None:
    assert RunId(tmp_path, "wandb").stored is None
    assert RunId(tmp_path, "wandb").store("abc") == "abc"
    assert (RunId(tmp_path, "wandb").stored, RunId(tmp_path, "mlflow").stored) == ("abc", None)


def test_mlflow_metric_names_and_settings_are_flat() -> None:
    assert [metric_name(name) for name in ("step", "timing/student", "timing/student/step", "a/b/c/d")] == [
        "step",
        "timing/student",
        "timing/student.step",
        "a/b.c.d",
    ]
    assert dict(flat({"a": {"b": 1}, "c": [{"d": None}, 2]})) == {"a.b": 1, "c.0.d": None, "c.1": 2}
