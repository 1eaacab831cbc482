"""Which attention implementation a model takes, from the settings, the device, the packages and the model.

An implementation named in the settings is taken, unless it does not compute what the model's config asks of attention
(`lacks`). `varlen` takes the first package of `VARLEN` without an obstacle, or fails. `auto` takes the first line that
applies:

    a CPU                                             sdpa, or eager if the model has a soft cap on its scores, or its
                                                      class in transformers has no sdpa
    a family that is not proven to pass documents     the same
    a package without an obstacle                     its variable-length kernels, no mask
    one document per row, no soft cap, no window      this package's attention function in SDPA's causal case, no mask
    otherwise                                         sdpa or eager, with a mask

With sequence parallelism (`parallel.sp`) attention is always this package's, without masks: it exchanges positions for
heads around one of the kernels of `SPREAD`, of which `sdpa` computes one document at a time on any device.
Generation with a cache takes `with_masks` of the model, on every device.

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

from distill_rl.config.schema import StudentConfig, TeacherConfig
from distill_rl.errors import ConfigError, problem
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
_SINKS = frozenset(
    {"deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash", "openai_privacy_filter"}
)
"""Families with learned sinks, which take a part of every softmax."""
PASSES_WINDOW = frozenset({
    "cohere2", "exaone4", "gemma2", "gemma3_text", "ministral", "mistral", "mixtral", "olmo3", "phi3", "qwen2", "qwen3",
    "qwen3_moe", "smollm3", "starcoder2",
})  # fmt: skip
"""Families that tell this package's attention the window of every layer. Others write it into a mask only."""
_NAMES = {name: f"{package}'s kernels" for package, name in VARLEN.items()}
_NAMES |= dict.fromkeys(SPREAD.values(), "attention over divided rows")
_NAMES["flash_attention_2"] = "FlashAttention's kernels"
"""What implementations are called in messages, if not by their names."""


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    implementation: str
    """Its name in transformers."""
    why: str
    """For the log."""


def choose(
    settings: StudentConfig | TeacherConfig,
    hf_config: PreTrainedConfig,
    *,
    packing: bool,
    no_kernel: str | None,
    spread: bool = False,
) -> ChosenAttention:
    """Chooses the attention implementation for one model, by the rules of this module, and says why.

    Args:
        settings: of the model: a student is trained, so its attention dropout counts.
        packing: rows may hold several documents.
        no_kernel: why the device has no variable-length kernels, `ON_CPU` for a CPU; None if it has them.
        spread: the positions of rows are divided over ranks.

    Raises:
        ConfigError: `varlen`, or with `spread` `flash_attention_2`, is requested and not available; or what is requested
            does not compute what the model's config asks of attention.
    """
    attention, training = settings.attention, isinstance(settings, StudentConfig)
    key = "student.attention" if training else "teachers[].attention"
    if not spread and attention not in ("auto", "varlen"):
        # Those of this package are judged by what they are given when they run.
        if attention not in OURS and (missing := list(lacks(attention, hf_config))):
            raise ConfigError.many([problem(key, rule, attention, "set it to auto") for rule in missing])
        return ChosenAttention(attention, "as configured")
    blocked = {name: next(obstacles(name, hf_config, dtype=settings.dtype, training=training), None) for name in VARLEN}
    if no_kernel is not None:
        blocked = dict.fromkeys(VARLEN, no_kernel)
    package = next((name for name in VARLEN if blocked[name] is None), None)
    if attention == "varlen" and package is None:
        raise ConfigError(key, str(blocked["torch"]), attention, "set it to auto")
    if spread:
        ConfigError.raise_all(
            spread_problems(hf_config, "student.parallel.sp" if training else "teachers[].parallel.sp")
        )
        if attention == "flash_attention_2":
            if blocked["flash_attn"] is not None:
                raise ConfigError(key, blocked["flash_attn"], attention, "set it to auto")
            package = "flash_attn"
        why = "all positions of some heads on every rank, by"
        if package is None or attention in ("sdpa", "eager"):
            return ChosenAttention(SPREAD["sdpa"], f"{why} sdpa within documents")
        return ChosenAttention(SPREAD[package], f"{why} variable-length kernels of {package}")
    if attention == "varlen":
        assert package is not None
        return ChosenAttention(VARLEN[package], f"variable-length kernels of {package}, as configured")
    plain = with_masks(hf_config)
    if no_kernel == ON_CPU:
        return plain
    if not family_of(hf_config).proven:
        why = f"{plain.why}; the family is not proven to pass on where documents end"
        return ChosenAttention(plain.implementation, why)
    if package is not None:
        return ChosenAttention(VARLEN[package], f"no mask; packed rows by variable-length kernels of {package}")
    if not packing and softcap_of(hf_config) is None and window_of(hf_config) is None:
        return ChosenAttention(VARLEN["torch"], "no mask: every row is one document")
    return ChosenAttention(plain.implementation, f"{plain.why}, with a mask: {blocked['torch']}")


def with_masks(hf_config: PreTrainedConfig) -> ChosenAttention:
    """The implementation of transformers that computes what a model's config asks: sdpa, or eager where sdpa does not.

    It is for generation with a cache too, and for models of which the text is one part.
    """
    if next(lacks("sdpa", hf_config.get_text_config()), None) is not None:
        return ChosenAttention("eager", "eager: sdpa has no soft cap on attention scores")
    if not has_sdpa(hf_config):
        return ChosenAttention("eager", f"eager: transformers has no sdpa attention for {hf_config.model_type}")
    return ChosenAttention("sdpa", "sdpa")


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


def lacks(implementation: str, hf_config: PreTrainedConfig) -> Iterator[str]:
    """Yields what a model's config asks of attention and an implementation does not compute; nothing for eager.

    Whether transformers has the implementation for the model's class at all is not looked at (`has_sdpa`).

    Args:
        implementation: its name in transformers, or one of `OURS`.
    """
    ours, family = implementation in OURS, hf_config.model_type
    what = _NAMES.get(implementation, implementation)
    capped = implementation in ("sdpa", VARLEN["torch"], SPREAD["torch"])
    if capped and (cap := softcap_of(hf_config)) is not None:
        verb = "has" if implementation == "sdpa" else "have"
        yield f"{what} {verb} no soft cap on attention scores, which the model needs (attn_logit_softcapping={cap:g})"
    without_mask = ours or implementation.startswith("flash")
    if without_mask and family in _SINKS:
        yield f"{what} cannot compute the attention sinks of {family}"
    if without_mask and (chunk := chunk_of(hf_config)) is not None:
        yield f"{what} cannot keep to the chunks of {chunk} positions of {family} (attention_chunk_size)"
    if implementation in SPREAD.values() and (floor := floor_of(hf_config)) is not None:
        yield f"{what} would scale by the place in a rank's part of a row, as {family} does from {floor} on (floor_scale)"
    if ours and (window := window_of(hf_config)) is not None and family not in PASSES_WINDOW:
        yield f"{what} would not be told the window of {window} positions of {family} (sliding_window)"
    if implementation in VARLEN.values() or implementation.startswith("flash"):
        yield from _heads(what, hf_config, padded=not ours)


def spread_problems(hf_config: PreTrainedConfig, setting: str) -> list[str]:
    """Why this package's attention cannot divide the positions of a model's rows over ranks, one line each.

    Args:
        setting: what the number of ranks is called in the lines.
    """
    missing = lacks(SPREAD["sdpa"], hf_config)
    return [problem(setting, f"must be 1: {rule}", remedy="leave it out") for rule in missing]


def _heads(what: str, hf_config: PreTrainedConfig, *, padded: bool) -> Iterator[str]:
    """Yields at most one line: kernels do not support the model's sizes of heads."""
    config: Any = hf_config
    size, values = head_size(hf_config), None
    if getattr(config, "qk_nope_head_dim", None) and getattr(config, "v_head_dim", None):
        size, values = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    sizes = [size, getattr(config, "global_head_dim", None)]
    if odd := [number for number in sizes if number is not None and (number > LARGEST_HEAD or number % 8)]:
        yield f"{what} support heads of a multiple of 8 features up to {LARGEST_HEAD}, not of {odd[0]}"
    elif not padded and values is not None and values != size:
        yield f"{what} support heads of one size, not queries of {size} and values of {values} features"


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
    yield from lacks(VARLEN[package], hf_config)
    if package == "torch" and training and dropout_of(hf_config):
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
        command = [sys.executable, "-c", f"import {package}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S)
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


def chunk_of(hf_config: PreTrainedConfig) -> int | None:
    """Positions of a chunk, in a model with layers that see only their own chunk (Llama 4); None without such layers."""
    size = getattr(hf_config, "attention_chunk_size", None) or None
    kinds = getattr(hf_config, "layer_types", None)
    return size if kinds is None or "chunked_attention" in kinds else None


def floor_of(hf_config: PreTrainedConfig) -> int | None:
    """Tokens of a row from which on attention is scaled by the place in it, in a model with such layers (Llama 4); else None."""
    kinds = getattr(hf_config, "no_rope_layers", None) or ()
    scaled = getattr(hf_config, "attn_temperature_tuning", None) and 0 in kinds
    return getattr(hf_config, "floor_scale", None) if scaled else None


def packed_limit(hf_config: PreTrainedConfig) -> tuple[int, str] | None:
    """Most tokens of a row of several documents, and the number in the config by which the family counts within the row.

    None: the family counts within documents, or is not known to count.
    """
    chunk, floor, block = chunk_of(hf_config), floor_of(hf_config), None
    if "minimax_m3_sparse" in (getattr(hf_config, "layer_types", None) or ()):
        block = getattr(hf_config, "index_block_size", None)
    limits = [(chunk, f"attention_chunk_size={chunk}")] if chunk else []
    limits += [(floor - 1, f"floor_scale={floor}")] if floor else []
    limits += [(block, f"index_block_size={block}")] if block else []
    return min(limits, default=None)


def dropout_of(hf_config: PreTrainedConfig) -> float:
    """The dropout probability on attention weights that a model's config asks for; 0 if none."""
    names = ("attention_dropout", "attn_pdrop")
    return next((value for name in names if (value := getattr(hf_config, name, None))), 0.0)
