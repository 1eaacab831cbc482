"""Kernels of the liger-kernel package for the norms, the rotary embedding and the MLP of a student."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distill_rl.errors import ConfigError
from distill_rl.system.environment import install_extra

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIGER = {
    "llama": "apply_liger_kernel_to_llama",
    "mistral": "apply_liger_kernel_to_mistral",
    "qwen2": "apply_liger_kernel_to_qwen2",
    "qwen3": "apply_liger_kernel_to_qwen3",
}
"""Model type → the function of `liger_kernel.transformers` that replaces RMSNorm, rotary embedding and SwiGLU."""


def liger_problems(hf_config: Any) -> list[str]:
    """Returns why a model's config rules out `student.kernels: liger`: one line, or an empty list if nothing does.

    Looks at `model_type` and `hidden_act` only, not at whether liger is installed.
    """
    if hf_config.model_type not in LIGER:
        return [f"liger replaces parts of {', '.join(LIGER)}; got {hf_config.model_type}"]
    if hf_config.hidden_act not in ("silu", "swish"):
        return [f"liger's MLP needs hidden_act silu; got {hf_config.hidden_act}"]
    return []


def use_liger(model: PreTrainedModel) -> None:
    """Makes `model` compute RMSNorm, rotary embedding and SwiGLU with liger's Triton kernels. Its loss is not changed.

    Norms and MLPs get another `forward` and keep their parameters, so this works before or after FSDP2 and on the meta
    device. The rotary embedding is a function in transformers' module of the family, so it is replaced for all models
    of that family in this process.

    Raises:
        ConfigError: the package or triton is missing, or there are no kernels for this model (`liger_problems`).
    """
    problems = liger_problems(model.config)
    if problems:
        raise ConfigError.many([f"student.kernels: {problem}; set student.kernels=torch" for problem in problems])
    try:
        from liger_kernel import transformers as liger
    except ImportError as error:
        remedy = f"{install_extra('liger')}, or set student.kernels=torch"
        raise ConfigError("student.kernels", "liger needs liger_kernel and triton", str(error), remedy) from error
    getattr(liger, LIGER[model.config.model_type])(
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False, model=model
    )
