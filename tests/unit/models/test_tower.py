"""The text tower of a model that reads images too is loaded, checked and exported as a causal language model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from distill_rl.errors import ConfigError
from distill_rl.evals.backends.hf import _load_model
from distill_rl.models import forward
from distill_rl.models.classes import examine
from distill_rl.models.export import export_model
from distill_rl.models.files import (
    architecture_problems,
    read_config,
    read_headers,
    read_model_facts,
    read_tokenizer,
)
from distill_rl.models.stops import configured_stops
from distill_rl.parallel.mesh import World
from tests.helpers.load import load_model
from tests.helpers.towers import FAMILIES, write_tower_model

IDS = torch.arange(3, 43)[None]
CLASSES = {
    "gemma3": "Gemma3ForCausalLM",
    "llava": "LlamaForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "idefics3": "LlamaForCausalLM",
    "internvl": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen3_vl": "Qwen3ForCausalLM",
}


@torch.no_grad()
def whole_logits(folder: Path) -> Tensor:
    """Logits of `IDS`, a text without images, by the whole model."""
    return AutoModelForImageTextToText.from_pretrained(folder).eval()(input_ids=IDS, use_cache=False).logits


@torch.no_grad()
def tower_logits(folder: Path, world: World, role: str = "teacher") -> Tensor:
    model = load_model(folder, world, role=role, dtype="fp32")  # type: ignore[arg-type]
    return forward.logits(model, IDS, torch.arange(40)[None])


def rename(folder: Path, old: str, new: str) -> None:
    file = folder / "model.safetensors"
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(file).items()}
    assert tensors.keys() != load_file(file).keys()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tower_has_the_logits_of_the_whole_model(tmp_path: Path, world: World, family: str, tie: bool) -> None:
    source, out = write_tower_model(tmp_path / "source", family, tie=tie), tmp_path / "out"
    assert architecture_problems("student.model", source) == []
    assert examine("student", source, attention="sdpa", packing=True, weights=True) == []
    wanted = whole_logits(source)
    student = load_model(source, world, role="student", dtype="fp32")
    with torch.no_grad():
        assert torch.equal(forward.logits(student, IDS, torch.arange(40)[None]), wanted)
    assert torch.equal(tower_logits(source, world), wanted)

    export_model(student, source=source, tokenizer=read_tokenizer(source), out_dir=out)
    config = AutoConfig.from_pretrained(out)
    assert config.architectures == [CLASSES[family]]
    assert config.tie_word_embeddings == (tie and family != "llama4"), "Llama 4 follows its text config"
    assert not {"text_config", "vision_config"} & json.loads((out / "config.json").read_text()).keys()
    model, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == CLASSES[family]
    assert not any(loading.values())
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=IDS, use_cache=False).logits, wanted)
    assert torch.equal(tower_logits(out, world), wanted)


@pytest.mark.parametrize(
    ("old", "new"),
    [("language_model.model.", "model.language_model."), ("language_model.model.", "model.")],
)
def test_all_namings_of_the_tensors_are_read(tmp_path: Path, world: World, old: str, new: str) -> None:
    source = write_tower_model(tmp_path, "llava")
    wanted = tower_logits(source, world)
    rename(source, old, new)
    rename(source, "language_model.lm_head", "lm_head")
    assert torch.equal(tower_logits(source, world), wanted)


def test_only_the_tower_is_counted_and_read(tmp_path: Path) -> None:
    source = write_tower_model(tmp_path, "llava")
    tower = AutoModelForCausalLM.from_config(read_config(source))
    parameters = sum(parameter.numel() for parameter in tower.parameters())
    assert read_headers(source).keys() == dict(tower.named_parameters()).keys()
    facts = read_model_facts(source, read_config(source))
    assert facts.parameters == parameters
    assert facts.bytes_on_disk == 4 * parameters


def test_an_output_layer_in_the_files_is_not_tied_by_default(tmp_path: Path, world: World) -> None:
    source = write_tower_model(tmp_path, "mistral3")
    wanted = whole_logits(source)
    config = json.loads((source / "config.json").read_text())
    del config["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(config))
    assert torch.equal(tower_logits(source, world), wanted)


def test_ends_of_answers_come_from_the_text_if_the_whole_names_none(tmp_path: Path) -> None:
    source = write_tower_model(tmp_path, "gemma3")
    (source / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((source / "config.json").read_text())
    config.pop("eos_token_id", None)
    config["text_config"]["eos_token_id"] = [1, 7]
    (source / "config.json").write_text(json.dumps(config))
    assert configured_stops(source) == (1, 7)


def test_tensors_of_the_tower_are_compared_and_those_of_images_are_not(tmp_path: Path) -> None:
    source = write_tower_model(tmp_path, "gemma3")
    file = source / "model.safetensors"
    tensors = load_file(file)
    del tensors["language_model.model.norm.weight"], tensors["vision_tower.post_layernorm.weight"]
    tensors["language_model.model.extra.weight"] = torch.zeros(1)
    save_file(tensors, file, metadata={"format": "pt"})
    missing, unexpected = examine("student", source, attention="sdpa", packing=True, weights=True)
    assert "1 tensor of gemma3_text must be in the files; got model.norm.weight" in missing
    assert "1 tensor in the files, and gemma3_text has none such; got model.extra.weight" in unexpected


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_loads_the_tower(tmp_path: Path, family: str) -> None:
    source = write_tower_model(tmp_path, family)
    model = _load_model(source, torch.float32).eval()
    assert type(model).__name__ == CLASSES[family]
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, whole_logits(source))


@pytest.mark.parametrize("family", ["paligemma", "mllama", "qwen3_vl_moe", "florence2"])
def test_what_has_no_tower_of_its_own_is_refused(tmp_path: Path, family: str) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    (line,) = architecture_problems("student.model", tmp_path)
    assert line.startswith(f"student.model: must be a causal language model; {family} reads images or sound")
    with pytest.raises(ConfigError, match="no causal language model of its text"):
        read_config(tmp_path)
