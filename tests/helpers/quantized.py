"""Checkpoints whose weights are quantised already."""

from __future__ import annotations

from pathlib import Path


def store_quantized(folder: Path, source: Path) -> Path:
    """Writes a model, as Transformers quantises it with torchao's int8, to `folder` with its tokenizer; returns `folder`."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(source, quantization_config=config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder
