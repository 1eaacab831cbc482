from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from distill_rl.errors import ConfigError
from distill_rl.models import forward, varlen
from distill_rl.models.attention import VARLEN
from distill_rl.parallel.mesh import World
from tests.helpers.load import load_model
from tests.helpers.zoo import write_family, write_model

FIRST, SECOND = [7, 3, 11, 5, 9], [8, 2, 6, 4, 12, 10, 3]


def packed() -> tuple[Tensor, Tensor]:
    """Two documents in one row, and the same two in reverse order."""
    ids = torch.tensor([FIRST + SECOND, SECOND + FIRST])
    positions = torch.tensor([[*range(5), *range(7)], [*range(7), *range(5)]])
    return ids, positions


def plain_model(path: Path, **settings: Any) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, **settings).eval()


def one_by_one(model: nn.Module) -> Tensor:
    """Logits of `packed`, with each document in a forward pass of its own."""
    first, second = (model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in (FIRST, SECOND))
    return torch.stack([torch.cat([first, second]), torch.cat([second, first])])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    ids, positions = packed()
    forward.logits(model, ids, positions).float().log_softmax(-1).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "eager", VARLEN["torch"]])
@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "mistral", "mistral-window", "phi3", "gpt2", "gemma2", "granite", "cohere"]
)
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(tmp_path: Path, world: World, name: str, attention: str) -> None:
    path = write_model(tmp_path, name)
    if (name, attention) == ("gemma2", "sdpa"):
        with pytest.raises(ConfigError, match=r"student\.attention: sdpa has no soft cap .*; got sdpa; set it to auto"):
            load_model(path, world, role="student", dtype="fp32", attention=attention)
        return
    wanted = one_by_one(plain_model(path, attn_implementation="sdpa" if attention == "sdpa" else "eager"))
    student = load_model(path, world, role="student", dtype="fp32", attention=attention)
    teacher = load_model(path, world, role="teacher", dtype="fp32", attention=attention)
    found = {
        "student": forward.logits(student, *packed()),
        "teacher": forward.logits(teacher, *packed()),
        "teacher by chunks": forward.head(teacher, forward.body(teacher, *packed())),
    }
    for logits in found.values():
        torch.testing.assert_close(logits, wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", ["llama-rope-scaled", "llama-biased", "qwen3-wide-heads", "gemma3", "olmo2"])
@torch.no_grad()
def test_loaded_model_has_the_logits_of_transformers(tmp_path: Path, world: World, name: str) -> None:
    path = write_model(tmp_path, name)
    ids = torch.arange(3, 43)[None]
    wanted = plain_model(path)(input_ids=ids, use_cache=False).logits
    for role in ("student", "teacher"):
        model = load_model(path, world, role=role, dtype="fp32")
        assert torch.equal(forward.logits(model, ids, torch.arange(40)[None]), wanted)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_student_keeps_fp32_weights_and_computes_in_bf16(tmp_path: Path, world: World, stored: str) -> None:
    path = write_model(tmp_path, "llama", dtype=stored)
    model = load_model(path, world, role="student", dtype="bf16")
    assert model.training
    for name, parameter in model.named_parameters():
        assert not isinstance(parameter, DTensor), name
        assert (parameter.dtype, parameter.requires_grad) == (torch.float32, True), name
    ids, positions = packed()
    logits = forward.logits(model, ids, positions)
    assert logits.dtype == torch.bfloat16
    wanted = plain_model(path, dtype=torch.bfloat16)(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(logits, wanted, rtol=0, atol=0.02)


@pytest.mark.parametrize(("dtype", "wanted"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_teacher_is_frozen_with_weights_in_its_dtype(
    tmp_path: Path, world: World, dtype: str, wanted: torch.dtype
) -> None:
    model = load_model(write_model(tmp_path, "llama"), world, role="teacher", dtype=dtype)
    assert not model.training
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(wanted, False)}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_recomputed_activations_leave_the_gradient_unchanged(tmp_path: Path, world: World) -> None:
    path = write_model(tmp_path, "qwen3", tie=True)
    kept = gradients(load_model(path, world, role="student", dtype="fp32"))
    model = load_model(path, world, role="student", dtype="fp32", activation_checkpointing=True)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    recomputed = gradients(model)
    assert len(calls) == 2
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def test_tied_embeddings_are_one_parameter_with_both_gradients(tmp_path: Path, world: World) -> None:
    path = write_model(tmp_path, "llama", tie=True)
    model = load_model(path, world, role="student", dtype="fp32")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    plain = plain_model(path)
    ids, positions = packed()
    plain(input_ids=ids, position_ids=positions, use_cache=False).logits.log_softmax(-1).square().sum().backward()
    torch.testing.assert_close(gradients(model)["model.embed_tokens.weight"], plain.lm_head.weight.grad)


def test_leaking_family_is_refused_only_with_packing(tmp_path: Path, world: World) -> None:
    path = write_model(tmp_path, "opt")
    with pytest.raises(ConfigError, match=r"opt.*must not see each other.*data\.packing: false"):
        load_model(path, world, role="student", dtype="fp32")
    load_model(path, world, role="student", dtype="fp32", packing=False)


def test_teacher_with_unknown_head_is_refused(tmp_path: Path, world: World) -> None:
    path = write_model(tmp_path, "recurrent-gemma")
    with pytest.raises(ConfigError, match="recurrent_gemma: logits must follow from hidden states"):
        load_model(path, world, role="teacher", dtype="fp32", packing=False)
    load_model(path, world, role="student", dtype="fp32", packing=False)


def test_unrecomputable_buffer_is_named(tmp_path: Path, world: World) -> None:
    with pytest.raises(ConfigError, match=r"falcon_h1: every buffer must be recomputable; got .*mup_vector"):
        load_model(write_model(tmp_path, "falcon-h1"), world, role="teacher", dtype="fp32", packing=False)


def test_missing_attention_package_is_named(tmp_path: Path, world: World) -> None:
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash_attn is installed")
    with pytest.raises(ConfigError, match=r"llama.*flash_attention_2"):
        load_model(write_model(tmp_path, "llama"), world, role="student", dtype="fp32", attention="flash_attention_2")


def test_a_missing_expert_is_named(tmp_path: Path, world: World) -> None:
    file = write_family(tmp_path, "mixtral") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"mlp\.experts\.down_proj, made of .*: shape must be \[4, 32, 64\].*\[3, 32, 64\]"
    ):
        load_model(tmp_path, world, role="student", dtype="fp32")


@torch.no_grad()
def test_flash_attention_receives_document_boundaries(tmp_path: Path, world: World) -> None:
    """Through its own arguments. Here a CPU implementation is registered under its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    boundaries = []

    def attend(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        boundaries.append((kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"].tolist(), kwargs["max_length_k"]))
        return varlen.attend(module, query, *args, package="torch", **kwargs)

    AttentionInterface.register("flash_on_cpu", attend)
    AttentionMaskInterface.register("flash_on_cpu", flash_attention_mask)
    path = write_model(tmp_path, "llama")
    wanted = one_by_one(plain_model(path))
    teacher = load_model(path, world, role="teacher", dtype="fp32")
    teacher.config._attn_implementation = "flash_on_cpu"
    found = forward.logits(teacher, *packed())
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-6)
    torch.testing.assert_close(forward.head(teacher, forward.body(teacher, *packed())), wanted, rtol=0, atol=5e-6)
    assert boundaries == [([0, 5, 12, 19, 24], [0, 5, 12, 19, 24], 128)] * 4


def test_choice_is_logged_once(tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path, "llama")
    with caplog.at_level("INFO", logger="distill_rl.models.load"):
        load_model(path, world, role="student", dtype="fp32")
    lines = [line for line in caplog.messages if "attention" in line]
    assert lines == [f"{path}: attention of the student is sdpa (sdpa)"]


def test_varlen_is_refused_on_a_cpu(tmp_path: Path, world: World) -> None:
    with pytest.raises(ConfigError, match=r"student\.attention: .* on GPUs only; got varlen; set it to auto"):
        load_model(write_model(tmp_path, "llama"), world, role="student", dtype="bf16", attention="varlen")
