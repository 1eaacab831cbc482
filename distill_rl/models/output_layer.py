"""The output layer of a model, read alone: hidden states become logits where the rest of the model is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distill_rl.errors import ConfigError
from distill_rl.models.families import scale_and_cap
from distill_rl.models.hub import read_config, resolve
from distill_rl.models.load import DTYPES, skeleton
from distill_rl.models.parallelize import tie_again
from distill_rl.models.weights import WeightFiles, names_in_files


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Some rows of it: logits = softcap(scale · hidden · Wᵀ + bias)."""

    weight: Tensor
    """[n, H]"""
    bias: Tensor | None
    """[n]"""
    scale: float
    softcap: float | None


def read_output_layer(
    path: str | Path, rows: slice | None = None, *, dtype: str, revision: str | None = None
) -> OutputLayer:
    """Rows of a model's output layer (the input embedding's where the two are tied), on the CPU; no more is read.

    Args:
        path: folder with config.json and safetensors, or a name on the hub.
        rows: which columns of the logits; what lies beyond the last one is left out. None: all.
        dtype: that the model computes in (fp32, bf16 or fp16); weights are rounded to it as they are in the model.

    Raises:
        ConfigError: as `load_model` does, or the model has no output layer of its own.
    """
    folder = resolve(path, revision, weights=True)
    config = read_config(folder)
    files = WeightFiles(folder)
    model = skeleton(config, dtype=DTYPES[dtype], attention="eager")
    tie_again(model)
    layer = model.get_output_embeddings()
    if layer is None:
        raise ConfigError(f"model {path}", "must have an output layer", config.model_type)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    stored = names_in_files(model, files)

    def read(parameter: Tensor) -> Tensor:
        file_name = stored[name_of[id(parameter)]]
        count, *rest = parameter.shape
        start, stop, _ = (rows or slice(None)).indices(count)
        if files.shape(file_name) != tuple(parameter.shape):
            rule = f"shape must be {list(parameter.shape)} by config.json"
            raise ConfigError(f"{folder}: tensor {file_name}", rule, str(list(files.shape(file_name))))
        if start >= stop:
            return torch.empty(0, *rest, dtype=DTYPES[dtype])
        return files.read(file_name, (slice(start, stop), *[slice(0, size) for size in rest])).to(DTYPES[dtype])

    bias = getattr(layer, "bias", None)
    return OutputLayer(read(layer.weight), None if bias is None else read(bias), *scale_and_cap(config))
