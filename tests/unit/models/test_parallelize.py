from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, LlamaConfig

from distill_rl.models.families import decoder_layers, family_of
from distill_rl.models.forward import logits
from distill_rl.models.parallelize import parallelize
from distill_rl.models.weights import skeleton
from distill_rl.parallel.mesh import close_world, open_world

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}


@pytest.mark.parametrize(("tie", "units"), [(False, 5), (True, 3)])
def test_layers_and_untied_embeddings_are_fsdp_units(tie: bool, units: int) -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=tie)
    model = skeleton(config, dtype=torch.float32, attention="sdpa")
    world = open_world(rank=0, dp=1, tp=1)
    try:
        parallelize(model, world.mesh, family=family_of(config), fsdp=True, compute_dtype=torch.bfloat16)
        wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
        assert len(wrapped) == units
        assert {*map(id, decoder_layers(model)), id(model)} <= {id(module) for module in wrapped}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    finally:
        close_world(world)


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
            parallelize(
                model,
                world.mesh,
                family=family_of(config),
                fsdp=False,
                activation_checkpointing=True,
                activation_offload=offload,
                compute_dtype=torch.float32,
            )
            ids = torch.arange(14).view(2, 7)
            logits(model, ids, torch.arange(7).repeat(2, 1)).square().sum().backward()
        finally:
            close_world(world)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        # torch 2.11 also saves empty tensors, which hold nothing.
        assert [shape for shape in moved if 0 not in shape] == [(2, 7, 32)] * (2 * offload)
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
