from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill_rl.config.save import save_config
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.observe.report.report import ReportRun, differences, environment, figures, header, read_run, read_runs
from distill_rl.system.environment import environment as this_environment

MACHINE = {
    "commit": "0123456789abcdef", "dirty": True, "version": "0.1.0", "python": "3.12.1", "host": "node7", "driver": "580.1",
    "packages": {"torch": "2.12.0"}, "cpu": "EPYC", "cores": 96, "memory_gib": 1007.5, "gpus": ["H100", "H100", "L4"],
    "nodes": ["8 GPUs (H100), 96 CPUs", "8 GPUs (H100), 96 CPUs"],
}  # fmt: skip


def make_run(folder: Path, machine: Any = None, **settings: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1700000000.0, "train/kl_loss": 0.5}\n')
    config = Config(teachers=[TeacherConfig(model="runs/teacher")])
    config.run.name, config.student.model, config.data.path = folder.name, "runs/student", "data.jsonl"
    for name, value in settings.items():
        setattr(config.train, name, value)
    save_config(config, folder / "config.yaml")
    if machine is not None:
        (folder / "logs" / "attempt_2").mkdir(parents=True)
        (folder / "logs" / "latest").symlink_to("attempt_2")
        (folder / "logs" / "attempt_2" / "environment.json").write_text(
            machine if isinstance(machine, str) else json.dumps(machine)
        )
    return folder


def test_commit_packages_and_hardware_are_shown(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", MACHINE))
    machine = "2 × H100, 1 × L4, EPYC, 96 cores, 1007.5 GiB"
    cluster = "8 GPUs (H100), 96 CPUs, 8 GPUs (H100), 96 CPUs"
    assert environment(run) == {
        "commit": "0123456789ab with changes", "machine": machine, "cluster": cluster, "host": "node7", "GPU driver": "580.1",
        "distill_rl": "0.1.0", "python": "3.12.1", "torch": "2.12.0",
    }  # fmt: skip
    assert {"commit": "0123456789ab with changes", "machine": machine}.items() <= header(run).items()


@pytest.mark.parametrize("machine", [None, "{", "[]", {"gpus": 3, "nodes": {}, "packages": [], "cpu": None}])
def test_missing_or_damaged_environments_are_left_out(tmp_path: Path, machine: Any) -> None:
    run = read_run(make_run(tmp_path / "a", machine))
    assert environment(run) == {}
    assert "machine" not in header(run)


def test_this_machine_is_recorded_in_a_form_that_is_shown() -> None:
    recorded = json.loads(json.dumps(this_environment()))
    shown = environment(ReportRun("r", [], environment=recorded))
    assert shown["torch"] == recorded["packages"]["torch"]
    assert f"{recorded['cores']} cores" in shown["machine"]
    assert len(recorded["commit"]) in (0, 40)


def test_settings_and_environments_that_differ_are_listed(tmp_path: Path) -> None:
    runs = read_runs(
        [
            make_run(tmp_path / "a", MACHINE, global_batch_size=32),
            make_run(tmp_path / "b", MACHINE | {"commit": "fedcba9876543210", "dirty": False}, global_batch_size=64),
            make_run(tmp_path / "c", global_batch_size=64),
        ]
    )
    rows = dict(differences(runs))
    assert rows["train.global_batch_size"] == ["32", "64", "64"]
    assert rows["commit"] == ["0123456789ab with changes", "fedcba987654", "—"]
    assert "run.name" not in rows
    assert "train.micro_batch_size" not in rows


def test_a_configuration_that_cannot_be_read_has_dashes(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b")])
    (tmp_path / "b" / "config.yaml").write_text("a: [")
    runs = read_runs([tmp_path / "a", tmp_path / "b"])
    assert dict(differences(runs))["train.micro_batch_size"][1] == "—"


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "x" / "run"), make_run(tmp_path / "y" / "run"), make_run(tmp_path / "z")]
    assert [run.name for run in read_runs([*folders, folders[0]])] == ["x/run (1)", "y/run", "z", "x/run (2)"]


def test_figures_count_faults_and_rows_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "bad_rows.jsonl").write_text('{"row": 1}\n{"row": 5}\n')
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "timing/step": 2.0, "faults/skipped_steps": 3.0}\n')
        file.write('{"step": 5, "train/kl_l{"step": 6}\n\n[1]\n{"step": 7, "timing')
    assert figures(read_run(folder)) == {
        "steps": "4", "KD, train": "0.5", "time spent in steps": "8.0 s", "rows left out": "2", "broken records": "2",
        "steps skipped": "3",
    }  # fmt: skip
