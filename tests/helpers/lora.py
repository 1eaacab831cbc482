"""Students with adapters: rows to train on, adapters of known values, and PEFT's own model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from torch.distributed.tensor import DTensor

from distill_rl.config.schema import Config, LoraConfig
from distill_rl.parallel.shards import local_slices
from distill_rl.student.engine import StudentEngine
from tests.helpers import engines

VOCABULARY, WIDTH, RANK = 320, 40, 4


def batch_rows():
    documents = engines.random_documents(12, seed=11, longest=18)
    return engines.token_rows(engines.uneven_packs(documents), WIDTH)


def lora_config(student: Path, whole: list[str], dropout: float = 0.0) -> Config:
    lora = LoraConfig(rank=RANK, alpha=6.0, dropout=dropout, modules_to_save=whole)
    return engines.engine_config(
        student,
        loss__kd_weight=0.0,
        loss__ce_weight=1.0,
        student__lora=lora,
        optimizer__lr=1e-2,
        schedule__warmup_steps=1,
    )


def known_value(name: str, shape: torch.Size) -> torch.Tensor:
    """A value of an adapter's tensor that depends on its name alone. At B = 0, A would have no gradient."""
    draw = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big"))
    return 0.1 * torch.randn(shape, generator=draw)


def set_adapters(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                part = known_value(name, parameter.shape)[local_slices(parameter)]
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(part)


def peft_model(path: Path, whole: Sequence[str] = (), targets: Sequence[str] = ("",)) -> torch.nn.Module:
    """The plain model with PEFT's adapters on every linear layer but the output layer, or on those with such an end.

    Args:
        whole: ends of the names of modules that are trained whole.
    """
    model = engines.plain_model(path)
    linear = [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and module is not model.get_output_embeddings()
        if name.endswith(tuple(targets))
    ]
    transposed = model.config.model_type == "gpt2"
    settings = PeftConfig(r=RANK, lora_alpha=6, target_modules=linear, fan_in_fan_out=transposed)
    model = inject_adapter_in_model(settings, model)
    for name, module in model.named_modules():
        if name and name.endswith(tuple(whole)):
            module.requires_grad_(True)
    return model


def run_steps(engine: StudentEngine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        rows = engines.token_rows([[document] for document in engines.random_documents(4, seed=step)], WIDTH)
        batch = engines.rank_batch(rows, engine.world.dp_rank, engine.world.dp, step)
        metrics = engine.train_step(batch, engines.no_targets)
        losses += [metrics[name].value for name in ("train/nll_loss", "train/grad_norm") if metrics]
    return losses
