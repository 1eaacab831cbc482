"""Which attention implementation a model takes, from the settings, the device, the packages and the model.

An implementation named in the settings is taken as it is. `varlen` takes the first package of `VARLEN` without an
obstacle, or fails. `auto` takes the first line that applies:

    a CPU                                             sdpa, or eager if the model has a soft cap on its scores, or its
                                                      class in transformers has no sdpa
    a family that is not proven to pass documents     the same
    a package without an obstacle                     its variable-length kernels, no mask
    one document per row, no soft cap, no window      this package's attention function in SDPA's causal case, no mask
    otherwise                                         sdpa or eager, with a mask

With sequence parallelism (`parallel.sp`) attention is always this package's, without masks: it exchanges positions for
heads around one of the kernels of `SPREAD`, of which `sdpa` computes one document at a time on any device.

Nothing here needs torch, so that `check` can judge the settings before a model exists. The arithmetic is in `varlen.py`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from distill_rl.errors import ConfigError
from distill_rl.models.families import family_of, head_size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VARLEN = {"flash_attn": "documents_fa", "torch": "documents_torch"}
"""By package with variable-length kernels, in order of preference: the name under which this package's attention is
registered with transformers. The names must not contain `flash` or `sdpa`, which transformers would interpret."""
SPREAD = {"flash_attn": "spread_fa", "torch": "spread_torch", "sdpa": "spread_plain"}
"""The same for rows whose positions are divided over ranks."""
OURS = (*VARLEN.values(), *SPREAD.values())
"""All names under which this package's attention is registered."""
ON_CPU = "the variable-length kernels run on GPUs only"
_IMPORT_TIMEOUT_S = 120
LARGEST_HEAD = 256
"""Largest number of features per head for which the kernels are compiled."""


@dataclass(frozen=True, slots=True)
class Choice:
    implementation: str
    """Its name in transformers."""
    why: str
    """For the log."""


def choose(
    attention: str,
    hf_config: PreTrainedConfig,
    *,
    dtype: str,
    packing: bool,
    training: bool,
    no_kernel: str | None,
    spread: bool = False,
) -> Choice:
    """Chooses the attention implementation for one model, by the rules of this module, and says why.

    Args:
        attention: the setting `attention`, or transformers' name of an implementation.
        dtype: in which the model computes: fp32, bf16 or fp16.
        packing: rows may hold several documents.
        training: the model is trained, so its attention dropout counts.
        no_kernel: why the device has no variable-length kernels, `ON_CPU` for a CPU; None if it has them.
        spread: the positions of rows are divided over ranks.

    Raises:
        ConfigError: `varlen`, or with `spread` `flash_attention_2`, is requested and not available.
    """
    if not spread and attention not in ("auto", "varlen"):
        return Choice(attention, "as configured")
    blocked = {name: next(obstacles(name, hf_config, dtype=dtype, training=training), None) for name in VARLEN}
    if no_kernel is not None:
        blocked = dict.fromkeys(VARLEN, no_kernel)
    package = next((name for name in VARLEN if blocked[name] is None), None)
    key = "student.attention" if training else "teachers[].attention"
    if attention == "varlen" and package is None:
        raise ConfigError(key, str(blocked["torch"]), attention, "set it to auto")
    if spread:
        if attention == "flash_attention_2":
            if blocked["flash_attn"] is not None:
                raise ConfigError(key, blocked["flash_attn"], attention, "set it to auto")
            package = "flash_attn"
        if package is None or attention in ("sdpa", "eager"):
            return Choice(SPREAD["sdpa"], "all positions of some heads on every rank, by sdpa within documents")
        why = f"all positions of some heads on every rank, by variable-length kernels of {package}"
        return Choice(SPREAD[package], why)
    if attention == "varlen":
        assert package is not None
        return Choice(VARLEN[package], f"variable-length kernels of {package}, as configured")
    plain = _without_kernels(hf_config)
    if no_kernel == ON_CPU:
        return plain
    if not family_of(hf_config).proven:
        return Choice(plain.implementation, f"{plain.why}; the family is not proven to pass on where documents end")
    if package is not None:
        return Choice(VARLEN[package], f"no mask; packed rows by variable-length kernels of {package}")
    if not packing and softcap_of(hf_config) is None and window_of(hf_config) is None:
        return Choice(VARLEN["torch"], "no mask: every row is one document")
    return Choice(plain.implementation, f"{plain.why}, with a mask: {blocked['torch']}")


def _without_kernels(hf_config: PreTrainedConfig) -> Choice:
    """The implementation to use where no kernel of ours fits: sdpa, or eager for models that cannot be run with it."""
    if softcap_of(hf_config) is not None:
        return Choice("eager", "eager: sdpa has no soft cap on attention scores")
    if not has_sdpa(hf_config):
        return Choice("eager", f"eager: transformers has no sdpa attention for {hf_config.model_type}")
    return Choice("sdpa", "sdpa")


def has_sdpa(hf_config: PreTrainedConfig) -> bool:
    """Whether transformers has sdpa attention for the model's class, which is imported unless the family is proven.

    Without PyTorch transformers has no classes. The answer is then yes, and whoever makes the class may find otherwise.
    """
    from transformers.utils import is_torch_available

    if family_of(hf_config).proven or not is_torch_available():
        return True
    from transformers import AutoModelForCausalLM

    mapping: Any = AutoModelForCausalLM._model_mapping
    return type(hf_config) not in mapping or bool(mapping[type(hf_config)]._supports_sdpa)


def obstacles(package: str, hf_config: PreTrainedConfig | None, *, dtype: str, training: bool) -> Iterator[str]:
    """Yields why a model cannot use the variable-length kernels of a package; nothing if it can.

    Whether the device can run them is not looked at (`varlen.no_kernel`).

    Args:
        package: a key of `VARLEN`.
        hf_config: None if it could not be read; only the package and `dtype` are then judged.
    """
    if package == "flash_attn" and not installed("flash_attn"):
        yield "flash_attn is not installed"
    if dtype == "fp32":
        yield "the kernels compute in bf16 and fp16, not in fp32"
    if hf_config is None:
        return
    size = head_size(hf_config)
    if size is not None and (size > LARGEST_HEAD or size % 8):
        yield f"the kernels support heads of a multiple of 8 features up to {LARGEST_HEAD}, not of {size}"
    if package == "torch":
        if softcap_of(hf_config) is not None:
            yield "torch's kernels have no soft cap on attention scores, which the model needs"
        if training and dropout_of(hf_config):
            yield f"torch's kernels have no attention dropout, the model's is {dropout_of(hf_config):g}"


def installed(package: str) -> bool:
    """Whether a package is installed. A mere folder of this name, such as W&B creates, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


@cache
def importable(package: str) -> str | None:
    """Why a package cannot be imported, in one line; None if it can. It is tried in a process of its own.

    Packages with compiled kernels are often found and yet do not load, because they were built for another torch.
    """
    if not installed(package):
        return "it is not installed"
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {package}"], capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_IMPORT_TIMEOUT_S} s"
    if not done.returncode:
        return None
    return (done.stderr.strip().splitlines() or [f"the import ended with {done.returncode}"])[-1]


def softcap_of(hf_config: PreTrainedConfig) -> float | None:
    """Bound of the attention scores before the softmax (Gemma 2); None if the model has none."""
    return getattr(hf_config, "attn_logit_softcapping", None) or None


def window_of(hf_config: PreTrainedConfig) -> int | None:
    """Positions, itself included, that a position sees in a layer with sliding attention; None without a window."""
    return getattr(hf_config, "sliding_window", None) or None


def dropout_of(hf_config: PreTrainedConfig) -> float:
    """The dropout probability on attention weights that a model's config asks for; 0 if none."""
    names = ("attention_dropout", "attn_pdrop")
    return next((value for name in names if (value := getattr(hf_config, name, None))), 0.0)
