"""What the workers need is compared with the machine's memory, its GPUs and /dev/shm."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from distill_rl.commands.check import _sum
from distill_rl.config.derive import all_rings, sizes, stored_targets
from distill_rl.config.facts import Facts, ModelFacts, TeacherFacts
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.models.files import gpu_bytes
from distill_rl.preflight import machine as memory
from distill_rl.preflight.machine import NEAR, compare_memory
from distill_rl.run.opened import RunFindings

MODEL = ModelFacts("llama", 10**9, 2048, 8192, 16, 32, 8, 32000, False, 4 * 10**9)
ALONE = Facts(student=MODEL)
TAUGHT = Facts(student=MODEL, teachers=(TeacherFacts(MODEL, 32000),), vocabulary_size=32000)
ON_GPUS = replace(TAUGHT, gpus=2)


@pytest.fixture
def config() -> Config:
    config = Config()
    config.student.model, config.data.path, config.loss.kd_weight, config.loss.ce_weight = "s", "d", 0.0, 1.0
    config.train.steps, config.run.name = 1, "r"
    return config


@pytest.fixture
def taught(config: Config) -> Config:
    config.loss.kd_weight = 1.0
    config.teachers = [TeacherConfig(name="big", model="t")]
    return config


def compared(config: Config, facts: Facts, *, host: int = 2**60, gpus: tuple[int, ...] = ()) -> RunFindings:
    findings = RunFindings()
    compare_memory(config, facts, findings, host=host, gpus=gpus)
    return findings


def test_only_memory_that_cannot_suffice_is_refused(config: Config) -> None:
    (student,) = sizes(config, ALONE).memory
    assert 0.85 * (student.total - student.base) < student.least < 0.9 * student.total
    assert compared(config, ALONE, host=student.least).problems == []
    (line,) = compared(config, ALONE, host=student.least - 1).problems
    assert line.startswith("memory: the workers need about ")
    config.ray.address = "auto"
    assert compared(config, ALONE, host=1) == RunFindings(), "a cluster is not this machine"


def test_memory_near_the_limit_is_noted(config: Config) -> None:
    (student,) = sizes(config, ALONE).memory
    enough = int(student.total / NEAR) + 1
    assert compared(config, ALONE, host=enough) == RunFindings()
    for host in (enough - 2, student.least):
        found = compared(config, ALONE, host=host)
        assert found.problems == []
        (note,) = found.notes
        assert note.startswith("memory: the workers need about ")
        assert "; if that is not enough, lower train.micro_batch_size" in note


def test_a_worker_that_no_gpu_can_hold_is_refused(taught: Config) -> None:
    student, teacher = sizes(taught, ON_GPUS).memory
    assert teacher.total < student.least
    found = compared(taught, ON_GPUS, gpus=(2**30, student.least - 1))
    (line,) = found.problems
    assert line.startswith("memory: a process of student needs about ")
    assert "raise parallel.tp" in line
    assert compared(taught, ON_GPUS, gpus=()) == RunFindings(), "what is not known is not compared"
    assert compared(taught, replace(TAUGHT, gpus=0), gpus=(1,)) == RunFindings()
    taught.ray.address = "auto"
    assert compared(taught, ON_GPUS, gpus=(1, 1)) == RunFindings()


def test_workers_that_share_a_gpu_are_compared_together(taught: Config) -> None:
    student, teacher = sizes(taught, ON_GPUS).memory
    both = student.least + teacher.least
    (line,) = compared(taught, ON_GPUS, gpus=(both - 1,) * 2).problems
    assert line.startswith("memory: student and big on one GPU need about ")
    assert compared(taught, ON_GPUS, gpus=(both,) * 2).problems == []
    taught.ray.placement = "disaggregated"
    assert compared(taught, ON_GPUS, gpus=(both - 1,) * 2).problems == []


def test_a_gpu_that_is_nearly_full_is_noted(taught: Config) -> None:
    taught.ray.placement = "disaggregated"
    student, _ = sizes(taught, ON_GPUS).memory
    found = compared(taught, ON_GPUS, gpus=(int(student.total / NEAR) - 2, 2**50))
    assert found.problems == []
    (note,) = found.notes
    assert note.startswith("memory: a process of student needs about ")
    assert compared(taught, ON_GPUS, gpus=(int(student.total / NEAR) + 1, 2**50)) == RunFindings()


def test_parts_of_a_process_are_counted_once_however_many_there_are(taught: Config) -> None:
    taught.ray.placement = "disaggregated"
    taught.teachers[0].parallel.dp = 2
    _, teacher = sizes(taught, ON_GPUS).memory
    assert (teacher.count, teacher.least // 2 < teacher.total) == (2, True)
    lines = compared(taught, ON_GPUS, gpus=(teacher.least // 2,) * 3).problems
    assert not any("big" in line for line in lines), lines


def shm(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage._replace(free=free if str(path) == "/dev/shm" else 2**50)
    )


def test_targets_that_do_not_fit_into_shm_are_noted(taught: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = stored_targets(taught, TAUGHT) + 256 * 2**20
    shm(monkeypatch, int(needed / 0.8) + 2)
    assert compared(taught, TAUGHT) == RunFindings()
    shm(monkeypatch, int(needed / 0.8) - 2)
    found = compared(taught, TAUGHT)
    assert found.problems == []
    (note,) = found.notes
    assert note.startswith("/dev/shm: targets of ")
    assert "Ray may spill to disk" in note
    assert "--shm-size" in note
    taught.transport = "shared_memory"
    assert compared(taught, TAUGHT) == RunFindings(), "rings are memfds, which /dev/shm does not limit"


def test_a_container_with_64_mb_of_shm_is_refused(taught: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    shm(monkeypatch, 64 * 2**20)
    for taught.transport in ("object_store", "shared_memory"):
        found = compared(taught, TAUGHT)
        assert found.notes == []
        (line,) = found.problems
        assert line.startswith(
            "/dev/shm: Ray's object store needs 80 MiB of it; got 64 MiB free; free some, or enlarge"
        )
        assert "--shm-size" in line


def test_rings_without_memfd_need_room_in_shm(taught: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    taught.transport = "shared_memory"
    taught.train.global_batch_size, taught.data.max_length = 2048, 8192
    rings = all_rings(taught, TAUGHT)
    assert rings > 80 * 2**20
    monkeypatch.setattr(memory, "memfd_usable", lambda: False)
    shm(monkeypatch, rings)
    assert compared(taught, TAUGHT) == RunFindings()
    shm(monkeypatch, rings - 1)
    (line,) = compared(taught, TAUGHT).problems
    assert line.startswith("/dev/shm: the teachers' rings need ")
    assert "memfd" in line


NVIDIA_SMI = """#!/bin/sh
case "$*" in
    *--id=GPU-b*) echo 40960 ;;
    *--id=*) echo "No devices were found"; exit 6 ;;
    *) printf '81559\\n40960\\n' ;;
esac
"""


def test_sizes_of_gpus_are_those_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_bytes() == (81559 << 20, 40960 << 20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert gpu_bytes() == (40960 << 20,)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-of-nobody")
    assert gpu_bytes() == ()
    program.unlink()
    assert gpu_bytes() == ()


def test_printed_parts_of_the_memory_add_up() -> None:
    for parts in (
        {"a": 104858, "b": 52429, "c": 1},
        {"a": 2**30 // 3, "b": 2**30 // 3, "c": 2**30 // 3},
        {"a": 3 * 2**30},
    ):
        whole, listed = _sum(parts)
        numbers = [float(text.split()[1]) for text in listed.split(" + ")]
        assert round(sum(numbers), 2) == float(whole.split()[0]), (whole, listed)
