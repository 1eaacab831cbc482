"""Teachers with quantised weights on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from distill_rl.config.facts import ModelFacts
from distill_rl.config.quantization import weight_bytes
from distill_rl.models import forward
from distill_rl.models.files import read_config, read_model_facts
from distill_rl.models.quantization import QuantizedWeight
from distill_rl.parallel.mesh import close_world, open_world
from tests.helpers.load import load_model
from tests.helpers.models import write_tiny_model
from tests.helpers.zoo import write_family

pytestmark = pytest.mark.gpu
pytest.importorskip("torchao", reason="the extra `quantization` is not installed")

IDS, POSITIONS = torch.arange(3, 27)[None], torch.arange(24)[None]
FORMATS = ("int8", "int4", "fp8")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@torch.no_grad()
def test_the_gpu_has_the_numbers_and_the_logits_of_the_cpu(tmp_path, name: str, format: str):
    path = write_family(tmp_path, name)
    found = {}
    for device in ("cpu", "cuda"):
        world = open_world(rank=0, dp=1, tp=1, device=device)
        try:
            model = load_model(path, world, role="teacher", dtype="fp32", attention="eager", quantization=format)
            logits = forward.logits(model, IDS.to(world.device), POSITIONS.to(world.device)).cpu()
            weights = {key: m.dequantize().cpu() for key, m in model.named_modules() if isinstance(m, QuantizedWeight)}
            found[device] = logits, weights
        finally:
            close_world(world)
    for key, weight in found["cpu"][1].items():
        # A quotient of a weight and its scale at half a step may be rounded to either side.
        other = found["cuda"][1][key]
        assert ((weight - other).abs() > 1e-6 * weight.abs().max()).double().mean() < 1e-3, key
    torch.testing.assert_close(found["cuda"][0], found["cpu"][0], rtol=0, atol=2e-2)


@pytest.mark.parametrize("format", FORMATS)
def test_loading_takes_hardly_more_than_what_stays(tmp_path, format: str):
    """48 million weights in bf16 would take 96 MB; the largest of them takes 2, and torchao's arithmetic in fp32 8 at once."""
    path = write_tiny_model(
        tmp_path, "llama", hidden=1024, layers=6, heads=8, kv_heads=4, vocab_size=512, dtype="bfloat16"
    )
    facts: ModelFacts = read_model_facts(path, read_config(path))
    world = open_world(rank=0, dp=1, tp=1, device="cuda")
    try:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = load_model(path, world, role="teacher", dtype="bf16", quantization=format)
        held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        assert held == pytest.approx(weight_bytes(format, facts, 2), rel=0.05)
        largest = 1024 * 2048
        assert peak - held < 8 * 4 * largest
        hidden = forward.body(model, IDS.to(world.device), POSITIONS.to(world.device))
        assert hidden.isfinite().all()
    finally:
        close_world(world)
