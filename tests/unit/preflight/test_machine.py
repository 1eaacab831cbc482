"""Settings that need a package of an extra are refused if it is not installed."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from distill_rl.config.schema import Config, ParallelConfig, TeacherConfig
from distill_rl.config.schema.backends import VllmConfig
from distill_rl.models import attention
from distill_rl.preflight.machine import extra_problems, gpu_problems
from distill_rl.system.environment import install_extra


def config_with_all_extras() -> Config:
    config = Config()
    config.student.kernels, config.loss.backend = "liger", "triton"
    config.observe.wandb = config.observe.mlflow = config.ray.dashboard = True
    config.evaluate.suites, config.evaluate.backend = ["mmlu"], "vllm"
    config.teachers = [TeacherConfig(), TeacherConfig(backend="vllm"), TeacherConfig(quantization="int4")]
    return config


def test_each_setting_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert list(extra_problems(config_with_all_extras())) == [
        "student.kernels: needs liger_kernel, which is not installed; got liger; " + install_extra("liger"),
        "loss.backend: needs triton, which is not installed; got triton; " + install_extra("triton"),
        "observe.wandb: needs wandb, which is not installed; got true; " + install_extra("wandb"),
        "observe.mlflow: needs mlflow, which is not installed; got true; " + install_extra("mlflow"),
        "ray.dashboard: needs aiohttp_cors, which is not installed; got true; " + install_extra("dashboard"),
        "evaluate.backend: needs vllm, which is not installed; got vllm; " + install_extra("vllm"),
        "teachers.1.backend: needs vllm, which is not installed; got vllm; " + install_extra("vllm"),
        "teachers.2.quantization: needs torchao, which is not installed; got int4; " + install_extra("quantization"),
    ]


def test_default_settings_need_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert list(extra_problems(Config())) == []
    config = Config()
    config.ray.dashboard, config.ray.address = True, "auto"
    assert list(extra_problems(config)) == [], "a joined cluster has its own dashboard"


def test_namespace_package_does_not_count_as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: ModuleSpec(name, None, origin=f"/site/{name}/__init__.py"))
    assert list(extra_problems(config_with_all_extras())) == []
    monkeypatch.undo()
    monkeypatch.setattr(attention, "find_spec", lambda name: ModuleSpec(name, None))
    assert len(list(extra_problems(config_with_all_extras()))) == 8


def test_folder_of_the_same_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not attention.installed("mlflow_of_nobody")
    assert attention.installed("json")


def test_an_engine_of_several_gpus_needs_them_beside_those_of_the_student() -> None:
    config = Config()
    config.teachers = [TeacherConfig(backend="vllm", parallel=ParallelConfig(tp=2))]
    assert list(gpu_problems(config, 3)) == []
    (line,) = gpu_problems(config, 2)
    assert line.startswith("teachers: 3 GPUs are asked, 2 are visible: an engine of vLLM with parallel.tp above 1")
    assert list(gpu_problems(config, 0)) == [], "on CPUs they are processes"


def test_engines_must_leave_the_student_some_of_a_gpu_that_they_share() -> None:
    config = Config()
    config.teachers = [TeacherConfig(backend="vllm", vllm=VllmConfig(0.5)), TeacherConfig(name="b", backend="vllm")]
    assert list(gpu_problems(config, 1)) == []
    config.teachers[0].vllm.gpu_share = 0.6
    (line,) = gpu_problems(config, 1)
    assert line.startswith("teachers[].vllm.gpu_share: engines of vLLM that share GPUs")
    config.ray.placement = "disaggregated"
    assert list(gpu_problems(config, 3)) == []
