"""Teachers with quantised weights that are split over tensor-parallel ranks: each rank quantises its own shard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from distill_rl.models import forward
from distill_rl.models.quantization import QuantizedLinear, QuantizedWeight
from distill_rl.parallel.mesh import close_world, open_world
from tests.helpers import ranks
from tests.helpers.load import load_model
from tests.helpers.ranks import run_ranks
from tests.helpers.zoo import write_model

pytestmark = pytest.mark.ranks
pytest.importorskip("torchao", reason="torchao is not installed here: bash launch/test.sh quantization")

TOKENS = torch.arange(3, 15)[None]
POSITIONS = torch.cat([torch.arange(5), torch.arange(7)])[None]
FORMATS = ("int8", "int4", "fp8")


def teachers(tp: int, paths: list[str]) -> list[tuple[Tensor, dict[str, tuple[Tensor, str]]]]:
    """Per model and format: all logits, and this rank's part of every weight [O, I] with what the layer's product is:
    `Shard`, `Partial` or, on one rank, `Replicate`; and the weights of all `experts`."""
    world = open_world(rank=ranks.rank(), dp=1, tp=tp, store=ranks.store(), timeout_s=60)
    results = []
    for path in paths:
        for format in FORMATS:
            model = load_model(path, world, role="teacher", dtype="fp32", quantization=format)
            with torch.no_grad():
                logits = forward.logits(model, TOKENS, POSITIONS)
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            parts = {}
            for name, module in model.named_modules():
                if isinstance(module, QuantizedLinear):
                    made = module.weight.dequantize()
                    parts[name] = (made.mT if module.weight.transposed else made, type(module.leaves).__name__)
                elif isinstance(module, QuantizedWeight) and module.data.ndim == 3:
                    parts[name] = (module.dequantize(), "experts")
            results.append((logits[0], parts))
    close_world(world)
    return results


def test_ranks_compute_together_what_a_plain_model_does_with_their_weights(tmp_path: Path) -> None:
    paths = [
        str(write_model(tmp_path / name, name, vocab_size=507, hidden=128))
        for name in ("llama", "qwen2", "phi3", "gpt2")
    ]
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 507}
    paths.append(str(write_model(tmp_path / "mixtral", "mixtral", **sizes)))
    split = run_ranks(2, teachers, 2, paths, group=False, timeout=300)
    (whole,) = run_ranks(1, teachers, 1, paths, group=False, timeout=300)
    for i in range(len(whole)):
        path, format = paths[i // len(FORMATS)], FORMATS[i % len(FORMATS)]
        plain = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").eval()
        kinds = set()
        for name, (first, leaves) in split[0][i][1].items():
            second = split[1][i][1][name][0]
            kinds.add(leaves)
            if leaves == "experts":
                assert torch.equal(first, second)
                assert torch.equal(first, whole[i][1][name][0])
                plain.get_parameter(name).data = first
                continue
            weight = torch.cat([first, second], dim=0 if leaves == "Shard" else 1)
            # Scales belong to output features or to groups of inputs, so only a scale that a split row has twice differs.
            if leaves == "Shard" or format == "int4":
                assert torch.equal(weight, whole[i][1][name][0]), (path, format, name)
            plain.get_submodule(name).weight.data = weight.mT if "gpt2" in path else weight
        assert kinds == {"Shard", "Partial"} | ({"experts"} if "mixtral" in path else set())
        with torch.no_grad():
            wanted = torch.cat([plain(input_ids=ids, use_cache=False).logits[0] for ids in TOKENS.split([5, 7], dim=1)])
        for rank in range(2):
            torch.testing.assert_close(split[rank][i][0], wanted, rtol=0, atol=2e-5)
