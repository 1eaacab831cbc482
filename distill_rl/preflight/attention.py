"""Whether models can have the attention that is asked for, and rows as wide as they will be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from distill_rl.config.facts import CPU_WIDTH_MULTIPLE, GPU_WIDTH_MULTIPLE, row_width, running_teachers
from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.models.attention.choice import VARLEN, installed, obstacles
from distill_rl.models.families import family_of
from distill_rl.preflight.opened import line, who


def attention_problems(config: Config, models: Sequence[tuple[str, Any]], *, gpus: int) -> Iterator[str]:
    """
    Args:
        models: key of the student and of each running teacher, with its transformers config (None: not readable).
        gpus: visible on this machine; what a cluster has is not known before it is joined.
    """
    settings: list[StudentConfig | TeacherConfig] = [config.student, *running_teachers(config)]
    for (key, hf_config), model in zip(models, settings):
        asked, remedy = model.attention, f"set {key}.attention=auto"
        if asked not in ("varlen", "flash_attention_2"):
            continue
        no_gpu = config.ray.address is None and not gpus
        if no_gpu:
            yield line(f"{key}.attention", "needs a GPU; none is visible", asked, remedy)
        if asked == "flash_attention_2":
            if not installed("flash_attn"):
                rule = "needs the package flash_attn, which is not installed"
                yield line(f"{key}.attention", rule, asked, f"pip install flash-attn, or {remedy}")
            if model.dtype == "fp32":
                yield line(f"{key}.attention", f"needs {key}.dtype: bf16", asked, f"{remedy}, or {key}.dtype=bf16")
            continue
        found = [list(obstacles(name, hf_config, dtype=model.dtype, training=key == "student")) for name in VARLEN]
        if all(found) and not no_gpu:
            for rule in found[-1]:
                yield line(f"{key}.attention", rule, asked, remedy)


def width_problems(config: Config, key: str, hf_config: Any, *, gpus: int) -> Iterator[str]:
    """Rows longer than a model has positions; they may be wider than data.max_length."""
    positions = getattr(hf_config, "max_position_embeddings", None)
    if positions is None:
        return
    longest, whose = config.data.max_length, who(key, config)
    if longest > positions:
        rule = f"must not exceed the {positions} positions of {whose}"
        yield line("data.max_length", rule, longest, f"use {positions} or less")
        return
    family, on_gpu = family_of(hf_config), gpus > 0
    width = row_width(longest, on_gpu=on_gpu)
    if width > positions and (family.learned_positions or not family.proven):
        multiple = GPU_WIDTH_MULTIPLE if on_gpu else CPU_WIDTH_MULTIPLE
        rule = f"rows of {longest} tokens are padded to {width} positions, a multiple of {multiple}; {whose} has {positions}"
        fitting = positions // multiple * multiple
        yield line("data.max_length", rule, None, f"use {fitting} or less" if fitting else "take another model")
