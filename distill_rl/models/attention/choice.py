"""Which attention implementation a model takes, by the settings, the device, what is installed and what the model needs.

Nothing here imports torch at run time, so that `check` can judge the settings before a model exists. The arithmetic
is in `varlen.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from distill_rl.errors import ConfigError
from distill_rl.models.families import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VARLEN = {"flash_attn": "documents_fa", "torch": "documents_torch"}
"""Package that brings the variable-length kernels → the name under which transformers knows this package's attention
with them, the preferred one first. Names that contain `flash` or `sdpa` mean something to transformers."""
ON_CPU = "the variable-length kernels run on GPUs only"
LARGEST_HEAD = 256
"""Features per head that the kernels are compiled for."""


@dataclass(frozen=True, slots=True)
class Choice:
    implementation: str
    """as transformers calls it"""
    why: str
    """for the log"""


def choose(
    asked: str,
    hf_config: PreTrainedConfig,
    *,
    dtype: str,
    packing: bool,
    training: bool,
    no_kernel: str | None,
) -> Choice:
    """The implementation for one model.

    Args:
        asked: the setting `attention`, or an implementation by the name that transformers has for it.
        dtype: that the model computes in: fp32, bf16 or fp16.
        packing: rows may hold several documents.
        training: the model is trained, so that its attention dropout counts.
        no_kernel: why the device has no variable-length kernels, `ON_CPU` for a CPU; None where it has.

    Raises:
        ConfigError: `varlen` is asked for and cannot be had.
    """
    if asked not in ("auto", "varlen"):
        return Choice(asked, "as configured")
    blocked = {name: next(obstacles(name, hf_config, dtype=dtype, training=training), None) for name in VARLEN}
    if no_kernel is not None:
        blocked = dict.fromkeys(VARLEN, no_kernel)
    package = next((name for name in VARLEN if blocked[name] is None), None)
    if asked == "varlen":
        if package is None:
            key = "student.attention" if training else "teachers[].attention"
            raise ConfigError(key, str(blocked["torch"]), "varlen", "set it to auto")
        return Choice(VARLEN[package], f"variable-length kernels of {package}, as configured")
    plain = _without_kernels(hf_config)
    if no_kernel == ON_CPU:
        return plain
    if not family_of(hf_config).proven:
        return Choice(plain.implementation, f"{plain.why}; the family is not proven to hand on where documents end")
    if package is not None:
        return Choice(VARLEN[package], f"no mask; packed rows by variable-length kernels of {package}")
    if not packing and softcap_of(hf_config) is None and window_of(hf_config) is None:
        return Choice(VARLEN["torch"], "no mask: every row is one document")
    return Choice(plain.implementation, f"{plain.why}, with a mask: {blocked['torch']}")


def _without_kernels(hf_config: PreTrainedConfig) -> Choice:
    if softcap_of(hf_config) is not None:
        return Choice("eager", "eager: sdpa has no soft cap on attention scores")
    return Choice("sdpa", "sdpa")


def obstacles(package: str, hf_config: PreTrainedConfig | None, *, dtype: str, training: bool) -> Iterator[str]:
    """What keeps a model from the variable-length kernels of a package, on any device.

    Args:
        hf_config: None where it could not be read.
    """
    if package == "flash_attn" and not installed("flash_attn"):
        yield "flash_attn is not installed"
    if dtype == "fp32":
        yield "the kernels compute in bf16 and fp16, not in fp32"
    if hf_config is None:
        return
    size = head_size(hf_config)
    if size is not None and (size > LARGEST_HEAD or size % 8):
        yield f"the kernels have heads of a multiple of 8 features up to {LARGEST_HEAD}, not of {size}"
    if package == "torch":
        if softcap_of(hf_config) is not None:
            yield "torch's kernels have no soft cap on attention scores, which the model needs"
        if training and dropout_of(hf_config):
            yield f"torch's kernels have no attention dropout, the model's is {dropout_of(hf_config):g}"


def installed(package: str) -> bool:
    """A folder of this name where Python was started, such as W&B leaves behind, is no package."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def head_size(hf_config: PreTrainedConfig) -> int | None:
    config: Any = hf_config
    heads = getattr(config, "num_attention_heads", None)
    return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)


def softcap_of(hf_config: PreTrainedConfig) -> float | None:
    """Bound of the attention scores before the softmax (Gemma 2)."""
    return getattr(hf_config, "attn_logit_softcapping", None) or None


def window_of(hf_config: PreTrainedConfig) -> int | None:
    """Positions that a layer of sliding attention sees, itself among them."""
    return getattr(hf_config, "sliding_window", None) or None


def dropout_of(hf_config: PreTrainedConfig) -> float:
    names = ("attention_dropout", "attn_pdrop")
    return next((value for name in names if (value := getattr(hf_config, name, None))), 0.0)
