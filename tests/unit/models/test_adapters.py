"""Adapters in a student on one rank: PEFT reads what is exported, and computes what the student does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from distill_rl.config.schema import LoraConfig
from distill_rl.models import adapters, forward
from distill_rl.models.export import export_model
from distill_rl.models.files import read_tokenizer
from distill_rl.models.parallelize import reshard
from distill_rl.parallel.mesh import World
from tests.helpers.load import load_model
from tests.helpers.models import write_tiny_model

IDS, POSITIONS = torch.arange(3, 15)[None], torch.arange(12)[None]
STUDENTS = {
    "llama": {"family": "llama", "dtype": "bfloat16"},
    "gpt2-tied-and-whole": {"family": "gpt2", "tie": True, "whole": ["wte"]},  # weights [in, out]
    "phi3": {"family": "phi3", "whole": ["norm"]},
    "mixtral": {"family": "mixtral", "whole": ["lm_head"]},  # experts are fused on load
}


def student_of(folder: Path, world: World, **settings):
    return load_model(folder, world, role="student", dtype="fp32", lora=LoraConfig(rank=4, alpha=6.0, **settings))


def disturb(model: torch.nn.Module) -> None:
    """Makes every trained parameter something else, as training would."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))


def plain_logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning", "ignore:.*no longer tied.*:UserWarning")
@pytest.mark.parametrize("name", STUDENTS)
def test_student_is_peft_s_model_and_its_export_is_peft_s_merge(tmp_path: Path, world: World, name: str) -> None:
    kind = dict(STUDENTS[name])
    whole = kind.pop("whole", [])
    source, out = write_tiny_model(tmp_path / "source", **kind), tmp_path / "out"
    student = student_of(source, world, modules_to_save=whole).eval()
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(forward.logits(student, IDS, POSITIONS), plain_logits(base)), "adapters begin at zero"
    reshard(student)
    disturb(student)
    with torch.no_grad():
        trained = forward.logits(student, IDS, POSITIONS)
    export_model(student, source=source, tokenizer=read_tokenizer(source), out_dir=out)

    peft = PeftModel.from_pretrained(base, out / "adapter")
    torch.testing.assert_close(plain_logits(peft), trained, rtol=1e-5, atol=1e-5)
    stored = AutoModelForCausalLM.from_pretrained(source)  # in the files' dtype, to which an export rounds
    PeftModel.from_pretrained(stored, out / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    merged, ours, before = (load_file(f / "model.safetensors") for f in (tmp_path / "merged", out, source))
    assert ours.keys() == before.keys()
    assert all(torch.equal(tensor, merged[key]) for key, tensor in ours.items())
    changed = [key for key in ours if not torch.equal(ours[key], before[key])]
    assert changed, "what was trained"
    assert not any("experts" in key or "ln_1" in key or "input_layernorm" in key for key in changed), "nothing else"

    settings = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 6)
    assert settings["base_model_name_or_path"] == str(source.resolve())


def test_base_is_frozen_in_the_compute_dtype_and_held_once(tmp_path: Path, world: World) -> None:
    source = write_tiny_model(tmp_path, "llama")
    lora = LoraConfig(modules_to_save=["lm_head"])
    student = load_model(source, world, role="student", dtype="bf16", lora=lora)
    trained = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"lm_head.weight"}
    dtypes = {name: parameter.dtype for name, parameter in student.named_parameters()}
    assert {dtypes[name] for name in trained} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in trained} == {torch.bfloat16}
    places = {name: parameter.data_ptr() for name, parameter in student.named_parameters() if name not in trained}
    forward.logits(student, IDS, POSITIONS).float().sum().backward()  # gathers what FSDP shards
    now = dict(student.named_parameters())
    assert all(now[name].data_ptr() == place for name, place in places.items()), "a second copy of the weights"
    assert all(now[name].grad is None for name in places)


def test_initial_adapters_follow_from_the_seed_and_the_name(tmp_path: Path, world: World) -> None:
    source = write_tiny_model(tmp_path, "llama")
    values = []
    for seed in (0, 0, 1):
        student = student_of(source, world)
        adapters.initialise(student, seed)
        values.append(
            {name: layer.lora_A["default"].weight for name, layer in adapters.adapted_layers(student).items()}
        )
    first, again, other = values
    assert all(torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]) for name in first)
    bound = 32**-0.5  # of the hidden size, as nn.Linear begins
    (a, b), *_ = [
        (first[f"model.layers.{i}.self_attn.q_proj"], first[f"model.layers.{i}.self_attn.k_proj"]) for i in (0, 1)
    ]
    assert not torch.equal(a, b)
    assert 0.8 * bound < a.abs().max() < bound


def test_recomputed_layers_give_the_same_gradient(tmp_path: Path, world: World) -> None:
    source, gradients = write_tiny_model(tmp_path, "llama"), []
    for recompute in (False, True):
        student = load_model(
            source, world, role="student", dtype="fp32", lora=LoraConfig(rank=4), activation_checkpointing=recompute
        )
        disturb(student)
        forward.logits(student, IDS, POSITIONS).square().sum().backward()
        gradients.append({n: p.grad for n, p in student.named_parameters() if p.grad is not None})
    plain, recomputed = gradients
    assert len(plain) == 2 * 14
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in plain.items())
