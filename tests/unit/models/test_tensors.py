"""The quick look at a model's tensors agrees with the model class."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from distill_rl.models.classes import examine
from distill_rl.models.files import plainly_whole, read_headers
from tests.helpers.models import FAMILIES, write_tiny_model

KNOWN = ("llama", "mistral", "qwen2", "qwen3")


def shapes_of(folder):
    return {name: tuple(entry["shape"]) for name, entry in read_headers(folder).items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [False, True])
def test_whole_models_are_whole_to_both(tmp_path, family, tie):
    folder = write_tiny_model(tmp_path / family, family, tie=tie)
    assert examine("student", folder, attention="sdpa", packing=True, weights=True) == []
    assert plainly_whole(AutoConfig.from_pretrained(folder), shapes_of(folder)) == (family in KNOWN)


@pytest.mark.parametrize("family", KNOWN)
def test_the_quick_look_misses_no_tensor_and_no_shape(tmp_path, family):
    folder = write_tiny_model(tmp_path / family, family)
    config, shapes = AutoConfig.from_pretrained(folder), shapes_of(folder)
    for name, shape in shapes.items():
        assert not plainly_whole(config, {other: size for other, size in shapes.items() if other != name}), name
        assert not plainly_whole(config, shapes | {name: (*shape[:-1], shape[-1] + 1)}), name
    assert not plainly_whole(config, shapes | {"model.layers.0.mlp.other": (4,)})


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"hidden_act": "gelu_fast"}, {"num_hidden_layers": 3}])
def test_what_is_unusual_is_left_to_the_class(tmp_path, change):
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    assert not plainly_whole(AutoConfig.from_pretrained(folder), shapes_of(folder))


def test_every_difference_has_a_line_of_its_own(tmp_path):
    folder = write_tiny_model(tmp_path / "model", layers=2)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1, "intermediate_size": 65}
    (folder / "config.json").write_text(json.dumps(config))
    left_over, misfits = examine("student", folder, attention="sdpa", packing=True, weights=True)
    assert left_over.startswith("student.model: 9 tensors in the files, and llama has none such; got model.layers.1.")
    assert "3 tensors must have the shape that config.json gives" in misfits
    assert "model.layers.0.mlp.down_proj.weight is [32, 64], not [32, 65]" in misfits
