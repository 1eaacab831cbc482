"""What the backend `vllm` refuses before any engine; tests/vllm runs the engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distill_rl.errors import ConfigError
from distill_rl.evals.vllm import VLLM, _require_device, _stored_dtype, _tensors
from tests.helpers.models import write_tiny_model


def test_without_vllm_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"backend vllm: needs vllm, which is not installed.*distill_rl\[vllm\]"):
        VLLM(write_tiny_model(tmp_path))


def test_a_folder_without_safetensors_is_refused_before_vllm_sees_it(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="weights must be safetensors"):
        VLLM(folder)


@pytest.mark.parametrize(("asked", "cpu"), [("", True), ("", False), ("cpu", True), ("cuda", False), ("cuda:0", False)])
def test_devices_of_the_build_are_taken(asked: str, cpu: bool) -> None:
    _require_device(asked, cpu)


@pytest.mark.parametrize(
    ("asked", "cpu", "rule"),
    [("cpu", False, "a build for GPUs"), ("cuda", True, "a build for CPUs"), ("cuda:1", False, "CUDA_VISIBLE_DEVICES")],
)
def test_other_devices_are_refused_with_what_to_do(asked: str, cpu: bool, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        _require_device(asked, cpu)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_of_the_files_is_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: "float32"}))
    assert _stored_dtype(tmp_path) == "float32"
    (tmp_path / "config.json").write_text("{}")
    assert _stored_dtype(tmp_path) == "auto"


def test_models_of_one_shape_are_told_from_others(tmp_path: Path) -> None:
    first, second = (write_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert _tensors(first) == _tensors(second)
    assert _tensors(first)["model.norm.weight"] == (32,)
    assert _tensors(write_tiny_model(tmp_path / "more", layers=3)) != _tensors(first)
