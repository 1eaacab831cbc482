"""Checks of the backend `vllm` before an engine starts; tests/vllm runs the engine."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from distill_rl.errors import ConfigError
from distill_rl.evals.backends.base import Settings
from distill_rl.evals.backends.vllm import (
    VllmBackend,
    _decode_alike,
    _require_device,
    _shape_of,
    _stored_dtype,
    engine_arguments,
    startup_lock,
)
from distill_rl.models.hub import read_tokenizer
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer


def test_without_vllm_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        ConfigError, match=r"backend vllm: needs vllm, which is not installed.* pip install -e .*\[vllm\]"
    ):
        VllmBackend(write_tiny_model(tmp_path))


def test_folder_without_safetensors_is_refused_before_vllm(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="weights must be safetensors"):
        VllmBackend(folder)


@pytest.mark.parametrize(
    ("device", "cpu"), [("", True), ("", False), ("cpu", True), ("cuda", False), ("cuda:0", False)]
)
def test_devices_of_the_build_are_taken(device: str, cpu: bool) -> None:
    _require_device(device, cpu)


@pytest.mark.parametrize(
    ("device", "cpu", "rule"),
    [("cpu", False, "a build for GPUs"), ("cuda", True, "a build for CPUs"), ("cuda:1", False, "CUDA_VISIBLE_DEVICES")],
)
def test_other_devices_are_refused_with_remedy(device: str, cpu: bool, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        _require_device(device, cpu)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_of_the_files_is_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: "float32"}))
    assert _stored_dtype(tmp_path) == "float32"
    (tmp_path / "config.json").write_text("{}")
    assert _stored_dtype(tmp_path) == "auto"


def test_models_of_one_shape_are_told_from_others(tmp_path: Path) -> None:
    first, second = (write_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert _shape_of(first)[1] == _shape_of(second)[1]
    assert _shape_of(first)[1]["model.norm.weight"] == (32,)
    assert _shape_of(write_tiny_model(tmp_path / "more", layers=3))[1] != _shape_of(first)[1]


def test_engine_is_kept_only_for_a_model_of_its_shape(tmp_path: Path) -> None:
    first, second = (write_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert _shape_of(first) == _shape_of(second)
    assert _shape_of(first) != _shape_of(write_tiny_model(tmp_path / "more", layers=3))
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert _shape_of(first) != _shape_of(second), "the same tensors, used differently"


def test_engine_is_kept_only_if_tokenizers_decode_alike(tmp_path: Path) -> None:
    first, second, third = (
        write_tiny_model(tmp_path / str(n), tokenizer=tiny_tokenizer(seed=seed)) for n, seed in enumerate((0, 0, 1))
    )
    used = read_tokenizer(first)
    used(["ka", "lo mi ter"], padding=True, truncation=True, max_length=2)
    assert _decode_alike(used, read_tokenizer(second))
    assert not _decode_alike(used, read_tokenizer(third))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_engines_with_equal_shares_leave_a_tenth_of_the_gpu(tmp_path: Path, count: int) -> None:
    arguments = engine_arguments(write_tiny_model(tmp_path), Settings(gpu_share=1 / count), cpu=False)
    assert count * arguments["gpu_memory_utilization"] == pytest.approx(0.9)


@pytest.mark.parametrize(("gpus", "executor"), [(1, "uni"), (2, "mp")])
def test_vllm_executor_backend_is_always_set(tmp_path: Path, gpus: int, executor: str) -> None:
    arguments = engine_arguments(write_tiny_model(tmp_path), Settings(tensor_parallel=gpus), cpu=False)
    assert (arguments["tensor_parallel_size"], arguments["distributed_executor_backend"]) == (gpus, executor)


def test_engines_on_the_same_gpus_start_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")

    def is_free() -> bool:
        (path,) = tmp_path.glob("*-1-2.lock")
        file = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(file)
        return True

    with startup_lock():
        assert not is_free()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        with startup_lock():
            assert not is_free()
        assert not is_free(), "releasing the other GPU's lock must not release this one"
    assert is_free()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    with pytest.raises(RuntimeError), startup_lock():
        raise RuntimeError
    assert is_free()
