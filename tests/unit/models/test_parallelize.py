from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig

from distill_rl.models.families import decoder_layers, family_of
from distill_rl.models.load import skeleton
from distill_rl.models.parallelize import parallelize
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
