"""Teachers with quantised weights: made when they are loaded, and stored like that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from distill_rl.config.quantization import GROUP, weight_bytes
from distill_rl.errors import ConfigError
from distill_rl.models import forward, quantization
from distill_rl.models.files import read_config, read_model_facts
from distill_rl.models.quantization import QuantizedLinear, QuantizedWeight, quantize_layer
from distill_rl.parallel.mesh import World
from tests.helpers.load import load_model
from tests.helpers.quantized import meant, store_quantized
from tests.helpers.zoo import write_family, write_model

pytest.importorskip("torchao", reason="torchao is not installed here: bash launch/test.sh quantization")

FORMATS = ("int8", "int4", "fp8")
IDS = torch.arange(3, 27)[None]
POSITIONS = torch.arange(24)[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_is_made_again_within_half_a_step(format: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(6, 40, 3 * GROUP) * torch.rand(6, 40, 1)).to(dtype)
    weight[0, 0], weight[0, 1] = 0, weight[0, 1].abs()  # a row of zeros, and one of one sign
    quantized = QuantizedWeight(weight, format)
    made = quantized.dequantize()
    assert (made.dtype, made.shape) == (weight.dtype, weight.shape)
    # One rounding of the product, and with int4 one of the scale, which is in the weight's dtype.
    torch.testing.assert_close(made.double(), meant(quantized), rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert torch.equal(quantized[3], made[3])
    error = (meant(quantized) - weight.double()).abs()
    scale = quantized.scale.double().repeat_interleave(weight.shape[-1] // quantized.scale.shape[-1], -1)
    # fp8 has 3 bits behind the point: half a step is 1/16 of a number, or of the least normal one, 2^-6.
    step = torch.maximum(weight.double().abs() / 8, scale * 2**-9) if format == "fp8" else scale
    # In bf16 a scale is off by up to 2^-9, of up to 15 steps of int4.
    assert (error <= step * (0.501 if dtype == torch.float32 else 0.54)).all()
    assert not meant(quantized)[0, 0].any()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_computes_with_the_weight_and_passes_gradients(format: str, transposed: bool) -> None:
    torch.manual_seed(1)
    layer = Conv1D(48, 64) if transposed else nn.Linear(64, 48)
    weight = torch.randn(64, 48) if transposed else torch.randn(48, 64)
    nn.init.normal_(layer.bias)
    quantize_layer(layer, weight, format, transposed=transposed)
    assert isinstance(layer, QuantizedLinear)
    rows, cotangent = torch.randn(5, 64, requires_grad=True), torch.randn(5, 48, dtype=torch.float64)
    plain = meant(layer.weight).mT if transposed else meant(layer.weight)
    expected = linear(rows.double(), plain, layer.bias.double())
    found = layer(rows)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(found, rows, cotangent.float())
    torch.testing.assert_close(gradient.double(), cotangent @ plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "mixtral", "gpt_oss", "qwen2_moe"])
@torch.no_grad()
def test_logits_are_those_of_a_plain_model_with_the_same_weights(
    tmp_path: Path, world: World, name: str, format: str
) -> None:
    path = write_family(tmp_path, name)
    attention = "eager" if name == "gpt_oss" else "sdpa"
    settings = {"dtype": "fp32", "attention": attention, "packing": name != "gpt_oss"}
    model = load_model(path, world, role="teacher", quantization=format, **settings)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, experts_implementation="eager")
    whole = plain.eval()(input_ids=IDS, use_cache=False).logits
    quantized = {key: module for key, module in model.named_modules() if isinstance(module, QuantizedWeight)}
    layers = model.config.num_hidden_layers
    assert len(quantized) >= 4 * layers
    assert not any(
        "lm_head" in key or "embed" in key or key.endswith(("gate.weight", "router.weight")) for key in quantized
    )
    for key, module in quantized.items():
        plain.get_parameter(key).copy_(meant(module))
    wanted = plain(input_ids=IDS, use_cache=False).logits
    found = forward.logits(model, IDS, POSITIONS)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    by_head = forward.head(model, forward.body(model, IDS, POSITIONS))
    torch.testing.assert_close(by_head, wanted, rtol=0, atol=2e-5)
    divergence = (whole.softmax(-1) * (whole.log_softmax(-1) - found.log_softmax(-1))).sum(-1)
    # Of these random weights; measured at most 0.004, 0.25 and 0.042, the most in mixtures, whose routers change their mind.
    assert divergence.mean() < {"int8": 0.01, "int4": 0.6, "fp8": 0.1}[format]


@pytest.mark.parametrize("format", FORMATS)
def test_memory_is_what_the_estimate_says(tmp_path: Path, world: World, format: str) -> None:
    path = write_model(tmp_path, "llama", hidden=256, vocab_size=512)
    model = load_model(path, world, role="teacher", dtype="bf16", quantization=format)
    facts = read_model_facts(path, read_config(path))
    inside, others = quantization.weight_bytes(model)
    assert inside < 0.6 * 2 * (facts.parameters - 2 * 512 * 256)
    assert inside + others == pytest.approx(weight_bytes(format, facts, 2), rel=0.02)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_rows_that_four_bits_do_not_suit_stay_as_they_are(tmp_path: Path, world: World) -> None:
    path = write_model(tmp_path, "llama", hidden=40)
    model = load_model(path, world, role="teacher", dtype="fp32", quantization="int4")
    quantized = [key for key, module in model.named_modules() if isinstance(module, QuantizedWeight)]
    assert quantized == [f"model.layers.{i}.mlp.down_proj.weight" for i in range(model.config.num_hidden_layers)]


def test_a_model_without_a_weight_that_four_bits_suit_is_refused(tmp_path: Path, world: World) -> None:
    path = write_model(tmp_path, "olmo2", hidden_size=24, intermediate_size=40)
    with pytest.raises(ConfigError, match=r"teachers\[\].quantization: no weight of this olmo2 can be held in int4"):
        load_model(path, world, role="teacher", dtype="fp32", quantization="int4")


@torch.no_grad()
def test_a_stored_checkpoint_has_the_logits_of_transformers(tmp_path: Path, world: World) -> None:
    source = write_model(tmp_path / "whole", "llama", hidden=64)
    path = store_quantized(tmp_path / "stored", source)
    model = load_model(path, world, role="teacher", dtype="fp32", quantization="as_stored")
    plain = AutoModelForCausalLM.from_pretrained(path).eval()
    wanted = plain(input_ids=IDS, use_cache=False).logits
    assert torch.equal(forward.logits(model, IDS, POSITIONS), wanted)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not torch.equal(wanted, AutoModelForCausalLM.from_pretrained(source).eval()(input_ids=IDS).logits)
    with pytest.raises(ConfigError, match=r"must not be quantized; .*quantization: as_stored or the backend vllm"):
        load_model(path, world, role="teacher", dtype="fp32")
    with pytest.raises(ConfigError, match="must not be quantized"):
        load_model(path, world, role="student", dtype="fp32")
    with pytest.raises(ConfigError, match=r"its weights must be quantised; those of this folder are not"):
        load_model(source, world, role="teacher", dtype="fp32", quantization="as_stored")


def test_a_method_that_is_not_available_ends_in_one_line(tmp_path: Path, world: World) -> None:
    from tests.unit.models.test_hub import change_config

    path = change_config(write_model(tmp_path, "llama"), quantization_config={"quant_method": "hqq"})
    with pytest.raises(
        ConfigError, match=r"quantization: as_stored: Transformers cannot load .* on cpu; got .*"
    ) as caught:
        load_model(path, world, role="teacher", dtype="fp32", quantization="as_stored")
    assert len(caught.value.problems) == 1
