"""Loads a Hugging Face causal LM into shards: created on the meta device, split, then filled from its files.

    meta device → parallelize → empty storage for the shards → buffers → weights by slices

1. `skeleton` creates the model without memory; a student may get adapters.
2. `parallelize` splits the parameters, still without memory.
3. `to_empty` allocates what this rank holds, and only that.
4. `restore_buffers` recomputes buffers that no file holds, such as rotary frequencies.
5. `read_weights` copies each parameter's slice from the files.

So no rank ever holds more than its shards and one slice in the dtype of the files. Weights that are to be quantised are
taken out in the second step and put back one by one after the last (`quantization`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema import StudentConfig, TeacherConfig
from distill_rl.errors import ConfigError, first_line
from distill_rl.models import adapters, families, forward, varlen, weights
from distill_rl.models.attention import choose, with_masks
from distill_rl.models.checks import check_plan, probe
from distill_rl.models.files import as_stored_problem, read_config, resolve
from distill_rl.models.forward import use_own_lengths
from distill_rl.models.parallelize import parallelize, tie_again
from distill_rl.models.quantization import Taken, weight_bytes
from distill_rl.parallel.shards import local_part

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from distill_rl.parallel.mesh import World

log = logging.getLogger(__name__)


def load_model(
    settings: StudentConfig | TeacherConfig,
    world: World,
    *,
    packing: bool,
    longest: int | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Loads a model into this rank's shards. Collective over the world.

    A student has fp32 master weights, sharded by FSDP2 × tensor parallelism (FSDP2 over the ranks that see other rows or
    other positions; on one rank they are plain tensors), computes in its `dtype` and is in training mode. With adapters, only these and modules to
    save are fp32 and require gradients; all else is in `dtype`. A teacher has weights in its `dtype`, split by tensor
    parallelism alone (its data-parallel ranks are replicas), and is frozen and in evaluation mode. Either's frozen weights
    may be quantised; those are split by tensor parallelism alone too. Call a student through `forward.logits`, a teacher
    through `forward.body` and `forward.head`. A family that this package's tests do not cover is tried out (`probe`). The
    chosen attention and the bytes read are logged.

    Args:
        settings: of the model.
        packing: whether rows may hold several documents.
        longest: most tokens of such a row; None: any number.
        seed: of the adapters' initial values.

    Raises:
        ConfigError: the model is missing, not safetensors, damaged, not divisible over the tensor-parallel ranks, or of
            a family that does not support what is requested.
    """
    path, quantization, compute_dtype = settings.model, settings.quantization, weights.DTYPES[settings.dtype]
    student = settings if isinstance(settings, StudentConfig) else None
    role, key = ("teacher", "teachers[]") if student is None else ("student", "student")
    folder = resolve(path, settings.revision, weights=True)
    config = read_config(folder, quantized=quantization == AS_STORED)
    family = families.family_of(config)
    ConfigError.raise_all(families.sequence_parallel_problems(config, world.sp, world.tp, f"{key}.parallel.sp"))
    chosen = choose(settings, config, packing=packing, no_kernel=varlen.no_kernel(world.device), spread=world.sp > 1)
    if world.rank == 0:
        log.info("%s: attention of the %s is %s (%s)", path, role, chosen.implementation, chosen.why)
    if quantization == AS_STORED:
        model = _load_as_stored(folder, config, world, dtype=compute_dtype, attention=chosen.implementation)
        probe(model, packing=packing, chunked_head=True, world=world, longest=longest)
        return model
    files = weights.WeightFiles(folder)
    adapted = student is not None and student.has_adapters
    dtype = compute_dtype if student is None or adapted else torch.float32
    model = weights.skeleton(config, dtype=dtype, attention=chosen.implementation)
    check_plan(model, world)
    model.requires_grad_(student is not None)
    if student is not None and adapted:
        adapters.inject(model, student)
    found = weights.tensors_in_files(model, files)
    offload = student is not None and student.activation_offload and world.device.type == "cuda"
    taken = parallelize(model, world.mesh, settings, offload=offload)
    if quantization is not None and not taken:
        rule = f"no weight of this {family.name} can be held in {quantization}"
        raise ConfigError(f"{key}.quantization", rule, path, "leave it out")
    _fill(model, files, found, world, taken)
    adapters.initialise(model, seed)
    model.train(student is not None)
    if not family.proven:
        probe(model, packing=packing, chunked_head=student is None, world=world, longest=longest)
    return model


def load_to_generate(folder: Path, world: World, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Loads a frozen model, split by tensor parallelism, that is used as transformers' own: with a cache, through its
    `forward`. Collective over the world, and so is every forward pass.

    A pass returns the same whole logits on every rank, as a plain tensor: the output layer gathers its columns. A cache
    holds the keys and values of this rank's heads.

    Args:
        folder: of the model.
        dtype: of the weights and the forward pass; None: as config.json says, or else as the first tensor is stored.

    Raises:
        ConfigError: as `load_model`.
    """
    config, files = read_config(folder), weights.WeightFiles(folder)
    if dtype is None:
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else files.dtype(min(files.names))
    model = weights.skeleton(config, dtype=dtype, attention=with_masks(config).implementation)
    check_plan(model, world)
    found = weights.tensors_in_files(model, files)
    parallelize(model, world.mesh, None)
    _fill(model, files, found, world)
    model.config.use_cache = True
    model.get_output_embeddings().register_forward_hook(
        lambda _, inputs, logits: logits.full_tensor() if isinstance(logits, DTensor) else logits
    )
    return model.eval().requires_grad_(False)


def _fill(
    model: PreTrainedModel, files: weights.WeightFiles, found: weights.Match, world: World, taken: Sequence[Taken] = ()
) -> None:
    """Allocates what this rank holds of a model that is on the meta device, and reads it from the files."""
    model.to_empty(device=world.device)
    tie_again(model)
    weights.restore_buffers(model)
    sizes = weights.read_weights(model, files, found)
    for one in taken:
        whole = torch.empty(one.parameter.shape, dtype=one.parameter.dtype, device="meta")
        split = one.parameter if one.inputs is None else whole
        part = local_part(split)
        weight = torch.empty(part.shape, dtype=part.dtype, device=world.device)
        sizes.append(weights.read_tensor(model, files, found, one.name, split, weight))
        one.put_back(weight)
        del weight
    log.info("%s: %d tensors, %.1f MB read by rank %d", files.folder, len(sizes), sum(sizes) / 1e6, world.rank)
    if taken:
        inside, others = (size / 1e6 for size in weight_bytes(model))
        told = "%s: %d weights in %s take %.1f MB, the other tensors %.1f MB"
        log.info(told, files.folder, len(taken), taken[0].format, inside, others)


def _load_as_stored(
    folder: Path, config: PreTrainedConfig, world: World, *, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """A frozen model from a quantised checkpoint, as Transformers loads it, on this rank's device; else as `load_model`."""
    from transformers import AutoModelForCausalLM

    key = f"teachers[].quantization: {AS_STORED}"
    if problem := as_stored_problem(config, folder, tp=world.tp):
        raise ConfigError(key, problem, str(folder))
    varlen.register()
    device = world.device
    place = {"device_map": {"": device}} if device.type != "cpu" else {}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **place,
        )
    except Exception as error:  # quantisers of a dozen packages, each with its own exceptions
        rule = f"Transformers cannot load {folder} as it is stored on {device.type}"
        remedy = "use another device or package, or the original weights with quantization: int8, int4 or fp8"
        raise ConfigError(key, rule, f"{type(error).__name__}: {first_line(error)}", remedy) from error
    model, report = loaded
    # A mismatched key comes with its two shapes.
    if wrong := sorted(report["missing_keys"]) + sorted(name for name, *_ in report["mismatched_keys"]):
        rule = f"{folder} lacks tensors that {model.config.model_type} needs, or has them in another shape"
        raise ConfigError(key, rule, f"{', '.join(wrong[:3])} ({len(wrong)} in all)", "copy the model again")
    weights.without_cache(model)
    use_own_lengths(model)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class OutputLayer:
    """Rows of a model's output layer: logits = softcap(scale · hidden · Wᵀ + bias)."""

    weight: Tensor
    """[n, H]"""
    bias: Tensor | None
    """[n]"""
    scale: float = 1.0
    softcap: float | None = None


def read_output_layer(
    path: str | Path, rows: slice | None = None, *, dtype: str, revision: str | None = None
) -> OutputLayer:
    """Reads rows of a model's output layer onto the CPU, and no other weights.

    If the layer is tied to the input embedding, they may be stored as rows of that.

    Args:
        path: folder with config.json and safetensors, or a name on the hub.
        rows: which columns of the logits, ignoring those beyond the last one. None: all.
        dtype: in which the model computes (fp32, bf16 or fp16). Weights are rounded to it as they are in the model.

    Raises:
        ConfigError: as in `load_model`, or the model has no output layer.
    """
    folder = resolve(path, revision, weights=True)
    config = read_config(folder)
    files = weights.WeightFiles(folder)
    in_dtype = weights.DTYPES[dtype]
    model = weights.skeleton(config, dtype=in_dtype, attention="eager")
    tie_again(model)
    layer = model.get_output_embeddings()
    if layer is None:
        raise ConfigError(f"model {path}", "must have an output layer", config.model_type)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    stored = weights.tensors_in_files(model, files).stored

    def read(parameter: Tensor) -> Tensor:
        file_names = stored[name_of[id(parameter)]]
        for file_name in file_names:
            files.require_shape(file_name, parameter)
            files.dtype(file_name)
        count, *rest = parameter.shape
        start, stop, _ = (rows or slice(None)).indices(count)
        if start >= stop:
            return torch.empty(0, *rest, dtype=in_dtype)
        return files.read_tied(file_names, (slice(start, stop), *[slice(0, size) for size in rest])).to(in_dtype)

    bias = getattr(layer, "bias", None)
    return OutputLayer(read(layer.weight), None if bias is None else read(bias), *forward.scale_and_cap(config))
