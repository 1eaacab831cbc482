from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, LlamaConfig

from distill_rl.config.schema import StudentConfig
from distill_rl.models.families import decoder_layers
from distill_rl.models.forward import logits
from distill_rl.models.parallelize import ComputeCopies, GradientReduction, parallelize, reshard, shard
from distill_rl.models.weights import skeleton
from distill_rl.parallel.mesh import World, close_world, data_mesh, open_world
from distill_rl.parallel.shards import local_part
from tests.helpers.zoo import write_model

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}


@pytest.mark.parametrize(("tie", "units"), [(False, 5), (True, 3)])
def test_layers_and_untied_embeddings_are_fsdp_units(tie: bool, units: int) -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=tie)
    model = skeleton(config, dtype=torch.float32, attention="sdpa")
    world = open_world(rank=0, dp=1, tp=1)
    try:
        shard(model, data_mesh(world.mesh), torch.bfloat16)
        wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
        assert len(wrapped) == units
        assert {*map(id, decoder_layers(model)), id(model)} <= {id(module) for module in wrapped}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    finally:
        close_world(world)


@pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "gemma2", "opt", "mixtral"])
def test_one_rank_has_the_gradients_of_fsdp_bit_for_bit(
    tmp_path: Path, world: World, family: str, dtype: torch.dtype
) -> None:
    """Summed over three micro-batches, with an evaluation between them, and the parameters are what is left in the end."""
    name, _, tied = family.partition("-")
    source = write_model(tmp_path, name, **({"tie": True} if tied else {}))
    gradients = []
    for fsdp in (False, True):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
        parameters = dict(model.named_parameters())
        if fsdp:
            shard(model, data_mesh(world.mesh), dtype)
        else:
            ComputeCopies.attach(model, dtype)
        reduction = GradientReduction(model, data_mesh(world.mesh), once=True)
        for i in range(3):
            reduction.before_micro_batch(last=i == 2)
            ids, positions = torch.arange(3 + i, 17 + i).view(2, 7), torch.arange(7).repeat(2, 1)
            found = logits(model, ids, positions)
            assert found.dtype == dtype
            found.float().log_softmax(-1)[..., 5].sum().backward()
            if i == 0:
                with torch.no_grad():
                    logits(model, ids, positions)
                reshard(model)
        reshard(model)
        if not fsdp:
            assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        gradients.append({name: local_part(parameter.grad) for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, gradients[1][name]), name


def test_offload_moves_the_input_of_every_layer_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []

    class Recording(torch.autograd.graph.save_on_cpu):
        def __init__(self, *arguments: Any, **settings: Any):
            super().__init__(*arguments, **settings)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (moved.append(tuple(tensor.shape)), pack(tensor))[1]

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Recording)
    config = LlamaConfig(**SIZES)
    gradients = []
    for offload in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
        world = open_world(rank=0, dp=1, tp=1)
        try:
            settings = StudentConfig(model="m", dtype="fp32", activation_checkpointing=True)
            parallelize(model, world.mesh, settings, offload=offload)
            ids = torch.arange(14).view(2, 7)
            logits(model, ids, torch.arange(7).repeat(2, 1)).square().sum().backward()
        finally:
            close_world(world)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        # torch 2.11 also saves empty tensors, which hold nothing.
        assert [shape for shape in moved if 0 not in shape] == [(2, 7, 32)] * (2 * offload)
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
