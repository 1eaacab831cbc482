"""Checks of the backend `vllm` before an engine starts; tests/vllm runs the engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distill_rl.errors import ConfigError
from distill_rl.evals.backends.vllm import VllmBackend, _decode_alike, _shape_of
from distill_rl.models.files import read_tokenizer
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
