"""How vLLM's engine is started, without starting one; tests/vllm runs engines."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from pathlib import Path

import pytest

from distill_rl.errors import ConfigError
from distill_rl.models.vllm import EngineSettings, engine_arguments, require_device, startup_lock, stored_dtype
from tests.helpers.models import write_tiny_model


@pytest.mark.parametrize(
    ("device", "cpu"), [("", True), ("", False), ("cpu", True), ("cuda", False), ("cuda:0", False)]
)
def test_devices_of_the_build_are_taken(device: str, cpu: bool) -> None:
    require_device(device, cpu)


@pytest.mark.parametrize(
    ("device", "cpu", "rule"),
    [("cpu", False, "a build for GPUs"), ("cuda", True, "a build for CPUs"), ("cuda:1", False, "CUDA_VISIBLE_DEVICES")],
)
def test_other_devices_are_refused_with_remedy(device: str, cpu: bool, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        require_device(device, cpu)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_of_the_files_is_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: "float32"}))
    assert stored_dtype(tmp_path) == "float32"
    (tmp_path / "config.json").write_text("{}")
    assert stored_dtype(tmp_path) == "auto"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_engines_with_equal_shares_leave_a_tenth_of_the_gpu(tmp_path: Path, count: int) -> None:
    arguments = engine_arguments(write_tiny_model(tmp_path), EngineSettings(gpu_share=1 / count), cpu=False)
    assert count * arguments["gpu_memory_utilization"] == pytest.approx(0.9)


@pytest.mark.parametrize(("gpus", "executor"), [(1, "uni"), (2, "mp")])
def test_vllm_executor_backend_is_always_set(tmp_path: Path, gpus: int, executor: str) -> None:
    arguments = engine_arguments(write_tiny_model(tmp_path), EngineSettings(tensor_parallel=gpus), cpu=False)
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
