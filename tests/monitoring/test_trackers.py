"""The real W&B and MLflow: what they store of a run and of a resumed run, and R22."""

from __future__ import annotations

import json
import logging
import math
import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from distill_rl.config.schema import Config, DataConfig, TeacherConfig
from distill_rl.observe.metrics import Metric
from distill_rl.observe.sinks import Observer, open_observer
from distill_rl.types import RunPaths
from tests.helpers.command import distill_rl, records, until

pytest.importorskip("wandb", reason="W&B is not installed: bash launch/test.sh monitoring")
pytest.importorskip("mlflow", reason="MLflow is not installed: bash launch/test.sh monitoring")

FEATURE = Path(__file__).parents[2] / "configs" / "features" / "trackers.yaml"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    caplog.set_level(logging.INFO, "distill_rl")


def settings(*trackers: str) -> Config:
    config = Config(teachers=[TeacherConfig(model="some/teacher")], data=DataConfig(path="https://me:secret@host/data"))
    config.run.name = "tracked"
    for name in trackers:
        setattr(config.observe, name, True)
    return config


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file: 7 bytes, then LevelDB's log format (32 KiB blocks; fragments with 7-byte headers)."""
    content, position, whole = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 2**15 - position % 2**15 < 7:  # the rest of a block is too short for a header
            position += 2**15 - position % 2**15
            continue
        size, kind = struct.unpack_from("<HB", content, position + 4)
        whole += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or its last fragment
            yield whole
            whole = b""


def wandb_rows(run: Path) -> list[dict[str, Any]]:
    """Everything that was logged, in order, from W&B's own files."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for file in sorted((run / "logs" / "wandb").glob("offline-run-*/run-*.wandb")):
        for content in wandb_records(file):
            record = Record.FromString(content)
            if record.HasField("history"):
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                rows.append({name: json.loads(value) for name, value in items.items()})
    return rows


def wandb_ids(run: Path) -> set[str]:
    return {file.stem.removeprefix("run-") for file in (run / "logs" / "wandb").glob("offline-run-*/run-*.wandb")}


def log_steps(observer: Observer, steps: range) -> None:
    for step in steps:
        loss = math.nan if step == 2 else 1.0 / step
        values = {"train/kl_loss": loss, "timing/student": 1.0, "timing/student/step": 0.5}
        observer.log(step, {name: Metric(value) for name, value in values.items()})


def is_connected(caplog: pytest.LogCaptureFixture, name: str, times: int = 1) -> Callable[[], bool]:
    return lambda: caplog.text.count(f"{name}: connected") >= times


def run_and_resume(run: Path, tracker: str, caplog: pytest.LogCaptureFixture) -> None:
    """Log steps 1 to 4, then resume from step 2 and log steps 3 to 6."""
    for attempt, (steps, resume) in enumerate([(range(1, 5), None), (range(3, 7), 2)], start=1):
        observer = open_observer(settings(tracker), RunPaths(run, attempt), total_steps=6, resume_step=resume)
        log_steps(observer, steps)
        until(is_connected(caplog, tracker, attempt), f"{tracker} is reached")
        observer.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_wandb_offline_has_every_step_of_a_resumed_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_and_resume(tmp_path, "wandb", caplog)
    rows = wandb_rows(tmp_path)
    # One folder to upload, with what the run has recorded; the attempt before is put aside.
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["train/kl_loss"] for row in rows if row["step"] in (1, 4)] == [1.0, 0.25]
    recorded = {record["step"]: record["time"] for record in records(tmp_path)}
    assert [row["_timestamp"] for row in rows[:2]] == pytest.approx([recorded[1], recorded[2]], abs=0.01)
    assert len(list((tmp_path / "logs" / "wandb").glob("earlier-offline-run-*"))) == 1
    assert rows[0]["timing/student"] == 1.0
    assert rows[0]["timing/student/step"] == 0.5
    assert wandb_ids(tmp_path) == {(tmp_path / "logs" / "wandb.id").read_text().strip()}
    stored = b"".join(file.read_bytes() for file in (tmp_path / "logs").rglob("*.wandb"))
    assert b"some/teacher" in stored, "the configuration is stored"
    assert b"secret" not in stored, "but without its secrets"


def test_mlflow_files_have_every_step_of_a_resumed_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run_and_resume(tmp_path, "mlflow", caplog)
    client = MlflowClient((tmp_path / "logs" / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("distill_rl").experiment_id])
    assert run.info.run_name == "tracked"
    assert run.info.status == "FINISHED"
    assert run.data.params["teachers.0.model"] == "some/teacher"
    assert run.data.params["data.path"] == "https://<redacted>@host/data"
    history = client.get_metric_history(run.info.run_id, "train/kl_loss")
    assert sorted(metric.step for metric in history) == [1, 2, 3, 3, 4, 4, 5, 6]
    assert {metric.step: metric.value for metric in history}[4] == 0.25
    assert run.data.metrics["timing/student"] == 1.0
    assert run.data.metrics["timing/student.step"] == 0.5


def test_projects_are_named_by_the_environment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    store = (tmp_path / "elsewhere").as_uri()
    for name, value in {
        "WANDB_PROJECT": "mine-in-wandb",
        "MLFLOW_EXPERIMENT_NAME": "mine",
        "MLFLOW_TRACKING_URI": store,
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    observer = open_observer(settings("wandb", "mlflow"), RunPaths(tmp_path / "run"), total_steps=1)
    log_steps(observer, range(1, 2))
    until(lambda: is_connected(caplog, "wandb")() and is_connected(caplog, "mlflow")(), "both are reached")
    observer.close()
    (file,) = (tmp_path / "run" / "logs" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"mine-in-wandb" in file.read_bytes()
    client = MlflowClient(store)
    assert len(client.search_runs([client.get_experiment_by_name("mine").experiment_id])) == 1


@pytest.fixture(params=["closed port", "silent server"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    if request.param == "silent server":
        listener.listen(100)
        yield port
        listener.close()
    else:
        listener.close()
        yield port


def test_unreachable_trackers_do_not_affect_a_run(
    material,
    tmp_path: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R22: a whole run of configs/features/trackers.yaml has the same numbers as without trackers."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    before = set(psutil.pids())
    runs = []
    common = (
        "observe.every=1", "evaluate.suites=[]", "data.loss_on=all", "data.validation.path=null", "run.name=tiny",
    )  # fmt: skip
    for folder, trackers in (("without", ("observe.wandb=false", "observe.mlflow=false")), ("with", ())):
        config = material.config(tmp_path / folder)
        config.write_text(f"extends: {FEATURE}\n{config.read_text()}")
        result = distill_rl("train", "-c", config, *common, *trackers)
        assert result.code == 0, result.err
        runs.append(tmp_path / folder / "runs" / "tiny")
    plain, tracked = ([record.get("train/loss") for record in records(run)] for run in runs)
    assert tracked == plain
    log = (runs[1] / "logs" / "latest" / "driver.log").read_text()
    for name in ("wandb", "mlflow"):
        assert re.search(rf"{name} did not receive (\d+) of \1 records; metrics.jsonl has all of them", log)
    left = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    commands = [" ".join(process.info["cmdline"] or ()) for process in left]
    assert not [command for command in commands if "wandb-core" in command or "tracker_process" in command]
    assert not any("0" * 40 in file.read_text(errors="replace") for file in runs[1].rglob("*") if file.is_file())
