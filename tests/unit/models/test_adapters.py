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
from distill_rl.errors import ConfigError
from distill_rl.models import adapters, forward
from distill_rl.models.classes import survey
from distill_rl.models.export import export_model
from distill_rl.models.files import read_tokenizer
from distill_rl.models.parallelize import reshard
from distill_rl.parallel.mesh import World
from distill_rl.student.engine import StudentEngine
from tests.helpers.load import load_model
from tests.helpers.lora import VOCABULARY, lora_config, run_steps
from tests.helpers.models import write_tiny_model
from tests.helpers.zoo import LEAKING, MIXTURES, write_family

IDS, POSITIONS = torch.arange(3, 15)[None], torch.arange(12)[None]
STUDENTS = {
    "llama": {"family": "llama", "dtype": "bfloat16"},
    "gpt2-tied-and-whole": {"family": "gpt2", "tie": True, "whole": ["wte"]},  # weights [in, out]
    "phi3": {"family": "phi3", "whole": ["norm"]},
    "mixtral": {"family": "mixtral", "whole": ["lm_head"]},  # experts are fused on load
}
LIKE_EXPERTS = ("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe")
"""Mixtures whose shared experts and dense layers have the names that the experts had before they were fused."""
STUDENTS |= {name: {"zoo": name, "whole": ["norm"]} for name in LIKE_EXPERTS}


def student_of(folder: Path, world: World, **settings):
    return load_model(folder, world, role="student", dtype="fp32", lora=LoraConfig(rank=4, alpha=6.0, **settings))


def write_student(path: Path, zoo: str = "", **kind) -> Path:
    return write_family(path, zoo, vocab_size=VOCABULARY) if zoo else write_tiny_model(path, **kind)


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
    source, out = write_student(tmp_path / "source", **kind), tmp_path / "out"
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
    assert not any(".experts." in key or "ln_1" in key or "input_layernorm" in key for key in changed), "nothing else"

    settings = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 6)
    assert settings["base_model_name_or_path"] == str(source.resolve())
    assert bool(settings["target_parameters"]) == (name in LIKE_EXPERTS), "else PEFT finds layers by their names"


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_has_the_adapters_that_check_counts_and_trains_no_more(
    tmp_path: Path, world: World, family: str
) -> None:
    config = lora_config(write_family(tmp_path, family, vocab_size=VOCABULARY), [])
    config.data.packing = family not in LEAKING
    engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
    layers = adapters.adapted_layers(engine.model)
    counted = survey(tmp_path, config.student)
    assert len(layers) == counted.layers
    assert sum(parameter.numel() for parameter in engine.parameters) == counted.trained
    names = {end.rpartition(".")[2] for end in layers}
    assert {"gate_proj", "up_proj", "down_proj"} <= names or family not in LIKE_EXPERTS
    before = {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}
    assert any(run_steps(engine, 0, 2))
    changed = {name for name, now in engine.model.named_parameters() if not torch.equal(now, before[name])}
    assert changed == {f"{name}.{part}.default.weight" for name in layers for part in adapters.WEIGHTS}


@pytest.mark.parametrize("targets", [["shared_experts.down_proj"], ["up_proj", "q_b_proj"]])
def test_peft_reads_some_targets_that_are_named_like_experts_and_dropout(
    tmp_path: Path, world: World, targets: list[str]
) -> None:
    source, out = write_family(tmp_path / "source", "deepseek_v3"), tmp_path / "out"
    student = student_of(source, world, targets=targets, dropout=0.5).eval()
    disturb(student)
    with torch.no_grad():
        trained = forward.logits(student, IDS, POSITIONS)
    export_model(student, source=source, tokenizer=read_tokenizer(source), out_dir=out)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), out / "adapter")
    torch.testing.assert_close(plain_logits(peft), trained, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_a_peft_that_adapts_other_layers_is_refused_in_one_line(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_family(tmp_path, "dots1")
    monkeypatch.setattr(
        adapters, "_misread", lambda *_: frozenset()
    )  # PEFT's rule is not what this module takes it for
    with pytest.raises(ConfigError, match=r"^student.lora: PEFT [\d.]+ adapts other layers of dots1 .*got model\."):
        student_of(source, world)


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
