"""Checkpoints whose weights are quantised already, and what quantised weights stand for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from distill_rl.models.quantization import QuantizedWeight


def store_quantized(folder: Path, source: Path) -> Path:
    """Writes a model, as Transformers quantises it with torchao's int8, to `folder` with its tokenizer; returns `folder`."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(source, quantization_config=config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def meant(weight: QuantizedWeight) -> Tensor:
    """What the numbers of a weight stand for, by the definition in fp64."""
    data, scale = weight.data, weight.scale.double()
    if weight.zero is None:
        made = data.double() * scale
    else:
        codes = torch.zeros(*data.shape[:-1], 2 * data.shape[-1], dtype=torch.float64)
        codes[..., ::2], codes[..., 1::2] = (data % 16).double(), (data // 16).double()
        repeats = codes.shape[-1] // scale.shape[-1]
        zero = weight.zero.double().repeat_interleave(repeats, -1)
        made = (codes - zero) * scale.repeat_interleave(repeats, -1)
    return made.mT if weight.transposed else made
