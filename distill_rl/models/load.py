"""A Hugging Face causal LM as a sharded module: described on the meta device, split, then filled from its files.

    meta device → parallelize → empty storage for the shards → buffers → weights by slices

No rank ever holds more than its shards and one slice in the dtype of the files.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from distill_rl.errors import ConfigError
from distill_rl.models import families
from distill_rl.models.attention import varlen
from distill_rl.models.attention.choice import choose
from distill_rl.models.hub import read_config, read_tokenizer, resolve, tokenizer_hash, vocabulary_size
from distill_rl.models.parallelize import parallelize, tie_again
from distill_rl.models.probe import probe
from distill_rl.models.weights import WeightFiles, read_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from distill_rl.parallel.mesh import World

__all__ = ["load_model", "read_config", "read_tokenizer", "tokenizer_hash", "vocabulary_size"]

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(
    path: str | Path,
    world: World,
    *,
    role: Literal["student", "teacher"],
    dtype: str | torch.dtype,
    attention: str = "auto",
    activation_checkpointing: bool = False,
    compile: bool = False,
    revision: str | None = None,
    packing: bool = True,
) -> PreTrainedModel:
    """Load a model into this rank's shards; collective over the world.

    A student has fp32 master weights, sharded by FSDP2 × tensor parallelism, computes in `dtype` and is in training
    mode. A teacher has weights in `dtype`, split by tensor parallelism alone (its data-parallel ranks are replicas),
    is frozen and in evaluation mode. Call a student through `families.logits`, a teacher through `families.body`
    and `families.head`.

    Args:
        path: folder with config.json and safetensors, or a name on the hub.
        attention: the setting of this name, or an attention implementation as transformers calls it.
        packing: rows hold several documents; a family not proven to keep them apart is then tried out.

    Raises:
        ConfigError: model missing, not safetensors, damaged, not divisible over the tensor-parallel ranks, or of a
            family that cannot do what it is asked for.
    """
    student = role == "student"
    compute_dtype = DTYPES[dtype] if isinstance(dtype, str) else dtype
    folder = resolve(path, revision, weights=True)
    config = read_config(folder)
    family = families.family_of(config)
    files = WeightFiles(folder)
    chosen = choose(
        attention,
        config,
        dtype="fp32" if compute_dtype is torch.float32 else str(compute_dtype).removeprefix("torch."),
        packing=packing,
        training=student,
        no_kernel=varlen.no_kernel(world.device),
    )
    if world.rank == 0:
        log.info("%s: attention of the %s is %s (%s)", path, role, chosen.implementation, chosen.why)
    model = skeleton(config, dtype=torch.float32 if student else compute_dtype, attention=chosen.implementation)
    parallelize(
        model,
        world.mesh,
        family=family,
        fsdp=student,
        activation_checkpointing=activation_checkpointing,
        compute_dtype=compute_dtype,
        compile=compile,
    )
    model.to_empty(device=world.device)
    tie_again(model)
    restore_buffers(model)
    reading = read_weights(model, files)
    log.info("%s: %d tensors, %.1f MB read by rank %d", path, reading.tensors, reading.total_bytes / 1e6, world.rank)
    model.train(student).requires_grad_(student)
    if not family.proven:
        probe(model, packing=packing, chunked_head=not student)
    return model


def skeleton(config: PreTrainedConfig, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model without memory: every tensor on the meta device, parameters in `dtype`.

    Raises:
        ConfigError: no causal LM of this config, or the attention implementation is not available.
    """
    from transformers import AutoModelForCausalLM

    varlen.register()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"model type {config.model_type}",
            f"transformers must have it as a causal LM with {attention} attention",
            str(error).splitlines()[0],
            "try another setting of `attention`",
        ) from error
    # A cache makes packed documents see each other; see families.logits.
    model.config.use_cache = False
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            # It looks for padding, and so waits for the GPU in every forward; padding here needs no mask.
            module.warn_if_padding_and_no_attention_mask = _no_warning
    return model


def _no_warning(*inputs: object) -> None:
    pass


@torch.no_grad()
def restore_buffers(model: PreTrainedModel) -> None:
    """Recompute the buffers that no file holds (rotary frequencies, embedding scales) after `to_empty`.

    Raises:
        ConfigError: a buffer that the model's own initialisation leaves as it is.
    """
    stored = set(model.state_dict())
    lost = {name: buffer for name, buffer in model.named_buffers() if name not in stored}
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark for "leave this alone"
    for buffer in lost.values():
        buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min)
    for owner in {name.rpartition(".")[0] for name in lost}:
        model._init_weights(model.get_submodule(owner))
    for parameter in model.parameters():
        del parameter._is_hf_initialized  # type: ignore[attr-defined]
    for name, buffer in lost.items():
        untouched = buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min
        if untouched.any():
            raise ConfigError(f"model type {model.config.model_type}", "every buffer must be recomputable", name)
