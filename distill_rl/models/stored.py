"""Checkpoints that are quantised already, loaded as Transformers loads them.

Each method has a package and a layout of its own, all known to Transformers' quantisers, so neither our loader nor tensor
parallelism applies to them: one rank holds the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.errors import ConfigError, first_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

_PACKAGES: dict[str, tuple[str, ...]] = {
    "awq": ("gptqmodel", "accelerate"),
    "auto-round": ("auto_round",),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors",),
    "fbgemm_fp8": ("accelerate",),
    "fp8": ("accelerate",),
    "gptq": ("optimum", "gptqmodel"),
    "hqq": ("hqq",),
    "mxfp4": ("accelerate",),
    "mxfp8": ("accelerate",),
    "quanto": ("optimum.quanto", "accelerate"),
    "torchao": ("torchao",),
}
"""Method of a checkpoint → modules that Transformers needs for it."""
_INSTALLED_AS = {
    "auto_round": "auto-round",
    "compressed_tensors": "compressed-tensors",
    "optimum.quanto": "optimum-quanto",
}


def method_of(config: PreTrainedConfig) -> str | None:
    """How a checkpoint's weights are quantised, as config.json calls it; None if they are not."""
    found: Any = getattr(config, "quantization_config", None)
    if not found:
        return None
    return str((found if isinstance(found, dict) else found.to_dict()).get("quant_method", "unknown"))


def missing_packages(method: str, *, on_gpu: bool) -> list[str]:
    """What must be installed for checkpoints of a method and is not, as pip names it.

    Args:
        on_gpu: Transformers then needs accelerate, whatever the method, to load onto the GPU.
    """
    needed = dict.fromkeys([*_PACKAGES.get(method, ()), *(("accelerate",) if on_gpu else ())])
    return [_INSTALLED_AS.get(name, name) for name in needed if not _found(name)]


def as_stored_problem(config: PreTrainedConfig, *, several: bool, tp: int) -> str:
    """Why a checkpoint cannot be loaded as it is stored; empty if nothing is known against it.

    Args:
        several: whether its folder holds several models that are joined (`headers.holds_several`).
        tp: tensor-parallel size.
    """
    if method_of(config) is None:
        return "its weights must be quantised; those of this folder are not (no quantization_config in config.json)"
    if several:
        return "the folder must hold a language model alone, not one for images or sound too"
    if tp > 1:
        return f"quantised weights are not split over ranks; parallel.tp is {tp}"
    return ""


def load_as_stored(
    folder: Path, *, dtype: torch.dtype, attention: str, device: torch.device, key: str
) -> PreTrainedModel:
    """Loads a quantised checkpoint onto `device`, without code of its own and from safetensors only.

    Args:
        dtype: of the computation, and of the weights that are not quantised.
        attention: transformers' name of an implementation.
        key: the setting that asked for it, for the errors.

    Raises:
        ConfigError: a package is missing, the method is not available on this device, or the weights do not belong to
            the model.
    """
    from transformers import AutoModelForCausalLM

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
    wrong = [*_names(report.get("missing_keys")), *_names(report.get("mismatched_keys"))]
    if wrong:
        rule = f"{folder} lacks tensors that {model.config.model_type} needs, or has them in another shape"
        raise ConfigError(key, rule, f"{', '.join(wrong[:3])} ({len(wrong)} in all)", "copy the model again")
    return model


def _names(entries: Sequence[Any] | set[Any] | None) -> list[str]:
    return sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in entries or ())


def _found(module: str) -> bool:
    """Whether a module, or one in a package, is installed; nothing is imported but the package around it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
